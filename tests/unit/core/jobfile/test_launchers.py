"""Commands of ranks: the job's own interpreter, programs, and the launchers of a job file."""

import base64
import json

import pytest

from ascendrun.core.jobfile.model import JobSpec
from ascendrun.core.jobs.plan import PORT_TOKEN, Tree
from ascendrun.core.reports import Route
from ascendrun.node import join
from tests.lib.launch_plans import job, plan, ranks_of, refusal, report


def test_python_becomes_the_jobs_own_interpreter():
    def argv(**fields):
        return ranks_of(plan(job(**fields), "a"))[0].argv

    assert argv(python="/opt/py") == ("/opt/py", "train.py")
    assert argv() == ("python", "train.py")
    assert argv(python="/opt/py", command=("/usr/bin/python3", "x")) == ("/usr/bin/python3", "x")


def test_a_program_runs_under_the_agents_python_here_and_python3_elsewhere():
    trees = [Tree("programs", "d" * 64, 1, 1)]
    spec = JobSpec.model_validate({"name": "j", "program": "trajectory", "env": {"PYTHONPATH": "/mine"}})
    reports = {
        "here": report("here", routes={"there": Route("e", "10.0.0.1")}, python="/v/python"),
        "there": report("there", routes={"here": Route("e", "10.0.0.2")}, python="/agent/python"),
    }
    first, second = ranks_of(plan(spec, "here addr=local\nthere\n", reports, trees))
    assert first.argv == ("/v/python", "-m", "ascendrun.programs.trajectory")
    assert second.argv[0] == "python3"
    assert first.env["PYTHONPATH"] == "/r/trees/" + "d" * 64 + ":/mine"


@pytest.mark.parametrize(
    "command, tail, rank",
    [
        (("python", "-u", "t.py", "-x"), ("t.py", "-x"), ("python", "-u", "t.py", "-x")),
        (
            ("/opt/python3.10", "-m", "pkg.t", "-x"),
            ("--module", "pkg.t", "-x"),
            ("/opt/python3.10", "-u", "-m", "pkg.t", "-x"),
        ),
        (("python", "-X", "dev", "t.py"), ("--no-python", "python", "-X", "dev", "t.py"), None),
        (("train.py", "-x"), ("train.py", "-x"), ("python3", "-u", "train.py", "-x")),
        (("./run.sh", "a b"), ("--no-python", "./run.sh", "a b"), None),
        (("python",), ("--no-python", "python"), None),
    ],
)
def test_torchrun_gets_the_command_in_the_form_it_wants(command, tail, rank):
    planned = plan(job(launcher="torchrun", command=command), "a slots=2\nb slots=2\n")
    launcher = planned.nodes[1].launcher
    assert launcher.argv == (*launcher.plain[:8], "--no-python") and launcher.command == (rank or command)
    assert [(one.rank, one.local_rank) for one in ranks_of(planned)] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert set(ranks_of(planned)[3].env) == {"ASCENDRUN_METRICS_FILE", "TORCHELASTIC_ERROR_FILE"}
    argv = launcher.plain
    assert argv[1:8] == (
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        "--nproc-per-node=2",
        "--node-rank=1",
        "--master-addr=10.0.0.1",
        f"--master-port={PORT_TOKEN}",
    )
    assert argv[8:] == tail
    assert argv[0] == (command[0] if "python" in command[0] else "python3")


def test_deepspeed_gets_the_whole_world_and_needs_nodes_of_one_size():
    spec = job(launcher="deepspeed", devices={"type": "npu", "ids": (2, 3)})
    launcher = plan(spec, "a\nb\n").nodes[1].launcher
    argv = launcher.plain
    world = argv[3].partition("=")[2]
    assert json.loads(base64.urlsafe_b64decode(world)) == {"a": [2, 3], "b": [2, 3]}
    assert argv[4:] == ("--node_rank=1", "--master_addr=10.0.0.1", f"--master_port={PORT_TOKEN}", "train.py")
    assert launcher.argv == (*argv[:7], "--no_local_rank", "--no_python")
    assert launcher.command == ("python", "-u", "train.py", f"--local_rank={join.LOCAL_RANK_TOKEN}")
    assert refusal(job(launcher="deepspeed"), "a slots=1\nb slots=2\n").key == "plan.uneven-ranks"


@pytest.mark.parametrize("slots, several", [(2, ("--multi_gpu",)), (1, ())])
def test_accelerate_gets_all_processes_of_the_job(slots, several):
    spec = job(launcher="accelerate", command=("python", "train.py", "-x"))
    launcher = plan(spec, f"a slots={slots}\n").nodes[0].launcher
    assert launcher.plain == (
        "python",
        "-m",
        "accelerate.commands.launch",
        *several,
        "--num_machines=1",
        f"--num_processes={slots}",
        "--machine_rank=0",
        "--main_process_ip=127.0.0.1",
        f"--main_process_port={PORT_TOKEN}",
        "--same_network",
        "--rdzv_backend=static",
        "train.py",
        "-x",
    )
    assert launcher.argv == (*launcher.plain[:-2], "--no_python")
    assert launcher.command == ("python", "-u", "train.py", "-x")
    assert launcher.env["ACCELERATE_USE_CPU"] == "true", "each process would train for itself"
    assert refusal(job(launcher="accelerate"), "a slots=1\nb slots=2\n").key == "plan.uneven-ranks"


def test_the_launcher_none_runs_one_process_a_node_that_sees_all_devices():
    planned = plan(job(launcher="none", devices={"type": "cuda", "per_node": 4}), "a\nb\n")
    assert planned.world_size == 2
    assert [
        (rank.rank, rank.local_rank, rank.env["LOCAL_WORLD_SIZE"], rank.env["CUDA_VISIBLE_DEVICES"])
        for rank in ranks_of(planned)
    ] == [(0, 0, "1", "0,1,2,3"), (1, 0, "1", "0,1,2,3")]
