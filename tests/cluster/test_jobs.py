"""Jobs over real sshd on hosts of their own: starts, ends, stops, and what a bad day does to them."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any, Callable

import leftovers
import pytest
from scenes import BEAT_ON, Scene, await_that, run_text, venv_python

from tests.lib.vcluster.machines import HEAD
from tests.lib.vcluster.network import ip_in

# --- a node says no: nobody starts ---


def test_a_taken_port_on_the_rank_0_node_is_named_and_waited_for(scene: Scene) -> None:
    job_file = scene.job("taken", "touch", "/tmp/started-later", more="env: {MASTER_PORT: 29555}\n")
    program = "import socket,time; s=socket.create_server(('', 29555)); print(1, flush=True); time.sleep(600)"
    listen = ["python3", "-c", program]
    with scene.cluster.host_popen("node1", listen, stdout=-1, env=dict(scene.cluster.host_environ())) as squatter:
        assert squatter.stdout.readline()
        job = scene.start(job_file)
        scene.await_state(job, "BACKOFF")
        assert not any(scene.cluster.path(host, "/tmp/started-later").exists() for host in scene.cluster.hosts)
        squatter.kill()
    [held] = [event for event in scene.show(job)["events"] if event["code"] == "held"][:1]
    assert held["hosts"] == ["node1"] and held["values"]["reason"]["why"]["values"]["port"] == 29555
    scene.await_state(job, "SUCCEEDED")


def test_an_unreachable_node_means_nobody_starts_and_is_named(scene: Scene) -> None:
    scene.cluster.sshd_stop("node2")
    done = scene.ascendrun("submit", scene.job("half", "touch", "/tmp/started"), code=1)
    assert "node2" in done.stderr
    assert scene.reason("j-0001")["code"] == "preflight-failed"
    assert not scene.cluster.path("node1", "/tmp/started").exists()


# --- which network ---

CONNECT = """
import json, os, socket
address, rank = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), int(os.environ["RANK"])
if rank == 0:
    with socket.create_server(address, family=socket.AF_INET6 if ":" in address[0] else socket.AF_INET) as server:
        print("met", server.accept()[1][0], flush=True)
else:
    while True:
        try:
            socket.create_connection(address).close()
            break
        except ConnectionRefusedError:
            pass
