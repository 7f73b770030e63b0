"""Search on the nodes in the part of the ranks' output that the head does not have yet; reads their hits."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ascendrun.core.dataclass import dataclass
from ascendrun.core.errors import AscendrunError
from ascendrun.core.logs.log_lines import LogLine, process_name, process_number
from ascendrun.core.node_messages import Failure
from ascendrun.head.agents.connections import Links, ask
from ascendrun.head.protocol import agent_messages as agent
from ascendrun.head.protocol.control_messages import Grep, GrepReply
from ascendrun.head.protocol.control_socket import Answer, ControlClient
from ascendrun.head.protocol.remote import Reply
from ascendrun.head.spool.clocks import HostClock
from ascendrun.head.spool.spool_files import StreamFiles, line_start, size_of
from ascendrun.node import layout, wire
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.head.spool.artifact_fetch import Subject

GREP_S = 20.0
ANSWER_S = GREP_S + 10.0

Position = tuple[int, int]
"""(generation, offset)"""


@dataclass(frozen=True)
class Wanted:
    """Selection of lines. `since_s`, `until_s`: in the head's clock, None: no bound."""

    patterns: tuple[str, ...]
    ignore_case: bool = False
    invert: bool = False
    since_s: float | None = None
    until_s: float | None = None


@dataclass(frozen=True)
class HostHits:
    """Hits of one host: lines by (rank, stream), in order. `problem`: why the hits may be incomplete."""

    host: str
    lines: Mapping[tuple[int, str], Sequence[LogLine]]
    problem: Text | str | None = None


def copied_until(files: StreamFiles) -> Position:
    """Return the position up to which the copy has complete lines; (0, 0): nothing yet."""
    there = files.generations()
    if not there:
        return 0, 0
    path = files.path(there[-1])
    return there[-1], line_start(path, size_of(path))


def make_request(wanted: Wanted, starts: Mapping[tuple[int, str], Position], clock: HostClock) -> dict[str, Any]:
    """Make the request to a host, in its own clock. `starts`: by (rank, stream)."""

    def to_ns(at_s: float | None) -> int | None:
        return None if at_s is None else round(clock.to_node_s(at_s) * 1e9)

    return {
        "files": {f"{process_name(rank)}.{stream}": list(start) for (rank, stream), start in starts.items()},
        "patterns": list(wanted.patterns),
        "ignore_case": wanted.ignore_case,
        "invert": wanted.invert,
        "since_ns": to_ns(wanted.since_s),
        "until_ns": to_ns(wanted.until_s),
        "timeout_s": GREP_S,
    }


def read_hits(host: str, body: bytes, *, attempt: int, clock: HostClock, is_complete: bool) -> HostHits:
    """Read the hits in a node's reply; truncated frames are missing, and this is reported. Only the last frame shows
    that the search was complete: the search process may have been killed, also by the kernel."""
    lines: dict[tuple[int, str], list[LogLine]] = {}
    problem: Text | None = (
        Text("grep.incomplete", "did not finish") if is_complete else Text("grep.timed-out", "timed out")
    )
    try:
        for header, text in wire.FrameReader().feed(body):
            if header.get("end"):
                problem = Text("grep.truncated", "more matches than can be sent") if header.get("truncated") else None
                continue
            name, stream = str(header["file"]).rsplit(".", 1)
            rank, at_ns = process_number(name), header.get("at_ns")
            at_s = clock.to_head_s(at_ns / 1e9) if isinstance(at_ns, int) else None
            line = LogLine(at_s, host, rank, stream, text.decode("utf-8", "backslashreplace"), attempt)
            lines.setdefault((rank, stream), []).append(line)
    except (wire.FrameError, ValueError, KeyError, TypeError) as error:
        problem = Text("grep.invalid-reply", "invalid reply: {error}", error=str(error))
    return HostHits(host, lines, problem)


def relay(links: Links, subject: Subject, request: Grep, answer: Answer) -> None:
    """Forward a request to each host of `hosts` and its reply back, one for each host; the controller's part."""
    tag = layout.make_tag(subject.run, request.attempt)
    waiting = set(request.hosts)

    def deliver(host: str, reply: Reply[agent.GrepReply]) -> None:
        waiting.discard(host)
        is_complete = reply.error is None and reply.message.complete
        problem = None if reply.error is None else reply.error.message
        answer(GrepReply(host, problem, is_complete), reply.body, not waiting)

    away = Failure("unreachable", Text("agent.not-connected", "not reachable now"))
    by_name = {host.name: host for host in subject.hosts}
    for name, wanted in request.hosts.items():
        if name not in by_name or not links.get(by_name[name]).is_up:
            deliver(name, Reply(None, error=away))
            continue
        request_ = agent.Grep.from_header({**wanted, "tag": tag})
        ask(links, by_name[name], request_, deadline_s=ANSWER_S, then=partial(deliver, name))


def starts_of(
    attempt_dir: Path, host: str, attempt: int, ranks: Collection[int], streams: Collection[str]
) -> dict[tuple[int, str], Position]:
    """Return from where each stream of a host is missing in the copy, including streams without any copy."""
    return {
        (rank, stream): copied_until(StreamFiles(attempt_dir / host, host, rank, stream, attempt))
        for rank in ranks
        for stream in streams
    }


def query_hosts(
    state_dir: Path,
    job_id: str,
    attempt: int,
    requests: Mapping[str, Mapping[str, Any]],
    clocks: Mapping[str, HostClock],
) -> list[HostHits]:
    """Return one reply for each host of `requests`, also on errors; uses a running controller, starts none."""
    found: dict[str, HostHits] = {}
    problem: Text | str = Text("grep.no-reply", "no reply in time")
    try:
        with ControlClient(state_dir) as client:
            for reply, body in client.stream(Grep(job_id, attempt, requests), timeout_s=ANSWER_S + 5.0):
                clock = clocks.get(reply.host, HostClock())
                found[reply.host] = (
                    HostHits(reply.host, {}, reply.problem)
                    if reply.problem
                    else read_hits(reply.host, body, attempt=attempt, clock=clock, is_complete=reply.complete)
                )
    except AscendrunError as error:
        problem = error.message
    return [found.get(host, HostHits(host, {}, problem)) for host in requests]
