"""Strategies of Lightning for NPUs, CUDA and CPUs: one device, DDP, FSDP by torch's fully_shard.

Lightning's own start on the CPU where the accelerator is not theirs, open CUDA streams, or refuse the accelerator.
Only public methods are overridden.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from ascendrun.lightning.package import IS_OLD, fabric, part
from ascendrun.lightning.position import LateLoader, Position, ResumableLoader
from ascendrun.programs.devices.accelerator import Accelerator, worker_context
from ascendrun.programs.trainer.distributed import join
from ascendrun.programs.trainer.runtime import DRAIN_S, Runtime
from ascendrun.programs.trainer.strategies.engine import repeated_layers

SingleDevice: Any = part("strategies.SingleDeviceStrategy")
Distributed: Any = part("strategies.DDPStrategy")


class Shared:
    """What all strategies here do. `here`: this rank among its peers, from `setup_environment` on."""

    opened: Accelerator
    position: Position
    here: Runtime
    model: Any
    lightning_module: Any
    checkpoint_io: Any
    is_global_zero: bool

    def open(self, opened: Accelerator) -> None:
        self.opened, self.position = opened, Position(opened)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Set the start method of workers, and make training data resumable. A forked worker of a process that uses an
        NPU is rejected by torch_npu."""
        context = worker_context(self.opened.family)
        if isinstance(dataloader, DataLoader) and dataloader.num_workers > 0 and context is not None:
            dataloader.multiprocessing_context = context
        trainer = getattr(self.lightning_module, "trainer", None)
        resumes = hasattr(dataloader, "state_dict") and hasattr(dataloader, "load_state_dict")
        if trainer is None or resumes or isinstance(dataloader, LateLoader):
            return dataloader
        if trainer.training:
            return ResumableLoader(dataloader, self.position)
        return LateLoader(dataloader) if trainer.validating or trainer.sanity_checking else dataloader

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint. Every rank takes part in those of the checkpoint directory."""
        owns = getattr(self.checkpoint_io, "owns", None)
        if owns is not None and owns(filepath):
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options)
        elif self.is_global_zero:
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options)

    def _arrive(self, rank: int, local_rank: int, world_size: int, control: Any) -> None:
        self.here = Runtime(rank, local_rank, world_size, control, self.opened)
        if hasattr(self.checkpoint_io, "here"):
            self.checkpoint_io.here = self.here


class OneDevice(Shared, SingleDevice):  # type: ignore[misc]
    """Training on one device: npu:0, cuda:0 or the CPU."""

    def __init__(self, opened: Accelerator, **options: Any) -> None:
        super().__init__(device=opened.device, **options)
        self.open(opened)

    def setup_environment(self) -> None:
        super().setup_environment()
        self._arrive(0, 0, 1, None)


class DDP(Shared, Distributed):  # type: ignore[misc]
    """Distributed data parallel over hccl, nccl or gloo. `options`: of torch's DistributedDataParallel."""

    def __init__(self, opened: Accelerator, *, timeout_s: float = 600.0, **options: Any) -> None:
        super().__init__(timeout=timedelta(seconds=timeout_s), process_group_backend=opened.backend, **options)
        self.open(opened)
        self.timeout_s, self.options = timeout_s, options

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def setup_distributed(self) -> None:
        """Join the process group. HCCL's limits are set below that of torch, so that HCCL names the missing rank."""
        fabric.utilities.seed.reset_seed()
        self.set_world_ranks()
        control = dist.group.WORLD
        if not dist.is_initialized():
            os.environ["MASTER_ADDR"] = str(self.cluster_environment.main_address)
            os.environ["MASTER_PORT"] = str(self.cluster_environment.main_port)
            control = join(self.global_rank, self.world_size, self.opened.backend, self.timeout_s)
            atexit.register(leave)
        self._arrive(self.global_rank, self.local_rank, self.world_size, control)

    def configure_ddp(self) -> None:
        """Wrap the model, on its own device and in no stream of CUDA. Lightning 1.9 opens none."""
        if IS_OLD:
            super().configure_ddp()
        else:
            ids = self.determine_ddp_device_ids()
            self.model = DistributedDataParallel(self.model, device_ids=ids, **self.options)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over ranks. hccl has no mean of integers, which Lightning takes of the sizes of batches."""
        is_mean = str(reduce_op).lower() in ("mean", "avg")
        if not is_mean or not isinstance(tensor, torch.Tensor) or tensor.is_floating_point():
            return super().reduce(tensor, group, reduce_op)
        total = super().reduce(tensor, group, "sum")
        return total.copy_(total / self.world_size)


def leave() -> None:
    """Destroy the process group at the end of the process, after gloo's threads are done."""
    if dist.is_initialized():
        time.sleep(DRAIN_S)
        dist.destroy_process_group()


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
