"""The arguments of a Trainer for this machine and its launcher, with its ranks and addresses; the checkpoint to
resume from, and total steps."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ascendrun.lightning.accelerator import NAME, NPUAccelerator, choose, make_precision
from ascendrun.lightning.callback import StepCheckpoints, Supervision
from ascendrun.lightning.package import part
from ascendrun.lightning.strategies import DDP, FSDP, OneDevice
from ascendrun.programs.devices.accelerator import Precision, choose_family, open_accelerator
from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trainer import checkpoint
from ascendrun.text import Text, listed

Base: Any = part("plugins.environments.ClusterEnvironment")
NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")


def is_launched() -> bool:
    """Return whether a launcher started this process as one of several ranks, or as the only one."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


class LaunchedEnvironment(Base):  # type: ignore[misc]
    """Ranks from RANK, LOCAL_RANK, NODE_RANK (torchrun: GROUP_RANK) and WORLD_SIZE. The global rank is RANK: neither
    the local rank nor a product of counts, so hosts may have different numbers of ranks."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self.environ = dict(os.environ if environ is None else environ)
        self.check()

    def check(self) -> None:
        """Raise InvalidDataError with all variables that are missing, or not numbers, or contradict each other."""
        own = self.environ
        wanted = [*NUMBERS, "MASTER_ADDR"] if own.get("WORLD_SIZE") != "1" else ["RANK", "WORLD_SIZE"]
        problems = [listed("lightning.variable-missing", name=name) for name in wanted if not own.get(name)]
        problems += [
            listed("lightning.variable-number", name=name, value=own[name])
            for name in NUMBERS
            if own.get(name) and not own[name].isdigit()
        ]
        if not problems and self.global_rank() >= self.world_size():
            rank, world = self.global_rank(), self.world_size()
            problems.append(listed("lightning.rank-range", rank=rank, world=world))
        if problems:
            raise InvalidDataError.of(problems)

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return self.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        return int(self.environ.get("MASTER_PORT", "0"))

    @staticmethod
    def detect() -> bool:
        return is_launched()

    def world_size(self) -> int:
        return int(self.environ["WORLD_SIZE"])

    def set_world_size(self, size: int) -> None:
        """No effect: Lightning passes the product of counts, which is wrong where hosts have different ones."""

    def global_rank(self) -> int:
        return int(self.environ["RANK"])

    def set_global_rank(self, rank: int) -> None:
        """No effect, as for `set_world_size`."""

    def local_rank(self) -> int:
        return int(self.environ.get("LOCAL_RANK", "0"))

    def node_rank(self) -> int:
        return int(self.environ.get("NODE_RANK", self.environ.get("GROUP_RANK", "0")))

    def local_world_size(self) -> int:
        """Return the number of ranks of this host; all of them if the launcher does not set it."""
        return int(self.environ.get("LOCAL_WORLD_SIZE", self.environ["WORLD_SIZE"]))

    def nodes(self) -> int:
        """Return the number of hosts. Strategies use it for messages only."""
        return int(self.environ.get("GROUP_WORLD_SIZE", 0)) or max(1, self.world_size() // self.local_world_size())


STRATEGIES = ("auto", "ddp", "fsdp")


def settings(
    *,
    strategy: str = "auto",
    precision: str | int = "auto",
    device: str = "auto",
    devices: int | str = "auto",
    num_nodes: int = 1,
    callbacks: Sequence[Any] = (),
    checkpoint_dir: str | Path = "checkpoints",
    save_steps: int = 500,
    save_total_limit: int = 2,
    timeout_s: float = 600.0,
    **ddp_options: Any,
) -> dict[str, Any]:
    """Return the arguments of a Trainer: accelerator, devices, num_nodes, strategy, plugins, callbacks.

    Under a launcher (ascendrun, torchrun) ranks, hosts and devices are its own. Elsewhere `devices` and `num_nodes` are
    Lightning's; auto is one device. `strategy`: auto (one device, or ddp), ddp or fsdp. `precision`: auto, or a name of
    Lightning. `device`: auto, npu, cuda or cpu. `checkpoint_dir`: where $ASCENDRUN_CHECKPOINT_DIR is not set.
    `timeout_s`: of collectives. `ddp_options`: such as find_unused_parameters. Raises InvalidDataError.
    """
    environment = LaunchedEnvironment() if is_launched() else None
    here = environment.local_world_size() if environment else 1 if devices == "auto" else devices
    nodes = environment.nodes() if environment else num_nodes
    world = environment.world_size() if environment else int(here) * nodes
    refuse(strategy, devices, here)
    local_rank = environment.local_rank() if environment else int(os.environ.get("LOCAL_RANK", "0"))
    opened = open_accelerator(choose_family(device, os.environ), local_rank)
    chosen = choose(precision, opened)
    checkpoints = StepCheckpoints(folder(checkpoint_dir), keep=save_total_limit)
    more: dict[str, Any] = {}
    if strategy == "auto" and world == 1:
        made: Any = OneDevice(opened)
    elif strategy == "fsdp":
        refuse_scaling(chosen)
        made = FSDP(opened, timeout_s=timeout_s, **ddp_options)
        more = {"inference_mode": False}  # gathered weights of a validation are used by the training
    else:
        made = DDP(opened, timeout_s=timeout_s, **ddp_options)
    return {
        **more,
        "accelerator": NPUAccelerator() if opened.family == NAME else opened.family,
        "devices": here,
        "num_nodes": nodes,
        "strategy": made,
        "plugins": [make_precision(chosen, opened), checkpoints, *([environment] if environment else [])],
        "callbacks": [*callbacks, Supervision(checkpoints, save_steps=save_steps)],
    }


def refuse_scaling(chosen: Precision) -> None:
    if chosen.scales:
        raise InvalidDataError(listed("lightning.fsdp-scaling", reason=chosen.reason))


def refuse(strategy: str, devices: int | str, here: int | str) -> None:
    """Raise InvalidDataError with all problems of the arguments."""
    problems: list[Text | str] = []
    if strategy not in STRATEGIES:
        problems.append(listed("lightning.unknown-strategy", name=strategy, names=list(STRATEGIES)))
    if devices != "auto" and not (isinstance(devices, int) and devices > 0):
        problems.append(listed("lightning.devices", value=str(devices)))
    elif devices not in ("auto", here):
        problems.append(listed("lightning.other-devices", given=devices, here=here))
    if problems:
        raise InvalidDataError.of(problems)


def folder(checkpoint_dir: str | Path = "checkpoints") -> Path:
    """Return the launcher's checkpoint directory, else `checkpoint_dir`."""
    return Path(os.environ.get("ASCENDRUN_CHECKPOINT_DIR") or checkpoint_dir).absolute()


