"""Conversion of records and messages of nodes to inputs of the lifecycle and reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ascendrun.core.dataclass import load_dataclass
from ascendrun.core.events import Event
from ascendrun.core.hosts import Host
from ascendrun.core.jobs import endings, inputs
from ascendrun.core.jobs.job import Exit, Leftover
from ascendrun.core.node_messages import Failure, node_text
from ascendrun.core.reports import NodeReport, Route
from ascendrun.head.protocol.agent_bootstrap import Login
from ascendrun.head.protocol.agent_messages import AgentInfo, ProbeReply
from ascendrun.head.protocol.file_messages import FileTrouble
from ascendrun.node.layout import split_tag


def make_event(host: str, line: Mapping[str, Any]) -> inputs.JobInput | None:
    """Return the lifecycle input of a line of a node's `events` file; None: there is none.

    An incomplete line is not from the supervisor: the job can write to the file.
    """
    try:
        return _make_event(host, line)
    except (KeyError, TypeError, ValueError):
        return None


def _make_event(host: str, line: Mapping[str, Any]) -> inputs.JobInput | None:
    kind = line.get("event")
    if kind == "rank_started":
        return inputs.RankStarted(host, int(line["rank"]), int(line["pid"]), int(line.get("local_rank", 0)))
    if kind == "rank_exited":
        return endings.RankExited(
            host,
            int(line["rank"]),
            Exit(
                code=line.get("code"),
                signal=line.get("signal"),
                at_ns=int(line["at_ns"]),
                stopped=bool(line.get("stopped")),
                killed_at_exit=bool(line.get("note")),
                exited_ns=line.get("exited_ns"),
                max_rss_bytes=line.get("max_rss_bytes"),
                done=bool(line.get("done")),
            ),
        )
    if kind == "forked_rank_started":
        return endings.ForkedRankStarted(host, int(line["rank"]), int(line["pid"]))
    if kind == "forked_rank_exited":
        end = Exit(line["code"], line["signal"], int(line["at_ns"]), stopped=bool(line.get("stopped")))
        return endings.ForkedRankExited(host, int(line["rank"]), end)
    if kind == "rank_lingers":
        after_s = line.get("after_s")
        return endings.RankHungAtExit(
            host, int(line["rank"]), str(line.get("why", "")), None if after_s is None else float(after_s)
        )
    if kind == "start_failed":
        return endings.StartFailed(host, line.get("rank"), Failure.of_node(line).line())
    if kind == "ended":
        rows = line.get("exits") or {}
        exits = {int(rank): load_dataclass(Exit, {**row, "at_ns": line["at_ns"]}) for rank, row in rows.items()}
        return endings.NodeEnded(host, tuple(load_dataclass(Leftover, row) for row in line.get("leftovers", ())), exits)
    if kind == "leftovers_gone":
        return endings.LeftoversGone(host)
    if kind == "io_error":
        values = {"step": str(line["step"]), "errno": str(line["errno"]), "count": int(line["count"])}
        return endings.NodeTrouble(host, "io-error", values, int(line["at_ns"]))
    if kind == "records_lost":
        return endings.NodeTrouble(host, "records-lost", {"count": int(line["count"])}, int(line["at_ns"]))
    if kind == "supervisor_lost":
        return endings.SupervisorLost(host)
    if kind == "stopping":
        return endings.StopStarted(
            host,
            str(line.get("by")),
            node_text(line.get("reason")),
            int(line["at_ns"]) / 1e9,
            done=bool(line.get("done")),
        )
    return None


def make_report(host: Host, info: AgentInfo, probe: ProbeReply, *, clock_offset_s: float, login: Login) -> NodeReport:
    """Make a node's report from its agent's first event and its reply to a probe."""
    kinds: dict[tuple[str, str], Route] = {}  # one object for all peers behind a route: a thousand hosts have a million
    routes: dict[str, Route] = {}
    for peer, route in probe.routes.items():
        interface, source = route["interface"], route["source"]
        if interface and source and peer != host.name:
            routes[peer] = kinds.setdefault((interface, source), Route(interface, source))
    return NodeReport(
        host=host.name,
        free_bytes=probe.free_bytes,
        clock_offset_s=clock_offset_s,
        routes=routes,
        **vars(info),
        is_local=host.is_local,
        login_s=login.wait_s,
        login_noise=login.noise,
    )


def file_event(host: str, trouble: FileTrouble, *, now_s: float) -> Event:
    """Return the job event for a node's event about a file."""
    values = {name: value for name, value in vars(trouble).items() if name != "tag"}
    return Event(trouble.CODE, values, (host,), (), split_tag(trouble.tag)[1], now_s)
