"""Times with their errors, peers' words, launchers' summaries, and words in two languages."""

from __future__ import annotations

import pytest

from ascendrun.ascend.vocabularies import is_warning
from ascendrun.health.diagnosis import Evidence, FixedClock, HostEvidence, Line, RankEvidence, diagnose, render
from ascendrun.health.diagnosis.evidence import Moment, moment, stamp_of, with_stamps


def test_events_nearer_than_their_clocks_errors_have_no_order() -> None:
    one, other = Moment(100.0, 0.5, "a"), Moment(100.8, 0.5, "b")
    assert not one.is_before(other) and not other.is_before(one)
    assert one.is_before(Moment(101.1, 0.5, "b"))
    assert one.is_before(Moment(100.1, 0.5, "a")), "one host's own clock orders its own events"


def test_a_host_s_offset_is_removed() -> None:
    evidence = Evidence("j", "FAILED", hosts=(HostEvidence("a", clock=FixedClock(90.0, 0.01)),))
    found = moment(evidence, "a", 190.0)
    assert found == Moment(100.0, 0.01, "a")
    unknown = moment(evidence, "elsewhere", 190.0)
    assert unknown is not None and unknown.error_s > 60


def test_a_log_in_local_time_is_set_by_the_end_of_its_process() -> None:
    line = Line("[ERROR] HCCL(1,python):2026-11-20-18:00:05.250.000 [a.cc:1] x", "f")
    stamp = stamp_of(line.text)
    assert stamp is not None and stamp % 60 == 5.25
    east = stamp - 8 * 3600  # the node's clock ran eight hours ahead of UTC
    assert with_stamps([line], until_s=east + 2.0)[0].at_s == east


def test_of_a_job_without_any_trace_nothing_is_made_up() -> None:
    ranks = tuple(RankEvidence(rank, "a") for rank in range(4))
    found = diagnose(Evidence("j", "FAILED", cause="failure", world_size=4, ranks=ranks, hosts=(HostEvidence("a"),)))
    assert found.confidence.value == "unknown"
    assert render(found, "zh").message and render(found).message


@pytest.mark.parametrize(
    "text",
    [
        "Warning : ASCEND_HOME_PATH environment variable is not set.",
        "WARNING: no space",
        "[WARNING] no space",
        "[W1120 18:20:01.402 socket.cpp:697] [c10d] no",
        "[rank3]:[W1120 18:20:01.402 init.cpp:90] no",
        "[W a.ts:51] no",
        "W1120 18:20:09.990000 31011 site-packages/torch/api.py:897] Sending process 7 closing signal SIGTERM",
        "2026-11-20 18:05:02,114 - WARNING - no space",
        "2026-11-20 18:05:02 | WARNING  | a.py:3 | no",
        "/opt/lib/io.py:15: UserWarning: CUDA error: out of memory",
        "FutureWarning: old",
        "  warnings.warn(",
    ],
)
def test_a_warning_is_known_by_its_own_level(text: str) -> None:
    assert is_warning(text)


@pytest.mark.parametrize(
    "text",
    [
        "npu01:40:41 [0] NCCL WARN NET/IB: Got completion from peer 10.0.0.3<47644> with status=12",
        "[E1120 18:20:01.402 socket.cpp:697] [c10d] The client socket has timed out",
        "RuntimeError: no warning was given",
        "2026-11-20 18:05:02,114 - ERROR - warning lights: WARNING",
        "What: W",
        "[rank0]: WorkerError: Warning ignored",
    ],
)
def test_an_error_is_no_warning_whatever_it_speaks_of(text: str) -> None:
    assert not is_warning(text)


def crashed(code: int, *lines: Line, dmesg: str = "") -> Evidence:
    rank = RankEvidence(
        0,
        "a",
        pid=4711,
        code=code if code > 0 else None,
        signal=-code if code < 0 else None,
        exited_at_s=10.0,
        lines=lines,
    )
    host = HostEvidence("a", clock=FixedClock(0.0, 0.001), dmesg=(Line(dmesg, "a/dmesg", 0, None, "dmesg"),))
    return Evidence("j", "FAILED", world_size=1, ranks=(rank,), hosts=(host,))


def test_the_kernels_words_of_a_crash_are_its_evidence() -> None:
    said = "[Fri Nov 20 10:00:02 2026] traps: python[4711] trap invalid opcode ip:7f1a sp:7ffd error:0 in libfast.so"
    assert said in [proof.text for proof in diagnose(crashed(-4, dmesg=said)).evidence]
    other = said.replace("4711", "47110")
    assert other not in [proof.text for proof in diagnose(crashed(-4, dmesg=other)).evidence]


def test_errors_in_a_row_stand_in_their_order_and_the_first_one_tells_why() -> None:
    texts_said = ("10:00:01 ERROR the evaluation set is empty", "10:00:02 ERROR training ends")
    found = diagnose(crashed(3, *(Line(text, "a/rank-0.err.0", 0, 9.9) for text in texts_said)))
    assert "evaluation set is empty" in render(found).message
    assert [proof.text for proof in found.evidence][1:] == list(texts_said)


def test_a_warning_is_nobodys_last_word() -> None:
    said = "/opt/lib/args.py:15: FutureWarning: `a` is deprecated and cannot be used"
    found = diagnose(crashed(3, Line(said, "a/rank-0.err.0", 0, 1.0)))
    assert said not in [proof.text for proof in found.evidence] and "deprecated" not in render(found).message
