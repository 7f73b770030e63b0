"""Two ranks whose bfloat16 gradients, 256 and 1, have a mean that bfloat16 cannot hold: each says what came of them."""

from __future__ import annotations

import torch
from torch import nn

from ascendrun.programs.devices.accelerator import choose_precision
from ascendrun.programs.trainer import optim, runtime
from ascendrun.programs.trainer.strategies.engine import whole
from ascendrun.programs.trainer.strategies.parallel import wrap


def main(argv: list[str]) -> None:
    runtime.run(lambda here: reduce(argv[0], here), timeout_s=60)


def reduce(strategy: str, here: runtime.Runtime) -> None:
    precision = choose_precision("bfloat16", here.accelerator)
    module = nn.Linear(1, 4, bias=False)
    engine = wrap(module, here, strategy=strategy, make_optimizer=lambda m: optim.adamw(m, 0.1), precision=precision)
    with engine.accumulate(last=True), engine.autocast():
        engine.backward(engine.model(torch.full((1, 1), 256.0 if here.rank else 1.0)).sum().float())
    gradient = whole(module.weight.grad)
    here.log(f"gradient {gradient.flatten().tolist()}")
