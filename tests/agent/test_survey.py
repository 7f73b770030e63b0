"""A survey: every question has an answer, whatever hangs, lies or is missing on the node; nothing of it stays."""

import os
import socket
import subprocess
import time
from pathlib import Path

import pytest

from ascendrun.node import procs
from ascendrun.node.agent import leases
from ascendrun.node.op_errors import message
from tests.agent.conftest import PY
from tests.ports import free_port

HANG = (
    "import signal,subprocess,sys,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True); "
    "time.sleep(600)"
)


def survey(agent, *items, shell=None, timeout_s=20.0, **more):
    return agent.do("survey", items=list(items), shell=shell, timeout_s=timeout_s, **more)["results"]


def marked(word: str) -> list[int]:
    """Living processes that carry the word in their environment."""
    wanted = word.encode()
    return [
        pid
        for pid, stat in procs.snapshot().items()
        if not stat.is_dead and pid != os.getpid() and wanted in procs.read_environ(pid)
    ]


# --- what hangs ---


def test_a_tool_that_ignores_term_is_killed_with_all_it_started_and_the_others_answer(agent):
    word = "SURVEY_TEST_%d" % time.monotonic_ns()
    results = survey(
        agent,
        {"name": "hangs", "kind": "shell_argv", "argv": [PY, "-c", HANG], "timeout_s": 1.0},
        {"name": "says", "kind": "argv", "argv": ["echo", "hello"]},
        shell={"env": {word: "1"}},
    )
    assert results["hangs"]["timed_out"] and results["hangs"]["code"] is None
    assert results["says"]["out"] == "hello\n" and results["says"]["code"] == 0
    assert not marked(word)


def test_when_the_surveys_own_time_is_over_every_item_has_an_answer_all_the_same(agent):
    items = [{"name": "hangs-%d" % n, "kind": "argv", "argv": ["sleep", "600"], "timeout_s": 60.0} for n in range(30)]
    results = survey(agent, *items, timeout_s=1.5)
    assert set(results) == {item["name"] for item in items}
    assert all(raw.get("timed_out") or raw.get("late") for raw in results.values())
    agent.do("ping")


def test_a_read_that_never_comes_back_is_late_and_holds_up_nothing(agent, tmp_path):
    os.mkfifo(tmp_path / "pipe")  # who opens it to read waits for a writer, as on a dead network file system
    results = survey(
        agent,
        {"name": "pipe", "kind": "file", "path": str(tmp_path / "pipe"), "timeout_s": 0.5},
        {"name": "file", "kind": "file", "path": "/proc/self/comm"},
    )
    assert results["pipe"]["late"] and "text" in results["file"]
    with open(tmp_path / "pipe", "wb"):
        pass  # lets the reader go


def test_output_is_bounded_and_the_rest_is_said_to_be_cut(agent):
    raw = survey(
        agent, {"name": "flood", "kind": "argv", "argv": ["sh", "-c", "yes | head -c 1000000"], "max_bytes": 1000}
    )["flood"]
    assert raw["truncated"] and len(raw["out"]) == 1000


def test_output_that_is_no_text_is_told_as_text(agent):
    raw = survey(agent, {"name": "bytes", "kind": "argv", "argv": ["printf", r"a\377b"]})["bytes"]
    assert raw["out"] == r"a\xffb"


# --- what is missing or wrong ---


def test_a_missing_tool_is_missing_and_not_a_failure_of_the_survey(agent):
    raw = survey(agent, {"name": "tool", "kind": "argv", "argv": ["no-such-tool-here"]})["tool"]
    assert raw["missing"] and "no-such-tool-here" in str(raw["error"])


def test_an_unknown_kind_and_a_malformed_item_are_errors_of_their_own(agent):
    results = survey(
        agent,
        {"name": "new", "kind": "of-a-later-release"},
        {"name": "bad", "kind": "file"},
        {"name": "fine", "kind": "limits"},
    )
    assert "no survey item of kind" in results["new"]["error"] and results["bad"]["error"]
    assert set(results["fine"]["limits"]) >= {"NOFILE", "NPROC", "MEMLOCK"}


