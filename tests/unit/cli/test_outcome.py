"""Following a job: what a person and a script see of its life, and how the command ends."""

import json
import time
from typing import Any

import pytest

from ascendrun.core.errors import UnreachableError
from ascendrun.core.events import Event
from ascendrun.head.spool.artifact_store import write_verdict
from ascendrun.health.diagnosis import Confidence, Diagnosis
from ascendrun.health.diagnosis.render import render
from ascendrun.text import to_json
from tests.lib.story_cluster import STORIES, Desk, end, make_job, once_exists, rank_fails, run, says, state


def test_submit_shows_every_line_once_and_ends_as_the_job(desk: Desk) -> None:
    desk.cluster.story = STORIES["good"]()
    desk.cluster.view = make_job(world_size=0)  # not planned yet
    result = desk.say("submit", "job.yaml")
    assert result.code == 0
    assert result.out == "[0-3] hello\n[2] only two\n"
    assert "CHECKING: asking n[1-2]" in result.err
    assert "RUNNING on n[1-2], 4 ranks" in result.err
    assert "j-0001 SUCCEEDED after 1m30s: step 10 · loss 0.25" in result.err


def test_a_failed_job_ends_with_its_first_failure_the_ranks_last_words_and_the_next_command(desk: Desk) -> None:
    desk.cluster.story = STORIES["bad"]()
    result = desk.say("submit", "job.yaml")
    assert result.code == 1
    story = result.err[result.err.index("first failure") :].splitlines()
    assert story == [
        "first failure: rank 3 on n2 exited with code 7",
        "last error output of rank 3 on n2:",
        "    Traceback",
        "    ValueError: no data",
        "j-0001 FAILED after 1m30s: rank 3 on n2 ended with exit code 7",
        "hint: ascendrun explain j-0001",
        "hint: ascendrun logs j-0001 --rank 3",
        "hint: ascendrun show j-0001",
    ]


def test_of_a_long_error_output_only_the_end_is_repeated(desk: Desk) -> None:
    lines = b"".join(b"line %d\n" % number for number in range(50))
    desk.cluster.story = [run(), says(lines, 1, stream="err"), rank_fails(1, 2), *end("FAILED")]
    err = desk.say("submit", "job.yaml").err
    assert "    line 49\n" in err and "    line 30\n" in err and "    line 29\n" not in err


def test_a_job_stopped_elsewhere_ends_the_follower_with_1_and_the_reason(desk: Desk) -> None:
    desk.cluster.story = [run(), says(b"x\n"), *end("STOPPED", reason="stopped by you")]
    result = desk.say("logs", "-f", "demo")
    assert (result.code, result.out) == (1, "[0-3] x\n")
    assert "j-0001 STOPPED after 1m30s: stopped by you" in result.err


def test_following_goes_on_over_a_new_attempt(desk: Desk) -> None:
    desk.cluster.story = STORIES["again"]()
    result = desk.say("submit", "job.yaml")
    assert (result.code, result.out) == (0, "[0-3] first\n[0-3] second\n")
    assert "── attempt 2 ──" in result.err


def test_bytes_that_arrive_after_the_job_has_ended_are_shown(desk: Desk) -> None:
    def late(cluster: object) -> None:
        import threading

        def write() -> None:
            desk.cluster.write(0, b"last words\nno newline")
            desk.cluster.complete()

        timer = threading.Timer(0.3, write)
        timer.start()

    desk.cluster.story = [run(), says(b"early\n", 0), late, state("SUCCEEDED", ended_at_s=time.time())]
    assert desk.say("submit", "job.yaml").out == "[0] early\n[0] last words\n[0] no newline\n"


def test_a_job_that_never_started_ends_the_follower_at_once(desk: Desk) -> None:
    desk.cluster.story = [state("CHECKING", reason="asking"), state("FAILED", reason="n2: no python", ended_at_s=1.0)]
    result = desk.say("submit", "job.yaml")
    assert result.code == 1
    assert "j-0001 FAILED: n2: no python" in result.err.replace(" after 0s", "")


def test_wait_prints_no_lines(desk: Desk) -> None:
    desk.cluster.story = STORIES["good"]()
    result = desk.say("submit", "job.yaml", "--wait", "-o", "json")
    assert result.code == 0
    assert json.loads(result.out)["state"] == "SUCCEEDED"


def test_detach_prints_the_id_alone_on_stdout(desk: Desk) -> None:
    result = desk.say("submit", "job.yaml", "--detach")
    assert (result.code, result.out) == (0, "j-0001\n")
    assert "ascendrun logs -f j-0001" in result.err


