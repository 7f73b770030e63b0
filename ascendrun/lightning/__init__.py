"""PyTorch Lightning on NPUs, and under ascendrun: `Trainer(**ascendrun.lightning.settings())` (docs/lightning.md).

    package        the Lightning package in use, and which versions are supported
    accelerator    NPUs as an accelerator of Lightning, registered as "npu"; the precision plugin for a chip
    strategies     one device, DDP, FSDP; hccl, nccl or gloo; workers that are spawned; checkpoints of all ranks
    position       where a training is in its data, and its random numbers
    callback       save in the format of the bundled programs, stop at a signal, report steps
    setup          ranks and addresses of a launcher; settings(), resume(), steps_of()

Scripts import it after Lightning. `lightning.pytorch` and `pytorch_lightning` have different classes; the one that the
script has imported is used.
"""

from __future__ import annotations

from ascendrun.lightning import accelerator as _accelerator
from ascendrun.lightning.accelerator import NPUAccelerator, make_precision
from ascendrun.lightning.callback import StepCheckpoints, Supervision
from ascendrun.lightning.setup import LaunchedEnvironment, resume, settings, steps_of
from ascendrun.lightning.strategies import DDP, FSDP, OneDevice

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
