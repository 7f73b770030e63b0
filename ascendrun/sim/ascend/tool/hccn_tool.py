"""`hccn_tool` of a simulated node: reads its command line and prints what the real one prints.

Both forms are understood: `-i N -ITEM -g` and the 950's `-g -ITEM -i N -u UDIE -p PORT`. Nothing can be set.
"""

from __future__ import annotations

import time
from typing import Sequence

from ascendrun.sim.ascend.tool.hccn import ITEMS, NOT_DONE, REFUSED, Port, render_item
from ascendrun.sim.ascend.tool.npu_smi import Answer, Scene

_WITH_VALUE = ("-i", "-u", "-p")


def answer(arguments: Sequence[str], scene: Scene) -> Answer:
    """What the command line `hccn_tool ARGUMENTS` prints."""
    if scene.faults.has("hccn_refused") or not scene.is_privileged:
        return Answer(f"{REFUSED}\n", 1)
    device, items, words = _read(arguments)
    reading = next((one for one in scene.readings if str(one.chip.logic_id) == device), None)
    is_query = "-g" in arguments and len(items) == 1
    if not is_query or reading is None or scene.faults.is_driver_away() or not scene.node.family.speed_mbit:
        return Answer(f"{NOT_DONE}\n", 1)
    port = Port(scene.node, scene.faults, reading, words, time.time())
    text = render_item(items[0], port)
    return Answer(text, 1 if text == f"{NOT_DONE}\n" else 0)


def _read(arguments: Sequence[str]) -> tuple[str, list[str], list[str]]:
    """The device ("" without one), the items, and the other words."""
    device, items, words = "", [], []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if word in _WITH_VALUE and rest:
            value = rest.pop(0)
            device = value if word == "-i" else device
        elif word in ITEMS:
            items.append(word)
        else:
            words.append(word)
    return device, items, words
