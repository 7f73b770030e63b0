"""`ascendrun explain` over jobs as the head keeps them: one screen, two languages, records for programs, exit codes."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Callable

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from corpus import FOLDER, load
from spooling import spool_case

from ascendrun.cli import main
from ascendrun.core.events import Event
from ascendrun.core.jobs.job import Cause, State
from ascendrun.core.jobs.reasons import because
from ascendrun.head.state.store import Store
from tests.lib.demo_jobs import store_job

Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Say:
    monkeypatch.setenv("ASCENDRUN_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("LANG", "C.UTF-8")
    monkeypatch.delenv("LC_ALL", raising=False)

    def run(*argv: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(argv)
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def keep(tmp_path: Path, name: str) -> str:
    return spool_case(load(FOLDER / f"{name}.yaml"), tmp_path)


def test_one_screen_has_the_verdict_the_evidence_the_chain_and_the_way_out(tmp_path: Path, say: Say) -> None:
    job = keep(tmp_path, "sixty_four_ranks_and_the_noise_of_the_stop")
    code, out, _ = say("explain", job)
    assert code == 0
    assert len(out.splitlines()) <= 24, out
    first = out.splitlines()[2]
    assert first == (
        "rank 37 on npu05 failed first: AssertionError: activations are not finite (at model.py:311)  [certain]"
    ), out
    assert "npu05/rank-37.err.0:" in out
    assert "consequence  ranks 0-15" in out and "teardown     ranks 16-36,38-63" in out
    assert f"ascendrun logs {job} --rank 37 --stream err" in out


def test_why_shows_what_the_class_follows_from(tmp_path: Path, say: Say) -> None:
    job = keep(tmp_path, "a_truncated_parquet_on_one_rank")
    _, out, _ = say("explain", job)
    assert "class  the data that it reads; one rank  [likely]" in " ".join(out.split(" ")).replace("   ", "  ")
    assert "exceptions" not in out
    _, out, _ = say("explain", job, "--why")
    assert "exceptions ArrowInvalid: data" in out
    _, out, _ = say("explain", keep(tmp_path, "one_silent_node_hccl"), "--why")
    assert "unreachable; before it did not apply: other-tls" in out


def test_the_same_in_chinese(tmp_path: Path, say: Say) -> None:
    _, out, _ = say("explain", keep(tmp_path, "one_silent_node_hccl"), "--lang", "zh")
    assert "npu03 上的 rank 16-23" in out and "[很可能]" in out and "处理建议" in out


def test_programs_get_every_field(tmp_path: Path, say: Say) -> None:
    job = keep(tmp_path, "the_kernel_killed_it_for_memory")
    _, out, _ = say("explain", job, "-o", "json")
    found = json.loads(out)
    assert (found["id"], found["attempt"], found["state"]) == (job, 1, "FAILED")
    diagnosis = found["diagnosis"]
    assert (diagnosis["code"], diagnosis["confidence"], diagnosis["ranks"]) == ("host-oom", "certain", [5])
    assert diagnosis["evidence"][0]["file"] == "npu02/gathered/dmesg/excerpt.txt"
    assert {link["role"] for link in diagnosis["chain"]} == {"initiating", "consequence"}


def test_what_is_not_known_is_called_that(tmp_path: Path, say: Say) -> None:
    _, out, _ = say("explain", keep(tmp_path, "all_time_out_and_nothing_tells_why"))
    assert "[unknown]" in out and "--collect" in out


def test_a_job_that_runs_says_what_is_odd(tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    from ascendrun.query.explain import explain_job

    job = keep(tmp_path, "it_runs_with_a_silent_node")
    found = explain_job(tmp_path, job, now_s=1_790_000_120.0, liveness={job: {"npu02": "UNREACHABLE"}}).diagnosis
    assert found.code == "running"
    assert ("diagnosis.anomaly.host-unreachable", ["npu02"]) in [
        (anomaly.key, anomaly.values["hosts"]) for anomaly in found.anomalies if "hosts" in anomaly.values
    ], found.anomalies


def test_a_job_that_is_not_there_exits_4(tmp_path: Path, say: Say) -> None:
    keep(tmp_path, "it_succeeded")
    for argv in (("explain", "j-9999"), ("explain", "j-0001", "--attempt", "7")):
        code, out, err = say(*argv)
        assert (code, out) == (4, "") and err, argv


def test_show_names_the_reason(tmp_path: Path, say: Say) -> None:
    _, out, _ = say("show", keep(tmp_path, "one_rank_raises_the_others_lose_it"))
    assert "rank 2 on npu02 failed first: ValueError: sample 17 has no label" in out and "ascendrun explain" in out


def test_nothing_that_a_rank_wrote_steers_the_terminal(tmp_path: Path, say: Say) -> None:
    _, out, _ = say("explain", keep(tmp_path, "coloured_traceback"), "--all")
    assert "no such expert" in out and "\x1b" not in out


def refuse(state_dir: Path, why: str) -> str:
    """Keeps a job that the gate refused to start; its id."""
    store = Store.open(state_dir)
    try:
        job = store_job(store, now_s=time.time(), hosts=("n1", "n2"))
        job = replace(
            job,
            state=State.FAILED,
            cause=Cause.REFUSED,
            attempt=1,
            reason=because("preflight-failed", why=why),
            ended_at_s=time.time(),
        )
        event = Event("state-changed", {"state": "FAILED", "reason": job.reason}, attempt=1, at_s=time.time())
        store.jobs.save(job, [event], now_s=time.time())
    finally:
        store.close()
    return job.id


def test_a_reason_of_many_lines_is_told_once_in_full_and_elsewhere_by_its_first(tmp_path: Path, say: Say) -> None:
    job = refuse(tmp_path, "2 checks fail:\n  n1: no \x1b[31mNPU\n  n2: the disk is full")
    code, out, _ = say("explain", job)
    rows = out.splitlines()
    assert code == 0 and "  n1: no NPU" in rows and "  n2: the disk is full  [certain]" in rows, out
    assert (
        any(row.startswith("  FAILED: ") and row.endswith("2 checks fail: …") for row in rows)
        and out.count("the disk is full") == 1
    )
    assert "\\n" not in out and "\x1b" not in out


def test_after_a_failure_it_says_that_nothing_starts_again_by_itself(tmp_path: Path, say: Say) -> None:
    job = refuse(tmp_path, "n1: no NPU")
    rows = say("explain", job)[1].splitlines()
    assert any(row.startswith("  not restarted automatically") for row in rows[rows.index("outcome") :])
    told = json.loads(say("explain", job, "--lang", "zh", "-o", "json")[1])["diagnosis"]["outcome"]
    assert told[-1]["message"].startswith("不会自动重新启动")