def test_files_that_are_not_there_are_left_out_and_one_alone_says_so(agent, tmp_path):
    (tmp_path / "a.conf").write_text("one")
    results = survey(
        agent,
        {"name": "many", "kind": "files", "paths": [str(tmp_path / "*.conf"), "/no/such"]},
        {"name": "one", "kind": "file", "path": "/no/such"},
        {"name": "list", "kind": "listdir", "path": "/proc/self/task"},
    )
    assert results["many"]["texts"] == {str(tmp_path / "a.conf"): "one"}
    assert results["one"]["missing"]
    assert str(agent.process.pid) in results["list"]["names"]


# --- in the shell of a job ---


def test_the_shell_is_the_one_that_a_rank_gets(agent):
    """A real rank and a survey item print their environments: nothing but marks of their own may differ."""
    job = agent.node.job("head-job.1", ["env", "-0"], setup="export FROM_SETUP=yes; PATH=/opt/x:$PATH")
    job["ranks"][0]["env"] = {"OF_THE_PLAN": "1"}
    agent.start(job)
    agent.wait_ended("head-job.1")
    shell = {"setup": job["setup"], "env": {"OF_THE_PLAN": "1"}, "cwd": job["cwd"]}
    raw = survey(agent, {"name": "env", "kind": "shell_argv", "argv": ["env", "-0"]}, shell=shell)["env"]
    seen = dict(pair.split("=", 1) for pair in raw["out"].split("\0") if pair)
    had = dict(pair.split("=", 1) for pair in agent.output("head-job.1").decode().split("\0") if pair)
    assert raw["setup"] == "fine" and seen["FROM_SETUP"] == "yes" and seen["PATH"].startswith("/opt/x:")
    own = {"ASCENDRUN_EXEC", "ASCENDRUN_RUN_ID", "ASCENDRUN_METRICS_FILE", "TORCHELASTIC_ERROR_FILE"}
    assert {name: value for name, value in seen.items() if name not in own} == {
        name: value for name, value in had.items() if name not in own
    }


@pytest.mark.parametrize(
    "setup, word", [("false", "failed"), ("exit 3", "failed"), ("no-such-file-x", "failed"), ("true", "fine")]
)
def test_a_set_up_that_fails_is_told_from_a_command_that_fails(agent, setup, word):
    item = {"name": "x", "kind": "shell_argv", "argv": ["sh", "-c", "exit 7"]}
    raw = survey(agent, item, shell={"setup": setup})["x"]
    assert raw["setup"] == word
    assert (raw["code"] == 7) == (word == "fine")


def test_a_command_that_the_set_up_does_not_lead_to_is_no_command(agent):
    raw = survey(agent, {"name": "x", "kind": "shell_argv", "argv": ["no-such-python"]}, shell={"setup": "true"})["x"]
    assert raw["setup"] == "no-command"


def test_the_shell_stands_in_a_folder_from_which_nothing_is_imported(agent, tmp_path):
    raw = survey(
        agent,
        {"name": "x", "kind": "shell_argv", "argv": ["sh", "-c", "pwd; ls -A"]},
        shell={"cwd": str(tmp_path / "not-yet")},
    )["x"]
    assert raw["out"] == f"{agent.node.root}/empty\n"


# --- files, ports, processes ---


def test_a_write_is_tried_where_the_folder_will_be_and_leaves_nothing(agent, tmp_path):
    (tmp_path / "file").write_text("")
    wanted = [str(tmp_path / "ckpt" / "deep"), str(tmp_path / "file"), "/proc"]
    folders = survey(agent, {"name": "w", "kind": "write_probe", "paths": wanted})["w"]["folders"]
    assert folders[wanted[0]]["at"] == str(tmp_path) and folders[wanted[0]]["uid"] == os.getuid()
    assert folders[wanted[0]]["free_bytes"] > 0 and "error" not in folders[wanted[0]]
    assert folders[wanted[1]]["error"] and folders["/proc"]["error"]
    assert sorted(os.listdir(tmp_path)) == ["file", "node"]


