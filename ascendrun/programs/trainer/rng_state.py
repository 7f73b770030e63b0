"""All random generators of one rank, as plain values that a checkpoint can hold."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ascendrun.programs.trainer.devices.accelerator import Accelerator


def take(accelerator: Accelerator) -> dict[str, Any]:
    version, words, spare = random.getstate()
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    state = {
        "python": [version, list(words), spare],
        "torch": torch.get_rng_state(),
        "numpy": [
            str(kind),
            torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            int(position),
            int(has_gauss),
            float(gauss),
        ],
    }
    if accelerator.module is not None:
        state["device"] = accelerator.module.get_rng_state().cpu()
    return state


def put(state: Mapping[str, Any], accelerator: Accelerator) -> None:
    version, words, spare = state["python"]
    random.setstate((version, tuple(words), spare))
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if accelerator.module is not None and "device" in state:
        accelerator.module.set_rng_state(state["device"])
