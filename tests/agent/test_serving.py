"""The agent's manners: it answers everything, in time, whatever it is asked and on whatever Python it runs."""

import marshal
import os
import select
import time
from pathlib import Path

import pytest

from ascendrun.node import loader, procs, reap, wire
from ascendrun.node.op_errors import message
from tests.agent.conftest import PY, TAG


def test_a_whole_job_runs_on_every_python_at_hand(node, python, tmp_path):
    agent = node.connect(python=python)
    assert agent.hello["protocol"] == wire.PROTOCOL
    assert agent.hello["agent_sha256"] == loader.pack_agent(loader.read_sources())[1]
    assert agent.hello["python"] and agent.hello["root"] == str(node.root) and agent.hello["cpus"] >= 1
    reply, body = agent.ask("exec", b"x" * 300000, argv=["cat"], timeout_s=20)
    assert reply["code"] == 0 and body == b"x" * 300000
    assert agent.do("probe", peers={"me": ["127.0.0.1"]})["routes"]["me"]["source"] == "127.0.0.1"
    code = tmp_path / "code"
    code.mkdir()
    (code / "train.sh").write_text("echo trained $RANK $MASTER_PORT\n")
    sha256 = agent.stage(code)
    agent.start(
        node.job(TAG, ["sh", "train.sh"], ["sh", "train.sh"], trees=[sha256], link_tree=sha256, setup="true"),
        master_port=29500,
    )
    assert agent.wait_ended(TAG)["codes"] == {"0": 0, "1": 0}
    assert agent.output(TAG, 1) == b"trained 1 29500\n"
    agent.wait(lambda: agent.do("processes", tag=TAG)["phase"] == "ended")  # its supervisor writes that last
    second = "head-job.2"
    agent.begin(node.job(second, ["sh", "-c", "sleep 600 & setsid sleep 600 & wait"]))
    assert agent.end(second)["leftovers"] == []
    assert agent.close() == 0


def test_a_node_compiles_only_what_it_runs_and_keeps_it(node, python):
    def kept():
        """The file has a check and the compiled modules by name, in a format that every Python here reads."""
        return {name for file in node.root.glob("*.code") for name in marshal.loads(file.read_bytes()[4:])}

    agent = node.connect(python=python)
    agent.ask("exec", argv=["true"])
    agent.wait(lambda: "ascendrun.node.agent.execute" in kept())
    assert not {name for name in kept() if "supervisor" in name or "lease" in name or "survey" in name}
    agent.run(node.job(TAG, ["true"]))
    assert "ascendrun.node.supervisor.supervise" in kept()
    assert agent.close() == 0 and "ascendrun.node.agent.leases" in kept()
    (file,) = node.root.glob("*.code")
    file.write_bytes(file.read_bytes()[:1000])  # cut by a power failure
    again = node.connect(python=python)
    again.phase(TAG)
    assert again.close() == 0 and "ascendrun.node.agent.serve" in kept()


def test_unknown_and_malformed_requests_are_refused_and_the_agent_lives_on(agent):
    assert agent.refused("no-such-op")["code"] == "unknown-op"
    assert agent.refused("prepare")["code"] == "bad-request"
    assert agent.refused("prepare", tag="head-job.1")["code"] == "bad-request"
    agent.node.tags.clear()
    assert agent.refused("go", tag="../../etc.1")["code"] == "bad-request"
    agent.node.tags.clear()
    assert agent.refused("put_tree", tree="../x", size_bytes=1, offset=0)["code"] == "bad-request"
    assert agent.refused("exec", argv=[])["code"] == "internal"
    assert agent.refused("exec", argv="not a list", timeout_s="x")["code"] == "bad-request"
    agent.do("ping")


def test_nonsense_on_the_input_ends_the_agent_with_a_word(node):
    agent = node.connect()
    agent.stdin.write(b"GET / HTTP/1.1\r\n\r\n" * 10)
    agent.stdin.flush()
    assert agent.process.wait(30) == 2
    assert b"over the limits" in agent.process.stderr.read()
    agent.close()


def test_beats_and_pings_go_on_while_a_command_hangs_and_a_deadline_is_kept(agent):
    number = agent.post("exec", argv=["sleep", "600"], timeout_s=3)
    agent.do("ping")
    agent.wait(lambda: [e for e in agent.events if e["event"] == "beat"])
    reply, _ = agent.wait(lambda: agent.replies.get(number))
    assert reply["timed_out"] and reply["code"] is None and reply["signal"] == 9
    slow = agent.post("exec", argv=["sleep", "600"], timeout_s=60, deadline_s=0.2)
    reply, _ = agent.wait(lambda: agent.replies.get(slow))
    assert reply["error"]["code"] == "deadline"


