"""The dashboard: what browsers that show a job of 64 hosts, or the overview, cost the head node.

    python -m benchmarks.dashboard [--seconds 60] [--hosts 64] [--browsers 20] [--nodes 1000] [--jobs 10000]
        [--results FOLDER]

A simulated state directory has one running job of 8 ranks on each host. All ranks write a step every two seconds, all
devices are sampled every five. The streams are those that a page opens; their bytes are read and dropped. Time is CPU
time of the dashboard's process, user and kernel, in percent of one core. Then the page is opened ten times in a state
directory of so many nodes and jobs that have ended, with pauses in which its data gets old: the median duration.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from benchmarks.results import RESULTS, Sheet, median, read_rows, shown, table, write_page
from tests.lib.top_world import PER_NODE, TopWorld, controller_lock, make_usual_world, write_pulse

COLUMNS = ("page", "browsers", "cpu_percent", "kb_s", "page_ms", "page_cpu_ms", "load")
PAGES = {"overview": "/", "job": "/jobs/j-0001"}
GOAL, PAGE_GOAL_MS = 5.0, 300.0
PAGES_OPENED, SAMPLED_EVERY_S = 10, 5
SETTLE_S = 5.0


@contextlib.contextmanager
def dashboard(state_dir: Path) -> Iterator[tuple[psutil.Process, str, str]]:
    """Yield the process, its address and its token."""
    argv = [sys.executable, "-m", "ascendrun", "--state-dir", str(state_dir), "dashboard", "--no-browser"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        address, _, token = process.stdout.readline().strip().partition("/?token=")
        try:
            yield psutil.Process(process.pid), address, token
        finally:
            process.terminate()


class Ranks(threading.Thread):
    """All ranks write a step every two seconds."""

    def __init__(self, state_dir: Path) -> None:
        super().__init__(daemon=True)
        self._files = sorted(state_dir.rglob("rank-*.metrics.0"))
        self.has_ended = threading.Event()

    def run(self) -> None:
        step = 2000
        while not self.has_ended.wait(2.0):
            step += 1
            line = {"step": step, "timestamp": time.time(), "loss": 2.0, "step_s": 2.0, "comm_s": 0.2}
            for path in self._files:
                with open(path, "a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")


class Sampler(threading.Thread):
    """The devices of each host get other values every five seconds, those of a fifth of the hosts each second."""

    def __init__(self, world: TopWorld, job: str, hosts: int, busy: int) -> None:
        super().__init__(daemon=True)
        self._world, self._job, self._hosts, self._busy = world, job, hosts, busy
        self.has_ended = threading.Event()

    def run(self) -> None:
        turn = 0
        while not self.has_ended.wait(1.0):
            turn += 1
            self._world.now_s = time.time() + 2  # its samples are 3 s old
            for number in range(1 + turn % SAMPLED_EVERY_S, self._hosts + 1, SAMPLED_EVERY_S):
                host, is_busy = f"npu{number:02d}", number <= self._busy
                values = {(host, device): {"power_w": 300.0 + random.randrange(20)} for device in range(PER_NODE)}
                self._world.add_samples(
                    [host],
                    job=self._job if is_busy else None,
                    first_rank=(number - 1) * PER_NODE,
                    changes=values if is_busy else {},
                )
            write_pulse(self._world.state_dir)


class Browser(threading.Thread):
    """The stream of one open page."""

    def __init__(self, address: str, token: str, page: str) -> None:
        super().__init__(daemon=True)
        request = urllib.request.Request(f"{address}/live{page}", headers={"Authorization": f"Bearer {token}"})
        self._reply = urllib.request.urlopen(request, timeout=60)
        self.size = 0

    def run(self) -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            while data := self._reply.read1(65536):
                self.size += len(data)

    def close(self) -> None:
        self._reply.close()


def measure(sheet: Sheet, process: psutil.Process, browsers: Sequence[Browser], page: str, seconds: float) -> None:
    time.sleep(SETTLE_S)
    before, size, began_s = process.cpu_times(), sum(one.size for one in browsers), time.monotonic()
    time.sleep(seconds)
    after, took_s = process.cpu_times(), time.monotonic() - began_s
    percent = 100 * (after.user + after.system - before.user - before.system) / took_s
    kb_s = (sum(one.size for one in browsers) - size) / 1000 / took_s
    load = f"{os.getloadavg()[0]:.1f}"
    sheet.add(page=page, browsers=len(browsers), cpu_percent=percent, kb_s=kb_s, load=load)


def open_pages(sheet: Sheet, process: psutil.Process, address: str, token: str, page: str) -> None:
    took_ms, before = [], process.cpu_times()
    for _ in range(PAGES_OPENED):
        time.sleep(2.0)
        request = urllib.request.Request(f"{address}/", headers={"Authorization": f"Bearer {token}"})
        began_s = time.monotonic()
        with urllib.request.urlopen(request, timeout=60) as reply:
            reply.read()
        took_ms.append(1000 * (time.monotonic() - began_s))
    after = process.cpu_times()
    cpu_ms = 1000 * (after.user + after.system - before.user - before.system) / PAGES_OPENED
    took = {"page_ms": statistics.median(took_ms), "page_cpu_ms": cpu_ms}
    sheet.add(page=page, browsers=1, **took, load=f"{os.getloadavg()[0]:.1f}")


def write_results(sheet: Sheet, most: int, command: str) -> None:
    rows = read_rows(sheet.path)
    idle = median([row for row in rows if row["browsers"] == "0"], "cpu_percent") or 0.0
    lines = []
    for row in rows:
        if row["page_ms"]:
            goal = "met" if float(row["page_ms"]) <= PAGE_GOAL_MS else "**not met yet**"
            figures = ["", "", "", shown(float(row["page_ms"])), shown(float(row["page_cpu_ms"]))]
            lines.append([row["page"], row["browsers"], *figures, goal])
            continue
        over = float(row["cpu_percent"]) - idle
        goal = "" if int(row["browsers"]) < most else "met" if over <= GOAL else "**not met yet**"
        figures = [shown(float(row["cpu_percent"])), shown(over), row["kb_s"], "", ""]
        lines.append([row["page"], row["browsers"], *figures, goal])
    goal = f"goal: ≤ {GOAL:g} % over idle, ≤ {PAGE_GOAL_MS:g} ms"
    figures = ["CPU, % of a core", "over idle", "kB/s to all", "ms to open the page", "CPU for it, ms"]
    header = ["page", "browsers", *figures, goal]
    says = "CPU time of the dashboard's process while browsers show a page."
    write_page(sheet, title="Dashboard", says=says, body=table(header, lines), command=command)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.dashboard", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--hosts", type=int, default=64, help=f"hosts of the job, with {PER_NODE} ranks each")
    parser.add_argument("--browsers", type=int, default=20)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--results", type=Path, default=RESULTS)
    choice = parser.parse_args(argv)
    with Sheet(choice.results, "dashboard", COLUMNS) as sheet, tempfile.TemporaryDirectory() as folder:
        state_dir = Path(folder) / "state"
        world = make_usual_world(state_dir, busy=choice.hosts, idle=0)
        ranks, sampler = Ranks(state_dir), Sampler(world, "j-0001", choice.hosts, choice.hosts)
        ranks.start()
        sampler.start()
        with controller_lock(state_dir), dashboard(state_dir) as (process, address, token):
            measure(sheet, process, [], "-", choice.seconds)
            for page, path in PAGES.items():
                for count in (1, choice.browsers):
                    browsers = [Browser(address, token, path) for _ in range(count)]
                    for one in browsers:
                        one.start()
                    measure(sheet, process, browsers, page, choice.seconds)
                    for one in browsers:
                        one.close()
        for writer in (ranks, sampler):
            writer.has_ended.set()
            writer.join()
        large_dir = Path(folder) / "large"
        world = make_usual_world(large_dir, busy=choice.hosts, idle=choice.nodes - choice.hosts)
        world.add_past(choice.jobs)
        sampler = Sampler(world, "j-0001", choice.nodes, choice.hosts)
        with controller_lock(large_dir), dashboard(large_dir) as (process, address, token):
            sampler.start()
            open_pages(sheet, process, address, token, f"overview of {choice.nodes} nodes and {choice.jobs} ended jobs")
            sampler.has_ended.set()
            sampler.join()
    command = f"python -m benchmarks.dashboard --seconds {choice.seconds:g} --hosts {choice.hosts}"
    write_results(
        sheet, choice.browsers, f"{command} --browsers {choice.browsers} --nodes {choice.nodes} --jobs {choice.jobs}"
    )


if __name__ == "__main__":
    main()