print(json.dumps([os.environ["GLOO_SOCKET_IFNAME"], address[0]]), flush=True)
"""


@pytest.mark.parametrize("prefix", ["10.99.0.", "fd77::"])
def test_ranks_meet_over_the_interface_that_leads_to_the_addresses_of_the_hostfile(
    scene_of: Callable[..., Scene], prefix: str
) -> None:
    """Each host has a second interface, named in the hostfile by an address of its network."""
    scene, bits = scene_of(2), "64 nodad" if ":" in prefix else "24"
    pids = [scene.cluster.init_pid(name) for name in (HEAD, "node1", "node2")]
    on = [scene.cluster.head_run, *(partial(scene.cluster.host_run, name) for name in scene.cluster.hosts)]
    for number, run in enumerate(on, start=1):
        link = "bridge" if number == 1 else f"veth peer name vf{number} netns {pids[0]}"
        ip_in(pids[number - 1], f"link add fast0 type {link}\n")
        run(["sh", "-c", "echo 0 > /proc/sys/net/ipv6/conf/fast0/disable_ipv6"], check=True, cwd="/")
        ip_in(pids[number - 1], f"addr add {prefix}{number}/{bits} dev fast0\nlink set fast0 up\n")
        if number > 1:
            ip_in(pids[0], f"link set vf{number} master fast0 up\n")
    path = scene.job("fast", per_node=1, slots=1, command=["python3", "-c", CONNECT])
    (scene.folder / "fast.hosts").write_text("".join(f"node{n} slots=1 addr={prefix}{n + 1}\n" for n in (1, 2)))
    job = scene.start(path)
    scene.await_state(job, "SUCCEEDED")
    await_that(lambda: scene.is_drained(job), "every byte is here")
    text = b"".join(scene.on_head(job, "rank-*.out.0").values()).decode()
    assert text.count(json.dumps(["fast0", f"{prefix}2"])) == 2 and f"met {prefix}3" in text


# --- a rank fails ---


def test_a_failing_rank_is_named_and_when_the_job_has_failed_the_others_are_gone_also_the_deaf(scene: Scene) -> None:
    done = scene.ascendrun("submit", scene.job("failing", "deaf", "meet", "exit-rank", 2, 3, "hang"), code=1)
    assert scene.everywhere("j-0001") == []
    reason = scene.reason("j-0001")
    assert (reason["code"], reason["ranks"], reason["hosts"]) == ("rank-exited", [2], ["node2"])
    assert reason["values"] == {"code": 3}
    assert reason["message"] in done.stderr
    assert {rank["stopped"] for rank in scene.show("j-0001")["ranks"] if rank["rank"] != 2} == {True}
    detail = scene.show("j-0001")  # `submit` has waited for the diagnosis
    assert detail["job"]["confidence"] != "preliminary"
    found = json.loads(scene.ascendrun("explain", "j-0001", "-o", "json").stdout)["diagnosis"]
    shown = (detail["first_failure_ranks"], detail["first_failure_hosts"], detail["job"]["confidence"])
    assert shown == (found["ranks"], found["hosts"], found["confidence"])


# --- head and cable die, training does not ---


@pytest.mark.shared_home
def test_training_outlives_the_controller_and_a_cut_cable_and_every_byte_arrives_once(scene: Scene) -> None:
    job = scene.start(scene.job("outliving", "meet", *BEAT_ON, "print", "done"))
    scene.await_line(job, "beat 20")
    leftovers.kill(leftovers.controllers(scene.cluster, scene.ascendrun.state_dir))
    scene.cluster.cut("node2")
    assert scene.state(job) == "RUNNING"  # asking starts a new controller
    await_that(
        lambda: (
            {node["host"]: node["liveness"] for node in scene.show(job)["nodes"]}
            == {"node1": "ALIVE", "node2": "UNREACHABLE"}
        ),
        "node1 alive, node2 unreachable",
        deadline_s=60,
    )
    scene.stays(job, "RUNNING", for_s=15)
    scene.cluster.heal("node2")
    scene.enough()
    scene.await_state(job, "SUCCEEDED")
    await_that(lambda: scene.is_drained(job), "every byte is here")
    assert scene.on_head(job) == scene.on_node(job)
    assert all(data.endswith(b"done\n") for name, data in scene.on_head(job, "rank-*.out.0").items())
    assert scene.show(job)["job"]["attempt"] == 1


# --- stop ---


@pytest.mark.shared_home
def test_stop_leaves_nothing_and_a_job_with_the_same_command_line_lives_on(scene: Scene) -> None:
    words = ("meet", "family", "print", "met", "deaf", "hang")
    victim = scene.start(scene.job("victim", *words, slots=4, more="checkpoint: {grace_period_s: 2}\n"))
    bystander = scene.start(scene.job("bystander", *words, slots=4))
    for job in (victim, bystander):
        scene.await_line(job, "met", count=4)
        assert len(scene.everywhere(job)) == 16
    others = set(scene.everywhere(bystander))
    scene.ascendrun("stop", victim, code=0)
    assert scene.everywhere(victim) == []
    assert scene.state(victim) == "STOPPED"
    assert set(scene.everywhere(bystander)) == others
    assert scene.ascendrun("stop", "--now", bystander).returncode == 0
    assert scene.everywhere(bystander) == []


def test_a_stop_that_a_cut_node_could_not_hear_reaches_it_when_it_answers(scene: Scene) -> None:
    job = scene.begin(scene.job("cut-off", "print", "ready", "hang", more="checkpoint: {grace_period_s: 1}\n"))
    scene.cluster.cut("node2")
    done = scene.ascendrun("stop", "--now", job, timeout=120)
    assert done.returncode == 6 and "node2" in done.stderr, run_text(done)
    detail = scene.show(job)
    assert detail["job"]["state"] == "STOPPED" and detail["unconfirmed_hosts"] == ["node2"]
    assert len(scene.ranks_of(job, "node2")) == 2
    scene.cluster.heal("node2")
    await_that(lambda: scene.show(job)["unconfirmed_hosts"] == [], "node2 confirmed")
    scene.await_nobody(job)


# --- the good day ---


@pytest.mark.shared_home
def test_every_rank_of_two_hosts_gets_torchruns_environment_and_its_own_numbers(scene: Scene) -> None:
    names = (
        "RANK",
        "LOCAL_RANK",
        "NODE_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "GLOO_SOCKET_IFNAME",
        "HOSTNAME_SEEN",
    )
    scene.ascendrun("submit", scene.job("numbers", "meet", "env", *names), code=0)
    ranks: dict[int, dict[str, str]] = {}
    for path in scene.spooled("j-0001", "rank-*.out.0"):
        values = json.loads(path.read_text())
        ranks[int(values["RANK"])] = values
    assert sorted(ranks) == [0, 1, 2, 3]
    assert [ranks[rank]["LOCAL_RANK"] for rank in range(4)] == ["0", "1", "0", "1"]
    assert [ranks[rank]["NODE_RANK"] for rank in range(4)] == ["0", "0", "1", "1"]
    assert {values["WORLD_SIZE"] for values in ranks.values()} == {"4"}
    assert {values["MASTER_ADDR"] for values in ranks.values()} == {scene.cluster.address("node1")}
    assert {values["GLOO_SOCKET_IFNAME"] for values in ranks.values()} == {"eth0"}
    assert len({values["MASTER_PORT"] for values in ranks.values()}) == 1


def test_the_bundled_classifier_trains_over_two_hosts_and_beats_the_majority(scene: Scene) -> None:
    quickstart = Path(__file__).resolve().parents[2] / "jobs" / "quickstart.yaml"
    hostfile = scene.folder / "real.hosts"
    hostfile.write_text(scene.cluster.hostfile(slots=2))
    done = scene.ascendrun(
        "submit",
        quickstart,
        "--hostfile",
        hostfile,
        "--set",
        f"python={venv_python()}",
        "--set",
        "args.synthetic_tracks=600",
        "--set",
        "args.num_train_epochs=3",
        timeout=400,
        code=0,
    )
    found = scene.runs_on("node1").glob("*/work/out/report.json")
    report = json.loads(next(found).read_text())
    assert report["test"]["macro_f1"] > report["comparison"]["majority"]["pieces"]["macro_f1"]["value"]
    assert "macro F1" in done.stdout and "majority class" in done.stdout


@pytest.mark.parametrize(
    "options",
    [
        {"sshd_options": ["MaxSessions 1"]},
        {"shells": {"node1": "fish", "node2": "zsh"}, "rc_noise": {"node1": "welcome"}},
        {"shells": {"node1": "dash", "node2": "csh"}, "rc_noise": {"node2": "welcome"}},
        {"rc_noise": {"node1": "welcome", "node2": "welcome"}},
    ],
    ids=str,
)
def test_login_shells_noise_and_a_single_session_do_not_matter(
    options: dict[str, Any], scene_of: Callable[..., Scene]
) -> None:
    scene = scene_of(2, **options)
    scene.ascendrun("submit", scene.job("plain", "meet", "print", "hello $(touch /tmp/pwn) 'quoted' \"too\""), code=0)
    said = {data for name, data in scene.on_head("j-0001", "rank-*.out.0").items()}
    assert said == {b"hello $(touch /tmp/pwn) 'quoted' \"too\"\n"}
    assert not any(scene.cluster.path(host, "/tmp/pwn").exists() for host in scene.cluster.hosts)


TOGETHER = """
exec python -m torch.distributed.run --nnodes $NNODES --node_rank $NODE_RANK --nproc_per_node $NPROC_PER_NODE \\
    --master_addr $MASTER_ADDR --master_port $MASTER_PORT forked.py
