"""A model with weights, gradients and optimizer in equal parts on all ranks: torch's fully_shard (FSDP2)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from ascendrun.programs.trainer.devices.accelerator import Precision
from ascendrun.programs.trainer.errors import InvalidDataError
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.strategies.engine import Adam, Engine, cast
from ascendrun.programs.trainer.strategies.engine import whole as whole_of
from ascendrun.programs.trainer.strategies.simulate import repeated_layers


class FullySharded(Engine):
    """Model with weights gathered layer by layer on use. The weights of `module` may be on the meta device
    (accelerate's init_empty_weights, which keeps buffers real). Each rank then allocates only its part, and
    `fill`, or `weights.read_into` from files, must set the values."""

    strategy = "fsdp2"
    is_sharded = True

    def __init__(
        self, module: nn.Module, here: Runtime, *, adam: Adam, precision: Precision, offload: bool = False
    ) -> None:
        if precision.scales:
            raise InvalidDataError(
                "program.fsdp2-scaling",
                "fsdp2 has no loss scaling, and {reason}\nhint: use ddp or zero3, or another --dtype",
                reason=precision.reason,
            )
        shard(module, here, precision, offload=offload)
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
        super().__init__(module, here, adam=adam, precision=precision)

    def place(self, module: nn.Module) -> nn.Module:
        return module

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
        norm = math.sqrt(self.here.sum([sum(float(each.double().square().sum()) for each in mine)])[0])
        for each in mine:
            each.mul_(min(1.0, limit / (norm + 1e-6)))
        return torch.tensor(norm)

    def common_state(self) -> dict[str, Any]:
        buffers = {name: tensor for name, tensor in self.trained_state().items() if not is_sharded(tensor)}
        return {"model": buffers, "scaler": {}}

    def own_state(self) -> dict[str, Any]:
        weights = {name: tensor for name, tensor in self.trained_state().items() if is_sharded(tensor)}
        kept = {
            name: {key: local(value) for key, value in self.optimizer.state.get(weight, {}).items()}
            for name, weight in self.module.named_parameters()
            if weight.requires_grad
        }
        return {"model": {name: local(tensor) for name, tensor in weights.items()}, "optimizer": kept}

    def load_state(self, common: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        targets = self.trained_state()
        with torch.no_grad():
            for name, tensor in {**common["model"], **own["model"]}.items():
                local(targets[name]).copy_(tensor)
        for name, weight in self.module.named_parameters():
            if weight.requires_grad and own["optimizer"].get(name):
                self.optimizer.state[weight] = {
                    key: like(value, weight) for key, value in own["optimizer"][name].items()
                }

    def full_weights(self) -> dict[str, torch.Tensor]:
        whole: dict[str, torch.Tensor] = {}
        for name, tensor in self.trained_state().items():
            full = whole_of(tensor)
            if self.here.is_first:
                whole[name] = full.detach().cpu().clone()
        return whole

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        targets = self.trained_state()
        if set(targets) != set(weights):
            differ = sorted(set(targets) ^ set(weights))
            raise RuntimeError(f"weights do not fit: {differ[:3]} are only on one side")
        for name, tensor in weights.items():
            fill(targets[name], tensor.__getitem__)


def is_sharded(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "to_local")


def local(value: Any) -> Any:
    """Return this rank's part of a sharded tensor; other values unchanged."""
    return value.to_local() if is_sharded(value) else value


def like(value: Any, weight: torch.Tensor) -> Any:
    """Return a saved local part as a sharded tensor with the layout of `weight`; step counters stay plain."""
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        return value
    from torch.distributed.tensor import DTensor

    assert isinstance(weight, DTensor)
    return DTensor.from_local(
        value.to(weight.to_local().device),
        weight.device_mesh,
        weight.placements,
        shape=weight.shape,
        stride=weight.stride(),
    )


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
    mesh = target.device_mesh
    each = -(-target.shape[0] // mesh.size())
    return min(int(each * mesh.get_local_rank()), int(target.shape[0]))


def materialise(module: nn.Module, device: torch.device) -> None:
    """Allocate weights. Raises ValueError for a buffer on the meta device: its values are unknown."""
    lost = [name for name, buffer in module.named_buffers() if buffer.is_meta]
    if lost:
        raise ValueError(f"buffer {lost[0]} has no values; build the model with accelerate.init_empty_weights")
    module._apply(  # type: ignore[no-untyped-call]
        lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
    )


def shard(module: nn.Module, here: Runtime, precision: Precision, *, offload: bool) -> None:
    """Shard a model. Every repeated layer is gathered as a unit; the rest, embeddings and head, is another unit."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    mesh = init_device_mesh(here.family, (here.world_size,))
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
