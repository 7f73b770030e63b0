"""kill -9 at every step of ours: an attempt starts at most once, ends with proof, and leaves nobody."""

import json
import signal

import pytest

from ascendrun.node import layout, procs
from tests.agent.conftest import HOLD, PY, TAG
from tests.lib.vcluster.processes import await_that

HIDER = [
    PY,
    "-c",
    "import os,time\nif os.fork()==0:\n    os.setsid()\n    if os.fork()==0: time.sleep(600)\n"
    "    os._exit(0)\nos.wait()\nprint('hidden',flush=True)\ntime.sleep(600)",
]
DEAF = [PY, "-c", "import signal,time\nsignal.signal(15,signal.SIG_IGN)\nprint('deaf',flush=True)\ntime.sleep(600)"]


def kill_supervisor(node, tag):
    identity = node.identity(tag)
    assert procs.send_signal(identity["pid"], identity["start"], signal.SIGKILL)
    return identity


def test_a_killed_supervisor_is_told_and_its_ranks_are_ended_by_a_stop(node, agent):
    agent.start(node.job(TAG, HOLD, HIDER))
    agent.wait(lambda: agent.output(TAG, 1) == b"hidden\n")
    identity = kill_supervisor(node, TAG)
    assert agent.wait_told(TAG, "supervisor_lost")["pid"] == identity["pid"]
    assert agent.phase(TAG) == "lost" and len(node.alive(TAG)) >= 3
    agent.do("stop", tag=TAG, now=False, grace_s=5)
    ended = agent.wait_ended(TAG)
    assert ended["leftovers"] == [] and ended["codes"] == {"0": None, "1": None}
    agent.wait_phase(TAG, "ended")
    assert node.alive(TAG) == []
    assert [e["seq"] for e in agent.story(TAG)] == list(range(1, len(agent.story(TAG)) + 1))
    agent.do("stop", tag=TAG, now=True, grace_s=None)
    agent.do("ping")
    assert len(agent.told(TAG, "ended")) == 1 and len(agent.told(TAG, "supervisor_lost")) == 1


def test_agent_and_supervisor_killed_together_are_made_good_by_the_next_agent(node, agent):
    agent.start(node.job(TAG, HIDER))
    agent.wait(lambda: agent.output(TAG) == b"hidden\n")
    agent.kill()
    kill_supervisor(node, TAG)
    second = node.connect()
    second.do("follow", tag=TAG, offsets={})
    second.wait_told(TAG, "supervisor_lost")
    second.end(TAG)
    assert node.alive(TAG) == []


def test_after_a_reboot_the_attempt_is_lost_and_no_stranger_with_an_old_number_is_touched(node, agent):
    agent.begin(node.job(TAG, HOLD))
    rank = node.alive(TAG)[0]
    path = node.folder(TAG) / layout.IDENTITY
    true_identity = node.identity(TAG)
    path.write_text(json.dumps(dict(true_identity, boot_id="an-earlier-boot")))
    assert agent.phase(TAG) == "lost"
    assert agent.wait_told(TAG, "supervisor_lost")["reason"] == "node-rebooted"
    path.write_text(json.dumps(true_identity))
    assert procs.read_stat(rank)
    agent.end(TAG)


@pytest.mark.parametrize("now", [False, True])
def test_ranks_run_on_when_their_agent_ends_and_a_new_one_can_stop_them(node, agent, now):
    agent.begin(node.job(TAG, HOLD))
    if now:
        assert agent.close() == 0  # the end of its input
    else:
        agent.kill()
    assert len(node.alive(TAG)) == 1
    second = node.connect()
    assert second.phase(TAG) == "running"
    second.do("follow", tag=TAG, offsets={})
    second.do("stop", tag=TAG, now=now, grace_s=5)
    assert second.wait_ended(TAG)["codes"] == {"0": -9 if now else -15}


def die_at(node, hurt, point, act):
    """Until the agent, which does so, or its supervisor has died there."""
    try:
        act()
    except (EOFError, BrokenPipeError) as error:
        hurt.kill()
        assert "failpoint " + point in str(error)
    else:
        hurt.wait(lambda: "failpoint " + point in (node.folder(TAG) / "supervisor.log").read_text())


START_POINTS = [
    "prepare.before_record",
    "prepare.after_record",
    "launch.before_spawn",
    "launch.before_claim",
    "launch.after_claim",
    "agent.after_fork_before_record",
    "agent.after_record",
    "agent.after_exec_before_ack",
]


