"""Search of a block of output for the few lines that can hold progress."""

from __future__ import annotations

import re

LINE_BYTES = 4096
"""Longer lines are cut: no framework writes a line of progress that is longer."""
START_BYTES = 4 << 20
"""The line with the total number of steps is looked for in this many bytes from the start of the output."""
_LINE = re.compile(rb"[^\r\n]+")
TOTAL_MARKS = ("ptimization steps", "otal steps", "max_iters", "max_steps")
_COLOR = rb"(?:\x1b\[[0-9;]*m)?"
_MARKS = [
    re.compile(mark)
    for mark in (
        rb"oss(?! [a-hj-mo-uw-z])\w{0,12}(?: value)?[\"']?"
        + _COLOR
        + rb"\s{0,20}[:=|]?\s{0,20}"
        + _COLOR
        + rb"[\"'(\[]?[-+]?"
        rb"(?:\.?[0-9]|[Nn]a[Nn]|[Ii]nf|null)",
        rb"tep=[0-9]",
        rb"<[0-9?:\x1b\[;m -]{1,32},[0-9.?\x1b\[;m ]{1,32}(?:it|batch(?:es)?|steps?|s)/(?:s|it|batch|step)",
        rb"\(ms\): [0-9]",
        rb"_timesteps\s{1,20}\|",
        rb"\xe2(?:\x80\xa2\s[-0-9:\s]{0,20}[0-9.]{1,12}it/s"  # the bars of Lightning
        rb"|\x94[\x80\x81] [0-9]{1,9}/[0-9])",  # a bar below a table of names
        rb"Epoch(?: [0-9]{1,9}/[0-9]{1,9}\s{0,4}[\r\n]|\s{2,30}[A-Za-z])",  # the heading of an epoch or of such a table
    )
]
"""One of these is in every line that a pattern below reads: each starts with fixed bytes, which is fast to search.
A bar is found by its rate, since downloads draw bars too."""
_TOTAL_MARKS = [re.compile(mark.encode()) for mark in TOTAL_MARKS]


def find_lines(data: bytes, *, at_start: bool = False, is_any: bool = False) -> list[tuple[int, bytes]]:
    """Return (offset of its end, line) of the lines that may hold progress, in order. A carriage return ends a line.

    `at_start`: also lines with the total of steps. `is_any`: all lines, for the pattern of a job.
    """
    if is_any:
        return [(line.end(), line[0][:LINE_BYTES]) for line in _LINE.finditer(data)]
    marks = [*_MARKS, *(_TOTAL_MARKS if at_start else ())]
    hits = sorted(hit.start() for mark in marks for hit in mark.finditer(data))
    found: list[tuple[int, bytes]] = []
    end = -1
    for at in hits:
        if at < end:
            continue
        low, high = max(end, at - LINE_BYTES, 0), min(len(data), at + LINE_BYTES)
        begin = data.rfind(b"\n", low, at) + 1 or low
        begin = data.rfind(b"\r", begin, at) + 1 or begin
        end = data.find(b"\n", at, high)
        end = high if end < 0 else end
        cut = data.find(b"\r", at, end)
        end = end if cut < 0 else cut
        found.append((end, data[begin:end]))
        if b", skipped=" in found[-1][1]:  # old versions of DeepSpeed print the speed in the next line
            begin, after = end + 1, data.find(b"\n", end + 1, end + 1 + LINE_BYTES)
            if after >= 0 and b"SamplesPerSec" in data[begin:after]:
                found.append((after, data[begin:after]))
                end = after
    return found


_WORLD = re.compile(
    rb"Process rank: \d+, world size: (\d+)"  # LLaMA-Factory
    rb"|Process rank: \d+, device: [^\r\n]{0,200}distributed training: (False)"  # examples of transformers
    rb"|Distributed environment: [^\r\n]{0,200}\r?\n\s*Num processes: (\d+)"  # Accelerate
    rb"|All distributed processes registered\. Starting with (\d+) processes"  # Lightning
)


def find_world_size(data: bytes) -> int | None:
    """Return the world size that a framework first states in its output; None: it states none.

    Only what comes from the process group itself: Megatron, ms-swift and others print WORLD_SIZE of the environment.
    """
    found = _WORLD.search(data)
    numbers = [] if found is None else [group for group in found.groups() if group is not None]
    return None if not numbers else 1 if numbers[0] == b"False" else int(numbers[0])
