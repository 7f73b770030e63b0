"""`npu-smi` of a simulated node: reads its command line and prints what the real one prints."""

from __future__ import annotations

import os
import time
from typing import Callable, NamedTuple, Sequence

from ascendrun.sim.ascend.tool import lists
from ascendrun.sim.ascend.tool.faults import Faults
from ascendrun.sim.ascend.tool.live import Reading, readings
from ascendrun.sim.ascend.tool.model import MARKER_FOLDER, Node, read_faults, read_node
from ascendrun.sim.ascend.tool.processes import find_rows
from ascendrun.sim.ascend.tool.table import render_table
from ascendrun.sim.ascend.tool.views import TYPES, VIEWS, View, render_view

NO_DRIVER = "dcmi module initialize failed. ret is -8005"
DEVICE_USED = "dcmi model initialized failed, because the device is used. ret is -8020"
UNKNOWN = "Command or option is not found."
NO_CARD = f"Invalid card id.\nError parameter of -i\n{lists.USAGE}"
NO_CHIP = "Invalid chip id.\nError parameter of -c"
CARD_NEEDED = "\nThis command must input card id.\n"
_WITHOUT_CARD = ("topo", "vnpu-mode", "template-info", "key-manage")
_FLAGS = ("-i", "-c", "-p", "-t", "-d", "-s")


class Reply(NamedTuple):
    """Output and exit code of the tool."""

    text: str
    code: int = 0


class Scene(NamedTuple):
    """The node at one moment; `is_complete`: its install record says that the driver is."""

    node: Node
    faults: Faults
    readings: list[Reading]
    is_complete: bool
    is_privileged: bool


def read_scene(home: str, root: str) -> Scene:
    """The node whose files are in `home`, now."""
    node = read_node(home)
    faults = Faults(read_faults(home), time.time())
    rows = find_rows(root, os.path.join(home, MARKER_FOLDER), len(node.chips))
    complete = _is_complete(root) and not faults.has("driver_incomplete")
    privileged = os.geteuid() in (0, os.stat(home).st_uid)
    return Scene(node, faults, readings(node, faults, rows), complete, privileged)


def _is_complete(root: str) -> bool:
    try:
        with open(os.path.join(root, "etc/ascend_install.info"), encoding="utf-8") as file:
            return "Driver_Install_Status=complete" in file.read()
    except OSError:
        return False


def respond(arguments: Sequence[str], scene: Scene) -> Reply:
    """What the command line `npu-smi ARGUMENTS` prints; `info watch` only its first round."""
    if list(arguments) in (["-v"], ["--version"]):
        return Reply(lists.render_version(scene.node))
    if not arguments or arguments[0] != "info":
        return Reply(f"{UNKNOWN}\n", 1)
    words = list(arguments[1:])
    if words in (["-h"], ["--help"]):
        return Reply(lists.render_help())
    if scene.faults.is_driver_away():
        return Reply(f"{NO_DRIVER}\n", 1)
    if scene.faults.has("device_used"):
        return Reply(f"{DEVICE_USED}\n", 1)
    whole = _WHOLE.get(" ".join(words))
    if whole:
        return Reply(whole(scene))
    if words[:1] == ["watch"]:
        return Reply(lists.watch_head(scene.node) + lists.watch_rows(scene.node, _watched(words[1:], scene)))
    options = _options(words)
    if options is None or "-t" not in options or options["-t"] not in (*TYPES, *VIEWS):
        return Reply(f"{UNKNOWN}\n", 1)
    return _typed(options, scene)


def _table(scene: Scene) -> str:
    return render_table(scene.node, scene.readings, is_complete=scene.is_complete)


_WHOLE: dict[str, Callable[[Scene], str]] = {
    "": _table,
    "-l": lambda scene: lists.render_cards(scene.node, scene.readings),
    "-m": lambda scene: lists.render_mapping(scene.node, scene.readings),
    "-t topo": lambda scene: lists.render_topology(scene.node, scene.readings),
}


def _options(words: Sequence[str]) -> dict[str, str] | None:
    """The flags with their values; None when a word is no flag or a flag has no value."""
    pairs = list(zip(words[::2], words[1::2]))
    if len(words) % 2 or any(flag not in _FLAGS for flag, _ in pairs):
        return None
    return dict(pairs)


def _typed(options: dict[str, str], scene: Scene) -> Reply:
    kind = options["-t"]
    if kind == "topo":
        return Reply(lists.render_topology(scene.node, scene.readings))
    if "-i" not in options and kind not in _WITHOUT_CARD:
        return Reply(f"{CARD_NEEDED}\n", 1)
    card = [one for one in scene.readings if str(one.chip.npu_id) == options.get("-i")]
    if not card:
        return Reply(f"{NO_CARD}\n", 1)
    chips, chip_id = _chosen(card, options)
    if not chips:
        return Reply(f"{NO_CHIP}\n", 1)
    compatible = scene.node.is_compatible and not scene.faults.has("firmware_mismatch")
    view = View(scene.node, chips, chip_id, scene.is_privileged, compatible)
    try:
        return Reply(render_view(kind, view))
    except KeyError:
        return Reply(f"This device does not support querying {kind}.\n", 1)


def _chosen(card: list[Reading], options: dict[str, str]) -> tuple[list[Reading], int | None]:
    if "-c" not in options:
        return card, None
    chips = [one for one in card if str(one.chip.chip_id) == options["-c"]]
    return chips, chips[0].chip.chip_id if chips else None


def _watched(words: Sequence[str], scene: Scene) -> list[Reading]:
    options = _options(words) or {}
    return [one for one in scene.readings if options.get("-i") in (None, str(one.chip.npu_id))]


def watch_delay_s(arguments: Sequence[str]) -> float | None:
    """Seconds between the rounds of `info watch`; None for every other command."""
    if list(arguments[:2]) != ["info", "watch"]:
        return None
    options = _options(arguments[2:]) or {}
    delay = options.get("-d", "1")
    return float(delay) if delay.isdigit() and int(delay) else 1.0


def next_round(arguments: Sequence[str], home: str, root: str) -> str:
    """The rows of one more round of `info watch`."""
    scene = read_scene(home, root)
    return lists.watch_rows(scene.node, _watched(arguments[2:], scene))