@pytest.mark.parametrize("point", START_POINTS)
def test_killed_while_starting_nothing_runs_twice_and_a_stop_always_ends_it(node, point):
    hurt = node.connect(ASCENDRUN_FAILPOINT=f"{point}=kill")
    job = node.job(TAG, HOLD)

    def start():
        hurt.do("prepare", **job)
        hurt.ask("go", tag=TAG, master_port=None, secret_env={})

    die_at(node, hurt, point, start)
    agent = node.connect()
    agent.do("follow", tag=TAG, offsets={})
    await_that(lambda: agent.phase(TAG) in (None, "prepared", "running", "lost"))
    if agent.phase(TAG) in (None, "prepared"):
        agent.do("prepare", **job)
        agent.do("go", tag=TAG, master_port=None, secret_env={})
        agent.wait_told(TAG, "rank_started", rank=0)
    assert len(agent.pids(TAG)) <= 1
    agent.do("go", tag=TAG, master_port=None, secret_env={})
    assert len(agent.pids(TAG)) <= 1
    assert agent.end(TAG)["leftovers"] == []
    assert node.alive(TAG) == [] and len(agent.told(TAG, "ended")) == 1
    assert len(agent.told(TAG, "supervising")) <= 1 and len(agent.told(TAG, "rank_started")) <= 1


END_POINTS = [
    "agent.after_exit_before_record",
    "agent.after_exit_record",
    "stop.after_mark",
    "stop.after_term",
    "stop.before_kill",
    "stop.after_kill_before_confirm",
    "finish.before_terminal",
    "finish.after_event",
    "stop.after_wish",
]


@pytest.mark.parametrize("point", END_POINTS)
def test_killed_while_stopping_the_next_stop_ends_it_once_and_leaves_nobody(node, point):
    hurt = node.connect(ASCENDRUN_FAILPOINT=f"{point}=kill")
    hurt.start(node.job(TAG, HIDER, DEAF))
    hurt.wait(lambda: hurt.output(TAG) == b"hidden\n" and hurt.output(TAG, 1) == b"deaf\n")

    def stop():
        hurt.do("stop", tag=TAG, now=False, grace_s=0.05)
        hurt.wait(lambda: hurt.told(TAG, "ended") or hurt.told(TAG, "supervisor_lost"))

    die_at(node, hurt, point, stop)
    agent = node.connect()
    agent.do("follow", tag=TAG, offsets={})
    assert agent.end(TAG)["leftovers"] == []
    agent.wait_phase(TAG, "ended")
    assert node.alive(TAG) == []
    assert len(agent.told(TAG, "ended")) == 1


def test_a_paused_supervisor_does_not_stop_the_agent_from_answering(node):
    agent = node.connect(ASCENDRUN_FAILPOINT="stop.after_mark=pause")
    agent.start(node.job(TAG, HOLD))
    agent.do("stop", tag=TAG, now=False, grace_s=1)
    agent.wait_told(TAG, "stopping", by="head")
    identity = node.identity(TAG)
    agent.wait(lambda: procs.read_stat(identity["pid"]).state == "T")
    agent.do("ping")
    assert agent.phase(TAG) == "running"
    procs.send_signal(identity["pid"], identity["start"], signal.SIGCONT)
    agent.wait_ended(TAG)


def test_the_next_attempt_starts_as_soon_as_the_end_of_the_last_is_told(node):
    first = node.connect(ASCENDRUN_FAILPOINT="finish.after_event=pause")
    first.run(node.job("head-job.1", ["true"]))
    identity = node.identity("head-job.1")
    first.wait(lambda: procs.read_stat(identity["pid"]).state == "T")
    first.kill()
    agent = node.connect()
    agent.start(node.job("head-job.2", HOLD))
    agent.wait_told("head-job.2", "rank_started")
    procs.send_signal(identity["pid"], identity["start"], signal.SIGCONT)
    agent.wait_phase("head-job.1", "ended")
    agent.end("head-job.2")


def test_a_supervisor_that_hangs_is_taken_over_by_a_stop_at_once(node):
    agent = node.connect(ASCENDRUN_FAILPOINT="stop.after_mark=pause")
    agent.start(node.job(TAG, HIDER))
    agent.wait(lambda: agent.output(TAG) == b"hidden\n")
    agent.do("stop", tag=TAG, now=False, grace_s=500)
    identity = node.identity(TAG)
    agent.wait(lambda: procs.read_stat(identity["pid"]).state == "T")
    assert agent.end(TAG)["leftovers"] == []
    agent.wait(lambda: not procs.is_alive(identity))  # the stop lets it continue, and it ends
    assert node.alive(TAG) == []
