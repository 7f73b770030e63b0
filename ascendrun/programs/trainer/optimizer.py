"""Optimizers of one rank: AdamW and Muon over the groups of a plan, their states sharded over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable

import torch
import torch.distributed as dist
from torch import nn

from ascendrun.programs.devices.accelerator import make_adamw
from ascendrun.programs.trainer.checkpoint import Piece, Read
from ascendrun.programs.trainer.optim import Group, OptimizerPlan, names_of
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.schedule import value_at

POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
"""Coefficients of the five steps towards the nearest orthogonal matrix (Amsel et al., arXiv 2505.16932)."""
CUT_ELEMENTS = 1 << 14
"""Smaller tensors of AdamW are updated on every rank: the exchange would cost more than their moments."""


@dataclass(frozen=True)
class Owners:
    """The ranks that share the state of an optimizer, this one among them. `group`: theirs, None: all ranks.

    `local`, of a sharded model: the part of a weight that is on this rank, and the offset of its first element. None:
    weights are whole.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    local: Callable[[nn.Parameter], tuple[torch.Tensor, int]] | None = None


class Optimizer:
    """The optimizers of one rank. GradScaler treats it as one optimizer over all weights: it has their `param_groups`.

    `owners`: of a sharded model, None: those of the plan.
    """

    def __init__(
        self, plan: OptimizerPlan, module: nn.Module, here: Runtime, *, dtype: torch.dtype, owners: Owners | None
    ):
        self.plan, names = plan, names_of(module)
        owners = owners or (Owners(here.rank, here.world_size) if plan.shard else Owners())
        self.param_groups = [{"params": list(group.params)} for group in plan.groups]
        moments = [group for group in plan.groups if group.rule == "adamw"]
        self.rules: list[AdamW | Muon] = [
            Muon(group, names, owners, dtype) for group in plan.groups if group.rule == "muon"
        ]
        if moments:
            self.rules.append(AdamW(moments, names, here, owners))

    def begin(self, step: int) -> None:
        for rule in self.rules:
            rule.begin(step)

    def step(self) -> None:
        with torch.no_grad():
            exchanges = [exchange for rule in self.rules for exchange in rule.step()]
            for exchange in exchanges:
                exchange.finish()

    def skip_if(self, is_bad: torch.Tensor) -> None:
        """Do not take the next step if this is true, where the kernel can do so without waiting for the device."""
        for rule in self.rules:
            rule.skip_if(is_bad)

    def zero_grad(self) -> None:
        for rule in self.rules:
            rule.zero_grad()

    def state(self) -> Iterator[tuple[str, Piece, bool]]:
        """Yield the state by key, and whether only this rank has it, or all ranks that share it."""
        for rule in self.rules:
            yield from rule.state()

    def counts(self) -> dict[str, int]:
        """Return the number of steps taken, by weight; of AdamW, whose moments are corrected for it."""
        return {name: count for rule in self.rules for name, count in rule.counts().items()}

    def load(self, read: Read, counts: Mapping[str, int]) -> None:
        for rule in self.rules:
            rule.load(read, counts)


class Exchange:
    """An all-gather in progress. `wanted[rank]`: the tensors that the chunk of this rank is copied to, in order."""

    def __init__(self, mine: torch.Tensor, wanted: Sequence[Sequence[torch.Tensor]], owners: Owners) -> None:
        self.wanted, self.rank = wanted, owners.rank
        self.chunks = [torch.empty_like(mine) for _ in range(owners.size)]
        self.work = dist.all_gather(self.chunks, mine, async_op=True)

    def finish(self) -> None:
        self.work.wait()
        for rank, tensors in enumerate(self.wanted):
            if rank != self.rank and tensors:
                sizes = [tensor.numel() for tensor in tensors]
                for tensor, values in zip(tensors, torch.split(self.chunks[rank][: sum(sizes)], sizes)):
                    tensor.copy_(values.view_as(tensor))


# --- AdamW ---


@dataclass(frozen=True)
class Part:
    """The part of a weight that this rank updates. `leaf`: what the optimizer is given, the weight itself or a view of
    a part of it. `is_cut`: other ranks update other parts of a weight that all of them have."""

    name: str
    weight: nn.Parameter
    leaf: nn.Parameter
    offset: int
    is_cut: bool = False


