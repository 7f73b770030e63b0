"""Leases of devices and ports: held by one attempt at a time over agents, users and head nodes; never leaked."""

import contextlib
import json
import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from ascendrun.node import procs
from ascendrun.node.agent import leases, network
from ascendrun.node.op_errors import message
from tests.agent.conftest import HOLD, PY, Node
from tests.ports import free_port

SHOW = [PY, "-c", "import os; print(os.environ.get('HCCL_IF_BASE_PORT'))"]
SERVE = [
    PY,
    "-c",
    "import os,socket; s=socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"
    "s.bind(('', int(os.environ['MASTER_PORT']))); s.listen(); print('serves', flush=True)",
]
TAG, OTHER = "head-job.1", "other-job.1"


@pytest.fixture
def other(tmp_path):
    """The account of another head node's user on the same machine."""
    node = Node(tmp_path / "other")
    yield node
    assert not node.clean()


@pytest.fixture
def ids():
    """Numbers of devices that no other test of this machine uses."""
    first = 1000 + os.getpid() * 4
    return [first, first + 1, first + 2, first + 3]


def npus(numbers):
    return {"type": "npu", "ids": list(numbers)}


def held(numbers):
    found = leases.read_leases()
    return {number: found.get(f"npu/{number}", {}).get("tag") for number in numbers}


def free_block():
    return next(base for base in range(61024, 65504, 32) if leases.are_free(range(base, base + 32)))


def wait_free(agent, numbers):
    agent.wait(lambda: set(held(numbers).values()) == {None})


# --- the bad days ---


@pytest.mark.parametrize("point", ["lease.after_devices", "prepare.before_record", "launch.before_spawn"])
def test_an_agent_that_is_killed_before_the_supervisor_runs_leaks_nothing(node, ids, point):
    hurt = node.connect(ASCENDRUN_FAILPOINT=f"{point}=kill")
    with pytest.raises(EOFError):
        hurt.do("prepare", **node.job(TAG, HOLD, devices=npus(ids), hccl=[free_block()]))
        hurt.do("go", tag=TAG, master_port=None, secret_env={})
    hurt.kill()
    assert set(held(ids).values()) == {None}


@pytest.mark.parametrize("point", ["launch.before_claim", "launch.after_claim", "finish.before_terminal"])
def test_a_supervisor_that_is_killed_leaks_nothing(node, ids, point):
    hurt = node.connect(ASCENDRUN_FAILPOINT=f"{point}=kill")
    hurt.do("prepare", **node.job(TAG, ["true"], devices=npus(ids)))
    hurt.ask("go", tag=TAG, master_port=None, secret_env={})
    hurt.kill()
    agent = node.connect()
    agent.do("follow", tag=TAG, offsets={})
    agent.end(TAG)
    wait_free(agent, ids)


def test_a_repeated_go_waits_for_a_supervisor_that_is_slow_to_start(node, ids):
    first = node.connect(ASCENDRUN_FAILPOINT="launch.before_claim=pause")
    first.do("prepare", **node.job(TAG, HOLD, devices=npus(ids)))
    first.post("go", tag=TAG, master_port=None, secret_env={})
    first.wait(lambda: stopped_supervisors(node))
    [supervisor] = stopped_supervisors(node)
    first.kill()
    second = node.connect()
    number = second.post("go", tag=TAG, master_port=None, secret_env={})
    until = time.monotonic() + 2.0
    second.wait(lambda: number in second.replies or time.monotonic() > until)
    assert number not in second.replies
    os.kill(supervisor, signal.SIGCONT)
    reply, _ = second.wait(lambda: second.replies.pop(number, None))
    assert reply.get("supervisor_pid") == supervisor, reply
    second.do("stop", tag=TAG, now=True, grace_s=None)
    second.do("follow", tag=TAG, offsets={})
    second.wait_ended(TAG)


def stopped_supervisors(node):
    found = []
    for one in procs.snapshot().values():
        stat = procs.read_stat(one.pid)
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if stat is not None and stat.state == "T":
                argv = Path(f"/proc/{one.pid}/cmdline").read_bytes()
                found += [one.pid] if str(node.root).encode() in argv else []
    return found


