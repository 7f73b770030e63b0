"""Run one of the two tools and write its output as the active faults change it."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Callable, Sequence

from ascendrun.sim.ascend.tool import hccn, npu_smi
from ascendrun.sim.ascend.tool.live import Reply, Scene, read_scene
from ascendrun.sim.ascend.tool.model import HOME, Faults, value_of

HANG_S = 3600.0  # long past every deadline, and yet an end: a hanging tool ignores every signal but KILL
GARBAGE = b"\x00\xff\xfe\x1b[31m\x8d\x07+---\x93| npu-smi ???\r\x00" * 7

_TOOLS: dict[str, Callable[[Sequence[str], Scene], Reply]] = {"npu-smi": npu_smi.respond, "hccn_tool": hccn.respond}


def run(tool: str, root: str, arguments: Sequence[str]) -> int:
    """`root`: the directory that holds the node's tree, "/" on a separate node. Returns the exit code."""
    home = os.path.join(root, HOME)
    scene = read_scene(home, root)
    _stall(tool, scene.faults)
    reply = _TOOLS[tool](arguments, scene)
    write(reply.text, scene.faults)
    delay_s = npu_smi.watch_delay_s(arguments) if tool == "npu-smi" and not reply.code else None
    while delay_s is not None:
        time.sleep(delay_s)
        write(npu_smi.next_round(arguments, home, root), scene.faults)
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
