"""Faults of a simulated node, switched on and off while it runs."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Callable

from ascendrun.core.errors import InvalidInputError, NotFoundError, Problem
from ascendrun.sim.ascend.scenario import PlannedFault, fault_problems
from ascendrun.sim.ascend.tool import model
from ascendrun.sim.ascend.tool.model import Fault


def set_fault(root: Path, card: int | None, fault: str, *, value: str | None = None, after_s: float = 0.0) -> None:
    """From now on (`after_s` seconds on) the node below `root` has the fault; setting it again restarts it.

    `card`: an NPU id, None for a fault of the whole node. Raises InvalidInputError, NotFoundError where no node is
    installed.
    """
    node = read_node(root)
    npu_ids = tuple(dict.fromkeys(chip.npu_id for chip in node.chips))
    problems = fault_problems(PlannedFault(fault, card, value, after_s), npu_ids)
    if problems:
        raise InvalidInputError([Problem(str(root), None, None, message, hint) for message, hint in problems])
    new = Fault(fault, card, time.time() + after_s, value)
    _change(root, lambda faults: [*(one for one in faults if (one.name, one.card) != (fault, card)), new])


def clear_fault(root: Path, card: int | None, fault: str) -> None:
    """Undo one fault, of a card or (None) of the node; nothing happens where it was not set."""
    read_node(root)
    _change(root, lambda faults: [one for one in faults if (one.name, one.card) != (fault, card)])


def clear_all(root: Path) -> None:
    """Undo every fault of the node and its cards."""
    read_node(root)
    _change(root, lambda faults: [])


def list_faults(root: Path) -> list[Fault]:
    """Also those that start later."""
    read_node(root)
    return model.read_faults(str(root / model.HOME))


def read_node(root: Path) -> model.Node:
    """Raises NotFoundError where no simulated node is installed."""
    try:
        return model.read_node(str(root / model.HOME))
    except FileNotFoundError as error:
        raise NotFoundError(
            f"{root}: no simulated node is installed there", hint=f"python -m ascendrun.sim.ascend install {root}"
        ) from error


def _change(root: Path, change: Callable[[list[Fault]], list[Fault]]) -> None:
    """Change the faults under a lock, so that parallel changes are both kept; a reader gets the old or new file."""
    home = root / model.HOME
    with open(home / "lock", "a", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        beside = home / f".{model.STATE_FILE}.new"
        beside.write_text(model.dump_faults(change(model.read_faults(str(home)))))
        os.replace(beside, home / model.STATE_FILE)