def test_a_command_at_its_timeout_takes_all_it_started_with_it(agent):
    argv = ["sh", "-c", "setsid sleep 600 & (sleep 600 &) ; echo $$; sleep 600"]
    body = b""
    while not body:  # a machine that stalls may not have come to its first word
        reply, body = agent.ask("exec", argv=argv, timeout_s=2)
        assert reply["timed_out"]
    assert not [
        pid
        for pid in procs.snapshot()
        if b"ASCENDRUN_EXEC=" in procs.read_environ(pid) and str(agent.node.root).encode() in procs.read_environ(pid)
    ]
    assert procs.read_stat(int(body)) is None


def test_a_command_that_leaves_a_daemon_is_answered_when_it_ends_itself(agent):
    began = time.monotonic()
    reply, body = agent.ask("exec", argv=["sh", "-c", "sleep 30 & echo $!"], timeout_s=25)
    assert reply["code"] == 0 and time.monotonic() - began < 20
    stat = procs.read_stat(int(body))
    assert stat is not None
    procs.send_signal(stat.pid, stat.start, 9)


def test_output_of_a_command_is_bounded_and_says_so(agent):
    reply, body = agent.ask("exec", argv=["head", "-c", "9000000", "/dev/zero"], timeout_s=20, max_bytes=1000)
    assert len(body) == 1000 and reply["truncated"] and reply["out_bytes"] == 1000


def test_commands_end_with_the_agent(node, agent):
    agent.post("exec", argv=["sleep", "600"], timeout_s=600)
    sleeper = agent.wait(
        lambda: [
            pid
            for pid in reap.descendants(procs.snapshot(), [agent.process.pid])
            if pid != agent.process.pid and Path("/proc/%d/comm" % pid).read_text() == "sleep\n"
        ]
    )
    death = os.pidfd_open(sleeper[0])  # of somebody else's child: told when it has died, whoever reaps it and when
    agent.close()
    assert select.select([death], [], [], 30)[0]
    os.close(death)


def test_missing_commands_and_odd_arguments(agent):
    assert agent.refused("exec", argv=["no-such"], timeout_s=5)["message"] == message("no-such-command", path="no-such")
    odd = ["a'; echo b", "$(id)", "-n", "\n", "汉"]
    show = "import sys;sys.stdout.buffer.write(repr(sys.argv[1:]).encode())"
    _, body = agent.ask("exec", argv=[PY, "-c", show, *odd], timeout_s=20)
    assert body.decode() == repr(odd)


def test_a_name_that_does_not_resolve_is_told_as_unknown_with_the_reason(agent):
    peers = {"gone": ["no-such-host.invalid"], "none": [], "me": ["no-such.invalid", "127.0.0.1"]}
    routes = agent.do("probe", peers=peers)["routes"]
    assert routes["gone"] == {"interface": None, "source": None}
    assert routes["none"]["interface"] is None and routes["me"]["interface"] == "lo"


def test_an_idle_agent_that_follows_an_attempt_uses_little(node, agent):
    agent.start(node.job(TAG, ["sleep", "600"], ["sleep", "600"]))
    agent.wait_told(TAG, "rank_started", rank=1)
    pids = [agent.process.pid, node.identity(TAG)["pid"]]
    before = sum(procs.read_stat(pid).cpu_ticks for pid in pids)
    beats = len(agent.events)
    agent.wait(lambda: len([e for e in agent.events[beats:] if e["event"] == "beat"]) >= 3)
    used_s = (sum(procs.read_stat(pid).cpu_ticks for pid in pids) - before) / procs.TICKS_PER_S
    assert used_s < 0.3  # of about 6 s
    for pid in pids:
        rss = [line for line in Path("/proc/%d/status" % pid).read_text().splitlines() if line.startswith("VmRSS")]
        assert int(rss[0].split()[1]) < 40 << 10
    agent.end(TAG)


def test_an_agent_whose_file_is_gone_ends_when_it_is_probed(node, agent):
    assert "at_ns" in agent.do("probe", peers={})
    node.agent.unlink()
    agent.post("probe", peers={})
    assert agent.process.wait(30.0) == 0


def test_bye_ends_the_agent(agent):
    agent.post("bye")
    assert agent.process.wait(30) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user's folder")
def test_a_root_folder_of_another_user_is_refused(node):
    import subprocess

    os.chown(node.root, 12345, 12345)
    run = subprocess.run(
        [PY, "-I", "-S", str(node.agent), "serve"],
        input=b"",
        capture_output=True,
        env={**os.environ, "ASCENDRUN_NODE_ROOT": str(node.root)},
    )
    assert run.returncode == 96 and b"12345" in run.stderr
    os.chown(node.root, 0, 0)
