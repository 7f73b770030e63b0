"""Measures how long `top --once` takes for many hosts: asked for the first time, asked anew, and from what is kept.

    python -m benchmarks.samples.top [--hosts 64] [--times 5] [--cards 1] [--write]

Virtual hosts with a simulated Ascend node each. `asked at first`: no controller runs, no agent is on the hosts.
`asked`: controller connected, agents up, nothing young enough kept. `kept`: figures of a look before, some seconds old.
Where the time of a look goes is measured in a process of its own, with the same state folder. `--write` puts the table
into benchmarks/samples/top.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ascendrun.query.top_source import KEPT_S
from ascendrun.sim.ascend.scenario import Scenario
from benchmarks.bed import Bed
from benchmarks.ours import Ours
from tests.lib.vcluster.npus import install_on

RESULT = Path(__file__).with_name("top.md")
GOAL_S = 1.0
PATIENCE_S = 180.0
PHASES = """
import json, sys, time
marks = [("", time.perf_counter())]
def mark(name): marks.append((name, time.perf_counter()))
from ascendrun.cluster import Cluster
from ascendrun.cli.top.text import top_lines
from ascendrun.core.hosts import parse_hostfile
from ascendrun.head.state.user_files import load_settings
from ascendrun.query.top_source import TopReader
from ascendrun.health.top.join import make_view
import os
mark("imports")
with open(sys.argv[1]) as file:
    hosts = parse_hostfile(file.read(), sys.argv[1])
settings = load_settings(os.environ)
mark("settings and hostfile")
cluster = Cluster(settings)
cluster.jobs.list()
mark("controller and jobs")
now_s = time.time()
seen = TopReader(settings.state_dir).read(now_s=now_s)
mark("reading samples")
view = make_view(now_s=now_s, devices=seen.newest.devices, hosts=seen.newest.hosts, ranks=seen.newest.ranks,
                 jobs=seen.jobs, names=[host.name for host in hosts], refused={}, was_queried=False)
mark("joining")
lines = top_lines(view, width=120)
mark("writing")
print(json.dumps({name: at - before for (_, before), (name, at) in zip(marks, marks[1:])}))
"""


def look(ours: Ours, hostfile: Path, *, patience_s: float = 0.0) -> float:
    """How long one look took; looks again for so long when not every host has answered in time."""
    until = time.monotonic() + patience_s
    while True:
        cost = ours.run("top", "--once", "-H", str(hostfile))
        if cost.status == 0:
            return cost.wall_s
        assert cost.status == 6 and time.monotonic() < until, cost.tail


def phases(bed: Bed, ours: Ours, hostfile: Path) -> dict[str, float]:
    cost = bed.run([sys.executable, "-c", PHASES, str(hostfile)], env=ours.environ())
    assert cost.status == 0, cost.tail
    found: dict[str, float] = json.loads(cost.tail.strip().splitlines()[-1])
    return found


def measure(hosts: int, times: int, cards: int) -> str:
    with Bed(hosts) as bed:
        names = bed.cluster.hosts[:hosts]
        for number, name in enumerate(names if cards else (), start=1):
            install_on(bed.cluster, name, Scenario(cards=cards, number=number))
        ours = Ours(bed)
        hostfile = ours.hostfile(names)
        first_s = look(ours, hostfile, patience_s=PATIENCE_S)
        kept_s = [look(ours, hostfile) for _ in range(times)]
        parts = phases(bed, ours, hostfile)
        started = ours.run("--version").wall_s
        asked_s: list[float] = []
        for _ in range(min(times, 3)):
            time.sleep(KEPT_S + 1.0)  # until what is kept is too old: that is what is measured
            asked_s.append(look(ours, hostfile, patience_s=PATIENCE_S))
        ours.stop_controller()
    return table(
        hosts,
        cards,
        {"asked at first": [first_s], "asked": asked_s, "kept": kept_s},
        {"starting Python": started, **parts},
    )


def table(hosts: int, cards: int, looks: dict[str, list[float]], parts: dict[str, float]) -> str:
    lines = [
        "# How long `top --once` takes",
        "",
        f"`python -m benchmarks.samples.top`: {hosts} virtual hosts of {cards} simulated NPUs on one machine of"
        f" {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}. Goal for what is kept: {GOAL_S:g} s.",
        "",
        "| look | median | all |",
        "|---|---|---|",
    ]
    lines += [
        f"| {name} | {statistics.median(taken):.2f} s | {', '.join(f'{one:.2f}' for one in taken)} |"
        for name, taken in looks.items()
    ]
    whole = sum(parts.values())
    lines += ["", "| part of a look at what is kept | time | share |", "|---|---|---|"]
    lines += [f"| {name} | {1000 * taken:.0f} ms | {100 * taken / whole:.0f} % |" for name, taken in parts.items()]
    lines += [
        "",
        "The simulated tools are a Python each, and all hosts share this machine: what asking costs here says"
        " nothing of real hosts, which answer side by side.",
        "",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.samples.top")
    parser.add_argument("--hosts", type=int, default=64)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--cards", type=int, default=1, help="of each host; 0: hosts without tools")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(argv)
    text = measure(options.hosts, options.times, options.cards)
    print(text)
    if options.write:
        RESULT.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
