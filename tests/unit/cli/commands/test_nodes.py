"""Machines that no job may use, and attempts that no record explains, as the commands show them."""

import json
import time
from dataclasses import replace

from ascendrun.cli.options import parse_future, parse_since
from ascendrun.cluster import HostStatus
from ascendrun.core.jobs.job import Leftover
from ascendrun.core.machines import Hold, Machine, MachineState
from tests.lib.story_cluster import Desk, end, make_job

STUCK = Hold(
    "n2", MachineState.LEFTOVERS, "j-0001", "h-j-0001.1", 1e9, (Leftover(50, 9, "python", "D", "fuse_wait_answer", 7),)
)
SILENT = Hold("n1", MachineState.UNCONFIRMED, "j-0001", "h-j-0001.1", 1e9)
FOUND = Hold("n2", MachineState.LEFTOVERS, "j-0007", "h-j-0007.2", 1e9, is_found=True)

STATUS = HostStatus("n2", True, None, None, "n2", "3.11.7", 8, 64 << 30, 10 << 30, 0.002)


def machine(hold: Hold) -> Machine:
    return Machine("k", (hold.host,), frozenset(), (hold,))


def test_nodes_say_why_no_job_starts_on_a_host(desk: Desk) -> None:
    desk.cluster.statuses = [replace(STATUS, holds=(STUCK,))]
    result = desk.say("nodes", "-H", "all.hosts")
    assert result.code == 0 and "leftovers" in result.out
    assert all(word in result.err for word in ("n2", "50", "python", "fuse_wait_answer", "ascendrun release n2"))
    [row] = json.loads(desk.say("nodes", "-H", "all.hosts", "-o", "json").out)["nodes"]
    assert row["holds"][0]["processes"][0]["wait_channel"] == "fuse_wait_answer"
    assert (row["holds"][0]["state"], row["holds"][0]["job"], row["holds"][0]["since_s"]) == (
        "leftovers",
        "j-0001",
        1e9,
    )


def test_ps_lists_found_attempts_and_what_is_held(desk: Desk) -> None:
    desk.cluster.machines = (machine(FOUND), machine(SILENT))
    result = desk.say("ps")
    assert ["j-0007", "h-j-0007.2", "FOUND", "2", "n2"] in [line.split()[:5] for line in result.out.splitlines()]
    assert "ascendrun stop h-j-0007.2" in result.err and "ascendrun release n1" in result.err
    jobs = json.loads(desk.say("ps", "-o", "json").out)["jobs"]
    assert (jobs[0]["state"], jobs[0]["reason_code"]) == ("FOUND", "found")


def test_stop_exits_6_when_a_process_survives(desk: Desk) -> None:
    desk.cluster.view = make_job(state="RUNNING", holds=(STUCK,))
    desk.cluster.story = end("STOPPED")
    result = desk.say("stop", "demo")
    assert result.code == 6 and "fuse_wait_answer" in result.err


def test_release_continues_after_a_refusal_and_ends_with_its_code(desk: Desk) -> None:
    desk.cluster.machines = (machine(STUCK), machine(SILENT))
    assert desk.say("release", "n1").code == 0
    assert desk.say("release", "n[2-3]", "n1").code == 7
    assert desk.cluster.calls == [("release", host) for host in ("n1", "n2", "n3", "n1")]
    assert desk.say("release", "n3").code == 4


def test_a_found_attempt_is_one_row_for_all_its_hosts(desk: Desk) -> None:
    desk.cluster.machines = (machine(FOUND), machine(replace(FOUND, host="n1")))
    [view] = desk.cluster.jobs.found_attempts()
    assert (view.id, view.name, view.attempt, view.hosts) == ("j-0007", "h-j-0007.2", 2, ("n1", "n2"))


def test_show_names_the_process_that_holds_a_host(desk: Desk) -> None:
    desk.cluster.view = make_job(state="STOPPED", ended_at_s=1.0, holds=(STUCK, SILENT))
    lines = [line for line in desk.say("show", "demo").out.splitlines() if "fuse_wait_answer" in line]
    assert len(lines) == 1 and "n2" in lines[0]


def test_spares_are_shown_with_the_job_that_keeps_them_and_whether_they_are_ready(desk: Desk) -> None:
    desk.cluster.statuses = [replace(STATUS, spare_of="j-0001")]
    [row] = json.loads(desk.say("nodes", "-H", "all.hosts", "-o", "json").out)["nodes"]
    assert row["spare_of"] == "j-0001" and "j-0001 (spare)" in desk.say("nodes", "-H", "all.hosts").out
    desk.cluster.view = make_job(state="RUNNING", spares=("n3", "n4", "n5"))
    desk.cluster.spares = {"n3": None, "n4": "disk full"}
    out = desk.say("show", "j-0001").out
    assert all(part in out for part in ("n3 (ready)", "n4 (not ready: disk full)", "n5 (not checked yet)"))
    assert "n[3-5]" in desk.say("ps", "-o", "wide").out


def test_undrain_leaves_hosts_closed_that_are_not_ready(desk: Desk) -> None:
    desk.cluster.refused = ("n2",)
    result = desk.say("undrain", "n[1-2]")
    assert result.code == 3 and "ascendrun undrain --no-check n2" in result.err
    assert ("undrain", ("n1",)) in desk.cluster.calls and "disk full" in result.err
    assert desk.say("undrain", "n[1-2]", "--no-check").code == 0
    assert desk.cluster.calls[-1] == ("undrain", ("n1", "n2"))


def test_a_future_time_is_a_duration_from_now_or_the_next_such_time() -> None:
    before_s = time.time()
    assert before_s + 7200 <= parse_future("2h") <= time.time() + 7200
    for clock in ("00:00", "23:59:59"):
        assert before_s - 1 <= parse_future(clock) <= time.time() + 25 * 3600
    assert parse_future("2030-01-01T00:00:00Z") == parse_since("2030-01-01T00:00:00Z")
