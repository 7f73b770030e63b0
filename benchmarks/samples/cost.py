"""Measures what the sampler of one attempt costs its node, apart from the tools that it runs.

    python -m benchmarks.samples.cost [--seconds 120] [--every 5] [--write]

A simulated node of 8 NPUs, 8 ranks of 8 processes each. The sampler's own CPU time (user and system) is read from
/proc at both ends of the stretch; that of the tools it has waited for stands apart, since npu-smi costs whoever asks.
`--write` puts the table into benchmarks/samples/cost.md.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ascendrun.health.samples.device_samples import sampling_items
from ascendrun.node import layout, loader, procs, reap
from ascendrun.node.agent.attempt.attempts import Attempts
from ascendrun.sim.ascend.scenario import Scenario
from ascendrun.sim.ascend.tree import environ_of, install_tree

CARDS, RANKS, CHILDREN = 8, 8, 7
SETTLE_S = 15.0
"""Its start and the first round of every tool are not what it costs later."""
GOAL_PERCENT = 1.0
TAG = "bench-samples.1"
RESULT = Path(__file__).with_name("cost.md")


class Usage(NamedTuple):
    """CPU seconds so far."""

    own_s: float
    tools_s: float


class Row(NamedTuple):
    name: str
    own_percent: float
    tools_percent: float
    bytes_an_hour: float
    rss_mb: float


def usage_of(pid: int) -> Usage:
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
    return Usage(
        (int(fields[11]) + int(fields[12])) / procs.TICKS_PER_S, (int(fields[13]) + int(fields[14])) / procs.TICKS_PER_S
    )


def measure(name: str, family: str, *, every_s: float, seconds: float) -> Row:
    """One attempt from start to stop."""
    with tempfile.TemporaryDirectory(prefix="bench-samples-") as temp:
        attempts, root = make_node(Path(temp))
        attempts.prepare(make_request(str(root), family, every_s))
        attempts.go({"tag": TAG})
        try:
            folder = Path(layout.attempt_dir(str(root), TAG))
            pid = sampler_of(str(root))
            time.sleep(SETTLE_S)
            began, before, size = time.monotonic(), usage_of(pid), written(folder)
            time.sleep(seconds)
            after, passed_s = usage_of(pid), time.monotonic() - began
            grown = written(folder) - size
            rss_mb = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
        finally:
            attempts.stop({"tag": TAG, "now": True, "grace_s": 0})
            while reap.find_marked(reap.marks_of(TAG, str(root))):
                time.sleep(0.05)
    return Row(
        name,
        100 * (after.own_s - before.own_s) / passed_s,
        100 * (after.tools_s - before.tools_s) / passed_s,
        grown / passed_s * 3600,
        rss_mb,
    )


def make_node(temp: Path) -> tuple[Attempts, Path]:
    tree, root = temp / "tree", temp / "node"
    install_tree(tree, Scenario(cards=CARDS))
    root.mkdir(mode=0o700)
    pyz, sha256 = loader.pack_agent(loader.read_sources())
    agent = root / f"agent-{sha256[:16]}.pyz"
    agent.write_bytes(pyz)
    environ: dict[str, str] = environ_of(tree, dict(os.environ))
    login = {os.fsencode(name): os.fsencode(value) for name, value in environ.items()}
    return Attempts(
        str(root),
        agent=[sys.executable, "-I", "-S", str(agent)],
        login=login,
        umask=0o022,
        verify_tree=lambda sha256: None,
    ), root


def make_request(root: str, family: str, every_s: float) -> dict[str, object]:
    run, _ = layout.split_tag(TAG)
    script = "for i in {}; do sleep 3600 & done; exec sleep 3600".format(" ".join(str(k) for k in range(CHILDREN)))
    ranks = [
        {
            "rank": rank,
            "local_rank": rank,
            "argv": ["sh", "-c", script],
            "env": {"RANK": str(rank), "LOCAL_RANK": str(rank), "ASCENDRUN_SIM_NPU": str(rank)},
        }
        for rank in range(RANKS)
    ]
    return {
        "tag": TAG,
        "node_rank": 0,
        "ranks": ranks,
        "cwd": layout.work_dir(root, run),
        "setup": None,
        "trees": [],
        "link_tree": None,
        "ports": [],
        "start_s": 60,
        "max_s": None,
        "stop": {"signal": "TERM", "grace_s": 1},
        "sampling": {
            "every_s": every_s,
            "items": list(sampling_items(family, every_s=every_s)),
            "devices": list(range(RANKS)),
        },
    }


def sampler_of(root: str) -> int:
    """The oldest of them: the others are tools that it runs."""
    deadline = time.monotonic() + 20.0
    while time.monotonic() < deadline:
        found = reap.find_marked({**reap.marks_of(TAG, root), **reap.SAMPLER})
        if found:
            return found[0][0]
        time.sleep(0.05)
    raise SystemExit("no sampler came up")


def written(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("samples.*"))


def table(rows: Sequence[Row], every_s: float, seconds: float) -> str:
    lines = [
        "# What sampling costs a node",
        "",
        f"`python -m benchmarks.samples.cost`: {CARDS} simulated NPUs, {RANKS} ranks of {CHILDREN + 1} processes,"
        f" a sample every {every_s:g} s, {seconds:g} s measured, Python {platform.python_version()},"
        f" {os.cpu_count()} cores, {len(procs.snapshot())} processes on the machine, load"
        f" {os.getloadavg()[0]:.1f}. Percent of one core; goal: the sampler itself below {GOAL_PERCENT:g}.",
        "",
        "| what is asked | sampler itself | tools it ran | written an hour | memory |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.name} | {row.own_percent:.2f} % | {row.tools_percent:.2f} % | {row.bytes_an_hour / 1e6:.1f} MB |"
        f" {row.rss_mb:.0f} MB |"
        for row in rows
    ]
    lines += [
        "",
        "The tools here are simulated ones, each a Python of its own: their cost says nothing of the real ones.",
        "",
    ]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.samples.cost")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--every", type=float, default=5.0)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    rows = [
        measure("host and ranks", "cpu", every_s=options.every, seconds=options.seconds),
        measure("and 8 NPUs", "npu", every_s=options.every, seconds=options.seconds),
    ]
    text = table(rows, options.every, options.seconds)
    print(text)
    if options.write:
        RESULT.write_text(text)
    return 0 if all(row.own_percent < GOAL_PERCENT for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
