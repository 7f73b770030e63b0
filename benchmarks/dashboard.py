"""The dashboard: what browsers that show a job of 64 hosts, or the overview, cost the head node.

    python -m benchmarks.dashboard [--seconds 60] [--hosts 64] [--browsers 20] [--results FOLDER]

A simulated state directory has one running job of 8 ranks on each host. All ranks write a step every two seconds. The
streams are those that a page opens; their bytes are read and dropped. Time is CPU time of the dashboard's process, user
and kernel, in percent of one core.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
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
from tests.lib.top_world import PER_NODE, controller_lock, make_usual_world

COLUMNS = ("page", "browsers", "cpu_percent", "kb_s", "load")
PAGES = {"overview": "/", "job": "/jobs/j-0001"}
GOAL = 5.0
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


def write_results(sheet: Sheet, most: int, command: str) -> None:
    rows = read_rows(sheet.path)
    idle = median([row for row in rows if row["browsers"] == "0"], "cpu_percent") or 0.0
    lines = []
    for row in rows:
        over = float(row["cpu_percent"]) - idle
        goal = "" if int(row["browsers"]) < most else "met" if over <= GOAL else "**not met yet**"
        lines.append([row["page"], row["browsers"], shown(float(row["cpu_percent"])), shown(over), row["kb_s"], goal])
    header = ["page", "browsers", "CPU, % of a core", "over idle", "kB/s to all", f"goal: ≤ {GOAL:g} % over idle"]
    says = "CPU time of the dashboard's process while browsers show a page."
    write_page(sheet, title="Dashboard", says=says, body=table(header, lines), command=command)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.dashboard", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--hosts", type=int, default=64, help=f"hosts of the job, with {PER_NODE} ranks each")
    parser.add_argument("--browsers", type=int, default=20)
    parser.add_argument("--results", type=Path, default=RESULTS)
    choice = parser.parse_args(argv)
    with Sheet(choice.results, "dashboard", COLUMNS) as sheet, tempfile.TemporaryDirectory() as folder:
        state_dir = Path(folder) / "state"
        make_usual_world(state_dir, busy=choice.hosts, idle=0)
        ranks = Ranks(state_dir)
        ranks.start()
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
        ranks.has_ended.set()
        ranks.join()
    command = f"python -m benchmarks.dashboard --seconds {choice.seconds:g} --hosts {choice.hosts}"
    write_results(sheet, choice.browsers, f"{command} --browsers {choice.browsers}")


if __name__ == "__main__":
    main()
