"""A model with weights, gradients and optimizer in equal parts on all ranks: torch's fully_shard (FSDP2).

HSDP shards over the ranks of a host, or `shard_size` of them, and replicates these shards on the others: weights are
gathered inside a host, and only gradients cross the network.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Callable

import torch
from torch import nn

from ascendrun.programs.devices.accelerator import Precision
from ascendrun.programs.errors import ProgramError
from ascendrun.programs.trainer.checkpoint import Piece
from ascendrun.programs.trainer.optim import MakeOptimizer
from ascendrun.programs.trainer.optimizer import Owners
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.strategies.engine import Sharded, cast, is_sharded, repeated_layers, skeleton_of
from ascendrun.programs.trainer.strategies.engine import whole as whole_of
from ascendrun.text import listed


class FullySharded(Sharded):
    """Model with weights gathered layer by layer on use. The weights of `module` may be on the meta device
    (accelerate's init_empty_weights, which keeps buffers real). Each rank then allocates only its part, and
    `fill`, or `weights.read_into` from files, must set the values.

    `shard_size`: ranks among which weights are divided; None: all of them.
    """

    def __init__(
        self,
        module: nn.Module,
        here: Runtime,
        *,
        make_optimizer: MakeOptimizer,
        precision: Precision,
        offload: bool = False,
        shard_size: int | None = None,
    ) -> None:
        self.strategy = "fsdp2" if shard_size is None else "hsdp"
        self.shard_size = shard_size or here.world_size
        self.skeleton = skeleton_of(module)
        group = shard(module, here, precision, offload=offload, shard_size=shard_size)
        self.owners = Owners(here.rank % self.shard_size, self.shard_size, group, divided)
        materialise(module, torch.device("cpu") if offload else here.device)
        if offload:  # buffers stay on the compute device
            for part in module.modules():
                part._buffers.update(
                    {
                        name: buffer if buffer is None else buffer.to(here.device)
                        for name, buffer in part._buffers.items()
                    }
                )
        self.offload = offload
        super().__init__(module, here, make_optimizer=make_optimizer, precision=precision)

    @property
    def shards(self) -> tuple[int, int]:
        assert self.owners is not None
        return self.owners.size, self.owners.rank

    def gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        full = whole_of(tensor).detach()
        return full if is_sharded(tensor) else full.clone()

    def autocast(self) -> AbstractContextManager[Any]:
        # fully_shard itself casts the gathered weights and the inputs.
        return torch.autocast(self.here.family, enabled=False)

    @contextmanager
    def accumulate(self, *, last: bool) -> Iterator[None]:
        self.module.set_requires_gradient_sync(last)  # type: ignore[operator]
        self.module.set_is_last_backward(last)  # type: ignore[operator]
        yield

    def clip(self, limit: float) -> torch.Tensor:
        if not self.offload:
            return super().clip(limit)
        # The gradients are in host memory, which the device's own backend cannot sum.
        mine = [local(weight.grad) for weight in self.module.parameters() if weight.grad is not None]
        total = self.here.sum([sum(float(each.double().square().sum()) for each in mine)])[0]
        norm = math.sqrt(total * self.shard_size / self.here.world_size)
        for each in mine:
            each.mul_(min(1.0, limit / (norm + 1e-6)))
        return torch.tensor(norm)

    def piece(self, tensor: torch.Tensor) -> Piece:
        return Piece(local(tensor).detach().reshape(-1), first_element(tensor), tuple(tensor.shape))

    def fill(self, target: torch.Tensor, values: torch.Tensor) -> None:
        fill(target, values.__getitem__)


def divided(weight: nn.Parameter) -> tuple[torch.Tensor, int]:
    """Return the part of a weight that is on this rank, and the offset of its first element."""
    return local(weight), first_element(weight)


def local(value: Any) -> Any:
    """Return this rank's part of a sharded tensor; other values unchanged."""
    return value.to_local() if is_sharded(value) else value


def fill(target: torch.Tensor, read: Any) -> None:
    """Copy a complete tensor's values to a target, sharded or not. `read(slice)` returns some of its rows, so that a
    rank reads only its own rows from a file."""
    with torch.no_grad():
        if not is_sharded(target):
            target.copy_(read(slice(None)) if target.ndim else read(...))
            return
        mine = local(target)
        first = first_row(target)
        if mine.shape[0]:
            mine.copy_(read(slice(first, first + mine.shape[0])))


def first_row(target: Any) -> int:
    """Return the index of this rank's first row: fully_shard divides dimension 0 as torch.chunk does."""
    (dimension,) = [number for number, placement in enumerate(target.placements) if placement.is_shard()]
    each = -(-target.shape[0] // target.device_mesh.size(dimension))
    return min(int(each * target.device_mesh.get_local_rank(dimension)), int(target.shape[0]))


def first_element(target: torch.Tensor) -> int:
    return first_row(target) * math.prod(target.shape[1:]) if is_sharded(target) else 0


def materialise(module: nn.Module, device: torch.device) -> None:
    """Allocate weights. Raises ValueError for a buffer on the meta device: its values are unknown."""
    lost = [name for name, buffer in module.named_buffers() if buffer.is_meta]
    if lost:
        raise ValueError(f"buffer {lost[0]} has no values; build the model with accelerate.init_empty_weights")
    module._apply(  # type: ignore[no-untyped-call]
        lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
    )


def shard(
    module: nn.Module, here: Runtime, precision: Precision, *, offload: bool, shard_size: int | None = None
) -> Any:
    """Shard a model, and return the group of the ranks that hold it together. Every repeated layer is gathered as a
    unit; the rest, embeddings and head, is another unit."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    shape = (here.world_size,) if shard_size is None else (here.world_size // shard_size, shard_size)
    names = ("shard",) if shard_size is None else ("replicate", "shard")
    mesh = init_device_mesh(here.family, shape, mesh_dim_names=names)
    cast(module, precision)
    policy = MixedPrecisionPolicy(param_dtype=precision.compute, reduce_dtype=torch.float32)
    if precision.compute == precision.weights:
        policy = MixedPrecisionPolicy()
    details: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "offload_policy": OffloadPolicy()}
    if offload:
        details["offload_policy"] = CPUOffloadPolicy(pin_memory=here.family != "cpu")
    for layer in repeated_layers(module):
        fully_shard(layer, **details)
    fully_shard(module, **details)
    return mesh["shard"].get_group()


INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class InvalidWeightsError(ProgramError):
    """The files lack a weight of the model, or it has another shape; the message has its name."""


def read_into(
    module: nn.Module, folder: Path, *, name_in_file: Callable[[str], str | None] = lambda name: name
) -> None:
    """Read weights. `name_in_file`: a parameter's name in the files; None: not in the files (an adapter's). A tied
    weight may have either of its names. Raises InvalidWeightsError; for a missing weight, before any is read."""
    from safetensors import safe_open

    files = file_of_tensor(folder)
    wanted: dict[str, list[str]] = {}
    targets: dict[str, torch.Tensor] = {}
    for names, weight in named_with_ties(module):
        candidates = [each for each in map(name_in_file, names) if each is not None]
        if not candidates:
            continue
        found = next((each for each in candidates if each in files), None)
        if found is None:
            raise missing(folder, candidates[0])
        wanted.setdefault(files[found], []).append(found)
        targets[found] = weight
    for file, names in wanted.items():
        with safe_open(str(folder / file), framework="pt") as opened:
            for name in names:
                rows = opened.get_slice(name)
                if list(rows.get_shape()) != list(targets[name].shape):
                    raise InvalidWeightsError(
                        listed(
                            "program.weights-shape",
                            file=folder / file,
                            name=name,
                            found=rows.get_shape(),
                            expected=list(targets[name].shape),
                        )
                    )
                fill(targets[name], rows.__getitem__)


def missing(folder: Path, name: str) -> InvalidWeightsError:
    return InvalidWeightsError(listed("program.weights-missing", directory=folder, name=name))


def file_of_tensor(folder: Path) -> dict[str, str]:
    """Return {tensor: file}. Raises InvalidWeightsError."""
    if (folder / INDEX).is_file():
        return dict(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"])
    if not (folder / SINGLE).is_file():
        raise InvalidWeightsError(listed("program.no-safetensors", directory=folder, single=SINGLE, index=INDEX))
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(folder / SINGLE), framework="pt") as opened:
            return dict.fromkeys(opened.keys(), SINGLE)
    except SafetensorError as error:
        raise InvalidWeightsError(listed("program.bad-safetensors", file=folder / SINGLE, error=error)) from error


def named_with_ties(module: nn.Module) -> list[tuple[list[str], torch.Tensor]]:
    """Return every parameter once, with all its names."""
    names: dict[int, list[str]] = {}
    weights: dict[int, torch.Tensor] = {}
    for name, weight in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), []).append(name)
        weights[id(weight)] = weight
    return [(names[key], weights[key]) for key in names]
