"""How attempts end: failures, stops, programs that hide or will not go. The bad days first."""

from __future__ import annotations

import signal
import sys
import time

from ascendrun.node.op_errors import message

PY = sys.executable
HOLD = ["sh", "-c", "exec sleep 600"]
TAG = "head-job.1"


def python(code):
    return [PY, "-c", code]


def test_exit_3_of_one_rank_is_recorded_and_stops_the_others(node, agent):
    agent.start(node.job(TAG, HOLD, ["sh", "-c", "echo last words >&2; exit 3"], HOLD))
    ended = agent.wait_ended(TAG)
    first = agent.told(TAG, "rank_exited")[0]
    assert (first["rank"], first["code"], first["signal"], first["stopped"]) == (1, 3, None, False)
    others = [e for e in agent.told(TAG, "rank_exited") if e["rank"] != 1]
    assert [(e["code"], e["signal"], e["stopped"]) for e in others] == [(None, signal.SIGTERM, True)] * 2
    assert agent.told(TAG, "stopping")[0]["by"] == "failure"
    assert agent.told(TAG, "stopping")[0]["reason"] == message("rank-exited", rank=1, code=3, signal=None)
    assert ended["codes"] == {"0": -15, "1": 3, "2": -15} and ended["leftovers"] == []
    agent.wait(lambda: agent.output(TAG, 1, "err") == b"last words\n")
    assert node.alive(TAG) == [] and agent.phase(TAG) == "ended"


def test_death_by_a_signal_is_told_as_a_signal(node, agent):
    agent.start(node.job(TAG, ["sh", "-c", "kill -SEGV $$"]))
    assert agent.wait_ended(TAG)["codes"] == {"0": -11}
    exited = agent.told(TAG, "rank_exited")[0]
    assert (exited["code"], exited["signal"]) == (None, signal.SIGSEGV)


def test_all_ranks_exit_0_and_the_attempt_ends(node, agent):
    agent.start(node.job(TAG, ["true"], ["true"]))
    assert agent.wait_ended(TAG)["codes"] == {"0": 0, "1": 0}
    assert not agent.told(TAG, "stopping")


def test_a_rank_that_saves_on_the_signal_and_exits_0_within_the_grace(node, agent):
    save = python(
        "import signal,sys,time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: (print('saved', flush=True), sys.exit(0)))\n"
        "print('ready', flush=True)\ntime.sleep(600)"
    )
    agent.start(node.job(TAG, save, stop={"signal": "USR1", "grace_s": 60}))
    agent.wait(lambda: agent.output(TAG) == b"ready\n")
    agent.do("stop", tag=TAG, now=False, grace_s=60)
    assert agent.wait_ended(TAG)["codes"] == {"0": 0}
    exited = agent.told(TAG, "rank_exited")[0]
    assert exited["stopped"] and exited["code"] == 0
    assert agent.told(TAG, "stopping")[0]["signal"] == "USR1"
    agent.wait(lambda: agent.output(TAG) == b"ready\nsaved\n")


def test_a_rank_that_dies_of_the_stop_signal_does_not_cut_short_another_ones_saving(node, agent):
    slow = python(
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
    deaf = python(
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
            python(
                "import signal,time\nsignal.signal(15, signal.SIG_IGN)\nprint('ready', flush=True)\ntime.sleep(600)"
            ),
        )
    )
    agent.wait(lambda: agent.output(TAG))
    agent.do("stop", tag=TAG, now=False, grace_s=500)
    agent.wait_told(TAG, "stopping", by="head")
    agent.do("stop", tag=TAG, now=True, grace_s=None)
    assert agent.wait_ended(TAG)["codes"] == {"0": -9}
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
    commands = [python(code) for code in HIDERS.values()]
    other = "head-other.1"
    for tag in (TAG, other):
        agent.start(node.job(tag, *commands))
    for tag in (TAG, other):
        agent.wait(lambda tag=tag: all(agent.output(tag, n) for n in range(len(commands))))
    spared = set(agent.do("processes", tag=other)["pids"])
    hidden = set(agent.do("processes", tag=TAG)["pids"])
    assert len(hidden) >= 2 * len(commands) and not hidden & spared
    agent.do("stop", tag=TAG, now=False, grace_s=0.1)
    assert agent.wait_ended(TAG)["leftovers"] == []
    assert agent.do("processes", tag=TAG)["pids"] == []
    assert set(agent.do("processes", tag=other)["pids"]) == spared
    agent.do("stop", tag=other, now=True, grace_s=None)
    agent.wait_ended(other)


def test_daemons_of_ranks_that_exited_0_are_ended_and_their_open_pipes_do_not_hang_the_end(node, agent):
    leave = python("import os,time\nif os.fork()==0:\n    os.setsid(); time.sleep(600)\nprint('done',flush=True)")
    agent.start(node.job(TAG, leave, leave))
    assert agent.wait_ended(TAG)["codes"] == {"0": 0, "1": 0}
    assert agent.told(TAG, "stopping")[0]["by"] == "finished"
    assert agent.output(TAG, 0) == b"done\n"


def test_the_time_limit_stops_the_attempt(node, agent):
    agent.start(node.job(TAG, HOLD, max_s=0.2))
    agent.wait_ended(TAG)
    assert agent.told(TAG, "stopping")[0]["by"] == "limit"


def test_a_rank_that_finished_but_does_not_exit_is_ended_and_counts_as_0(node, agent):
    hang = python(
        "import os,time\n"
        "open(os.environ['ASCENDRUN_METRICS_FILE'],'a').write('{\"step\":1}\\n{\"done\": true}\\n')\n"
        "time.sleep(600)"
    )
    agent.start(node.job(TAG, hang, ["true"], exit_s=0.2))
    assert agent.wait_ended(TAG)["codes"] == {"0": 0, "1": 0}
    assert agent.told(TAG, "rank_lingers", rank=0)[0]["why"] == "finished"
    exited = agent.told(TAG, "rank_exited", rank=0)[0]
    assert exited["code"] == 0 and exited["note"] == "killed-at-exit"


def test_an_idle_rank_beside_one_that_ended_well_is_told_once_and_left_alone(node, agent):
    agent.start(node.job(TAG, HOLD, ["true"], linger_s=0.1, exit_s=0.1))
    hung = agent.wait_told(TAG, "rank_lingers", rank=0)
    assert (hung["why"], hung["after_s"]) == ("idle", 0.1)
    assert node.alive(TAG)
    agent.do("stop", tag=TAG, now=True, grace_s=None)
    agent.wait_ended(TAG)
    assert len(agent.told(TAG, "rank_lingers")) == 1


def test_a_shutdown_of_the_node_ends_the_ranks_gently(node, agent):
    agent.start(node.job(TAG, HOLD))
    agent.wait_told(TAG, "rank_started", rank=0)
    from ascendrun.node import procs

    identity = node.identity(TAG)
    procs.send_signal(identity["pid"], identity["start"], signal.SIGTERM)
    agent.wait_ended(TAG)
    assert agent.told(TAG, "stopping")[0]["by"] == "node"


def test_exit_records_carry_time_in_ns_and_what_was_used(node, agent):
    before = time.time_ns()
    agent.start(node.job(TAG, ["true"]))
    agent.wait_ended(TAG)
    exited = agent.told(TAG, "rank_exited")[0]
    assert before < exited["exited_ns"] <= time.time_ns() and exited["max_rss_bytes"] > 0 and exited["cpu_s"] >= 0
    assert [e["seq"] for e in agent.story(TAG)] == list(range(1, len(agent.story(TAG)) + 1))
