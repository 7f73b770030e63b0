"""Simulation of one training step: it tracks every tensor's size and lifetime, without memory or arithmetic.

The oracle of the planner's formula: it sees what the operators keep, and knows nothing of the formula.
"""

import contextlib
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Callable

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ascendrun.programs.devices.accelerator import Precision
from ascendrun.programs.trainer.strategies.engine import cast

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""A batch's tensors by name, as shape and dtype."""
Step = Callable[[nn.Module, dict[str, torch.Tensor]], torch.Tensor]
"""The summed loss of a batch. It must not read values: no `.item()`, no selection by a mask."""


@dataclass(frozen=True)
class Simulated:
    """Bytes of one step on one device that holds the whole model. `trained`: weights, as a number.

    `activations`: the peak beyond weights, gradients and optimizer, with each gradient freed when complete.
    `whole_step`: the peak of all tensors, with the moments of AdamW.
    """

    trained: int
    activations: int
    whole_step: int


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counter of the bytes of all live storages, with their peak."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self.seen: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        for each in tree_leaves(answer):
            if isinstance(each, torch.Tensor):
                self.count(each.untyped_storage())
        return answer

    def count(self, storage: Any) -> None:
        key = storage._cdata
        if key in self.seen:
            return
        self.seen[key] = storage.nbytes()
        self.live += self.seen[key]
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self.forget, key)

    def forget(self, key: int) -> None:
        self.live -= self.seen.pop(key, 0)


def simulate(
    build: Callable[[], nn.Module], step: Step, shapes: Shapes, *, precision: Precision, family: str = "cpu"
) -> Simulated:
    """Simulate a step on a device of this family. `build` makes the model from its configuration."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with torch.device("meta"):
        module = cast(build(), precision).train()
    with FakeTensorMode(allow_non_fake_inputs=True), dropout_of(family), LiveBytes() as bytes_of:
        pretend(module)
        trained = [weight for weight in module.parameters() if weight.requires_grad]
        before = bytes_of.live
        activations = passes(module, step, shapes, precision.compute, bytes_of, is_gradient_kept=False) - before
        optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)
        for _ in range(2):  # the second pass starts with the optimizer's moments
            bytes_of.peak = bytes_of.live
            passes(module, step, shapes, precision.compute, bytes_of, is_gradient_kept=True)
            optimizer.step()
            optimizer.zero_grad()
        return Simulated(sum(weight.numel() for weight in trained), activations, bytes_of.peak)


@contextlib.contextmanager
def dropout_of(family: str) -> Iterator[None]:
    """Use the dropout of a family: on NPU and CUDA it keeps a byte for each number, on a CPU its factor in float32."""
    usual = functional.dropout

    def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        return torch.native_dropout(input, p, True)[0] if training and p else input

    if family != "cpu":
        functional.dropout = dropout
    try:
        yield
    finally:
        functional.dropout = usual


def pretend(module: nn.Module) -> None:
    """Replace weights on the meta device by fake tensors on the CPU: its attention keeps no scores, as on NPUs and
    GPUs; that of the meta device does."""
    twins: dict[int, torch.Tensor] = {}
    for each in module.modules():
        for table in (each._parameters, each._buffers):
            for name, tensor in table.items():
                if tensor is None:
                    continue
                if id(tensor) not in twins:
                    fake = torch.empty_like(tensor, device="cpu")
                    is_weight = isinstance(tensor, nn.Parameter)
                    twins[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_weight else fake
                table[name] = twins[id(tensor)]  # type: ignore[assignment]


def passes(
    module: nn.Module, step: Step, shapes: Shapes, compute: torch.dtype, bytes_of: LiveBytes, *, is_gradient_kept: bool
) -> int:
    """Run one forward and backward pass and return the peak."""

    def drop(weight: torch.Tensor) -> None:
        weight.grad = None

    dropped = [] if is_gradient_kept else [weight for weight in module.parameters() if weight.requires_grad]
    hooks = [weight.register_post_accumulate_grad_hook(drop) for weight in dropped]  # type: ignore[no-untyped-call]
    tensors = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    cast: AbstractContextManager[Any] = contextlib.nullcontext()
    if compute != torch.float32:
        cast = torch.autocast("cpu", dtype=compute)
    with cast:
        loss = step(module, tensors)
    with warnings.catch_warnings():  # a first layer has an input without gradient
        warnings.simplefilter("ignore", UserWarning)
        loss.backward()  # type: ignore[no-untyped-call]
    for hook in hooks:
        hook.remove()
    return bytes_of.peak
