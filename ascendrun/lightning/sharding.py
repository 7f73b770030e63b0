"""Fully sharded data parallel: weights, gradients and optimizer in equal parts on all ranks, by torch's fully_shard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ascendrun.lightning.strategies import DDP
from ascendrun.programs.devices.accelerator import Accelerator
from ascendrun.programs.trainer.strategies.layers import repeated_layers


class FSDP(DDP):
    """Layers of a ModuleList are gathered one by one, the rest together. Checkpoints have whole tensors: another
    number of ranks, or DDP, can resume from them. float16 is refused: a scaler sees the gradients of one rank."""

    def __init__(self, opened: Accelerator, *, timeout_s: float = 600.0) -> None:
        super().__init__(opened, timeout_s=timeout_s)
        self.kept: dict[str, Any] = {}

    def configure_ddp(self) -> None:
        """Give all ranks the weights of rank 0, and divide them."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        for tensor in self.lightning_module.state_dict().values():
            dist.broadcast(tensor, 0)
        self.mesh = init_device_mesh(self.opened.family, (self.world_size,))
        self.model = Outer(self.lightning_module)
        for layer in repeated_layers(self.lightning_module):
            fully_shard(layer, mesh=self.mesh)
        fully_shard(self.model, mesh=self.mesh)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the whole weights on every rank. All ranks call it together. After the training, when Lightning has
        moved the parts to host memory, they are those of the last checkpoint, which is of the end."""
        state = self.lightning_module.state_dict()
        if all(value.device.type == self.opened.family for value in state.values()):
            self.kept = {name: whole(value) for name, value in state.items()}
        return self.kept

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the whole state of an optimizer on every rank. All ranks call it together."""
        found = optimizer.state_dict()
        state = {
            number: {name: whole(value) for name, value in values.items()} for number, values in found["state"].items()
        }
        return {**found, "state": state}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"]):
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            state = {
                number: {name: divided(value, weights[int(number)]) for name, value in values.items()}
                for number, values in saved["state"].items()
            }
            optimizer.load_state_dict({**saved, "state": state})


class Outer(nn.Module):
    """The module whose call gathers the weights that are in no layer; a LightningModule is called by its steps."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return self.module(*arguments, **named)


def whole(value: Any) -> Any:
    """Return a divided tensor as a whole one in host memory, and other values as they are."""
    return value.full_tensor().cpu() if hasattr(value, "full_tensor") else value


def divided(value: Any, weight: Any) -> Any:
    """Return this rank's part of a state of a weight."""
    if not hasattr(weight, "full_tensor") or not isinstance(value, torch.Tensor) or value.shape != weight.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(weight.device), weight.device_mesh, weight.placements)
