"""The errors that npu-smi and hccn_tool print, often on stdout, instead of an answer."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from re import Pattern

from ascendrun.ascend.reading import shown
from ascendrun.text import Text


@dataclass(frozen=True)
class ToolError:
    """One error: `kind` is stable, `code` the tool's own number (None where it gives none), `text` the line itself.

    `hint` is None where only the neighbouring lines show what to do.
    """

    kind: str
    code: int | None
    text: str
    message: Text
    hint: Text | str | None


# Most specific first: (kind, pattern, message, hint). A group named `code` is the tool's number.
_TABLE: tuple[tuple[str, Pattern[str], Text, Text | str | None], ...] = tuple(
    (kind, re.compile(pattern), message, hint)
    for kind, pattern, message, hint in (
        (
            "device-held",
            r"device is used\. ret is (?P<code>-[0-9]{4})",
            Text("tool-error.device-held", "the device is in use by another container"),
            Text(
                "tool-error.device-held.hint",
                "find the container that mounts it: docker ps; stop it, or use other devices",
            ),
        ),
        (
            "driver",
            r"dcmi mod(?:ule|el) initialized? failed\. ret is (?P<code>-8005)",
            Text(
                "tool-error.driver",
                "npu-smi cannot reach the driver: not loaded, no device nodes, no permission, or other libraries",
            ),
            Text(
                "tool-error.driver.hint",
                "lsmod | grep drv_; ls -l /dev/davinci_manager /dev/davinci*; id -nG; reinstall the driver",
            ),
        ),
        (
            "dcmi",
            r"dcmi mod(?:ule|el) initialized? failed.*?ret is (?P<code>-[0-9]{4})",
            Text("tool-error.dcmi", "npu-smi cannot reach the driver"),
            "dmesg | tail; npu-smi info",
        ),
        (
            "dcmi",
            r"npu get board type failed\. ret is (?P<code>-?[0-9]{1,6})",
            Text("tool-error.board", "npu-smi cannot identify the board"),
            None,
        ),
        (
            "dcmi",
            r"Failed to execute npu-smi \w+\. ret is (?P<code>-[0-9]{4})",
            Text("tool-error.execute", "npu-smi cannot execute the command"),
            None,
        ),
        (
            "no-card",
            r"^\s*Invalid card id\.",
            Text("tool-error.no-card", "NPU not found: the id is wrong, or the board is no longer on the bus"),
            "npu-smi info -l; lspci -d 19e5:",
        ),
        (
            "no-card",
            r"^\s*There is no NPU card on this server\.",
            Text("tool-error.no-npu", "the driver does not detect any NPU"),
            "lspci -d 19e5:; dmesg",
        ),
        (
            "no-chip",
            r"^\s*Invalid chip id\.",
            Text("tool-error.no-chip", "chip not found on this NPU"),
            "npu-smi info -m",
        ),
        (
            "wrong-use",
            r"This command must input (?:card id|phy id|chip id)",
            Text("tool-error.needs-id", "the query requires an id"),
            None,
        ),
        (
            "wrong-use",
            r"Must input parameter of \w+",
            Text("tool-error.needs-parameter", "the query requires another parameter"),
            None,
        ),
        (
            "wrong-use",
            r"Command or option is not found\.",
            Text("tool-error.unknown-command", "the command is not supported by this npu-smi"),
            None,
        ),
        (
            "wrong-use",
            r"^\s*Error parameter (?:of -\w|in querying)",
            Text("tool-error.bad-parameter", "the tool rejected the parameter"),
            None,
        ),
        (
            "unsupported",
            r"This device does not support (?:querying|switching) ",
            Text("tool-error.unsupported", "not supported on this chip"),
            None,
        ),
        (
            "unsupported",
            r"[Tt]his command cannot be executed on a VM",
            Text("tool-error.virtual", "not permitted in a VM or a container"),
            Text("tool-error.virtual.hint", "run it on the host, or in a privileged container"),
        ),
        ("unsupported", r"NPU is working in SMP mode", Text("tool-error.smp", "not supported in SMP mode"), None),
        (
            "permission",
            r"pls check cmd run permission",
            Text("tool-error.device-permission", "the tool has no permission to read the device"),
            Text("tool-error.device-permission.hint", "run it as root"),
        ),
        (
            "permission",
            r"[Pp]ermission denied|Operation not permitted|(?:requires?|need|have) root p",
            Text("tool-error.user-permission", "the user has no permission"),
            Text("tool-error.user-permission.hint", "run it as root or as a member of HwHiAiUser: id -nG"),
        ),
        (
            "missing-library",
            r"error while loading shared libraries: (?P<name>\S+?):",
            Text("tool-error.missing-library", "a library of the tool is missing or not on LD_LIBRARY_PATH"),
            Text(
                "tool-error.missing-library.hint",
                "ls /usr/local/Ascend/driver/lib64; in a container: mount /usr/local/Ascend/driver and /usr/local/dcmi",
            ),
        ),
        (
            "missing-tool",
            r"(?:npu-smi|hccn_tool)\S*: (?:command )?not found",
            Text("tool-error.missing-tool", "the tool is not installed or not on PATH"),
            Text(
                "tool-error.missing-tool.hint",
                "ls -l /usr/local/bin/npu-smi /usr/local/Ascend/driver/tools/hccn_tool; install the driver",
            ),
        ),
        ("no-file", r"No such file or directory", Text("tool-error.no-file", "file not found"), None),
        (
            "failed",
            r"[Cc](?:md|ommand) execute failed|Read file failed",
            Text("tool-error.no-reason", "the tool failed without a reason"),
            None,
        ),
        (
            "failed",
            r"^\s*(?:Failed to (?:query|get|alloc|malloc)|[Gg]et npu info failed|Get pid name failed)",
            Text("tool-error.query", "the tool cannot query the device"),
            None,
        ),
        ("failed", r"fail!\s*$", Text("tool-error.query", "the tool cannot query the device"), None),
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
    for kind, pattern, message, hint in _TABLE:
        found = pattern.search(text)
        if found:
            code = found.groupdict().get("code")
            return ToolError(kind, int(code) if code else None, text.strip(), message, hint)
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
