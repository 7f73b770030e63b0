"""How attempts end: failures, stops, programs that hide or will not go. The bad days first."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from ascendrun.node import layout, procs, reap
from ascendrun.node.op_errors import message
from tests.agent.conftest import HOLD, PY, TAG, program

HELD = """
import ctypes, os, sys, time
pid, libc = int(sys.argv[1]), ctypes.CDLL(None, use_errno=True)
assert libc.ptrace(16, pid, 0, 0) == 0  # as a debugger: it stops, and SIGCONT does not make it continue
os.waitpid(pid, 0x40000000)
print("held", flush=True)
time.sleep(600)
"""


def start_saving(node, agent):
    """A rank that saves on the signal of its job, within its grace."""
    save = program(
        "import signal,sys,time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: (print('saved', flush=True), sys.exit(0)))\n"
        "print('ready', flush=True)\ntime.sleep(600)"
    )
    agent.start(node.job(TAG, save, stop={"signal": "USR1", "grace_s": 60}))
    agent.wait(lambda: agent.output(TAG) == b"ready\n")


def test_exit_3_of_one_rank_is_recorded_and_stops_the_others(node, agent):
    ended = agent.run(node.job(TAG, HOLD, ["sh", "-c", "echo last words >&2; exit 3"], HOLD))
    first = agent.told(TAG, "rank_exited")[0]
    assert (first["rank"], first["code"], first["signal"], first["stopped"]) == (1, 3, None, False)
    others = [e for e in agent.told(TAG, "rank_exited") if e["rank"] != 1]
    assert [(e["code"], e["signal"], e["stopped"]) for e in others] == [(None, signal.SIGTERM, True)] * 2
    assert agent.told(TAG, "stopping")[0]["by"] == "failure"
    assert agent.told(TAG, "stopping")[0]["reason"] == message("rank-exited", rank=1, code=3, signal=None)
    assert ended["codes"] == {"0": -15, "1": 3, "2": -15} and ended["leftovers"] == []
    agent.wait(lambda: agent.output(TAG, 1, "err") == b"last words\n")
    agent.wait_phase(TAG, "ended")
    assert node.alive(TAG) == []


def test_death_by_a_signal_is_told_as_a_signal(node, agent):
    assert agent.run(node.job(TAG, ["sh", "-c", "kill -SEGV $$"]))["codes"] == {"0": -11}
    exited = agent.told(TAG, "rank_exited")[0]
    assert (exited["code"], exited["signal"]) == (None, signal.SIGSEGV)


def test_a_rank_that_saves_on_the_signal_and_exits_0_within_the_grace(node, agent):
    start_saving(node, agent)
    agent.do("stop", tag=TAG, now=False, grace_s=60)
    assert agent.wait_ended(TAG)["codes"] == {"0": 0}
    exited = agent.told(TAG, "rank_exited")[0]
    assert exited["stopped"] and exited["code"] == 0
    assert agent.told(TAG, "stopping")[0]["signal"] == "USR1"
    agent.wait(lambda: agent.output(TAG) == b"ready\nsaved\n")


def test_a_rank_that_dies_of_the_stop_signal_does_not_cut_short_another_ones_saving(node, agent):
    slow = program(
        "import signal,sys,time\n"
        "def save(*_):\n    time.sleep(1.0); print('saved', flush=True); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\nprint('ready', flush=True)\ntime.sleep(600)"
    )
    agent.start(node.job(TAG, slow, HOLD, stop={"signal": "TERM", "grace_s": 60}))
    agent.wait(lambda: agent.output(TAG) == b"ready\n")
    agent.do("stop", tag=TAG, now=False, grace_s=None)
    assert agent.wait_ended(TAG)["codes"] == {"0": 0, "1": -15}
    agent.wait(lambda: agent.output(TAG).endswith(b"saved\n"))


def test_a_rank_that_ignores_everything_is_killed_after_the_grace(node, agent):
    deaf = program(
        "import signal,time\nfor s in (1,2,10,15): signal.signal(s, signal.SIG_IGN)\n"
        "print('ready', flush=True)\ntime.sleep(600)"
    )
    agent.start(node.job(TAG, deaf))
    agent.wait(lambda: agent.output(TAG))
    agent.do("stop", tag=TAG, now=False, grace_s=0.2)
    assert agent.wait_ended(TAG)["codes"] == {"0": -9}


def test_stop_now_kills_at_once_and_may_overtake_a_gentle_stop(node, agent):
    agent.start(
        node.job(
            TAG,
            program(
                "import signal,time\nsignal.signal(15, signal.SIG_IGN)\nprint('ready', flush=True)\ntime.sleep(600)"
            ),
        )
    )
    agent.wait(lambda: agent.output(TAG))
    agent.do("stop", tag=TAG, now=False, grace_s=500)
    agent.wait_told(TAG, "stopping", by="head")
    assert agent.end(TAG)["codes"] == {"0": -9}
    assert [e["signal"] for e in agent.told(TAG, "stopping")] == ["TERM", "KILL"]


HIDERS = {
    "setsid": "import os,time\nif os.fork()==0:\n    os.setsid(); time.sleep(600)\n"
    "print('x',flush=True)\ntime.sleep(600)",
    "double fork": "import os,time\nif os.fork()==0:\n    os.setsid()\n    if os.fork()==0: time.sleep(600)\n"
    "    os._exit(0)\nos.wait()\nprint('x',flush=True)\ntime.sleep(600)",
    "double fork, cleared environment": "import os,time\nif os.fork()==0:\n    os.setsid()\n    if os.fork()==0:\n"
    "        os.execve('/bin/sleep',['sleep','600'],{})\n    os._exit(0)\n"
    "os.wait()\nprint('x',flush=True)\ntime.sleep(600)",
    "ignores TERM, three deep": "import os,signal,time\nsignal.signal(15,signal.SIG_IGN)\n"
    "for _ in range(3):\n    if os.fork(): break\n    os.setsid()\nelse: time.sleep(600)\n"
    "print('x',flush=True)\ntime.sleep(600)",
}


def test_stop_leaves_nobody_however_they_hide_and_spares_the_same_command_elsewhere(node, agent):
    commands = [program(code) for code in HIDERS.values()]
    other = "head-other.1"
    for tag in (TAG, other):
        agent.start(node.job(tag, *commands))
    for tag in (TAG, other):
        agent.wait(lambda tag=tag: all(agent.output(tag, n) for n in range(len(commands))))
    spared = set(agent.pids(other))
    hidden = set(agent.pids(TAG))
    assert len(hidden) >= 2 * len(commands) and not hidden & spared
    agent.do("stop", tag=TAG, now=False, grace_s=0.1)
    assert agent.wait_ended(TAG)["leftovers"] == []
    assert agent.pids(TAG) == []
    assert set(agent.pids(other)) >= spared, "a child may have been forked meanwhile"
    agent.end(other)


def test_daemons_of_ranks_that_exited_0_are_ended_and_their_open_pipes_do_not_hang_the_end(node, agent):
    leave = program("import os,time\nif os.fork()==0:\n    os.setsid(); time.sleep(600)\nprint('done',flush=True)")
    assert agent.run(node.job(TAG, leave, leave))["codes"] == {"0": 0, "1": 0}
    assert agent.told(TAG, "stopping")[0]["by"] == "finished"
    assert agent.output(TAG, 0) == b"done\n"


def test_the_time_limit_stops_the_attempt(node, agent):
    agent.run(node.job(TAG, HOLD, max_s=0.2))
    assert agent.told(TAG, "stopping")[0]["by"] == "limit"


def test_a_rank_that_finished_but_does_not_exit_is_ended_and_counts_as_0(node, agent):
    hang = program(
        "import os,time\n"
        "open(os.environ['ASCENDRUN_METRICS_FILE'],'a').write('{\"step\":1}\\n{\"done\": true}\\n')\n"
        "time.sleep(600)"
    )
    assert agent.run(node.job(TAG, hang, ["true"], exit_s=0.2))["codes"] == {"0": 0, "1": 0}
    assert agent.told(TAG, "rank_lingers", rank=0)[0]["why"] == "finished"
    exited = agent.told(TAG, "rank_exited", rank=0)[0]
    assert exited["code"] == 0 and exited["note"] == "killed-at-exit"


def test_an_idle_rank_beside_one_that_ended_well_is_told_once_and_left_alone(node, agent):
    agent.start(node.job(TAG, HOLD, ["true"], linger_s=0.1, exit_s=0.1))
    hung = agent.wait_told(TAG, "rank_lingers", rank=0)
    assert (hung["why"], hung["after_s"]) == ("idle", 0.1)
    assert node.alive(TAG)
    agent.end(TAG)
    assert len(agent.told(TAG, "rank_lingers")) == 1


def test_a_stopped_supervisor_continues_for_a_stop_and_its_ranks_may_save(node, agent):
    start_saving(node, agent)
    identity = node.identity(TAG)
    procs.send_signal(identity["pid"], identity["start"], signal.SIGSTOP)
    agent.do("stop", tag=TAG, now=False, grace_s=60)
    assert agent.wait_ended(TAG)["codes"] == {"0": 0}
    agent.wait(lambda: agent.output(TAG) == b"ready\nsaved\n")


@pytest.mark.parametrize("now", [False, True])
def test_a_supervisor_that_ignores_a_stop_is_replaced_at_the_second_request_or_at_once(node, agent, now):
    agent.begin(node.job(TAG, HOLD))
    identity = node.identity(TAG)
    held = subprocess.Popen([PY, "-c", HELD, str(identity["pid"])], stdout=subprocess.PIPE)
    try:
        if held.stdout is None or held.stdout.readline() != b"held\n":
            pytest.skip("this user may not trace processes")
        if not now:
            agent.do("stop", tag=TAG, now=False, grace_s=0)
            asked = node.folder(TAG) / layout.STOP
            order = json.loads(asked.read_text())
            asked.write_text(json.dumps({**order, "first_ns": order["first_ns"] - 10**11}))
            assert node.alive(TAG) and not agent.told(TAG, "stopping")
        agent.do("stop", tag=TAG, now=now, grace_s=0)
        assert agent.wait_ended(TAG)["codes"] == {"0": None}
        assert node.alive(TAG) == []
    finally:
        held.kill()
        held.communicate()


def start_renewed(node, agent, lease_s, is_enough):
    """Start a rank under such a lease and renew it until it is enough; the longest time between two renewals."""
    stop = {"signal": "TERM", "grace_s": 0}
    last_s, longest_gap_s, at_ns = time.monotonic(), 0.0, None
    agent.do("prepare", **node.job(TAG, HOLD, fence_s=reap.MARGIN_S + lease_s, stop=stop))
    agent.do("follow", tag=TAG, offsets={})
    agent.post("go", tag=TAG, master_port=None, secret_env={})
    while not (agent.told(TAG, "rank_started") and is_enough()) and not agent.told(TAG, "ended"):
        at_ns = agent.do("renew", tag=TAG, at_ns=at_ns)["at_ns"]
        longest_gap_s, last_s = max(longest_gap_s, time.monotonic() - last_s), time.monotonic()
        agent.pump(0.05)
    return longest_gap_s


def test_ranks_end_without_the_head_when_their_lease_is_over(node, agent):
    start_renewed(node, agent, 4.0, lambda: True)
    agent.wait_ended(TAG)
    assert agent.told(TAG, "rank_started") and agent.told(TAG, "stopping")[0]["by"] == "fence"


def test_ranks_run_on_while_the_head_renews_their_lease(node, agent):
    lease_s, began_s = 3.0, time.monotonic()
    longest_gap_s = start_renewed(node, agent, lease_s, lambda: time.monotonic() > began_s + lease_s + 2)
    if longest_gap_s < lease_s / 3:  # else this machine was too busy to renew it
        assert node.alive(TAG) and not agent.told(TAG, "stopping")
    agent.end(TAG)


def test_a_go_that_comes_after_the_lease_starts_nothing(node, agent):
    agent.do("prepare", **node.job(TAG, HOLD, fence_s=100))
    os.utime(node.folder(TAG) / layout.RENEWED, ns=(1, 1))
    agent.do("follow", tag=TAG, offsets={})
    agent.do("go", tag=TAG, master_port=None, secret_env={})
    agent.wait_ended(TAG)
    assert agent.told(TAG, "stopping")[0]["by"] == "fence" and not agent.told(TAG, "rank_started")


def test_a_late_or_a_repeated_renewal_does_not_make_a_lease_longer(node, agent):
    agent.do("prepare", **node.job(TAG, HOLD, fence_s=100))
    file = node.folder(TAG) / layout.RENEWED
    first = agent.do("renew", tag=TAG)["at_ns"]
    second = agent.do("renew", tag=TAG, at_ns=first)["at_ns"]
    assert file.stat().st_mtime_ns == first
    agent.do("renew", tag=TAG, at_ns=second)
    agent.do("renew", tag=TAG, at_ns=first)
    agent.do("renew", tag=TAG, at_ns=second + 3_600_000_000_000)
    assert file.stat().st_mtime_ns == second
    agent.do("abort", tag=TAG)


@pytest.mark.parametrize("metrics, is_done", [('{"step": 1}', False), ('{"done": true}', True)])
def test_the_work_of_a_rank_that_exits_0_at_a_shutdown_is_complete_only_if_it_was_before(node, agent, metrics, is_done):
    rank = program(
        "import os,signal,sys,time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        f"open(os.environ['ASCENDRUN_METRICS_FILE'], 'a').write('{metrics}\\n')\n"
        "print('ready', flush=True)\ntime.sleep(600)"
    )
    agent.start(node.job(TAG, rank))
    agent.wait(lambda: agent.output(TAG) == b"ready\n")
    identity = node.identity(TAG)
    procs.send_signal(identity["pid"], identity["start"], signal.SIGTERM)
    assert agent.wait_ended(TAG)["codes"] == {"0": 0}
    stopping, exited = agent.told(TAG, "stopping")[0], agent.told(TAG, "rank_exited")[0]
    assert stopping["by"] == "node"
    if is_done:
        assert stopping["done"] and exited["done"]
    else:
        assert "done" not in stopping and exited["stopped"] and "done" not in exited


def test_a_child_without_any_trace_is_found_on_the_roll_of_a_dead_supervisor(node, agent):
    """Its environment is cleared, its session is its own, its parent is gone."""
    agent.start(node.job(TAG, program(HIDERS["double fork, cleared environment"])))
    agent.wait(lambda: agent.output(TAG) == b"x\n")
    identity = node.identity(TAG)
    hidden: list[int] = []

    def is_hidden():  # until then the last child has the environment of the rank
        hidden[:] = [pid for pid in agent.pids(TAG) if pid not in node.alive(TAG)]
        return len(hidden) == 1

    agent.wait(is_hidden)
    start = procs.read_stat(hidden[0]).start
    roll = node.folder(TAG) / layout.ROLL
    agent.wait(lambda: roll.exists() and [hidden[0], start] in json.loads(roll.read_text())["seen"])
    procs.send_signal(identity["pid"], identity["start"], signal.SIGKILL)
    agent.wait_told(TAG, "supervisor_lost")
    assert hidden[0] in agent.pids(TAG)
    agent.end(TAG)
    assert procs.describe(hidden[0], start) is None


def test_ranks_are_killed_before_their_supervisor_when_memory_runs_out(node, agent):
    agent.begin(node.job(TAG, HOLD))
    pids = [node.identity(TAG)["pid"], *node.alive(TAG)]
    supervisor, rank = (int(Path("/proc/%d/oom_score_adj" % pid).read_text()) for pid in pids)
    assert rank == min(1000, supervisor + 100)
    agent.end(TAG)


def test_an_end_that_a_rank_writes_is_replaced_by_the_supervisors(node, agent):
    forge = program(
        "import os,sys,time\n"
        "path = os.path.join(os.path.dirname(os.environ['ASCENDRUN_METRICS_FILE']), 'events.0')\n"
        'end = \'{"seq":50,"at_ns":1,"event":"ended","leftovers":[],"codes":{"0":0}}\'\n'
        "open(path, 'a').write(end + '\\n{\"torn')\n"
        "print('forged', flush=True)\n"
        "while not os.path.exists('go'): time.sleep(0.01)\n"
        "sys.exit(3)"
    )
    agent.start(node.job(TAG, forge))
    agent.wait(lambda: agent.output(TAG) == b"forged\n" and agent.told(TAG, "ended"))
    seen = agent.do("processes", tag=TAG)
    assert seen["supervisor"] and [one["killed"] for one in seen["processes"]] == [False]
    assert agent.phase(TAG) == "running"
    Path(layout.work_dir(str(node.root), "head-job"), "go").touch()
    true = agent.wait(lambda: [end for end in agent.told(TAG, "ended") if "exits" in end])[0]
    assert true["exits"] == {"0": {"code": 3, "signal": None, "stopped": False, "done": False}}
    assert agent.told(TAG, "rank_exited")[-1]["code"] == 3


def test_exit_records_carry_time_in_ns_and_what_was_used(node, agent):
    before = time.time_ns()
    agent.run(node.job(TAG, ["true"]))
    exited = agent.told(TAG, "rank_exited")[0]
    assert before < exited["exited_ns"] <= time.time_ns() and exited["max_rss_bytes"] > 0 and exited["cpu_s"] >= 0
    assert [e["seq"] for e in agent.story(TAG)] == list(range(1, len(agent.story(TAG)) + 1))