def test_sizes_are_those_of_all_files_and_a_path_that_is_missing_is(agent, tmp_path):
    (tmp_path / "data" / "b").mkdir(parents=True)
    (tmp_path / "data" / "a").write_bytes(b"x" * 10)
    (tmp_path / "data" / "b" / "c").write_bytes(b"x" * 5)
    paths = [str(tmp_path / "data"), str(tmp_path / "data" / "a"), str(tmp_path / "none")]
    sizes = survey(agent, {"name": "s", "kind": "size", "paths": paths})["s"]["sizes"]
    assert (sizes[paths[0]]["kind"], sizes[paths[0]]["bytes"], sizes[paths[0]]["files"]) == ("folder", 15, 2)
    assert sizes[paths[1]]["bytes"] == 10 and sizes[paths[2]]["missing"]
    few = survey(agent, {"name": "s", "kind": "size", "paths": paths[:1], "max_files": 1})["s"]["sizes"]
    assert few[paths[0]]["truncated"]


def test_a_taken_port_is_told_with_its_holder_and_a_free_one_is_free_afterwards(agent):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port, free = held.getsockname()[1], free_port()
        taken = survey(agent, {"name": "p", "kind": "bind", "ports": [port, free]})["p"]["taken"]
    assert list(taken) == [str(port)]
    assert (taken[str(port)]["pid"], taken[str(port)]["uid"]) == (os.getpid(), os.getuid())
    assert taken[str(port)]["command"]
    socket.create_server(("", free)).close()


def test_a_port_whose_last_connections_have_just_ended_is_free_for_the_next_job(agent):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = server.accept()
            accepted.close()  # the server's side ends first: the kernel keeps its port in mind for a minute
            assert client.recv(1) == b""
    assert survey(agent, {"name": "p", "kind": "bind", "ports": [port]})["p"]["taken"] == {}


