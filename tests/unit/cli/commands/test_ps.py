"""The table of jobs, once and again as they change."""

from __future__ import annotations

import json

import pytest

from ascendrun.cli.output import format_table, width_of
from ascendrun.cluster import JobView
from tests.lib.story_cluster import Desk, StoryJobs, make_job


def test_ps_is_a_table_of_live_jobs(desk: Desk) -> None:
    desk.cluster.view = make_job(state="RUNNING", started_at_s=1.0, attempt=1, progress={"step": 5, "loss": 2.31})
    lines = desk.say("ps").out.splitlines()
    assert lines[0].split() == "ID NAME STATE ATTEMPT NODES RANKS AGE DURATION PROGRESS REASON".split()
    assert lines[1].split()[:6] == ["j-0001", "demo", "RUNNING", "1", "n[1-2]", "4"]
    assert "step 5 · loss 2.31" in lines[1]


def test_ps_quiet_prints_the_ids_of_live_jobs(desk: Desk) -> None:
    desk.cluster.view = make_job(state="RUNNING", started_at_s=1.0, attempt=1)
    assert desk.say("ps", "-q").out == desk.say("ps", "-o", "name").out == "j-0001\n"


def test_ps_watch_prints_a_job_again_when_it_changes_and_its_end(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ascendrun.cli.commands.ps.WATCH_S", 0.0)
    views = [make_job(), make_job(), make_job(state="RUNNING"), make_job(state="RUNNING", progress={"step": 1})]

    class Watched(StoryJobs):
        """Each list is one moment; after the last one the job has ended, and then a user ends the command."""

        def list(self, *, everything: bool = False, folded: bool = False) -> tuple[JobView, ...]:
            if views:
                return (views.pop(0),)
            if self._cluster.view.ended_at_s is not None:
                raise KeyboardInterrupt
            self._cluster.view = make_job(state="FAILED", ended_at_s=2.0)
            return ()

    desk.cluster.jobs = Watched(desk.cluster)
    result = desk.say("ps", "-w", "-o", "jsonl")
    assert result.code == 130
    assert [json.loads(line)["state"] for line in result.out.splitlines()] == ["QUEUED", "RUNNING", "FAILED"]
    for argv in (["-q"], ["-o", "json"], ["-o", "name"]):
        assert desk.say("ps", "-w", *argv).code == 2


def test_ps_names_the_phase_in_which_a_program_makes_no_steps(desk: Desk) -> None:
    for progress, shown in [({"phase": "data"}, "phase data"), ({"step": 5, "phase": "evaluation"}, "step 5 · phase")]:
        desk.cluster.view = make_job(state="RUNNING", started_at_s=1.0, attempt=1, progress=progress)
        assert shown in desk.say("ps").out


def test_at_80_columns_ps_keeps_the_reason() -> None:
    from ascendrun.cli.job_columns import job_columns

    reason = "28 of 32 ranks running; npu03 unreachable for 20 s"
    progress = {"step": 12345, "loss": 2.31, "tokens_per_s": 15300.0}
    job = make_job(state="RUNNING", name="qwen32b-lora", started_at_s=1.0, progress=progress, reason=reason)
    lines = format_table([job], job_columns(9e9), width=80).splitlines()
    assert all(width_of(line) <= 80 for line in lines)
    assert lines[0].split()[:3] == ["ID", "NAME", "STATE"] and lines[0].split()[-1] == "REASON"
    assert "28 of 32 ranks running" in lines[1]
    assert "PROGRESS" in format_table([job], job_columns(9e9)), "in a pipe nothing is dropped"


def test_when_a_job_is_expected_to_start_is_in_wide_tables_and_in_others_if_known(desk: Desk) -> None:
    from ascendrun.cli import output as out

    starts_at_s = 1_763_686_400.0
    assert "STARTS" not in desk.say("ps").out
    header, row = desk.say("ps", "-o", "wide").out.splitlines()[:2]
    assert row[header.index("STARTS") :].split()[0] == "-"
    desk.cluster.view = make_job(start_expected_at_s=starts_at_s)
    for argv in (["ps"], ["ps", "-o", "wide"]):
        header, row = desk.say(*argv).out.splitlines()[:2]
        assert row[header.index("STARTS") :].startswith(f"{out.describe_time(starts_at_s)}  ")
    [job] = json.loads(desk.say("ps", "-o", "json").out)["jobs"]
    assert job["start_expected_at"].startswith("2025-11-21T00:53:20")


def test_an_empty_ps_says_where_ended_jobs_are(desk: Desk) -> None:
    desk.cluster.view = make_job(state="FAILED")
    result = desk.say("ps")
    assert (result.code, len(result.out.splitlines())) == (0, 1)
    assert "ascendrun ps -a" in result.err