def test_ranks_that_outlive_their_supervisor_keep_the_devices(node, agent, other, ids):
    agent.start(node.job(TAG, HOLD, HOLD, devices=npus(ids[:2])))
    agent.wait_told(TAG, "rank_started", rank=1)
    assert held(ids) == {ids[0]: TAG, ids[1]: TAG, ids[2]: None, ids[3]: None}
    os.kill(node.identity(TAG)["pid"], signal.SIGKILL)
    agent.wait(lambda: agent.phase(TAG) == "lost")
    second = other.connect()
    error = second.refused("prepare", **other.job(OTHER, HOLD, devices=npus(ids[1:3])))
    assert error["code"] == "held" and error["message"]["values"]["device"] == ids[1]
    assert held(ids)[ids[2]] is None  # what it had already taken is free
    agent.end(TAG)
    assert second.do("prepare", **other.job(OTHER, HOLD, devices=npus(ids[1:3])))["ready"]


def test_an_older_agent_of_the_same_job_gives_way_another_job_does_not(node, other, ids):
    old = node.connect()
    old.do("prepare", **node.job(TAG, HOLD, devices=npus(ids), ports=[free_port()]))
    stranger = other.connect()
    assert stranger.refused("prepare", **other.job(OTHER, HOLD, devices=npus(ids)))["code"] == "held"
    again = node.job("head-job.2", HOLD, devices=npus(ids))
    assert node.connect().do("prepare", **again)["ready"]
    assert old.process.wait(10) == -signal.SIGKILL
    assert set(held(ids).values()) == {"head-job.2"}


def test_go_over_another_agent_than_the_preparation_has_the_same_leases(node, ids):
    first = node.connect()
    port, base = free_port(), free_block()
    ready = first.do("prepare", **node.job(TAG, HOLD, devices=npus(ids), ports=[port], hccl=[base]))
    assert (ready["master_port"], ready["hccl"]) == (port, [base])
    second = node.connect()
    second.do("follow", tag=TAG, offsets={})
    second.do("go", tag=TAG, master_port=port, hccl_base=base, secret_env={})
    second.wait_told(TAG, "rank_started")
    first.process.wait(10)
    found = leases.read_leases()
    assert {found[name]["tag"] for name in (f"npu/{ids[0]}", f"hccl/{base}", f"port/{port}")} == {TAG}
    second.end(TAG)


def test_the_next_attempt_drops_what_an_aborted_one_prepared(node, agent, ids):
    agent.do("prepare", **node.job(TAG, HOLD, devices=npus(ids)))
    agent.do("prepare", **node.job("head-job.2", HOLD, devices=npus(ids[:1])))
    assert held(ids) == {ids[0]: "head-job.2", **dict.fromkeys(ids[1:])}
    agent.do("abort", tag="head-job.2")
    wait_free(agent, ids)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
def test_another_user_is_named(node, agent, ids):
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:  # bare: pytest must not end in the child
        os.setuid(65534)
        kept = leases.take(f"npu/{ids[0]}", "theirs-j-0007.1", "0" * 8)
        os.write(theirs, b"x" if kept else b"-")
        signal.pause()
    try:
        assert os.read(ours, 1) == b"x"
        error = agent.refused("prepare", **node.job(TAG, HOLD, devices=npus(ids)))
        values = error["message"]["values"]
        assert (values["user"], values["tag"]) == (procs.user_name(65534), "theirs-j-0007.1")
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert agent.do("prepare", **node.job(TAG, HOLD, devices=npus(ids)))["ready"]


def test_a_name_without_an_owner_is_refused_too(node, agent, ids):
    with socket.socket(socket.AF_UNIX) as squatter:
        squatter.bind(f"\0ascendrun/1/npu/{ids[0]}")
        error = agent.refused("prepare", **node.job(TAG, HOLD, devices=npus(ids)))
    assert error["message"] == message("device-in-use", type="npu", device=ids[0])


# --- ports of HCCL ---


def test_jobs_on_one_machine_get_disjoint_blocks_and_the_ranks_know_theirs(node, agent, other):
    base = free_block()
    agent.start(node.job(TAG, HOLD, hccl=[base]), hccl_base=base)
    agent.wait_told(TAG, "rank_started")
    free = next(k for k in range(base + 32, 65504, 32) if leases.are_free(range(k, k + 32)))
    second = other.connect()
    assert second.refused("prepare", **other.job(OTHER, SHOW, hccl=[base]))["code"] == "held"
    assert second.do("prepare", **other.job(OTHER, SHOW, hccl=[base, free]))["hccl"] == [free]
    second.do("follow", tag=OTHER, offsets={})
    second.do("go", tag=OTHER, master_port=None, hccl_base=free, secret_env={})
    second.wait_ended(OTHER)
    assert second.output(OTHER).split() == [b"%d" % free]
    assert f"hccl/{free}" not in leases.read_leases()
    agent.end(TAG)


