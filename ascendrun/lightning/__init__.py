"""PyTorch Lightning on NPUs, and under ascendrun: `Trainer(**ascendrun.lightning.settings())` (docs/lightning.md).

    package        the Lightning package in use, and which versions are supported
    accelerator    NPUs as an accelerator of Lightning, registered as "npu"
    environment    ranks and addresses from the variables of a launcher
    strategies     one device, DDP; hccl, nccl or gloo; workers that are spawned; checkpoints of all ranks
    sharding       FSDP by fully_shard
    precision      the precision plugin for a chip
    position       where a training is in its data, and its random numbers
    checkpoints    CheckpointIO in the format of the bundled programs
    callback       save, stop at a signal, report steps
    setup          settings(), resume(), steps_of()

Scripts import it after Lightning. `lightning.pytorch` and `pytorch_lightning` have different classes; the one that the
script has imported is used.
"""

from __future__ import annotations

from ascendrun.lightning import accelerator as _accelerator
from ascendrun.lightning.accelerator import NPUAccelerator
from ascendrun.lightning.callback import Supervision
from ascendrun.lightning.checkpoints import StepCheckpoints
from ascendrun.lightning.environment import LaunchedEnvironment
from ascendrun.lightning.precision import make_precision
from ascendrun.lightning.setup import resume, settings, steps_of
from ascendrun.lightning.sharding import FSDP
from ascendrun.lightning.strategies import DDP, OneDevice

__all__ = [
    "DDP",
    "FSDP",
    "LaunchedEnvironment",
    "NPUAccelerator",
    "OneDevice",
    "StepCheckpoints",
    "Supervision",
    "make_precision",
    "resume",
    "settings",
    "steps_of",
]

_accelerator.register()
