"""From what agents say to what the lifecycle understands."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ascendrun.core.jobs import job as w
from ascendrun.core.node_messages import Failure, node_text
from ascendrun.core.reports import NodeReport, Route


def make_event(host: str, line: Mapping[str, Any]) -> w.JobInput | None:
    """The event that a line of a node's `events` file stands for; None when the lifecycle has no use for it.

    A line with parts missing is none of our supervisor's: the file lies where the job itself can write.
    """
    try:
        return _make_event(host, line)
    except (KeyError, TypeError, ValueError):
        return None


def _make_event(host: str, line: Mapping[str, Any]) -> w.JobInput | None:
    kind = line.get("event")
    if kind == "rank_started":
        return w.RankStarted(host, int(line["rank"]), int(line["pid"]), int(line.get("local_rank", 0)))
    if kind == "rank_exited":
        return w.RankExited(
            host,
            int(line["rank"]),
            w.Exit(
                code=line.get("code"),
                signal=line.get("signal"),
                at_ns=int(line["at_ns"]),
                stopped=bool(line.get("stopped")),
                killed_at_exit=bool(line.get("note")),
                exited_ns=line.get("exited_ns"),
                max_rss_bytes=line.get("max_rss_bytes"),
            ),
        )
    if kind == "rank_lingers":
        after_s = line.get("after_s")
        return w.RankHungAtExit(
            host, int(line["rank"]), str(line.get("why", "")), None if after_s is None else float(after_s)
        )
    if kind == "start_failed":
        return w.StartFailed(host, line.get("rank"), start_failure(line).line())
    if kind == "ended":
        return w.NodeEnded(host, tuple(int(pid) for pid in line.get("leftovers", ())))
    if kind == "supervisor_lost":
        return w.SupervisorLost(host)
    if kind == "stopping":
        return w.StopStarted(host, str(line.get("by")), node_text(line.get("reason")), int(line["at_ns"]) / 1e9)
    return None


def start_failure(line: Mapping[str, Any]) -> Failure:
    """Why a rank could not be started. Before release 0.9 nodes wrote sentences: `message` and `hint`."""
    if isinstance(line.get("message"), str):
        return Failure("cannot-start", str(line["message"]), line.get("hint"))
    return Failure.of_node(line)


def make_report(
    host: str, hello: Mapping[str, Any], probe: Mapping[str, Any], *, clock_offset_s: float | None
) -> NodeReport:
    """A node's report from its agent's greeting and its answer to `probe`."""
    kinds: dict[tuple[str, str], Route] = {}  # one object for all peers behind a route: of a thousand that is a million
    routes = {
        peer: kinds.setdefault((route["interface"], route["source"]), Route(route["interface"], route["source"]))
        for peer, route in probe.get("routes", {}).items()
        if route["interface"] and route["source"]
    }
    return NodeReport(
        host=host,
        root=hello["root"],
        hostname=hello["hostname"],
        boot_id=hello["boot_id"],
        machine_id=hello.get("machine_id"),
        user=hello["user"],
        python=hello["python"],
        python_version=hello["python_version"],
        kernel=hello["kernel"],
        arch=hello["arch"],
        cpus=int(hello["cpus"]),
        memory_bytes=hello.get("memory_bytes"),
        free_bytes=probe.get("free_bytes"),
        clock_offset_s=clock_offset_s,
        routes=routes,
    )


def report_values(report: NodeReport, everyone: Collection[str] = ()) -> dict[str, Any]:
    """A report as plain data, for the socket. Routes as [interface, source, peers]: all peers share a few.

    peers null: all of `everyone` but the host itself. A thousand hosts would else name each other a million times.
    """
    groups: dict[Route, list[str]] = {}
    for peer, route in report.routes.items():
        groups.setdefault(route, []).append(peer)
    values = dict(vars(report))
    others = {*everyone} - {report.host}
    values["routes"] = [
        [route.interface, route.source, None if len(peers) == len(others) and others.issuperset(peers) else peers]
        for route, peers in groups.items()
    ]
    return values


def load_report(values: Mapping[str, Any], everyone: Collection[str] = ()) -> NodeReport:
    """The report of `report_values`, with the same `everyone`."""
    routes: dict[str, Route] = {}
    for interface, source, peers in values["routes"]:
        if peers is None:
            routes = dict.fromkeys(everyone, Route(interface, source))
            routes.pop(values["host"], None)
        else:
            routes.update(dict.fromkeys(peers, Route(interface, source)))
    return NodeReport(**{**values, "routes": routes})
