"""Times with their errors, peers' words, launchers' summaries, and words in two languages."""

from __future__ import annotations

import pytest

from ascendrun.ascend.signatures import signatures
from ascendrun.health.diagnosis import Evidence, FixedClock, HostEvidence, Line, RankEvidence, diagnose, tell
from ascendrun.health.diagnosis.peers import find_words
from ascendrun.health.diagnosis.reading import RULED
from ascendrun.health.diagnosis.telling import texts
from ascendrun.health.diagnosis.times import Moment, moment, stamp_of, with_stamps


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


@pytest.mark.parametrize("text, kind, wait", [
    ("|  10.0.0.9(7)   |  16666  |   10.0.0.8(1)   |  3234  |  client  | time out |   ENABLE  | x", "link", "connect"),
    ("gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.3]:4102", "lost", "lost"),
    ("The Notify register has not received the Notify record from remote rank: [7].", "remote", "exec"),
    ("fault_info[\"Failed to connect agent[1,3,]\"]", "missing", "connect"),
    ("DistStoreError: Timed out after 301 seconds waiting for clients. 3/4 clients joined.", "timeout", "connect"),
])
def test_words_about_other_ranks_are_read(text: str, kind: str, wait: str) -> None:
    words = list(find_words([Line(text, "f")]))
    assert (kind, wait) in [(word.kind, word.wait) for word in words], words


def test_the_languages_have_the_same_texts_with_the_same_places() -> None:
    english, chinese = texts("en"), texts("zh")
    for part in english.keys() - {"phrases"}:
        assert english[part].keys() == chinese[part].keys(), part
    for code, row in english["verdicts"].items():
        assert row.keys() == chinese["verdicts"][code].keys(), code
        assert all(row[name] == "" or chinese["verdicts"][code][name] for name in row), code


def test_signatures_that_are_weighed_together_exist() -> None:
    assert RULED <= {row.code for row in signatures()}


def test_of_a_job_without_any_trace_nothing_is_made_up() -> None:
    ranks = tuple(RankEvidence(rank, "a") for rank in range(4))
    found = diagnose(Evidence("j", "FAILED", cause="failure", world_size=4, ranks=ranks, hosts=(HostEvidence("a"),)))
    assert found.confidence.value == "not known"
    assert tell(found, "zh").says and tell(found).says
