"""The errors that npu-smi and hccn_tool print, often on stdout, instead of an answer."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from re import Pattern

from ascendrun.ascend.reading import shown


@dataclass(frozen=True)
class ToolError:
    """One error: `kind` is stable, `code` the tool's own number (None where it gives none), `text` the line itself.

    `says` and `hint` are ours; `hint` is None where only the neighbouring lines know the way out.
    """

    kind: str
    code: int | None
    text: str
    says: str
    hint: str | None


# Most specific first: (kind, pattern, what it means, the way out). A group named `code` is the tool's number.
_TABLE: tuple[tuple[str, Pattern[str], str, str | None], ...] = tuple(
    (kind, re.compile(pattern), says, hint)
    for kind, pattern, says, hint in (
        (
            "device-held",
            r"device is used\. ret is (?P<code>-[0-9]{4})",
            "the device is held by another container",
            "find who mounts it: docker ps; stop that container, or take other devices",
        ),
        (
            "driver",
            r"dcmi mod(?:ule|el) initialized? failed\. ret is (?P<code>-8005)",
            "npu-smi cannot reach the driver: not loaded, no device nodes, no permission, or other libraries",
            "lsmod | grep drv_; ls -l /dev/davinci_manager /dev/davinci*; id -nG (HwHiAiUser?); reinstall the driver",
        ),
        (
            "dcmi",
            r"dcmi mod(?:ule|el) initialized? failed.*?ret is (?P<code>-[0-9]{4})",
            "npu-smi cannot reach the driver",
            "dmesg | tail; npu-smi info",
        ),
        ("dcmi", r"npu get board type failed\. ret is (?P<code>-?[0-9]{1,6})", "npu-smi cannot tell the board", None),
        ("dcmi", r"Failed to execute npu-smi \w+\. ret is (?P<code>-[0-9]{4})", "npu-smi could not do it", None),
        (
            "no-card",
            r"^\s*Invalid card id\.",
            "no such NPU: a wrong id, or the card dropped off the bus",
            "npu-smi info -l; lspci -d 19e5:",
        ),
        ("no-card", r"^\s*There is no NPU card on this server\.", "the driver sees no NPU", "lspci -d 19e5:; dmesg"),
        ("no-chip", r"^\s*Invalid chip id\.", "no such chip on this NPU", "npu-smi info -m"),
        ("wrong-use", r"This command must input (?:card id|phy id|chip id)", "the query needs an id", None),
        ("wrong-use", r"Must input parameter of \w+", "the query needs one more parameter", None),
        ("wrong-use", r"Command or option is not found\.", "this npu-smi does not know the command", None),
        ("wrong-use", r"^\s*Error parameter (?:of -\w|in querying)", "the tool refused the parameter", None),
        ("unsupported", r"This device does not support (?:querying|switching) ", "not supported on this chip", None),
        (
            "unsupported",
            r"[Tt]his command cannot be executed on a VM",
            "not allowed in a VM or a container",
            "ask on the host, or in a privileged container",
        ),
        ("unsupported", r"NPU is working in SMP mode", "not supported in SMP mode", None),
        ("permission", r"pls check cmd run permission", "the tool may not read the device", "run it as root"),
        (
            "permission",
            r"[Pp]ermission denied|Operation not permitted|(?:requires?|need|have) root p",
            "the user may not do this",
            "run as root or as a member of HwHiAiUser: id -nG",
        ),
        (
            "missing-library",
            r"error while loading shared libraries: (?P<name>\S+?):",
            "a library that the tool needs is missing or not on LD_LIBRARY_PATH",
            "ls /usr/local/Ascend/driver/lib64; in a container: mount /usr/local/Ascend/driver and /usr/local/dcmi",
        ),
        (
            "missing-tool",
            r"(?:npu-smi|hccn_tool)\S*: (?:command )?not found",
            "the tool is not installed or not on PATH",
            "ls -l /usr/local/bin/npu-smi /usr/local/Ascend/driver/tools/hccn_tool; install the driver",
        ),
        ("no-file", r"No such file or directory", "a file is not there", None),
        ("failed", r"[Cc](?:md|ommand) execute failed|Read file failed", "the tool failed without a reason", None),
        (
            "failed",
            r"^\s*(?:Failed to (?:query|get|alloc|malloc)|[Gg]et npu info failed|Get pid name failed)",
            "the tool could not ask the device",
            None,
        ),
        ("failed", r"fail!\s*$", "the tool could not ask the device", None),
    )
)

# Most lines are no error: one search instead of one for each row. (A group has its name once in a pattern.)
_ANY = re.compile("|".join(f"(?:{re.sub('[(][?]P<[a-z]+>', '(?:', pattern.pattern)})" for _, pattern, _, _ in _TABLE))


@lru_cache(maxsize=4096)  # the lines of a tool are few, and many nodes say them
def read_error(line: str) -> ToolError | None:
    """The error that a line is, or None when it is none that we know."""
    text = shown(line)
    if not _ANY.search(text):
        return None
    for kind, pattern, says, hint in _TABLE:
        found = pattern.search(text)
        if found:
            code = found.groupdict().get("code")
            return ToolError(kind, int(code) if code else None, text.strip(), says, hint)
    return None


def split_errors(lines: Iterable[str]) -> tuple[tuple[ToolError, ...], tuple[str, ...]]:
    """The known errors among the lines, and the lines that are none; usage lines that follow an error are dropped."""
    errors: list[ToolError] = []
    rest: list[str] = []
    for line in lines:
        error = read_error(line)
        if error:
            errors.append(error)
        elif not (errors and shown(line).lstrip().startswith("Usage:")):
            rest.append(line)
    return tuple(errors), tuple(rest)