def test_submit_as_json_returns_at_once_with_the_record(desk: Desk) -> None:
    result = desk.say("submit", "job.yaml", "-o", "json", "--set", "nodes=2", "--hostfile", "all.hosts")
    assert json.loads(result.out)["id"] == "j-0001"
    from pathlib import Path

    assert desk.cluster.calls == [("submit", "job.yaml", ("nodes=2",), Path("all.hosts"))]


def test_the_follower_survives_a_hostile_rank(desk: Desk) -> None:
    desk.cluster.story = [run(), says(b"\x1b]0;owned\x07\x1b[2J[/foo] \xe2\x80\xae\n", 0), *end("SUCCEEDED")]
    assert desk.say("submit", "job.yaml").out == "[0] [/foo] \\u202e\n"


def test_logs_dash_f_of_a_live_job_wakes_the_controller(desk: Desk) -> None:
    desk.cluster.view = make_job(state="RUNNING", attempt=1)
    desk.cluster.story = end("SUCCEEDED")
    assert desk.say("logs", "-f", "j-0001").code == 0
    assert ("ensure_controller",) in desk.cluster.calls


def test_the_tail_of_the_past_is_followed_by_all_that_comes(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.cluster.view = make_job(state="RUNNING", attempt=1)
    desk.cluster.write(0, b"one\ntwo\nthree\n", at_s=1.0)
    monkeypatch.setenv("STORY_MAY_END", str(desk.folder))
    desk.cluster.story = [run(), run(), once_exists("STORY_MAY_END"), says(b"new\n", 0), *end("SUCCEEDED")]
    assert desk.say("logs", "-f", "demo", "--tail", "1").out == "[0] three\n[0] new\n"


@pytest.mark.parametrize(("name", "code"), [("SUCCEEDED", 0), ("FAILED", 1), ("STOPPED", 1)])
def test_wait_exits_as_the_job_did(desk: Desk, name: str, code: int) -> None:
    desk.cluster.story = [run(), *end(name)]
    assert desk.say("wait", "j-0001").code == code


def test_wait_gives_up_at_its_deadline(desk: Desk) -> None:
    result = desk.say("wait", "j-0001", "--timeout", "2m")
    assert result.code == 124
    assert desk.cluster.calls == [("wait", "j-0001", 120.0)]


def test_what_never_arrived_of_a_job_that_ended_long_ago_is_said_not_waited_for(desk: Desk) -> None:
    desk.cluster.view = make_job(state="SUCCEEDED", attempt=1, ended_at_s=1.0)
    desk.cluster.write(0, b"here\n")
    result = desk.say("logs", "-f", "demo")
    assert (result.code, result.out) == (0, "[0] here\n")
    assert "the last lines may be missing" in result.err


def test_a_controller_that_dies_meanwhile_does_not_end_the_follower(desk: Desk) -> None:
    def is_dead(cluster: object) -> None:
        raise UnreachableError("the controller ended")

    desk.cluster.story = [run(), run(), is_dead, is_dead, says(b"still here\n"), *end("SUCCEEDED")]
    result = desk.say("logs", "-f", "demo")
    assert (result.code, result.out) == (0, "[0-3] still here\n")
    assert result.err.count("warning: the controller ended;") == 1


def test_submit_prints_what_the_checks_before_the_start_warn_of_once(desk: Desk) -> None:
    def warns(cluster: Any) -> None:
        values = {"finding": "clock-offset", "values": {}, "warning": "n1: the clock is 3 s ahead"}
        cluster.job_events = (*cluster.job_events, Event("preflight-warning", values, ("n1",), attempt=1))

    desk.cluster.story = [state("CHECKING"), warns, run(), says(b"x\n"), *end("SUCCEEDED")]
    assert desk.say("submit", "job.yaml").err.count("the clock is 3 s ahead") == 1


def test_ps_shows_the_cause_of_a_failed_job_that_was_diagnosed(desk: Desk) -> None:
    reason = "rank 3 on n2 ended with exit code 1"
    desk.cluster.view = make_job(state="FAILED", attempt=1, ended_at_s=9.0, reason=reason)
    assert reason in desk.say("ps", "-a").out
    known = Diagnosis("python-name", Confidence.CERTAIN, (3,), ("n2",))
    desk.cluster.spool.mkdir(parents=True)
    write_verdict(desk.cluster.spool, {}, to_json(known))
    out = desk.say("ps", "-a").out
    assert str(render(known, "en").message) in out and reason not in out
    assert json.loads(desk.say("ps", "-a", "-o", "json").out)["jobs"][0]["reason"] == reason
