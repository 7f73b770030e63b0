"""Views of hosts that `ascendrun.Cluster` returns: results of commands, and their state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.head.protocol.control_messages import ExecReply, NodeReply


@dataclass(frozen=True)
class ExecResult:
    """Reply of one host to `exec`. `exit_code` None with `error` set: it did not run or did not end in time."""

    host: str
    exit_code: int | None
    stdout: bytes
    stderr: bytes
    error: Text | str | None
    wall_s: float


@dataclass(frozen=True)
class HostStatus:
    """One host as `nodes` shows it: reachable or why not, and its report about itself (None: unreachable)."""

    host: str
    reachable: bool
    error: Text | str | None
    hint: Text | str | None
    hostname: str | None
    python_version: str | None
    cpus: int | None
    memory_bytes: int | None
    free_bytes: int | None
    clock_offset_s: float | None
    job: str | None


def make_exec_result(reply: ExecReply, body: bytes, timeout_s: float) -> ExecResult:
    """Make the result of one host's reply to `exec` from the controller."""
    if reply.failed is not None:
        return ExecResult(reply.host, None, b"", b"", reply.failed.line(), reply.wall_s)
    code, error = reply.code, None
    if reply.timed_out:
        code = None
        error = Text("exec.timed-out", "did not end within {limit_s:g} s and was killed", limit_s=timeout_s)
    elif reply.signal is not None:
        code = 128 + reply.signal
    return ExecResult(reply.host, code, body[: reply.out_bytes], body[reply.out_bytes :], error, reply.wall_s)


def make_host_status(reply: NodeReply, holders: Mapping[str, str]) -> HostStatus:
    """Make the status of one host's reply to `nodes`; `holders`: the job that uses each host."""
    report, failure = reply.report, reply.refused
    return HostStatus(
        host=reply.host,
        reachable=report is not None,
        error=failure.message if failure else None,
        hint=failure.hint if failure and failure.hint else None,
        hostname=report.hostname if report else None,
        python_version=report.python_version if report else None,
        cpus=report.cpus if report else None,
        memory_bytes=report.memory_bytes if report else None,
        free_bytes=report.free_bytes if report else None,
        clock_offset_s=report.clock_offset_s if report else None,
        job=holders.get(reply.host),
    )