class AdamW:
    """torch's or torch_npu's AdamW on the parts of the weights that this rank updates.

    torch's ZeroRedundancyOptimizer gives whole weights to ranks, and a checkpoint of it has to be gathered on one rank;
    these parts are equal, saved by each rank, and read by any number of them (docs/decisions/08-training-loop.md).
    """

    def __init__(self, groups: Sequence[Group], names: Mapping[int, str], here: Runtime, owners: Owners) -> None:
        self.groups, self.owners = groups, owners
        self.parts = [[self.part(weight, names[id(weight)]) for weight in group.params] for group in groups]
        told: list[dict[str, Any]] = [
            {"params": [part.leaf for part in parts if part.leaf.numel()], "betas": group.betas, "eps": group.eps}
            for group, parts in zip(groups, self.parts)
        ]
        is_sharded = owners.local is not None or owners.size > 1
        self.inner = make_adamw(told, here.accelerator, lr=0.0, betas=groups[0].betas, is_sharded=is_sharded)
        self.every = [part for parts in self.parts for part in parts]

    def part(self, weight: nn.Parameter, name: str) -> Part:
        if self.owners.local is not None:
            mine, offset = self.owners.local(weight)
            return Part(name, weight, nn.Parameter(mine.detach()), offset)
        if self.owners.size == 1 or weight.numel() < CUT_ELEMENTS:
            return Part(name, weight, weight, 0)
        first, last = chunk_of(weight.numel(), self.owners.rank, self.owners.size)
        return Part(name, weight, nn.Parameter(weight.detach().view(-1)[first:last]), first, is_cut=True)

    def begin(self, step: int) -> None:
        for group, told in zip(self.groups, self.inner.param_groups):
            told["lr"], told["weight_decay"] = value_at(group.lr, step), value_at(group.weight_decay, step)

    def skip_if(self, is_bad: torch.Tensor) -> None:
        if self.inner.defaults.get("fused"):
            self.inner.found_inf = is_bad.float()  # type: ignore[attr-defined]

    def step(self) -> list[Exchange]:
        for part in self.every:
            if part.leaf is not part.weight and part.weight.grad is not None:
                gradient: Any = part.weight.grad
                if part.is_cut:
                    gradient = gradient.reshape(-1)[part.offset : part.offset + part.leaf.numel()]
                elif hasattr(gradient, "to_local"):
                    gradient = gradient.to_local()
                part.leaf.grad = gradient.view_as(part.leaf)
        self.inner.step()
        return [self.exchange(part) for part in self.every if part.is_cut]

    def exchange(self, part: Part) -> Exchange:
        flat, size = part.weight.detach().view(-1), self.owners.size
        mine = flat.new_zeros(-(-flat.numel() // size))
        mine[: part.leaf.numel()] = part.leaf.detach()
        spans = [chunk_of(flat.numel(), rank, size) for rank in range(size)]
        return Exchange(mine, [[flat[first:last]] for first, last in spans], self.owners)

    def zero_grad(self) -> None:
        self.inner.zero_grad()  # that of torch_npu keeps its flat buffer
        for part in self.every:
            if part.leaf is not part.weight:
                part.weight.grad = None

    def state(self) -> Iterator[tuple[str, Piece, bool]]:
        for part in self.every:
            shape = tuple(part.weight.shape)
            for key in ("exp_avg", "exp_avg_sq"):
                if key in self.inner.state.get(part.leaf, {}):
                    data = self.inner.state[part.leaf][key].detach().reshape(-1)
                    yield (
                        f"{key}/{part.name}",
                        Piece(data, part.offset, shape),
                        part.is_cut or self.owners.local is not None,
                    )

    def counts(self) -> dict[str, int]:
        held = [part for part in self.every if self.inner.state.get(part.leaf)]
        if not held:
            return {}
        steps = torch.stack(
            [torch.as_tensor(self.inner.state[part.leaf]["step"], dtype=torch.float32) for part in held]
        )
        return {part.name: int(count) for part, count in zip(held, steps.tolist())}

    def load(self, read: Read, counts: Mapping[str, int]) -> None:
        numbers = {
            id(leaf): i for i, leaf in enumerate(each for told in self.inner.param_groups for each in told["params"])
        }
        has_plain_counts = type(self.inner).__module__.startswith("torch_npu")
        state: dict[int, dict[str, Any]] = {}
        for part in self.every:
            size = part.leaf.numel()
            found = {key: read(f"{key}/{part.name}", part.offset, size) for key in ("exp_avg", "exp_avg_sq")}
            if not size or found["exp_avg"] is None:
                continue
            count = counts[part.name]
            state[numbers[id(part.leaf)]] = {
                "step": count if has_plain_counts else torch.tensor(float(count)),
                **{key: value.clone().view_as(part.leaf) for key, value in found.items() if value is not None},
            }
        self.inner.load_state_dict({"state": state, "param_groups": self.inner.state_dict()["param_groups"]})


# --- Muon ---


class Muon:
    """Muon on stacks of matrices of one shape: Nesterov momentum, equilibrated rows, the nearest orthogonal matrix by
    Polar Express, NorMuon's variance reduction, decay only where it agrees with the update.

    Matrix i of a stack of K belongs to rank i // ceil(K / N); the last ranks may have fewer, or none. Of a sharded
    model each rank gets the whole gradients of its matrices, and sends their updates, of which all take their rows.
    """

    def __init__(self, group: Group, names: Mapping[int, str], owners: Owners, dtype: torch.dtype) -> None:
        self.group, self.owners = group, owners
        self.dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        by_shape: dict[torch.Size, list[nn.Parameter]] = {}
        for weight in group.params:
            by_shape.setdefault(weight.shape, []).append(weight)
        self.stacks = [Stack(weights, names, owners) for weights in by_shape.values()]
        self.now = (0.0, 0.0, 0.0)

    def begin(self, step: int) -> None:
        group = self.group
        self.now = value_at(group.lr, step), value_at(group.weight_decay, step), value_at(group.momentum, step)

    def skip_if(self, is_bad: torch.Tensor) -> None:
        """Its update is taken in any case; the loop ends before it is saved."""

    def zero_grad(self) -> None:
        for weight in self.group.params:
            weight.grad = None

    def step(self) -> list[Exchange]:
        lr, decay, momentum = self.now
        for stack in self.stacks:
            gradients, updates = stack.gradients(), stack.momentum
            if stack.mine:
                updates = orthogonal_update(
                    torch.stack(gradients).float(),
                    stack.momentum,
                    stack.variance,
                    momentum=momentum,
                    beta2=self.group.beta2,
                    steps=self.group.ns_steps,
                    dtype=self.dtype,
                )
            rows, columns = updates.shape[-2:]
            rate = lr * max(1.0, rows / columns) ** 0.5
            for values, change in stack.changes(updates):
                agrees = (change * values) >= 0
                values.sub_(rate * change + rate * decay * values * agrees)
        has_exchange = self.owners.size > 1 and self.owners.local is None
        return [stack.exchange() for stack in self.stacks if has_exchange]

    def state(self) -> Iterator[tuple[str, Piece, bool]]:
        for stack in self.stacks:
            for i, name in enumerate(stack.names):
                for key, buffer in (("momentum", stack.momentum[i]), ("variance", stack.variance[i])):
                    piece = Piece(buffer.reshape(-1), 0, tuple(buffer.shape))
                    yield f"{key}/{name}", piece, self.owners.size > 1 or self.owners.local is not None

    def counts(self) -> dict[str, int]:
        return {}

    def load(self, read: Read, counts: Mapping[str, int]) -> None:
        for key, piece, _ in self.state():
            found = read(key, 0, piece.data.numel())
            if found is not None:
                piece.data.copy_(found)


class Stack:
    """Matrices of one shape, and the state of those that belong to this rank."""

    def __init__(self, weights: Sequence[nn.Parameter], names: Mapping[int, str], owners: Owners) -> None:
        self.weights, self.owners = weights, owners
        self.each = -(-len(weights) // owners.size)
        self.mine = self.of(owners.rank)
        self.names = [names[id(weight)] for weight in self.mine]
        rows, columns = weights[0].shape[0], math.prod(weights[0].shape[1:])
        like = {"dtype": torch.float32, "device": weights[0].device}
        reduced = (rows, 1) if rows >= columns else (1, columns)
        self.momentum = torch.zeros(len(self.mine), rows, columns, **like)  # type: ignore[call-overload]
        self.variance = torch.zeros(len(self.mine), *reduced, **like)  # type: ignore[call-overload]

    def of(self, rank: int) -> Sequence[nn.Parameter]:
        return self.weights[rank * self.each : (rank + 1) * self.each]

    def gradients(self) -> list[torch.Tensor]:
        """Return the whole gradients of this rank's matrices. Of a sharded model one matrix is gathered at a time."""
        if self.owners.local is None:
            return [matrix(weight.grad) for weight in self.mine]
        found = []
        for number, weight in enumerate(self.weights):
            gradient: Any = weight.grad
            whole = gradient.full_tensor()
            if number // self.each == self.owners.rank:
                found.append(matrix(whole))
        return found

    def changes(self, updates: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (values on this rank, their update), from the updates of this rank's matrices."""
        if self.owners.local is None:
            yield from ((matrix(weight.detach()), update) for weight, update in zip(self.mine, updates))
            return
        for number, weight in enumerate(self.weights):
            owner, at = divmod(number, self.each)
            whole = (
                updates[at].contiguous()
                if owner == self.owners.rank
                else self.momentum.new_empty(self.momentum.shape[1:])
            )
            dist.broadcast(whole, dist.get_global_rank(self.owners.group, owner), group=self.owners.group)
            values, offset = self.owners.local(weight)
            first = offset // math.prod(weight.shape[1:])
            yield matrix(values.detach()), whole[first : first + len(values)]

    def exchange(self) -> Exchange:
        mine = self.weights[0].new_zeros(self.each * self.weights[0].numel())
        for place, weight in zip(torch.split(mine, self.weights[0].numel()), self.mine):
            place.copy_(weight.detach().view(-1))
        wanted = [[weight.detach().view(-1) for weight in self.of(rank)] for rank in range(self.owners.size)]
        return Exchange(mine, wanted, self.owners)


def orthogonal_update(
    gradients: torch.Tensor,
    momentum_buffer: torch.Tensor,
    variance: torch.Tensor,
    *,
    momentum: float,
    beta2: float,
    steps: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the updates of a stack of matrices, to be multiplied by the rate; both buffers are updated in place."""
    momentum_buffer.lerp_(gradients, 1 - momentum)
    x = nearest_orthogonal(torch.lerp(gradients, momentum_buffer, momentum), steps, dtype).float()
    rows, columns = x.shape[-2:]
    x = x * (min(rows, columns) ** 0.5 / frobenius(x).clamp_min(1e-6))
    along = -1 if rows >= columns else -2  # the mean square of each row of a tall matrix, each column of a wide one
    mean_square = x.square().mean(dim=along, keepdim=True)
    variance.lerp_(mean_square, 1 - beta2)
    scale = variance.clamp_min(1e-10).rsqrt()
    size = x.shape[along]
    before = (mean_square.sum(dim=(-2, -1), keepdim=True) * size).sqrt()
    after = (mean_square * size * scale.square()).sum(dim=(-2, -1), keepdim=True).sqrt()
    update: torch.Tensor = x * scale * (before / after.clamp_min(1e-10))
    return update


def nearest_orthogonal(gradients: torch.Tensor, steps: int, dtype: torch.dtype) -> torch.Tensor:
    """Return matrices with the same singular vectors, and singular values near 1. Rows get equal norms first."""
    x: torch.Tensor = gradients.to(dtype)
    mean_norm = frobenius(x.float()) / x.shape[-2] ** 0.5
    x = x * (mean_norm / x.float().norm(dim=-1, keepdim=True).clamp_min(1e-6)).to(dtype)
    x = x / (frobenius(x) * 1.01 + 1e-6)
    is_tall = x.shape[-2] > x.shape[-1]
    for a, b, c in POLAR_EXPRESS[:steps]:
        gram = x.mT @ x if is_tall else x @ x.mT
        polynomial = b * gram + c * (gram @ gram)
        x = a * x + (x @ polynomial if is_tall else polynomial @ x)
    return x


def frobenius(x: torch.Tensor) -> torch.Tensor:
    norms: torch.Tensor = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    return norms


def matrix(weight: Any) -> torch.Tensor:
    """Return a weight as a matrix: a kernel of a convolution has its first dimension as rows."""
    return weight.view(weight.shape[0], math.prod(weight.shape[1:]))  # type: ignore[no-any-return]


def chunk_of(length: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the first element of a rank's part of a tensor, and the one after its last: equal parts but at the end."""
    each = -(-length // world_size)
    return min(rank * each, length), min((rank + 1) * each, length)
