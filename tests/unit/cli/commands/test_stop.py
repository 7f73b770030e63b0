"""Stopping jobs: who waits, and what cannot be confirmed."""

import json

from tests.lib.story_cluster import Desk, end, make_job, run


def test_stop_waits_until_the_job_has_ended(desk: Desk) -> None:
    desk.cluster.view = make_job(state="RUNNING")
    desk.cluster.story = [run(), *end("STOPPED", reason="stopped by you")]
    result = desk.say("stop", "j-0001", "--now")
    assert result.code == 0
    assert desk.cluster.calls == [("stop", "j-0001", True)]
    assert result.err.endswith("j-0001 STOPPED: stopped by you\n") and result.out == ""


def test_what_a_command_changed_is_printed_for_programs(desk: Desk) -> None:
    desk.cluster.story = [run(), *end("STOPPED", reason="stopped by you")]
    [job] = json.loads(desk.say("stop", "j-0001", "-o", "json").out)["jobs"]
    assert (job["id"], job["state"]) == ("j-0001", "STOPPED")
    assert json.loads(desk.say("wait", "j-0001", "-o", "json").out)["state"] == "STOPPED"
    (desk.folder / "bad.yaml").write_text("nodes: 0")
    result = desk.say("validate", "bad.yaml", "all.hosts", "-o", "json")
    assert result.code == 2 and len(json.loads(result.out)["problems"]) > 1 and result.err
    assert json.loads(desk.say("validate", "all.hosts", "-o", "json").out)["problems"] == []
    assert json.loads(desk.say("undrain", "n1", "--no-check", "-o", "json").out)["machines"] == []


def test_stop_without_waiting_returns_at_once(desk: Desk) -> None:
    desk.cluster.story = [run()]
    assert desk.say("kill", "demo", "--no-wait").code == 0
    assert desk.cluster.view.state == "STOPPING" and len(desk.cluster.story) == 1


def test_stop_asks_every_job_even_when_one_is_unknown(desk: Desk) -> None:
    desk.cluster.story = end("STOPPED")
    result = desk.say("stop", "j-9", "j-0001")
    assert result.code == 4
    assert [call[1] for call in desk.cluster.calls] == ["j-9", "j-0001"]
    assert "error: no job 'j-9'" in result.err


def test_stop_names_nodes_that_could_not_confirm(desk: Desk) -> None:
    desk.cluster.unconfirmed = ("n1", "n2")
    desk.cluster.story = end("STOPPED")
    result = desk.say("stop", "demo")
    assert result.code == 6
    assert "warning: " in result.err and "n[1-2]" in result.err


def test_stopping_an_ended_job_is_a_conflict(desk: Desk) -> None:
    desk.cluster.view = make_job(state="FAILED")
    assert desk.say("stop", "demo").code == 7
