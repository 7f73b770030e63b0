"""Ranks below torchrun, deepspeed and accelerate over real sshd: output, end and number of each are a rank's."""

import json
from typing import Any

import pytest
from scenes import Scene, await_that, run_text, venv_python

TRAIN = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
total = torch.tensor([float(rank)])
dist.all_reduce(total)
print(f"rank {rank} of {dist.get_world_size()}, local {os.environ['LOCAL_RANK']}: sum {total.item()}", flush=True)
print("x" * 200000, flush=True)  # more than a pipe has room for
for step in range(1, 4):
    print({"loss": 2.0 / step, "step": step}, flush=True)
dist.barrier()
if rank == 3 and "fail" in sys.argv:
    raise ValueError("planted")
dist.barrier()
dist.destroy_process_group()
"""


def submit(scene: Scene, launcher: str, *words: str) -> Any:
    (scene.folder / "code" / "train.py").write_text(TRAIN)
    more = f"launcher: {launcher}\npython: {venv_python()}\n"
    job = scene.job(f"by-{launcher}", command=["python", "train.py", *words], more=more)
    return scene.ascendrun("submit", job, timeout=400)


def check_outputs(scene: Scene, job: str) -> None:
    """Each rank has a file of its own with all of its lines, on the host that it ran on."""
    await_that(lambda: scene.is_drained(job), "every byte is here")
    files = scene.on_head(job, "rank-*.out.0")
    assert sorted(files) == [f"node{1 + rank // 2}/rank-{rank}.out.0" for rank in range(4)]
    for name, data in files.items():
        rank = int(name.rpartition("rank-")[2][0])
        lines = data.decode().splitlines()
        assert f"rank {rank} of 4, local {rank % 2}: sum 6.0" in lines and "x" * 200000 in lines, (name, lines[:1])
        assert sum("'step'" in line for line in lines) == 3


def one_of(launcher: str) -> Any:
    return launcher if launcher == "torchrun" else pytest.param(launcher, marks=pytest.mark.thorough)


@pytest.mark.parametrize("launcher", list(map(one_of, ("torchrun", "deepspeed", "accelerate"))))
def test_a_failure_of_rank_3_is_of_rank_3_on_every_screen(scene: Scene, launcher: str) -> None:
    done = submit(scene, launcher, "fail")
    assert done.returncode == 1, run_text(done)
    await_that(lambda: scene.show("j-0001")["job"]["confidence"] != "preliminary", "it is diagnosed")
    detail = scene.show("j-0001")
    assert detail["first_failure_code"] == "rank-exited", detail["first_failure"]
    assert (detail["first_failure_hosts"], detail["first_failure_ranks"]) == (["node2"], [3])
    assert detail["first_failure_values"] == {"code": 1}
    ranks = {rank["rank"]: rank for rank in detail["ranks"]}
    assert [ranks[rank]["host"] for rank in sorted(ranks)] == ["node1", "node1", "node2", "node2"]
    assert ranks[3]["exit_code"] == 1
    check_outputs(scene, "j-0001")

    def output(*options: str) -> Any:
        ran = scene.ascendrun(*options, code=0)
        return ran.stdout

    (listed,) = json.loads(output("ps", "-a", "-o", "json"))["jobs"]
    assert "rank 3" in json.dumps(listed), listed
    explained = json.loads(output("explain", "j-0001", "-o", "json"))
    diagnosis = explained["diagnosis"]
    assert (diagnosis["ranks"], diagnosis["hosts"], diagnosis["confidence"]) == ([3], ["node2"], "certain"), diagnosis
    assert diagnosis["evidence"][0]["file"] == "node2/rank-3.err.0"
    report = json.loads(output("report", "j-0001", "-o", "json"))
    assert "rank 3" in json.dumps(report)
    shown = output("logs", "j-0001", "--rank", "3")
    assert "rank 3 of 4" in shown and "rank 2 of 4" not in shown
    assert {line.split("]")[0] for line in shown.splitlines() if line.startswith("[")} == {"[3"}, shown[-2000:]
    assert "ValueError: planted" in shown


@pytest.mark.thorough
@pytest.mark.parametrize("launcher", ["deepspeed", "accelerate"])
def test_a_training_below_a_launcher_succeeds(scene: Scene, launcher: str) -> None:
    done = submit(scene, launcher)
    assert done.returncode == 0, run_text(done)
    check_outputs(scene, "j-0001")
