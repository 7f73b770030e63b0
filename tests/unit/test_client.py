"""ascendrun.log and ascendrun.callback: in a rank of any launcher, outside ascendrun, and from the agent's archive."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import ascendrun
from ascendrun.core.metrics import parse_line
from ascendrun.query.library import copy_library
from tests.ports import free_port

REPO = Path(ascendrun.__file__).resolve().parent.parent


@pytest.fixture
def metrics(tmp_path, monkeypatch):
    path = tmp_path / "rank-0.metrics.0"
    monkeypatch.setenv("ASCENDRUN_METRICS_FILE", str(path))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    return path


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Scalar:
    """As a tensor with one element."""

    def __init__(self, value):
        self.value = value

    def __float__(self):
        return float(self.value)


class Batch:
    def __float__(self):
        raise RuntimeError("a Tensor with 2 elements cannot be converted to Scalar")


def test_a_step_is_a_line_that_the_head_understands(metrics):
    ascendrun.log(step=7, loss=Scalar(2.5), learning_rate=1e-4, tokens_per_s=10, note="text", flag=True, bad=Batch())
    (row,) = rows(metrics)
    assert set(row) == {"timestamp", "step", "loss", "learning_rate", "tokens_per_s"}
    line = parse_line(metrics.read_bytes())
    assert (line.step, line.loss, line.lr, line.tokens_per_s) == (7, 2.5, 1e-4, 10)


def test_a_call_without_a_step_is_the_next_one_and_a_loss_may_diverge(metrics):
    ascendrun.log(step=41, loss=1)
    ascendrun.log(loss=float("nan"))
    ascendrun.log(step="many", loss=2)
    assert [row["step"] for row in rows(metrics)] == [41, 42]
    assert parse_line(metrics.read_bytes().splitlines()[1]).diverged


@pytest.mark.parametrize(
    "rank, local_rank, file, writes",
    [
        ("3", "1", "rank-3.metrics.0", True),  # spawn: its own file
        ("2", "0", "rank-1.metrics.0", True),  # torchrun on node 1: the first rank there
        ("3", "1", "rank-1.metrics.0", False),
        ("1", "1", "rank-0.metrics.0", False),
        (None, None, "rank-0.metrics.0", True),
        ("5", "5", "mine.jsonl", True),
    ],
)
def test_one_process_writes_each_file(tmp_path, monkeypatch, rank, local_rank, file, writes):
    for name, value in (("RANK", rank), ("LOCAL_RANK", local_rank), ("ASCENDRUN_METRICS_FILE", str(tmp_path / file))):
        monkeypatch.setenv(name, value) if value is not None else monkeypatch.delenv(name, raising=False)
    ascendrun.log(step=1, loss=1.0)
    assert bool(rows(tmp_path / file)) == writes


def test_a_full_disk_or_no_ascendrun_never_ends_the_training(metrics, monkeypatch):
    monkeypatch.setenv("ASCENDRUN_METRICS_FILE", "/dev/full")
    ascendrun.log(step=1, loss=1.0)
    monkeypatch.setenv("ASCENDRUN_METRICS_FILE", "/no/such/folder/file")
    ascendrun.log(step=1, loss=1.0)
    monkeypatch.delenv("ASCENDRUN_METRICS_FILE")
    ascendrun.log(step=1, loss=1.0)
    assert not metrics.exists()


def test_a_trainer_and_an_accelerator_report_through_the_callback(metrics):
    made = ascendrun.callback()
    state = SimpleNamespace(global_step=10, max_steps=40)
    made.on_train_begin(None, state, None)
    made.on_log(None, state, None, logs={"loss": 3.0, "epoch": 0.5, "grad_norm": 1.5}, model=None)
    assert made.on_any_other_event(None, state, None) is None
    made.store_init_configuration({"lr": 1.0})
    made.log({"train_loss": Scalar(4), "loss": 2.0}, step=11)
    made.log({"loss": 1.0})
    made.finish()
    start, *steps = rows(metrics)
    assert (start["event"], start["total_steps"]) == ("start", 40)
    assert [(row["step"], row["loss"], row.get("total_steps")) for row in steps] == [
        (10, 3.0, 40),
        (11, 2.0, None),
        (12, 1.0, None),
    ]
    with pytest.raises(AttributeError):
        _ = made.no_event


LIGHTNING = """
import sys, torch, ascendrun
import pytorch_lightning as pl
class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, index):
        return self.layer(batch[0]).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 2)))
options = dict(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
more = dict(devices=2, strategy="ddp") if "together" in sys.argv else {}
pl.Trainer(**options, **more, callbacks=[ascendrun.callback()]).fit(Model(), data)
"""
ACCELERATE = """
import sys, accelerate, ascendrun
more = dict(cpu=True) if "together" in sys.argv else {}
accelerator = accelerate.Accelerator(log_with=[ascendrun.callback()], **more)
accelerator.init_trackers("training", config={"lr": 0.1})
"""


LEAVE = """
import torch.distributed
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
"""
"""Without it, threads of gloo may abort the interpreter at its end, on a busy machine."""


@pytest.mark.parametrize("script", [LIGHTNING, ACCELERATE], ids=["lightning", "accelerate"])
@pytest.mark.parametrize("way, size", [("apart", 1), ("together", 2)])
def test_the_start_of_a_real_framework_has_the_ranks_that_it_trains_with(tmp_path, script, way, size):
    """With the environment of two ranks: a Trainer() without devices, and an Accelerator() on CPUs that it was not
    asked to use, train alone."""
    pytest.importorskip("pytorch_lightning" if script is LIGHTNING else "accelerate")
    ranks, port = [], free_port()
    for rank in range(1 if script is LIGHTNING and way == "apart" else 2):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": "0", "PYTHONPATH": str(REPO)}
        own["ASCENDRUN_METRICS_FILE"] = str(tmp_path / f"rank-{rank}.metrics.0")
        command = [sys.executable, "-c", script + LEAVE, way]
        ranks.append(subprocess.Popen(command, env={**os.environ, **own}, cwd=tmp_path, stderr=subprocess.PIPE))
    for rank in ranks:
        assert rank.wait(240) == 0, rank.stderr.read().decode()[-3000:]
    starts = [row for row in rows(tmp_path / "rank-0.metrics.0") if row.get("event") == "start"]
    assert [row["world_size"] for row in starts] == [size]


SCRIPT = """
import ascendrun
from ascendrun import callback, log
log(step=3, loss=0.5)
callback()
try:
    from ascendrun.node import loader
    from ascendrun.core import hosts
    print("all of it")
except ImportError:
    print("client only")
"""


@pytest.mark.parametrize("others, said", [((), "client only"), ((str(REPO),), "all of it")])
def test_ranks_find_it_in_the_staged_library_and_an_installed_ascendrun_stays_whole(tmp_path, others, said):
    copy_library(tmp_path / "library")
    path, env = (
        os.pathsep.join((str(tmp_path / "library"), *others)),
        {"ASCENDRUN_METRICS_FILE": str(tmp_path / "metrics")},
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", SCRIPT], env={**env, "PYTHONPATH": path}, cwd=tmp_path, capture_output=True
    )
    assert (done.stdout.decode().strip(), done.stderr.decode()) == (said, "")
    assert [(row["step"], row["loss"]) for row in rows(tmp_path / "metrics")] == [(3, 0.5)]