def resume(checkpoint_dir: str | Path = "checkpoints") -> str | None:
    """Return what to pass as `ckpt_path` to `fit`: the newest complete checkpoint; None: there is none.

    Under ascendrun it is the one that is complete on the hosts together, also where this host lacks it: the ranks
    receive it from those that have it.
    """
    parent = folder(checkpoint_dir)
    if "ASCENDRUN_JOB_ID" in os.environ:
        step = os.environ.get("ASCENDRUN_RESUME_STEP", "")
        return str(parent / checkpoint.folder_name("step", int(step))) if step.isdigit() else None
    for _, path in checkpoint.directories(parent, "step"):
        problem = checkpoint.fault(path)
        if problem is None:
            return str(path)
        checkpoint.log_skipped(path, problem)
    return None


def steps_of(trainer: Any, *, samples: int | None = None, batch_size: int | None = None) -> int:
    """Return the optimizer steps of a training: of all its epochs, with accumulation and all ranks. Call it in
    `configure_optimizers`.

    Data without a length needs `samples`, the number of samples of all ranks in an epoch, and `batch_size` of one rank.
    Raises InvalidDataError where the number does not follow.
    """
    if samples is not None and batch_size is not None:
        if trainer.max_epochs in (None, -1):
            steps = trainer.max_steps
        else:
            batches = math.ceil(samples / (batch_size * trainer.world_size))
            steps = math.ceil(batches / trainer.accumulate_grad_batches) * trainer.max_epochs
            steps = steps if trainer.max_steps == -1 else min(steps, trainer.max_steps)
    else:
        steps = trainer.estimated_stepping_batches
    if not math.isfinite(steps) or steps < 1:
        raise InvalidDataError(listed("lightning.no-steps"))
    return int(steps)