"""
APART = "exec python -m torch.distributed.run --standalone --nproc_per_node 2 forked.py"
FORKED = """
import os, time
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
for step in range(1, 4):
    print({"loss": 1.0 / step, "step": step, "epoch": step, "rank": dist.get_rank()}, flush=True)
while not os.path.exists("/tmp/enough"):
    time.sleep(0.05)
dist.barrier()
if os.environ.get("FAILS") == os.environ["RANK"]:
    os._exit(7)
dist.barrier()
dist.destroy_process_group()
"""


def forking(scene: Scene, name: str, text: str, more: str = "") -> Path:
    """A job whose process on each node starts torchrun itself."""
    (scene.folder / "code" / "forked.py").write_text(FORKED)
    options = f"launcher: none\nsampling: {{interval_s: 0.5}}\npython: {sys.executable}\n{more}"
    return scene.job(name, command=["bash", "-c", text], more=options)


@pytest.mark.thorough
def test_a_script_that_forks_its_ranks_has_an_output_for_each_node(scene: Scene) -> None:
    job = scene.start(forking(scene, "together", TOGETHER))

    def screen(*words: str) -> Any:
        return scene.ascendrun.ask(*words)

    await_that(lambda: (screen("ps", "-a")["jobs"][0]["progress"] or {}).get("step") == 3, "ps shows the last step")
    await_that(lambda: screen("ps", "-a")["jobs"][0]["world_size"] == 4, "all ranks are known")
    found = [rank for group in screen("stacks", job)["groups"] for rank in group["ranks"]]
    assert sorted(found) == [0, 1, 2, 3], found
    scene.enough()
    scene.await_state(job, "SUCCEEDED")
    await_that(lambda: scene.is_drained(job), "every byte is here")
    outputs = scene.on_head(job, "*.out.0")
    assert sorted(outputs) == ["node1/node-0.out.0", "node2/node-1.out.0"]
    for number, data in enumerate(outputs[name] for name in sorted(outputs)):
        assert {word for word in (b"'rank': 0", b"'rank': 1", b"'rank': 2", b"'rank': 3") if word in data} == {
            b"'rank': %d" % (2 * number),
            b"'rank': %d" % (2 * number + 1),
        }
    lines = [json.loads(line) for line in scene.ascendrun("logs", job, "-o", "jsonl").stdout.splitlines()]
    assert lines and {line["rank"] for line in lines} == {None}, "no rank is invented for a line"
    refused = scene.ascendrun("logs", job, "--rank", "0")
    assert refused.returncode == 4 and "--hosts" in refused.stderr, run_text(refused)
    assert not [event for event in scene.show(job)["events"] if event["code"] == "separate-trainings"]
    ends = [(rank["rank"], rank["host"], rank["exit_code"]) for rank in scene.show(job)["forked_ranks"]]
    assert ends == [(0, "node1", 0), (1, "node1", 0), (2, "node2", 0), (3, "node2", 0)]


@pytest.mark.thorough
def test_a_rank_that_a_script_forks_fails_as_that_rank(scene: Scene) -> None:
    job = scene.start(forking(scene, "fails", f"export FAILS=3; {TOGETHER}"))
    await_that(lambda: len(scene.show(job)["forked_ranks"]) == 4, "all ranks are known")
    scene.enough()
    scene.await_state(job, "FAILED")
    await_that(lambda: scene.show(job)["job"]["confidence"] != "preliminary", "it is diagnosed")
    detail = scene.show(job)
    assert detail["first_failure"] == "rank 3 on node2 exited with code 7"
    assert detail["first_failure_values"] == {"code": 7}
    (failed,) = [rank for rank in detail["forked_ranks"] if rank["rank"] == 3]
    assert (failed["host"], failed["exit_code"], failed["signal"]) == ("node2", 7, None)
    assert "rank 3" in scene.ascendrun("explain", job).stdout


def check_apart(scene: Scene, job: str) -> None:
    scene.await_state(job, "FAILED")
    detail = scene.show(job)
    (event,) = [event for event in detail["events"] if event["code"] == "separate-trainings"]
    assert event["values"] == {"world_size": 2} and event["severity"] == "error", event
    (gave_up,) = [event for event in detail["events"] if event["code"] == "gave-up"]
    assert gave_up["values"]["finding"] == "separate-trainings"
    explained = json.loads(scene.ascendrun("explain", job, "-o", "json").stdout)["diagnosis"]
    assert (explained["code"], explained["confidence"]) == ("separate-trainings", "certain"), explained
    assert "NNODES" in explained["hint"] and len(explained["hosts"]) == 1, explained
    listed = json.loads(scene.ascendrun("ps", "-a", "-o", "json").stdout)["jobs"]
    assert ["2" in str(row["reason"]) for row in listed if row["id"] == job] == [True], listed


@pytest.mark.thorough
def test_nodes_that_train_separately_fail_the_job(scene: Scene) -> None:
    """As LLaMA-Factory does without NNODES: torchrun of each node starts a world of its own."""
    check_apart(scene, scene.start(forking(scene, "apart", APART, "restart: {max_restarts: 3}\n")))
    skipped = scene.start(forking(scene, "wanted", APART, "checks: {skip: [separate-trainings]}\n"))

    def codes() -> list[str]:
        return [event["code"] for event in scene.show(skipped)["events"]]

    await_that(lambda: "separate-trainings" in codes(), "the event is recorded")
    scene.enough()
    scene.await_state(skipped, "SUCCEEDED")


@pytest.mark.thorough
def test_local_hosts_that_train_separately_fail_the_job(scene: Scene) -> None:
    job = forking(scene, "apart", APART, "restart: {max_restarts: 3}\n")
    (scene.folder / "apart.hosts").write_text("local1 slots=2 addr=local\nlocal2 slots=2 addr=local\n")
    check_apart(scene, scene.start(job))


PRINTS = """
import os, time
print("Distributed environment: DistributedType.NO", "Num processes: 1", "Process index: 0", sep="\\n", flush=True)
while not os.path.exists("/tmp/enough"):
    time.sleep(0.05)