def test_who_holds_a_file_open_is_named(agent, tmp_path):
    path = tmp_path / "davinci0"
    path.write_text("")
    with subprocess.Popen(
        [PY, "-c", "import sys; f = open(sys.argv[1]); print(1, flush=True); sys.stdin.read()", str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout.readline()
        raw = survey(agent, {"name": "o", "kind": "openers", "patterns": [str(tmp_path / "davinci*")]})["o"]
        holder.stdin.close()
    assert [(one["pid"], one["path"], one["tag"]) for one in raw["openers"]] == [(holder.pid, str(path), None)]


# --- reaching each other ---


def touch(agent, port, peer, *, nonce="n", timeout_s=10.0):
    return {
        "name": "connection-tests",
        "kind": "tcp",
        "as": "b",
        "nonce": nonce,
        "timeout_s": timeout_s,
        "targets": [{"peer": peer, "address": "127.0.0.1", "port": port}],
    }


def listener(port, *, nonce="n", timeout_s=10.0):
    return {
        "name": "listen",
        "kind": "listen",
        "as": "a",
        "nonce": nonce,
        "ports": [port],
        "expect": ["b"],
        "timeout_s": timeout_s,
    }


def test_two_agents_reach_each_other_whoever_comes_first_and_the_port_is_free_at_once(agent, node):
    other, port = node.connect(), free_port()
    asked = other.post("survey", items=[touch(other, port, "a")], shell=None, timeout_s=12)
    heard = survey(agent, listener(port))
    came = other.wait(lambda: other.replies.pop(asked, None))[0]["results"]["connection-tests"]["tests"]
    assert heard["listen"]["ports"][str(port)]["heard"] == ["b"]
    assert [(one["peer"], "error" in one) for one in came] == [("a", False)]
    held = socket.socket()  # without SO_REUSEADDR, as the agent holds a port for a job
    held.bind(("", port))
    held.close()


def test_a_block_of_ports_that_another_run_has_is_told_with_its_owner_and_not_listened_on(agent):
    base, port = 61024, free_port()
    (name,) = leases.block_names(base)
    other = leases.take(name, "h-j-0001.1", "another-node")
    try:
        raw = survey(agent, {**listener(port, timeout_s=0.5), "block": base, "tag": "h-j-0002.1"})["listen"]
    finally:
        other.release()
    assert raw == {"ports": {}, "leased": {"port": base, "uid": os.geteuid(), "tag": "h-j-0001.1"}}


def test_another_host_or_another_program_on_the_port_is_not_taken_for_the_peer(agent, node):
    other, port = node.connect(), free_port()
    asked = other.post("survey", items=[touch(other, port, "c")], shell=None, timeout_s=12)
    survey(agent, listener(port))
    came = other.wait(lambda: other.replies.pop(asked, None))[0]["results"]["connection-tests"]["tests"]
    assert came[0]["code"] == "wrong-host" and came[0]["error"] == message("other-host-answered", peer="a")
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        raw = survey(agent, touch(agent, stranger.getsockname()[1], "a", timeout_s=0.5))["connection-tests"]["tests"]
    assert raw[0]["error"]


def test_nobody_there_is_refused_and_a_round_that_failed_ends_by_itself(agent):
    came = survey(agent, touch(agent, free_port(), "a", timeout_s=3.0))["connection-tests"]["tests"]
    assert [one["code"] for one in came] == ["refused"]
    heard = survey(agent, listener(free_port(), timeout_s=0.5))["listen"]["ports"]
    assert [one["heard"] for one in heard.values()] == [[]]


def test_a_target_without_time_for_a_try_has_a_result_too(agent):
    came = survey(agent, touch(agent, free_port(), "a", timeout_s=1e-6))["connection-tests"]["tests"]
    assert [(one["peer"], "error" in one) for one in came] == [("a", True)]


def test_a_listener_tells_a_port_that_it_cannot_have(agent):
    with socket.create_server(("", 0)) as held:
        port = held.getsockname()[1]
        assert survey(agent, listener(port, timeout_s=2.0))["listen"]["ports"][str(port)]["error"]


def test_a_simulated_node_is_looked_at_below_its_own_folder(agent, node, tmp_path):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/davinci0").write_text("")
    item = {"name": "s", "kind": "stat", "paths": ["/dev/davinci0", "/dev/null"], "below": "SIM_ROOT_OF_THE_TEST"}
    here = survey(agent, item)["s"]["stats"]
    there = survey(node.connect(SIM_ROOT_OF_THE_TEST=str(tmp_path)), item)["s"]["stats"]
    assert here["/dev/null"]["kind"] == "device" and here["/dev/davinci0"].get("missing")
    assert there["/dev/davinci0"]["kind"] == "file" and there["/dev/null"]["missing"]


def test_a_survey_answers_on_every_python_at_hand(node, python):
    agent = node.connect(python=python)
    results = survey(
        agent,
        {"name": "x", "kind": "shell_argv", "argv": ["echo", "hi"]},
        {"name": "l", "kind": "limits"},
        {"name": "d", "kind": "disk", "paths": [str(Path("/")), "/dev/shm"]},
        {"name": "s", "kind": "stat", "paths": ["/etc", "/no"]},
        shell={"setup": "true"},
    )
    assert results["x"]["out"] == "hi\n" and results["l"]["limits"]
    shm = results["d"]["disks"]["/dev/shm"]
    assert (shm["kind"], shm["remote"]) == ("tmpfs", False)
    assert results["d"]["disks"]["/"]["free_bytes"] > 0 and results["s"]["stats"]["/no"]["missing"]
    assert agent.close() == 0
