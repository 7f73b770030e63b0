"""One training step that allocates nothing: every tensor's size and lifetime is followed, no number is computed."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any, Callable

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ascendrun.programs.trainer.devices.accelerator import Precision
from ascendrun.programs.trainer.strategies.engine import cast

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""A batch's tensors by name, as shape and dtype."""
Step = Callable[[nn.Module, dict[str, torch.Tensor]], torch.Tensor]
"""The summed loss of a batch. It may not look at values: no `.item()`, no selection by a mask."""


SHALLOW = 2, 4


@dataclass(frozen=True)
class Simulated:
    """Bytes of one step on one device that holds the whole model.

    `activations`: the most beyond weights, gradients and optimizer, gradients taken away as soon as they are made;
    `activations_in_layers`: the same while a repeated layer is at work, forward or backward.
    `whole_step`: the most altogether, optimizer included, with nothing sharded. `largest_layer`, `outside_layers`:
    weights of one repeated layer, and of all that is in none (embeddings, head). `trained_*`: of trained ones only.
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
    """Counts the bytes of all storages that are alive, and remembers the most, at all and while a layer is at work."""

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
        """Knows from now on when this layer is at work."""
        layer.register_forward_pre_hook(lambda *given: self.enter(True))
        layer.register_forward_hook(lambda *given: self.enter(False))
        layer.register_full_backward_pre_hook(lambda *given: self.enter(True))
        layer.register_full_backward_hook(lambda *given: self.enter(False))

    def enter(self, is_in_layer: bool) -> None:
        self.is_in_layer = is_in_layer
        if is_in_layer:
            self.peak_in_layers = max(self.peak_in_layers, self.live)


def simulate(
    build: Callable[[], nn.Module], step: Step, shapes: Shapes, *, precision: Precision, is_cast: bool = False
) -> Simulated:
    """`build` makes the model from its configuration; `is_cast`: weights are held in the compute precision while they
    are used, as sharded models do, instead of autocast."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    held = Precision(precision.compute, precision.compute, False, "") if is_cast else precision
    compute = torch.float32 if is_cast else precision.compute
    with torch.device("meta"):
        module = cast(build(), held).train()
    with FakeTensorMode(allow_non_fake_inputs=True), LiveBytes() as bytes_of:
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
        for _ in range(2):  # the second one has the optimizer's moments from its beginning
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
    is_cast: bool = False,
) -> Simulated:
    """As `simulate`, of a model of `layers` equal layers, from two shallow ones: what a layer adds, every layer adds.

    Sixty-four layers take minutes to follow, and show nothing that four do not. `build(n)`: the model with n layers.
    """
    if layers <= SHALLOW[1]:
        return simulate(lambda: build(layers), step, shapes, precision=precision, is_cast=is_cast)
    one, two = (
        asdict(simulate_deep(build, depth, step, shapes, precision=precision, is_cast=is_cast)) for depth in SHALLOW
    )
    more = layers - SHALLOW[1]
    return Simulated(**{name: two[name] + (two[name] - one[name]) * more // (SHALLOW[1] - SHALLOW[0]) for name in two})


def pretend(module: nn.Module) -> None:
    """Weights on the meta device become ones that claim to be on the CPU: its attention keeps no scores, as an NPU's
    and a GPU's; that of the meta device would."""
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
    """The peak of one forward and backward pass."""

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
    with warnings.catch_warnings():  # of a first layer whose input needs no gradient
        warnings.simplefilter("ignore", UserWarning)
        loss.backward()  # type: ignore[no-untyped-call]
    for hook in hooks:
        hook.remove()
    return bytes_of.peak


def held_bytes(weights: Sequence[torch.Tensor]) -> int:
    return sum(weight.numel() * weight.element_size() for weight in weights)


def repeated_layers(module: nn.Module) -> list[nn.Module]:
    """The layers of a transformer: the children of every list of modules of one class that is not inside another."""
    found: list[nn.Module] = []
    for child in module.children():
        members = list(child.children())
        if isinstance(child, nn.ModuleList) and len({type(member) for member in members}) == 1:
            found += members
        else:
            found += repeated_layers(child)
    return found
