"""What two ranks make of a step, beside what each makes alone: gradients of several buckets, of a precision that cannot
hold their mean, and random numbers."""

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ascendrun.programs.devices.accelerator import Precision, choose_precision
from ascendrun.programs.trainer import optim, runtime, schedule
from ascendrun.programs.trainer.data import Batch, Unit
from ascendrun.programs.trainer.loop import Loop
from ascendrun.programs.trainer.strategies import engine as engines
from ascendrun.programs.trainer.strategies.engine import whole
from ascendrun.programs.trainer.strategies.parallel import wrap
from ascendrun.programs.trainer.task import Settings, Task

FLOAT = Precision(torch.float32, torch.float32, False, "float32")
ROWS, WIDTH, STEPS = 12, 8, 2


def main(argv: list[str]) -> None:
    body = {"buckets": buckets, "seeds": seeds}.get(argv[0])
    runtime.run(body or (lambda here: reduce(argv[0], here)), timeout_s=60)


def reduce(strategy: str, here: runtime.Runtime) -> None:
    """bfloat16 gradients, 256 and 1: each says what came of them."""
    precision = choose_precision("bfloat16", here.accelerator)
    module = nn.Linear(1, 4, bias=False)
    engine = wrap(module, here, strategy=strategy, make_optimizer=lambda m: optim.adamw(m, 0.1), precision=precision)
    with engine.accumulate(last=True), engine.autocast():
        engine.backward(engine.model(torch.full((1, 1), 256.0 if here.rank else 1.0)).sum().float())
    gradient = whole(module.weight.grad)
    here.log(f"gradient {gradient.flatten().tolist()}")


def buckets(here: runtime.Runtime) -> None:
    engines.BUCKET_BYTES = 4 * WIDTH
    module, (x, _) = model(), rows(here.rank)
    alone = copy.deepcopy(module)
    alone(x).square().sum().backward()
    each = here.gather([weight.grad for weight in alone.parameters()])
    engine: Any = wrap(module, here, make_optimizer=lambda m: optim.adamw(m, 0.1), precision=FLOAT)
    with engine.accumulate(last=True):
        engine.backward(engine.model(x).square().sum())
    for at, weight in enumerate(module.parameters()):
        torch.testing.assert_close(weight.grad, torch.stack([mine[at] for mine in each]).mean(0))
    here.log(f"equal in {len(engine.buckets)} buckets")


def seeds(here: runtime.Runtime) -> None:
    task = Squares()
    train(here, task, Path.cwd() / "ckpt")
    every = [seed for mine in here.gather(task.seeds) for seed in mine]
    here.log(f"{len(set(every))} seeds of {len(every)} steps")


def model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.0), nn.Linear(WIDTH, 1))


def rows(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, WIDTH, generator=chance), torch.randn(ROWS, 1, generator=chance)


class Squares(Task):
    """Squared errors, each row with its weight. What the loop did is in `seeds` and `modes` (training or not)."""

    def __init__(self) -> None:
        self.seeds: list[int] = []
        self.modes: list[bool] = []
        self.module: nn.Module | None = None

    def collate(self, units: Sequence[Unit], step: int) -> Batch:
        x, y = rows()
        numbers = [number for unit in units for number in unit]
        weights = torch.tensor([1.0 + number % 3 for number in numbers])
        tensors = {"x": x[numbers], "y": y[numbers], "weights": weights}
        return Batch(tensors, float(weights.sum()), len(numbers), len(numbers))

    def loss(self, model: nn.Module, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        self.seeds.append(torch.initial_seed())
        errors = (model(tensors["x"]) - tensors["y"]).square().squeeze(1)
        return (errors * tensors["weights"]).sum()

    def evaluate(self, name: str, step: int) -> dict[str, float]:
        assert self.module is not None
        self.modes += [each.training for each in self.module.modules()]
        return {"loss": 0.0}


class Order:
    """Another half of the rows in each step."""

    steps_per_epoch = 2

    def units(self, step: int) -> Sequence[Unit]:
        return [(number,) for number in range(step % 2, ROWS, 2)]


RATE: Callable[[int], float] = schedule.scaled(0.1, schedule.linear(10, warmup=4))


def train(here: runtime.Runtime, task: Squares, folder: Path, source: Any = None, **changes: Any) -> nn.Module:
    """Train two steps by our own loop, of micro-batches of two rows. `source`: None: of `Order`."""
    task.module = module = model()
    engine = wrap(module, here, make_optimizer=lambda m: optim.adamw(m, RATE, weight_decay=0.1), precision=FLOAT)
    more: Mapping[str, Any] = {"max_grad_norm": 0.5, "micro_batch_size": 2, "save_steps": 0, **changes}
    Loop(here, engine, source or Order(), task, Settings(steps=STEPS, **more), folder=folder).run()
    return engine.module
