"""The head with many nodes and many past jobs: what its controller costs, and how long it stands still.

    python -m benchmarks.head [--nodes 1000] [--jobs 8] [--seconds 60] [--past 10000] [--repeat 1] [--results FOLDER]

The nodes are simulated agents behind a real SSH server (benchmarks/fleet.py); everything on the head is real. CPU and
memory are those of the controller and of its process for samples, user and kernel; `stall`: by how much the loop of the
controller was late at most.

start      all nodes connect, jobs of 8 ranks a node on all of them start
steady     each node sends samples every 5 s, metrics of all ranks and a printed line every 10 s
lines      64 nodes print 1000 lines a second each
bulk       8 nodes print 10 MB each, as fast as they are read
lost       5 % of the nodes are silent from one moment on, later they return
restart    the controller is killed; its guard starts another
past       commands with so many past jobs in the store, without nodes
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from ascendrun.core.settings import STATE_VARIABLE
from ascendrun.head.loop.daemon import running_pid
from ascendrun.head.state.state_dir import make_state_dir
from benchmarks.fleet import address
from benchmarks.results import RESULTS, Row, Sheet, median, read_rows, shown, table, write_page
from tests.lib.top_world import TopWorld

COLUMNS = ("what", "nodes", "measure", "value", "unit", "load", "note")
FEW_NODES = 200
"""With so many, results are head.csv; else head-NODES.csv."""
CHECKOUT = Path(__file__).resolve().parents[1]
JOB = (
    "name: {name}\ncommand: [train]\nhostfile: {hosts}\nnodes: {nodes}\ndevices: {{type: npu, per_node: 8}}\n"
    "checks: {{skip: [device-addresses, clock, peer-ports]}}\n{more}"
)
PATIENCE_S = 900.0
SETTLE_S = 20.0
LOOK_S = 0.05
ENOUGH = 0.85
"""Share of the nodes whose jobs must run: on a busy machine one of the jobs may start again and again."""


def prefer(pid: int) -> None:
    path = Path(f"/proc/{pid}/autogroup")
    if path.exists():
        path.write_text(str(os.nice(0)))


class Head:
    """A head node with a fleet of simulated agents."""

    def __init__(self, nodes: int) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="ascendrun-head-")
        self.folder, self.nodes = Path(self._temporary.name), nodes
        self.state_dir = self.folder / "state"
        own = {"HOME": str(self.folder), STATE_VARIABLE: str(self.state_dir), "PYTHONPATH": str(CHECKOUT)}
        self.env = {**os.environ, **own, "PYTHONDONTWRITEBYTECODE": ""}
        (self.folder / ".ssh").mkdir(mode=0o700)
        key = str(self.folder / ".ssh" / "id_ed25519")
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
        self.fleet = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.fleet", str(self.folder), str(nodes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=CHECKOUT,
            text=True,
        )
        found = self._answer()
        (self.folder / ".ssh" / "known_hosts").write_text(f"[127.1.*]:{found['port']} {found['key']}\n")
        self.hostfile = self.folder / "hosts"
        hosts = (f"n{i:04d} addr={address(i)} port={found['port']} user=root slots=8\n" for i in range(nodes))
        self.hostfile.write_text("".join(hosts))

    def __enter__(self) -> Head:
        return self

    def __exit__(self, *_: object) -> None:
        self.run("controller", "stop")
        self.fleet.kill()
        self.fleet.wait()
        self._temporary.cleanup()

    def _answer(self) -> dict[str, Any]:
        assert self.fleet.stdout is not None
        found: dict[str, Any] = json.loads(self.fleet.stdout.readline())
        return found

    def order(self, do: str, **values: object) -> dict[str, Any]:
        """Give the fleet an order; return when it is carried out."""
        assert self.fleet.stdin is not None
        self.fleet.stdin.write(json.dumps({"do": do, **values}) + "\n")
        self.fleet.stdin.flush()
        return self._answer()

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "ascendrun", *words]
        return subprocess.run(argv, env=self.env, cwd=CHECKOUT, capture_output=True, text=True, timeout=PATIENCE_S)

    def submit(self, name: str, nodes: int, more: str = "") -> None:
        path = self.folder / f"{name}.yaml"
        path.write_text(JOB.format(name=name, hosts=self.hostfile, nodes=nodes, more=more))
        done = self.run("submit", "-d", str(path))
        assert done.returncode == 0, done.stderr

    def controller(self) -> psutil.Process:
        """The running controller, with the priority of this process, also where sessions are scheduled as groups."""
        process = psutil.Process(running_pid(self.state_dir) or 0)
        prefer(process.pid)
        return process

    def pulse(self) -> Mapping[str, Any]:
        try:
            found: Mapping[str, Any] = json.loads((self.state_dir / "pulse.json").read_text())
        except (OSError, ValueError):
            return {"jobs": {}, "pid": 0}
        return found

    def liveness(self) -> list[str]:
        return [one["liveness"] for job in self.pulse()["jobs"].values() for one in job["hosts"].values()]

    def spooled_bytes(self) -> int:
        """Return the size of all output of ranks that is here."""
        return sum(path.stat().st_size for path in (self.state_dir / "jobs").rglob("rank-*.out.*"))

    def await_that(self, what: str, holds: Callable[[], bool]) -> float:
        """Return the seconds until it holds."""
        began = time.monotonic()
        while not holds():
            assert time.monotonic() - began < PATIENCE_S, f"not in time: {what}"
            time.sleep(LOOK_S)
        return time.monotonic() - began

    def states(self) -> dict[str, str]:
        rows = json.loads(self.run("ps", "-a", "-o", "json").stdout)["jobs"]
        return {row["name"]: row["state"] for row in rows}

    def _has_answer(self, name: str) -> bool:
        return self.states()[name] in ("RUNNING", "FAILED")

    def warm_up(self) -> None:
        """Have the fleet record what nodes reply: on a busy machine that takes longer than a start may wait."""
        for number in range(5):
            name = f"warm-{number}"
            self.submit(name, 2)
            self.controller()
            self.await_that("an answer", partial(self._has_answer, name))
            if self.states()[name] == "RUNNING":
                self.run("stop", "--now", name)
                return
        raise AssertionError(self.run("explain", "warm-4").stdout)

    def start_jobs(self, jobs: int) -> tuple[int, int]:
        """Submit jobs for almost all nodes; return how many nodes these are, and how many of them are enough."""
        each = round(self.nodes * 0.96) // jobs  # some are idle, as everywhere
        for number in range(jobs):
            self.submit(f"job-{number}", each)
        return each * jobs, round(ENOUGH * each * jobs)

    def await_running(self, nodes: int) -> float:
        def are_running() -> bool:
            jobs = self.pulse()["jobs"].values()
            return sum(len(job["hosts"]) for job in jobs if job["state"] == "RUNNING") >= nodes

        return self.await_that(f"{nodes} nodes run jobs", are_running)


def cpu_s(process: psutil.Process) -> list[float]:
    """CPU seconds of the controller with its processes that have ended, and of its process for samples."""
    controller, *samples = (one.cpu_times() for one in family(process))
    ended = controller.children_user + controller.children_system
    return [controller.user + controller.system + ended, *(used.user + used.system for used in samples)]


def family(process: psutil.Process) -> list[psutil.Process]:
    """Return the controller and its process for samples."""
    found = [process]
    for child in process.children():
        with suppress(psutil.NoSuchProcess):  # a search for stragglers ends after a moment
            found += [child] if any("sample_writer" in part for part in child.cmdline()) else []
    return found


class Measured:
    """One measurement of a controller: CPU, memory and the delay of its loop."""

    def __init__(self, sheet: Sheet, head: Head, what: str) -> None:
        self._sheet, self._head, self._what = sheet, head, what

    def __enter__(self) -> Measured:
        self._process = self._head.controller()
        self._began, self._cpu_s = time.monotonic(), cpu_s(self._process)
        return self

    def add(self, measure: str, value: float, unit: str, note: str = "") -> None:
        add(self._sheet, self._what, self._head.nodes, measure, value, unit, note)

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            return
        wall_s, before = time.monotonic() - self._began, [*self._cpu_s, 0.0]
        used_s = [now - then for now, then in zip(cpu_s(self._process), before)]
        sizes = [one.memory_info().rss / 1e6 for one in family(self._process)]
        shares = " + ".join(f"{100 * one / wall_s:.0f}" for one in used_s)
        self.add("CPU", 100 * sum(used_s) / wall_s, "% of a core", f"{shares}: {sum(used_s):.1f} s in {wall_s:.0f} s")
        self.add("memory", sum(sizes), "MB", " + ".join(f"{one:.0f}" for one in sizes))
        pulse = self._head.pulse()
        self.add("loop late at most", pulse["late_s"], "s", (pulse["stall"] or {}).get("line", ""))


def add(sheet: Sheet, what: str, nodes: int, measure: str, value: float, unit: str, note: str = "") -> None:
    load = f"{os.getloadavg()[0]:.1f}"
    sheet.add(what=what, nodes=nodes, measure=measure, value=value, unit=unit, load=load, note=note)


def measure_steady(sheet: Sheet, head: Head, seconds: float) -> None:
    time.sleep(SETTLE_S)
    with Measured(sheet, head, "steady"):
        time.sleep(seconds)


def measure_lines(sheet: Sheet, head: Head, seconds: float) -> None:
    before = sum(cpu_s(head.controller()))
    with Measured(sheet, head, "64 hosts × 1000 lines/s, with all else"):
        head.order("lines", hosts=64, per_s=1000, seconds=seconds)
    used_s = sum(cpu_s(head.controller())) - before
    add(sheet, "64 hosts × 1000 lines/s", head.nodes, "CPU of all", 100 * used_s / seconds, "% of a core")


def measure_bulk(sheet: Sheet, head: Head, mb: int) -> None:
    had, before = head.spooled_bytes(), sum(cpu_s(head.controller()))
    sent = head.order("bulk", hosts=8, mb=mb)["result"]  # it is carried out when the connections have the bytes
    head.await_that("all bytes are on the head", lambda: head.spooled_bytes() >= had + sent)
    used_ms = 1000 * (sum(cpu_s(head.controller())) - before)
    add(sheet, "bulk", head.nodes, "CPU of all until stored", used_ms * 1e6 / sent, "ms a MB", f"8 nodes × {mb} MB")


def measure_lost(sheet: Sheet, head: Head) -> None:
    count = head.nodes // 20
    lost = head.order("lose", count=count)["lost"]
    with Measured(sheet, head, f"{count} nodes lost"):

        def are(*words: str) -> bool:
            jobs = head.pulse()["jobs"].values()
            seen = [one["liveness"] for job in jobs for name, one in job["hosts"].items() if name in lost]
            return all(word in words for word in seen)

        began = time.monotonic()
        for words in (("SUSPECT", "UNREACHABLE"), ("UNREACHABLE",)):
            head.await_that(str(words), lambda words=words: are(*words))  # type: ignore[misc]
            add(sheet, "lost", head.nodes, f"until all are {words[0]}", time.monotonic() - began, "s")
    states = [job["state"] for job in head.pulse()["jobs"].values()]
    add(sheet, "lost", head.nodes, "jobs that run on", float(states.count("RUNNING")), "", f"of {len(states)}")
    head.order("find")
    add(sheet, "lost", head.nodes, "until all are back", head.await_that("back", lambda: are("ALIVE")), "s")


def measure_restart(sheet: Sheet, head: Head, running: int) -> None:
    process = head.controller()
    before = head.pulse()
    process.kill()
    began = time.monotonic()
    head.await_that("another controller", lambda: head.pulse()["pid"] not in (0, before["pid"]))
    with Measured(sheet, head, "controller killed"):
        head.await_that("all are connected", lambda: head.liveness().count("ALIVE") >= running)
        add(sheet, "restart", head.nodes, "until all nodes of jobs are connected", time.monotonic() - began, "s")
    jobs = head.pulse()["jobs"]
    unharmed = sum(job["state"] == "RUNNING" for name, job in jobs.items() if name in before["jobs"])
    add(sheet, "restart", head.nodes, "jobs that run on", float(unharmed), "", f"of {len(before['jobs'])}")


def measure_past(sheet: Sheet, count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        world = TopWorld(Path(folder) / "state", time.time())
        make_state_dir(world.state_dir)
        world.add_past(count)
        env = {**os.environ, STATE_VARIABLE: str(world.state_dir), "PYTHONPATH": str(CHECKOUT), "HOME": folder}
        for words in (("ps",), ("ps", "-a"), ("history",), ("top", "--once"), ("prune", "--dry-run")):
            argv = [sys.executable, "-m", "ascendrun", *words]
            before, began = os.times(), time.monotonic()
            done = subprocess.run(argv, env=env, capture_output=True, timeout=PATIENCE_S, check=False)
            wall_s, after = time.monotonic() - began, os.times()
            used_s = after.children_user + after.children_system - before.children_user - before.children_system
            note = f"wall {1000 * wall_s:.0f} ms, exit code {done.returncode}"
            add(sheet, f"`{' '.join(words)}`, {count} past jobs", 0, "CPU of the command", 1000 * used_s, "ms", note)
        subprocess.run([sys.executable, "-m", "ascendrun", "controller", "stop"], env=env, check=False)


def write_results(sheet: Sheet, nodes: int, command: str) -> None:
    """Write the page: medians of the repetitions, and from the smallest to the largest."""
    alike: dict[tuple[str, ...], list[Row]] = {}
    for row in read_rows(sheet.path):
        alike.setdefault((row["what"], row["nodes"], row["measure"]), []).append(row)
    body = []
    for (what, count, measure), rows in alike.items():
        values = sorted(float(row["value"]) for row in rows)
        spread = f"{shown(values[0])}–{shown(values[-1])}" if len(rows) > 1 else ""
        middle = f"{shown(median(rows, 'value'))} {rows[0]['unit']}"
        body.append([what, count, measure, middle, spread, shown(median(rows, "load")), rows[-1]["note"]])
    text = (
        "The controller with simulated nodes, and its process for samples: CPU time by process, not wall, that of the "
        "controller first. The nodes share the processors with them. The note is that of the last run. Compare within "
        "this page: times depend on the load and the machine."
    )
    headings = ["what", "nodes", "measure", "median", "from–to", "load", "note"]
    title = f"The head with {nodes} nodes"
    write_page(sheet, title=title, says=text, body=table(headings, body), command=command)


def measure_nodes(sheet: Sheet, nodes: int, jobs: int, seconds: float) -> None:
    with Head(nodes) as head:
        head.warm_up()
        with Measured(sheet, head, "start") as start:
            of, least = head.start_jobs(jobs)
            note = f"{least} of {of} nodes, after the last submit"
            start.add("until the ranks run", head.await_running(least), "s", note)
        measure_steady(sheet, head, seconds)
        measure_lines(sheet, head, seconds / 3)
        measure_bulk(sheet, head, 10)
        measure_lost(sheet, head)
        measure_restart(sheet, head, head.liveness().count("ALIVE"))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.head", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--past", type=int, default=10_000, help="past jobs, 0: none  [default: %(default)s]")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS)
    choice = parser.parse_args(argv)
    prefer(os.getpid())
    name = "head" if choice.nodes == FEW_NODES else f"head-{choice.nodes}"
    with Sheet(choice.results, name, COLUMNS) as sheet:
        for _ in range(choice.repeat):
            measure_nodes(sheet, choice.nodes, choice.jobs, choice.seconds)
        if choice.past:
            measure_past(sheet, choice.past)
    command = f"python -m benchmarks.head --nodes {choice.nodes} --jobs {choice.jobs} --seconds {choice.seconds:g}"
    write_results(sheet, choice.nodes, f"{command} --past {choice.past} --repeat {choice.repeat}")


if __name__ == "__main__":
    main()