"""


@pytest.mark.thorough
def test_ranks_that_print_a_smaller_world_size_fail_the_job(scene: Scene) -> None:
    """As Accelerate does on CPUs that it was not told to use: each rank trains, and has the others' WORLD_SIZE."""
    (scene.folder / "code" / "prints.py").write_text(PRINTS)
    job = scene.start(scene.job("alone", command=["python3", "prints.py"]), env={"ASCENDRUN_HANG_DIVISOR": "30"})
    scene.await_state(job, "FAILED")
    detail = scene.show(job)
    (event,) = [event for event in detail["events"] if event["code"] == "separate-trainings"]
    assert event["values"] == {"world_size": 1} and len(event["hosts"]) == 1, event
    diagnosis = json.loads(scene.ascendrun("explain", job, "-o", "json").stdout)["diagnosis"]
    assert (diagnosis["code"], diagnosis["confidence"]) == ("separate-trainings", "certain"), diagnosis


@pytest.mark.thorough
def test_a_command_on_nodes_without_ascendrun_reports_its_steps(scene: Scene) -> None:
    text = "import ascendrun; from ascendrun import callback, log; callback(); log(step=3, loss=0.5)"
    job = scene.start(scene.job("logs", command=["python3", "-S", "-c", text]))
    scene.await_state(job, "SUCCEEDED")
    await_that(lambda: scene.is_drained(job), "every byte is here")
    lines = [json.loads(path.read_bytes()) for path in scene.spooled(job, "rank-*.metrics.0")]
    assert [(line["step"], line["loss"]) for line in lines] == [(3, 0.5)] * 4
