"""Simulation of one training step: it tracks every tensor's size and lifetime, without memory or arithmetic."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any, Callable

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ascendrun.programs.devices.accelerator import Precision
from ascendrun.programs.trainer.strategies.engine import cast
from ascendrun.programs.trainer.strategies.layers import repeated_layers

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""A batch's tensors by name, as shape and dtype."""
Step = Callable[[nn.Module, dict[str, torch.Tensor]], torch.Tensor]
"""The summed loss of a batch. It must not read values: no `.item()`, no selection by a mask."""


SHALLOW = 2, 4


@dataclass(frozen=True)
class Simulated:
    """Bytes of one step on one device that holds the complete model.

    `activations`: the peak beyond weights, gradients and optimizer, with each gradient freed when complete;
    `activations_in_layers`: the same while a repeated layer runs, forward or backward.
    `whole_step`: the total peak, optimizer included, with nothing sharded. `largest_layer`, `outside_layers`:
    weights of one repeated layer, and of all outside layers (embeddings, head). `trained_*`: of trained weights only.
    """

    parameters: int
    trained: int
    weights: int
    trained_bytes: int
    largest_layer: int
    outside_layers: int
    activations: int
    activations_in_layers: int
    whole_step: int


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counter of the bytes of all live storages, with two peaks: overall, and while a watched layer runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = self.peak_in_layers = 0
        self.is_in_layer = False
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
        if self.is_in_layer:
            self.peak_in_layers = max(self.peak_in_layers, self.live)
        weakref.finalize(storage, self.forget, key)

    def forget(self, key: int) -> None:
        self.live -= self.seen.pop(key, 0)

    def watch(self, layer: nn.Module) -> None:
        """Record the peak of this layer's passes from now on."""
        layer.register_forward_pre_hook(lambda *given: self.enter(True))
        layer.register_forward_hook(lambda *given: self.enter(False))
        layer.register_full_backward_pre_hook(lambda *given: self.enter(True))
        layer.register_full_backward_hook(lambda *given: self.enter(False))

    def enter(self, is_in_layer: bool) -> None:
        self.is_in_layer = is_in_layer
        if is_in_layer:
            self.peak_in_layers = max(self.peak_in_layers, self.live)


def simulate(
    build: Callable[[], nn.Module],
    step: Step,
    shapes: Shapes,
    *,
    precision: Precision,
    family: str = "cpu",
    is_cast: bool = False,
) -> Simulated:
    """Simulate a step on a device of this family. `build` makes the model from its configuration; `is_cast`: weights
    are in the compute precision while they are used, as in sharded models, instead of autocast."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    held = Precision(precision.compute, precision.compute, False, "") if is_cast else precision
    compute = torch.float32 if is_cast else precision.compute
    with torch.device("meta"):
        module = cast(build(), held).train()
    with FakeTensorMode(allow_non_fake_inputs=True), dropout_of(family), LiveBytes() as bytes_of:
        pretend(module)
        layers = repeated_layers(module)
        for layer in layers:
            bytes_of.watch(layer)
        parameters = list(module.parameters())
        trained = [weight for weight in parameters if weight.requires_grad]
        before = bytes_of.live
        activations = passes(module, step, shapes, compute, bytes_of, is_gradient_kept=False) - before
        in_layers = max(0, bytes_of.peak_in_layers - before)
        optimizer = torch.optim.AdamW(trained, lr=1e-3, foreach=False)
        whole_step = 0
        for _ in range(2):  # the second pass starts with the optimizer's moments
            bytes_of.peak = bytes_of.live
            passes(module, step, shapes, compute, bytes_of, is_gradient_kept=True)
            optimizer.step()
            optimizer.zero_grad()
            whole_step = bytes_of.peak
        of_layers = {id(weight) for layer in layers for weight in layer.parameters()}
        return Simulated(
            parameters=sum(weight.numel() for weight in parameters),
            trained=sum(weight.numel() for weight in trained),
            weights=before,
            trained_bytes=held_bytes(trained),
            largest_layer=max((held_bytes(list(layer.parameters())) for layer in layers), default=0),
            outside_layers=held_bytes([weight for weight in parameters if id(weight) not in of_layers]),
            activations=activations,
            activations_in_layers=in_layers,
            whole_step=whole_step,
        )


def simulate_deep(
    build: Callable[[int], nn.Module],
    layers: int,
    step: Step,
    shapes: Shapes,
    *,
    precision: Precision,
    family: str = "cpu",
    is_cast: bool = False,
) -> Simulated:
    """Simulate a model of `layers` equal layers by two shallow models: every layer adds the same amount.

    Simulating sixty-four layers takes minutes and gives the same result. `build(n)`: the model with n layers.
    """
    given: dict[str, Any] = {"precision": precision, "family": family, "is_cast": is_cast}
    if layers <= SHALLOW[1]:
        return simulate(lambda: build(layers), step, shapes, **given)
    one, two = (asdict(simulate_deep(build, depth, step, shapes, **given)) for depth in SHALLOW)
    more = layers - SHALLOW[1]
    return Simulated(**{name: two[name] + (two[name] - one[name]) * more // (SHALLOW[1] - SHALLOW[0]) for name in two})


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


def held_bytes(weights: Sequence[torch.Tensor]) -> int:
    return sum(weight.numel() * weight.element_size() for weight in weights)
