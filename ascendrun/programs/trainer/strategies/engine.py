"""A model on one rank or replicated on all: backward pass, optimizer step, state and weights."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ascendrun.planner.cost import BUCKET_BYTES
from ascendrun.programs.devices.accelerator import Precision, Stamp, make_scaler
from ascendrun.programs.trainer.checkpoint import Piece, Pieces, Read
from ascendrun.programs.trainer.optim import MakeOptimizer
from ascendrun.programs.trainer.optimizer import Optimizer, Owners
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.schedule import value_at
from ascendrun.text import listed

STRATEGIES = ("none", "ddp", "fsdp2", "hsdp", "zero3")


@dataclass(frozen=True)
class State:
    """What a checkpoint keeps of an engine. `common`, `plain`: equal on all ranks; `own`: of this rank's shard."""

    common: Pieces
    own: Pieces
    plain: dict[str, Any]


class Engine:
    """A model on one rank. The engines of several ranks are subclasses.

    A step is: `begin(step)`; for each micro-batch `with accumulate(last=…): loss = model(…); backward(loss)`; then
    `finish(clip)`. Gradients of all ranks are averaged.
    """

    strategy = "none"

    def __init__(
        self, module: nn.Module, here: Runtime, *, make_optimizer: MakeOptimizer, precision: Precision
    ) -> None:
        self.here, self.precision = here, precision
        self.module = self.place(module)
        self.model: nn.Module = self.module
        self.gradients_ready: Stamp | None = None
        """Time at which this rank's own gradients of the last pass were ready; None: unknown."""
        self.scaler = make_scaler(here.accelerator, precision)
        self.plan = make_optimizer(self.module)
        self.plan.check(self.module)
        self.optimizer: Any = self.open_optimizer()

    def place(self, module: nn.Module) -> nn.Module:
        return cast(module, self.precision).to(device=self.here.device)

    def open_optimizer(self) -> Any:
        return Optimizer(self.plan, self.module, self.here, dtype=self.precision.compute, owners=self.owners)

    owners: Owners | None = None
    """Of a sharded model; None: weights are whole."""

    @property
    def shards(self) -> tuple[int, int]:
        """(the number of different shards of the state, this rank's); one shard: all ranks have all of it."""
        is_sharded = self.plan.shard and self.here.world_size > 1
        return (self.here.world_size, self.here.rank) if is_sharded else (1, 0)

    # --- a step ---

    def begin(self, step: int) -> None:
        """Set the rates, decays and momenta of a step."""
        self.optimizer.begin(step)

    def rate(self, step: int) -> float:
        """Return the learning rate of the first group."""
        return value_at(self.plan.groups[0].lr, step)

    def accumulate(self, *, last: bool) -> AbstractContextManager[Any]:
        """Return the context of one micro-batch's forward and backward pass; `last`: its end sums gradients over
        ranks."""
        return contextlib.nullcontext()

    def autocast(self) -> AbstractContextManager[Any]:
        return self.here.accelerator.autocast(self.precision.compute)

    def backward(self, loss: torch.Tensor) -> None:
        self.gradients_ready = None
        self.scaler.scale(loss).backward()

    def finish(self, clip: float) -> torch.Tensor:
        """Clip to the norm `clip` (0: no limit), run the optimizer step, drop the gradients. Return the original norm.

        The norm stays on the device. If it is not finite, fused kernels skip the step; under float16 that is the
        scaler's normal search for a scale.
        """
        self.scaler.unscale_(self.optimizer)
        norm = whole(self.clip(clip or float("inf")))
        if not self.precision.scales:
            self.optimizer.skip_if(~torch.isfinite(norm))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.drop_gradients()
        return norm

    def clip(self, limit: float) -> torch.Tensor:
        trained = [weight for weight in self.module.parameters() if weight.requires_grad]
        return nn.utils.clip_grad_norm_(trained, limit)

    def drop_gradients(self) -> None:
        self.optimizer.zero_grad()

    # --- state ---

    def state(self) -> State:
        """Return the state; tensors are not copied."""
        model = [(f"model/{n}", self.piece(tensor), is_sharded(tensor)) for n, tensor in self.trained_state().items()]
        pieces = [*model, *self.optimizer.state()]
        plain = {"counts": self.optimizer.counts(), "scaler": self.scaler.state_dict()}
        common = {key: piece for key, piece, is_own in pieces if not is_own}
        return State(common, {key: piece for key, piece, is_own in pieces if is_own}, plain)

    def piece(self, tensor: torch.Tensor) -> Piece:
        return Piece(tensor.detach().reshape(-1), 0, tuple(tensor.shape))

    def load_state(self, read: Read, plain: Mapping[str, Any]) -> None:
        """Read weights and optimizer, of this layout or of another. Raises KeyError for a weight that is not there."""
        with torch.no_grad():
            for name, tensor in self.trained_state().items():
                piece = self.piece(tensor)
                found = read(f"model/{name}", piece.offset, piece.data.numel())
                if found is None:
                    raise KeyError(name)
                piece.data.copy_(found)
            self.optimizer.load(read, plain["counts"])
        if plain["scaler"]:
            self.scaler.load_state_dict(plain["scaler"])

    def trained_state(self) -> dict[str, torch.Tensor]:
        """Return weights that training changes, and buffers; a frozen base is not saved with every checkpoint."""
        every = self.module.named_parameters(remove_duplicate=False)  # a tied weight has two names
        frozen = {name for name, weight in every if not weight.requires_grad}
        state = self.module.state_dict(keep_vars=True)
        return {name: tensor for name, tensor in state.items() if name not in frozen}

    def gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of the whole tensor on this rank's device. All ranks call it together."""
        return tensor.detach().clone()

    def fill(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """Set a weight, which may be sharded, to these values of all of it. All ranks call it together."""
        target.copy_(values)

    def whole(self) -> Engine:
        """Return the model with its present weights, all of them on this rank: for evaluation, generation and files.

        All ranks call it together, and then use it each for itself. Of a sharded model it is a copy, which the caller
        drops before the next step.
        """
        return self

    def full_weights(self) -> dict[str, torch.Tensor]:
        """Return a full copy of `trained_state` on the CPU of rank 0; {} elsewhere. All ranks call it together."""
        whole: dict[str, torch.Tensor] = {}
        for name, tensor in self.trained_state().items():  # one by one: together they may exceed the device
            full = self.gathered(tensor)
            if self.here.is_first:
                whole[name] = full.cpu()
        return whole

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Load unsharded weights, the same on every rank. Raises RuntimeError when names or shapes differ."""
        targets = self.trained_state()
        missing, unknown = sorted(set(targets) - set(weights)), sorted(set(weights) - set(targets))
        if missing or unknown:
            raise RuntimeError(listed("program.weights-differ", missing=missing[:3], unknown=unknown[:3]))
        with torch.no_grad():
            for name, values in weights.items():
                self.fill(targets[name], values)


class Sharded(Engine):
    """A model whose weights are divided among ranks. `skeleton`: see `skeleton_of`."""

    skeleton: nn.Module | None

    def place(self, module: nn.Module) -> nn.Module:
        return module

    def whole(self) -> Engine:
        assert self.skeleton is not None, "a model that was too large to be made whole"
        module = copy.deepcopy(self.skeleton)
        kinds = {name: tensor.dtype for name, tensor in module.state_dict().items()}
        copies: dict[int, torch.Tensor] = {}
        state = {}
        for name, tensor in self.module.state_dict(keep_vars=True).items():
            if id(tensor) not in copies:  # a tied weight has two names
                copies[id(tensor)] = self.gathered(tensor).to(kinds[name])
            state[name] = copies[id(tensor)]
        module.load_state_dict(state, assign=True)
        return Whole(module.to(self.here.device).train(self.module.training), self)


class Whole(Engine):
    """All weights of a sharded model on this rank, for passes without the other ranks."""

    def __init__(self, module: nn.Module, of: Engine) -> None:
        self.here, self.precision, self.module, self.model = of.here, of.precision, module, module


def skeleton_of(module: nn.Module) -> nn.Module | None:
    """Return a copy of a module without memory for its weights; None: it has none itself, as it is too large."""
    weights = list(module.parameters())
    if any(weight.is_meta or hasattr(weight, "ds_id") for weight in weights):
        return None
    empty = {id(each): nn.Parameter(torch.empty_like(each, device="meta"), each.requires_grad) for each in weights}
    return copy.deepcopy(module, empty)


class Replicated(Engine):
    """Every rank has all weights; gradients are averaged in buckets while the backward pass runs.

    Unlike torch's DistributedDataParallel the buckets never change, so that a resumed run sums in the same order as an
    uninterrupted one. Its price is in docs/decisions/08-training-loop.md.
    """

    strategy = "ddp"

    def __init__(
        self, module: nn.Module, here: Runtime, *, make_optimizer: MakeOptimizer, precision: Precision
    ) -> None:
        super().__init__(module, here, make_optimizer=make_optimizer, precision=precision)
        for tensor in self.module.state_dict().values():
            dist.broadcast(tensor, 0)
        self.buckets = buckets_of([weight for weight in self.module.parameters() if weight.requires_grad])
        self.is_last = False
        self.sent: list[tuple[list[nn.Parameter], list[torch.Tensor], Any]] = []
        """Buckets in transfer: their weights, the views of their sums, the work."""
        for number, bucket in enumerate(self.buckets):
            for weight in bucket:
                weight.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda _, number=number: self.arrived(number)
                )
        self.missing = [len(bucket) for bucket in self.buckets]

    @contextlib.contextmanager
    def accumulate(self, *, last: bool) -> Any:
        self.is_last = last
        self.missing = [len(bucket) for bucket in self.buckets]
        yield

    def arrived(self, number: int) -> None:
        """Send all complete buckets, in the same order on every rank."""
        if not self.is_last:
            return
        self.missing[number] -= 1
        while len(self.sent) < len(self.buckets) and self.missing[len(self.sent)] <= 0:
            self.send()

    def send(self) -> None:
        bucket = self.buckets[len(self.sent)]
        if len(self.sent) + 1 == len(self.buckets):
            self.gradients_ready = self.here.accelerator.stamp()
        gradients = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in bucket]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        sizes = [weight.numel() for weight in bucket]
        views = [part.view_as(weight) for part, weight in zip(torch.split(flat, sizes), bucket)]
        for weight, view in zip(bucket, views):
            if self.here.family == "npu":  # its fused optimizer has gradients in a buffer of its own
                weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            else:
                weight.grad = view
        self.sent.append((bucket, views, dist.all_reduce(flat, async_op=True)))

    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss / self.here.world_size)  # then the sums are means, without a pass over all gradients
        if not self.is_last:
            return
        while len(self.sent) < len(self.buckets):  # weights without a gradient in this step
            self.send()
        for bucket, views, work in self.sent:
            work.wait()
            for weight, view in zip(bucket, views):
                if weight.grad is not view and weight.grad is not None:
                    weight.grad.copy_(view)
        self.sent = []


def buckets_of(weights: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return the trained weights in buckets of one dtype, in reversed order, which is roughly that of the backward
    pass."""
    buckets: list[list[nn.Parameter]] = []
    size = 0
    for weight in reversed(weights):
        if not buckets or size >= BUCKET_BYTES or buckets[-1][0].dtype != weight.dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(weight)
        size += weight.numel() * weight.element_size()
    return buckets


def cast(module: nn.Module, precision: Precision) -> nn.Module:
    """Cast trained weights to the weights' precision, frozen weights to the compute precision. Buffers do not change:
    half precision makes positions unusable."""
    for weight in module.parameters():
        if weight.is_floating_point():
            weight.data = weight.data.to(precision.weights if weight.requires_grad else precision.compute)
    return module


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether this is fully_shard's tensor: others are whole, or of DeepSpeed."""
    return hasattr(tensor, "to_local")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the complete value of a tensor that may be sharded."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def size_of(weight: torch.Tensor) -> int:
    """Return the number of elements of a weight over all ranks; for a weight sharded by ZeRO-3 it is in ds_numel."""
    return int(getattr(weight, "ds_numel", weight.numel()))


def repeated_layers(module: nn.Module) -> list[nn.Module]:
    """Return the layers of a transformer: the children of each outermost module list with a single class."""
    found: list[nn.Module] = []
    for child in module.children():
        members = list(child.children())
        if isinstance(child, nn.ModuleList) and len({type(member) for member in members}) == 1:
            found += members
        else:
            found += repeated_layers(child)
    return found
