"""Strategies of Lightning for NPUs, CUDA and CPUs: one device, DDP, FSDP by torch's fully_shard.

Lightning's own start on the CPU where the accelerator is not theirs, open CUDA streams, or refuse the accelerator.
Only public methods are overridden.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from ascendrun.lightning.package import IS_OLD, fabric, part
from ascendrun.programs.devices.accelerator import Accelerator, worker_context
from ascendrun.programs.trainer.distributed import join
from ascendrun.programs.trainer.runtime import DRAIN_S, Runtime
from ascendrun.programs.trainer.strategies.engine import repeated_layers

Random = Mapping[str, Any]


@dataclass
class Position:
    """The position of one rank. `batches`: completed ones of this epoch. `start`: the random state before the first of
    them, which decides their order; None: the epoch has not started."""

    accelerator: Accelerator
    batches: int = 0
    start: Random | None = None
    resumed: Mapping[str, Any] | None = None
    """State of a checkpoint that the next iteration of the data continues from."""
    pending: Random | None = None
    """Random state to set before the next batch, so that what happens between a checkpoint and that batch, such as a
    validation, leaves the training as it would be after a resume."""
    generator: dict[str, torch.Tensor] = field(default_factory=dict)

    def completed(self, batch: int, *, is_last: bool) -> None:
        """Note that a batch, counted from 0 in its epoch, is trained on."""
        self.batches = 0 if is_last else batch + 1

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, in plain values and tensors."""
        self.hold()
        is_inside = self.batches > 0 and self.start is not None
        return {"batches": self.batches, "start": self.start if is_inside else None, "random": self.pending}

    def hold(self) -> None:
        """Note the random state, which the next batch of the training continues from: a
        validation does not change it."""
        if self.pending is None:
            self.pending = self.accelerator.rng_state()

    def load(self, state: Mapping[str, Any]) -> None:
        self.batches, self.resumed, self.pending = int(state["batches"]), state, None

    def settle(self) -> None:
        """Set the random state that a checkpoint was saved with, once."""
        if self.pending is not None:
            self.accelerator.set_rng_state(self.pending)
            self.pending = None


class LateLoader:
    """A loader that is iterated when the first batch is needed: an iterator draws random numbers, and its workers start
    with the order of its epoch. Other attributes are those of the loader inside."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader


class ResumableLoader(LateLoader):
    """A loader of training data that continues in the middle of an epoch: a map-style data set read in this process
    skips indices only; any other reads the batches again that were trained on, because its workers may use random
    numbers."""

    def __init__(self, loader: Iterable[Any], position: Position) -> None:
        super().__init__(loader)
        self.position = position

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: a checkpoint has the position of every rank. Lightning asks this of a loader that resumes."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """No effect, see `state_dict`."""

    def __iter__(self) -> Iterator[Any]:
        here, resumed = self.position, self.position.resumed
        here.resumed = None
        skipped = 0
        if resumed is None:
            here.settle()
        else:
            here.pending = None
            here.accelerator.set_rng_state(resumed["start"] or resumed["random"])
            skipped = int(resumed["batches"])
            self._set_generator(resumed["start"])
        here.start = self._random()

        def arrive() -> None:
            if resumed is not None and skipped:
                here.accelerator.set_rng_state(resumed["random"])

        batches = iter(self._without(skipped, arrive))
        while True:
            here.settle()
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch

    def _random(self) -> Random:
        state = {name: value for name, value in self.position.accelerator.rng_state().items() if name != "device"}
        generator = getattr(self.loader, "generator", None)
        return state if generator is None else {**state, "generator": generator.get_state()}

    def _set_generator(self, state: Random | None) -> None:
        generator = getattr(self.loader, "generator", None)
        if generator is not None and state is not None and "generator" in state:
            generator.set_state(state["generator"])

    def _without(self, count: int, arrive: Any) -> Iterable[Any]:
        if count == 0:
            return self.loader
        if is_skippable(self.loader):
            return remaining(self.loader, count, arrive)
        return replayed(self.loader, count, arrive)


def is_skippable(loader: Any) -> bool:
    """Return whether skipped indices leave the batches behind them as they are: no worker draws random numbers."""
    return type(loader) is DataLoader and loader.num_workers == 0 and not isinstance(loader.dataset, IterableDataset)


def remaining(loader: Any, count: int, arrive: Any) -> Iterable[Any]:
    """Return a loader of the batches after the first `count`. `arrive` is called before the first of them is read."""
    options = {"collate_fn": loader.collate_fn, "pin_memory": loader.pin_memory, "generator": loader.generator}
    if loader.batch_sampler is None:
        options.update(batch_size=None, sampler=Later(loader.sampler, count, arrive))
    else:
        options["batch_sampler"] = Later(loader.batch_sampler, count, arrive)
    return DataLoader(loader.dataset, **options)


def replayed(loader: Iterable[Any], count: int, arrive: Any) -> Iterator[Any]:
    batches = iter(loader)
    with contextlib.suppress(StopIteration):
        for _ in range(count):
            next(batches)
    arrive()
    yield from batches


class Later:
    """The indices of a sampler without the first ones."""

    def __init__(self, sampler: Any, count: int, arrive: Any) -> None:
        self.sampler, self.count, self.arrive = sampler, count, arrive

    def __len__(self) -> int:
        return max(0, len(self.sampler) - self.count)

    def __iter__(self) -> Iterator[Any]:
        indices = iter(self.sampler)
        for _ in range(self.count):
            next(indices, None)
        self.arrive()
        yield from indices


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
