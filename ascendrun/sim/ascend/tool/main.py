"""The two tools of a simulated node: `npu-smi` by its command line, and the output of each as the faults change it."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Callable, Sequence

from ascendrun.sim.ascend.tool import hccn, views
from ascendrun.sim.ascend.tool.live import Reading, Reply, Scene, read_scene
from ascendrun.sim.ascend.tool.model import HOME, Faults, value_of
from ascendrun.sim.ascend.tool.table import render_table
from ascendrun.sim.ascend.tool.views import TYPES, VIEWS, View, render_view

NO_DRIVER = "dcmi module initialize failed. ret is -8005"
DEVICE_USED = "dcmi model initialized failed, because the device is used. ret is -8020"
UNKNOWN = "Command or option is not found."
NO_CARD = f"Invalid card id.\nError parameter of -i\n{views.USAGE}"
NO_CHIP = "Invalid chip id.\nError parameter of -c"
CARD_NEEDED = "\nThis command must input card id.\n"
_WITHOUT_CARD = ("topo", "vnpu-mode", "template-info", "key-manage")
_FLAGS = ("-i", "-c", "-p", "-t", "-d", "-s")


def respond(arguments: Sequence[str], scene: Scene) -> Reply:
    """What the command line `npu-smi ARGUMENTS` prints; `info watch` only its first round."""
    if list(arguments) in (["-v"], ["--version"]):
        return Reply(f"npu-smi version: {scene.node.tool_version}\n")
    if not arguments or arguments[0] != "info":
        return Reply(f"{UNKNOWN}\n", 1)
    words = list(arguments[1:])
    if words in (["-h"], ["--help"]):
        return Reply(views.render_help())
    if scene.faults.is_driver_away():
        return Reply(f"{NO_DRIVER}\n", 1)
    if scene.faults.has("device_used"):
        return Reply(f"{DEVICE_USED}\n", 1)
    whole = _WHOLE.get(" ".join(words))
    if whole:
        return Reply(whole(scene))
    if words[:1] == ["watch"]:
        return Reply(views.watch_head(scene.node) + views.watch_rows(scene.node, _watched(words[1:], scene)))
    options = _options(words)
    if options is None or "-t" not in options or options["-t"] not in (*TYPES, *VIEWS):
        return Reply(f"{UNKNOWN}\n", 1)
    return _typed(options, scene)


_WHOLE: dict[str, Callable[[Scene], str]] = {
    "": lambda scene: render_table(scene.node, scene.readings, is_complete=scene.is_complete),
    "-l": lambda scene: views.render_cards(scene.node, scene.readings),
    "-m": lambda scene: views.render_mapping(scene.node, scene.readings),
    "-t topo": lambda scene: views.render_topology(scene.node, scene.readings),
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
        return Reply(views.render_topology(scene.node, scene.readings))
    if "-i" not in options and kind not in _WITHOUT_CARD:
        return Reply(f"{CARD_NEEDED}\n", 1)
    card = [one for one in scene.readings if str(one.chip.npu_id) == options.get("-i")]
    if not card:
        return Reply(f"{NO_CARD}\n", 1)
    chips = [one for one in card if options.get("-c") in (None, str(one.chip.chip_id))]
    if not chips:
        return Reply(f"{NO_CHIP}\n", 1)
    chip_id = chips[0].chip.chip_id if "-c" in options else None
    compatible = scene.node.is_compatible and not scene.faults.has("firmware_mismatch")
    view = View(scene.node, chips, chip_id, scene.is_privileged, compatible)
    try:
        return Reply(render_view(kind, view))
    except KeyError:
        return Reply(f"This device does not support querying {kind}.\n", 1)


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
    return views.watch_rows(scene.node, _watched(arguments[2:], scene))


HANG_S = 3600.0  # long past every deadline, and yet an end: a hanging tool ignores every signal but KILL
GARBAGE = b"\x00\xff\xfe\x1b[31m\x8d\x07+---\x93| npu-smi ???\r\x00" * 7

_TOOLS: dict[str, Callable[[Sequence[str], Scene], Reply]] = {"npu-smi": respond, "hccn_tool": hccn.respond}


def run(tool: str, root: str, arguments: Sequence[str]) -> int:
    """`root`: the directory that holds the node's tree, "/" on a separate node. Returns the exit code."""
    home = os.path.join(root, HOME)
    scene = read_scene(home, root)
    _stall(tool, scene.faults)
    reply = _TOOLS[tool](arguments, scene)
    write(reply.text, scene.faults)
    delay_s = watch_delay_s(arguments) if tool == "npu-smi" and not reply.code else None
    while delay_s is not None:
        time.sleep(delay_s)
        write(next_round(arguments, home, root), scene.faults)
    return reply.code


def _stall(tool: str, faults: Faults) -> None:
    hang, slow = faults.of("hang"), faults.number("slow")
    if hang and value_of(hang) in (tool, "both"):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)
        time.sleep(HANG_S)
    if slow:
        time.sleep(slow)


def write(text: str, faults: Faults) -> None:
    """Write the output to stdout as the faults change it."""
    content = text.encode()
    if faults.has("garbage"):
        content = GARBAGE
    elif faults.has("truncated"):
        content = content[: len(content) * 3 // 5].rstrip(b"\n ")
    pause_s = faults.number("trickle")
    out = sys.stdout.buffer
    for start in range(0, len(content), 1 if pause_s else max(1, len(content))):
        out.write(content[start : start + (1 if pause_s else len(content))])
        out.flush()
        if pause_s:
            time.sleep(pause_s)


def main(tool: str, root: str) -> None:
    """The whole life of the tool's process; a closed pipe ends it as it ends every C program."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        code = run(tool, root, sys.argv[1:])
    except KeyboardInterrupt:
        code = 130
    sys.stdout.flush()
    os._exit(code)
