"""How often the host asks the device for a number: never, in a step that is neither logged nor evaluated nor saved."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from ascendrun.programs.devices.accelerator import Precision, open_accelerator
from ascendrun.programs.trainer import optim, schedule
from ascendrun.programs.trainer.data import Batch, Buckets
from ascendrun.programs.trainer.loop import Loop
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.strategies.parallel import wrap
from ascendrun.programs.trainer.task import Settings, Task


class Reads(TorchDispatchMode):
    """The number of times that a value of a tensor was asked for, by operator."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


class Noted(Task):
    """Fits a line; notes how often values were read when each step begins."""

    parts = ("even",)
    evaluations = {"often": 5, "seldom": 10}

    def __init__(self, reads):
        self.reads, self.seen, self.evaluated = reads, [], []

    def collate(self, units, step):
        numbers = torch.tensor([number for unit in units for number in unit], dtype=torch.float32)
        return Batch({"x": numbers[:, None] / 10}, weight=len(numbers), tokens=len(numbers), samples=len(numbers))

    def loss(self, model, tensors):
        self.seen.append(self.reads.count)
        total = functional.mse_loss(model(tensors["x"]), 2 * tensors["x"], reduction="sum")
        return total, {"even": (total.detach(), tensors["x"].sum())}

    def evaluate(self, name, step):
        self.evaluated.append((name, step))
        return {name: float(step)}


def test_no_value_is_read_in_a_step_that_logs_nothing(tmp_path):
    """Clipping, AdamW and Muon, the loss and its parts: none of them."""
    here = Runtime(0, 0, 1, None, open_accelerator("cpu", 0))
    module = nn.Sequential(nn.Linear(1, 8), nn.Linear(8, 1))
    matrices = [weight for weight in module.parameters() if weight.ndim == 2]
    vectors = [weight for weight in module.parameters() if weight.ndim < 2]
    rate = schedule.scaled(0.01, schedule.cosine(20))
    plan = optim.OptimizerPlan([optim.Group(matrices, "muon", rate), optim.Group(vectors, "adamw", rate)])
    precision = Precision(torch.float32, torch.float32, False, "float32")
    engine = wrap(module, here, strategy="none", make_optimizer=lambda _: plan, precision=precision)
    with Reads() as reads:
        task = Noted(reads)
        settings = Settings(steps=20, logging_steps=10, save_in_background=False)
        rows = Buckets([1] * 40, batch_size=4, seed=1)
        Loop(here, engine, rows, task, settings, folder=tmp_path).run()
    assert len(task.seen) == 20 and len(set(task.seen)) == 1, task.seen
    assert task.evaluated == [("often", 5), ("often", 10), ("seldom", 10), ("often", 15), ("often", 20), ("seldom", 20)]