def test_a_block_with_a_port_in_use_is_skipped(node, agent):
    base = free_block()
    with socket.socket() as foreign:
        foreign.bind(("", base + 31))
        foreign.listen()
        error = agent.refused("prepare", **node.job(TAG, HOLD, hccl=[base]))
    assert error == {"code": "held", "message": message("hccl-ports-in-use", ports=[base])}
    assert agent.do("prepare", **node.job(TAG, HOLD, hccl=[base]))["hccl"] == [base]


def test_blocks_that_overlap_exclude_each_other(node, agent, other):
    base = free_block()
    assert leases.block_names(base) == [f"hccl/{base}"]
    assert leases.block_names(base + 5) == [f"hccl/{base}", f"hccl/{base + 32}"]
    agent.do("prepare", **node.job(TAG, HOLD, hccl=[base]))
    assert other.connect().refused("prepare", **other.job(OTHER, HOLD, hccl=[base + 31]))["code"] == "held"


def test_nodes_of_one_attempt_on_one_machine_share_their_block(node, agent, other):
    base = free_block()
    second = other.connect()
    for client, where in ((agent, node), (second, other)):
        assert client.do("prepare", **where.job(TAG, HOLD, hccl=[base]))["hccl"] == [base]
    assert agent.process.poll() is None  # it is no older agent of the same node


# --- MASTER_PORT ---


def test_the_store_binds_next_to_the_lease_and_others_do_not(node, agent, other):
    port = free_port()
    agent.start(node.job(TAG, SERVE, HOLD, ports=[port]))
    agent.wait(lambda: agent.output(TAG) == b"serves\n")
    assert leases.hold_port(port) is None
    second = other.connect()
    error = second.refused("prepare", **other.job(OTHER, HOLD, ports=[port]))
    assert error == {"code": "port-taken", "message": message("ports-in-use", ports=[port])}
    agent.end(TAG)
    assert second.do("prepare", **other.job(OTHER, HOLD, ports=[port]))["master_port"] == port


# --- names ---


def test_devices_are_named_by_what_containers_agree_on(tmp_path):
    npu, gpus = tmp_path / "dev", tmp_path / "gpus"
    for name in ("davinci_manager", "davinci10", "davinci2"):
        (npu / name).parent.mkdir(exist_ok=True)
        (npu / name).symlink_to("/dev/null" if name == "davinci2" else "/dev/zero")
    (gpus / "0000:3b:00.0").mkdir(parents=True)
    (gpus / "0000:18:00.0").mkdir()
    assert leases.device_names("npu", [0, 1, 2], dev=str(npu)) == ["npu/3", "npu/5", "npu/2"]
    assert leases.device_names("cuda", [0, 1], proc=str(gpus)) == ["cuda/0000:18:00.0", "cuda/0000:3b:00.0"]
    assert leases.device_names("cuda", [1], proc=str(tmp_path / "none")) == ["cuda/1"]


def test_the_listing_has_every_lease_with_its_owner(node, agent, ids):
    base = free_block()
    agent.do("prepare", **node.job(TAG, HOLD, devices=npus(ids[:1]), hccl=[base]))
    reply = agent.do("survey", items=[{"name": "l", "kind": "leases"}], timeout_s=5)["results"]["l"]["leases"]
    rows = {(row["type"], row["key"]): row for row in reply if row["tag"] == TAG}
    assert set(rows) == {("npu", str(ids[0])), ("hccl", str(base))}
    assert {row["uid"] for row in rows.values()} == {os.geteuid()}
    assert json.dumps(reply) and procs.boot_id()


# --- connection tests before the start ---


def test_two_preflights_that_want_one_port_and_block_test_one_after_the_other():
    port, base = free_port(), free_block()
    deadline = time.monotonic() + 60
    found = {}

    def listen(nonce):
        item = {"ports": [port, base], "as": "here", "nonce": nonce, "expect": ["peer"], "block": base, "tag": nonce}
        found[nonce] = network.listen(item, deadline)

    def connect(nonce):
        targets = [{"peer": "here", "address": "127.0.0.1", "port": number} for number in (port, base)]
        found["to " + nonce] = network.connect_all({"targets": targets, "as": "peer", "nonce": nonce}, deadline)

    threads = [
        threading.Thread(target=call, args=(nonce,)) for nonce in ("one.1", "two.1") for call in (listen, connect)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for nonce in ("one.1", "two.1"):
        assert {number: row["heard"] for number, row in found[nonce]["ports"].items()} == {
            str(port): ["peer"],
            str(base): ["peer"],
        }
        assert not [test for test in found["to " + nonce]["tests"] if "error" in test]
    assert f"hccl/{base}" not in leases.read_leases()
