"""The agent's pure decisions: when to signal, who lingers, whose process it is."""

import struct

import pytest

from ascendrun.core import rank_env
from ascendrun.core.jobfile import launchers
from ascendrun.core.jobs import plan
from ascendrun.node import failpoint, join, layout, ranks, reap
from ascendrun.node.agent import network
from ascendrun.node.procs import Stat
from ascendrun.node.supervisor import processes


def ladder(by, grace_s, signal="USR1"):
    found = reap.Ladder()
    found.set(reap.steps_for(by, now_s=100.0, signal=signal, grace_s=grace_s))
    return found


def taken(ladder, now_s):
    return [(step.signal, step.everything) for step in ladder.due(now_s)]


def test_a_requested_stop_saves_first_then_terms_then_kills():
    steps = ladder("head", 30.0)
    assert taken(steps, 100.0) == [("USR1", False)]
    assert taken(steps, 129.9) == [] and steps.next_s() == 130.0
    assert taken(steps, 130.0) == [("TERM", True)]
    assert taken(steps, 132.0) == [("KILL", True)] and steps.reached_kill and steps.next_s() is None


@pytest.mark.parametrize("grace_s, kill_at", [(300.0, 105.0), (1.0, 101.0)])
def test_a_failure_waits_for_nobody_longer_than_five_seconds(grace_s, kill_at):
    steps = ladder("failure", grace_s)
    assert taken(steps, 100.0) == [("TERM", True)]
    assert steps.next_s() == kill_at


def test_hung_ranks_print_their_stacks_before_they_are_killed():
    steps = ladder("hung", 5.0)
    assert taken(steps, 100.0) == [("ABRT", False)]
    assert taken(steps, 105.0) == [("TERM", True)] and steps.next_s() == 107.0
    assert taken(steps, 107.0) == [("KILL", True)]


def test_a_slower_way_never_replaces_a_quicker_one():
    steps = ladder("failure", 300.0)
    assert not steps.set(reap.steps_for("head", now_s=101.0, signal="USR1", grace_s=300.0))
    assert steps.set([reap.Step(101.0, "KILL", True)])
    assert taken(steps, 101.0) == [("KILL", True)]
    assert not steps.set([reap.Step(102.0, "KILL", True)])


def test_steps_that_were_slept_through_are_all_taken_in_order():
    assert taken(ladder("head", 10.0), 1000.0) == [("USR1", False), ("TERM", True), ("KILL", True)]


@pytest.mark.parametrize(
    "line, done",
    [
        (b'{"done": true}', True),
        (b'{"step": 1, "done":true, "x": 2}', True),
        (b'{"done": false}', False),
        (b'{"done": "true"}', False),
        (b'{"done": true', False),
        (b'"done"', False),
        (b'\xff"done"', False),
        (b'[{"done": true}]', False),
    ],
)
def test_only_a_whole_object_that_says_done_counts(line, done):
    assert processes.is_done_line(line) is done


def test_a_finished_rank_gets_its_time_to_exit_and_is_told_once():
    watch = processes.ExitWatch(exit_s=10.0, linger_s=60.0)
    watch.see_done(100.0)
    watch.see_done(105.0)

    def look(now_s):
        return watch.check(now_s, cpu_s=0.0, written_bytes=0, other_exited_s=None)

    assert [look(109.9), look(110.0), look(111.0)] == [None, processes.FINISHED, None]


def test_a_rank_that_computes_or_writes_is_not_idle_however_long_the_others_are_gone():
    watch = processes.ExitWatch(exit_s=10.0, linger_s=60.0)
    for n in range(20):
        assert watch.check(100.0 + 50 * n, cpu_s=0.2 * n, written_bytes=0, other_exited_s=100.0) is None
    for n in range(20):
        assert watch.check(1100.0 + 50 * n, cpu_s=3.8, written_bytes=n + 1, other_exited_s=100.0) is None
    assert watch.check(2110.0, cpu_s=3.8, written_bytes=20, other_exited_s=100.0) == processes.IDLE


def test_nobody_is_idle_while_no_other_rank_has_ended():
    watch = processes.ExitWatch(exit_s=10.0, linger_s=60.0)
    assert all(watch.check(at, cpu_s=0.0, written_bytes=0, other_exited_s=None) is None for at in (0.0, 1e6))


def process(pid, ppid, session, *, state="S", start=1):
    return Stat(b"%d (x) %s %d 0 %d" % (pid, state.encode(), ppid, session) + b" 0" * 15 + b" %d" % start)


def test_kin_are_found_through_all_generations_and_strangers_are_not():
    table = {
        p.pid: p
        for p in (process(1, 0, 1), process(10, 1, 10), process(11, 10, 10), process(12, 11, 12), process(20, 1, 20))
    }
    assert reap.descendants(table, [10]) == {10, 11, 12}
    assert reap.descendants(table, [99]) == set()


def test_a_session_counts_only_while_its_recorded_leader_leads_it():
    table = {p.pid: p for p in (process(10, 1, 10, start=5), process(11, 1, 10), process(21, 1, 20))}
    assert reap.in_sessions(table, {10: 5, 20: 7}) == {10, 11}
    assert reap.in_sessions(table, {10: 4}) == set()


@pytest.mark.parametrize("name", [b"python", b"a) R 1 (b", b"", b"x y\nz", b")))"])
def test_a_process_name_may_hold_anything(name):
    fields = [b"S", b"7", b"8", b"9"] + [b"0"] * 7 + [b"30", b"12"] + [b"0"] * 6 + [b"4711"] + [b"0"] * 30
    stat = Stat(b"42 (" + name + b") " + b" ".join(fields) + b"\n")
    assert (stat.pid, stat.state, stat.ppid, stat.session, stat.cpu_ticks, stat.start) == (42, "S", 7, 9, 42, 4711)


def test_group_paths_are_read_from_the_kernels_tables():
    mounts = (
        "35 24 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "36 24 0:31 / /sys/fs/my\\040group rw,nosuid shared:9 - cgroup2 cgroup2 rw\n"
    )
    assert reap.parse_mount(mounts) == "/sys/fs/my group"
    assert reap.parse_mount(mounts.splitlines()[0]) is None
    assert reap.parse_own("4:memory:/a\n0::/user.slice/x.scope\n") == "/user.slice/x.scope"
    assert reap.parse_own("4:memory:/a\n") is None


def test_a_route_answer_is_read_and_no_route_is_none():
    def attribute(kind, value):
        return struct.pack("=HH", 4 + len(value), kind) + value + b"\0" * (-len(value) % 4)

    body = (
        b"\0" * 12
        + attribute(1, bytes([10, 0, 0, 3]))
        + attribute(4, struct.pack("=I", 3))
        + attribute(7, bytes([10, 0, 0, 2]))
    )
    message = struct.pack("=IHHII", 16 + len(body), 24, 0, 1, 0) + body
    assert network.parse_answer(message) == (3, bytes([10, 0, 0, 2]))
    assert network.parse_answer(struct.pack("=IHHIIi", 36, 2, 0, 1, 0, -101) + b"\0" * 16) == (None, None)


@pytest.mark.parametrize("text", ["name", "name=explode", "=kill", "a=kill,b"])
def test_a_mistyped_failpoint_is_an_error(text):
    with pytest.raises(ValueError):
        failpoint.parse(text)


def test_failpoints_count():
    assert failpoint.parse("a.b:3=kill,c=raise") == {"a.b": [3, "kill"], "c": [1, "raise"]}


def test_the_tokens_are_the_plans():
    assert ranks.PORT_TOKEN == plan.PORT_TOKEN
    assert join.LOCAL_RANK_TOKEN == launchers.LOCAL_RANK_TOKEN
    assert ranks.PATH_TOKEN == rank_env.PATH_TOKEN.encode()
    assert layout.FORKS_VARIABLE == rank_env.FORKS_VARIABLE
    assert ranks.put_port("--port=" + plan.PORT_TOKEN, 29500) == "--port=29500"


def test_a_ranks_environment_overrides_in_order_and_drops_the_agents_own():
    login = {b"PATH": b"/bin", b"X": b"login", b"ASCENDRUN_FAILPOINT": b"x=kill", b"ASCENDRUN_RUN_ID": b"outer.1"}
    env = ranks.rank_environ(
        login, {"X": "plan", "Y": "plan"}, master_port=1, secret={"Y": "secret"}, tag="run.1", root="/r"
    )
    assert env == {
        b"PATH": b"/bin",
        b"X": b"plan",
        b"Y": b"secret",
        b"MASTER_PORT": b"1",
        b"ASCENDRUN_RUN_ID": b"run.1",
        b"ASCENDRUN_NODE_ROOT": b"/r",
    }


@pytest.mark.parametrize("own, expected", [({}, b"/login:/lib"), ({"PYTHONPATH": "/mine"}, b"/mine:/lib")])
def test_the_staged_library_is_last_on_the_path_of_modules(own, expected):
    how = {"master_port": None, "secret": {}, "tag": "run.1", "root": "/r"}
    login = {b"PYTHONPATH": b"/login"}
    assert ranks.rank_environ(login, own, library="/lib", **how)[b"PYTHONPATH"] == expected
    assert ranks.rank_environ(login, {}, **how)[b"PYTHONPATH"] == b"/login"
