"""Logs: how fast lines are merged and folded, how late a line is on the screen, what a flood costs.

    python -m benchmarks.logs [--repeat 3] [--lines 10000] [--steps 6000] [--seconds 15] [--results FOLDER]

fold      64 ranks x N lines in memory, merged and folded: all alike, or with measured numbers that differ on every rank
read      the same from files, as `ascendrun logs` does it, in a process of its own: lines a second, peak memory
latency   8 ranks on 4 hosts write 20 lines a second each: from the write to the pipe of whoever follows
flood     one rank that computes and writes a gigabyte, one a minute, into a plain file and under ascendrun: which
          share of its time it spends in write; the most memory that controller, agent and supervisor took
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ascendrun.core.logs.folding import fold
from ascendrun.core.logs.log_lines import LogLine, merge
from ascendrun.core.logs.log_view import FOLD_WINDOW_S
from benchmarks.bed import Bed
from benchmarks.ours import CHECKOUT, Ours
from benchmarks.results import RESULTS, Sheet, median, read_rows, shown, table, write_page
from tests.lib.vcluster.spec import root_home

COLUMNS = ("what", "case", "repeat", "measure", "value", "load", "note")
RANKS = 64
CASES = {
    "all alike": "step {step} of 10000 is done",
    "numbers differ": "step {step} loss 2.{noise:03d} lr 1.5e-05 took 0.{noise:03d} s",
}
HOSTS = 4
FLOOD_MB_S = 1000 / 60
STEP_S = 0.01
PATIENCE_S = 120.0

READ = """
import sys, time
from pathlib import Path
from itertools import chain
from ascendrun.core.logs.folding import fold
from ascendrun.core.logs.log_lines import merge_batches
from ascendrun.query.log_reader import StreamReader, batch_lines_for
from ascendrun.head.spool.spool_files import find_streams
found = find_streams(Path(sys.argv[1]), 1)
began = time.process_time()
readers = [StreamReader(one, batch_lines=batch_lines_for(len(found))) for one in found]
lines = chain.from_iterable(merge_batches([reader.batches(final=True) for reader in readers]))
count = sum(len(one.lines) for one in fold(lines, window_s=0.3))
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(count, time.process_time() - began, peak)
"""

SPEAKER = """
import os, sys, time
name, number, until = "abcdefgh"[int(os.environ["RANK"])], 0, time.monotonic() + float(sys.argv[1])
while time.monotonic() < until:
    os.write(1, b"%s%d %d\\n" % (name.encode(), number, time.time_ns()))
    number += 1
    time.sleep(0.05)
"""

TRAINER = """
import os, sys, time
steps, size = int(sys.argv[1]), int(sys.argv[2])
block = (b"x" * 127 + b"\\n") * (size // 128)
def compute(until):
    total = 0
    while time.thread_time() < until:
        total += sum(range(200))
began, writing_s = time.monotonic(), 0.0
for step in range(steps):
    compute(time.thread_time() + 0.008)
    view, write_s = memoryview(block), time.monotonic()
    while view:
        view = view[os.write(1, view):]
    writing_s += time.monotonic() - write_s
os.write(2, b"took %.6f writing %.6f\\n" % (time.monotonic() - began, writing_s))
"""


def streams_of(case: str, lines: int) -> list[list[LogLine]]:
    luck = random.Random(1)
    text = CASES[case]
    return [
        [
            LogLine(
                step * 0.5 + luck.random() * 0.2,
                f"n{rank // 8}",
                rank,
                "out",
                text.format(step=step, noise=luck.randrange(1000)),
                1,
            )
            for step in range(lines)
        ]
        for rank in range(RANKS)
    ]


def measure_fold(sheet: Sheet, repeat: int, lines: int) -> None:
    for case in CASES:
        streams = streams_of(case, lines)
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        folded = sum(1 for _ in fold(merge(streams), window_s=FOLD_WINDOW_S))
        wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
        note = f"{folded} lines shown"
        add(sheet, "fold", case, repeat, "lines/s", RANKS * lines / wall_s, note)
        add(sheet, "fold", case, repeat, "lines/s of CPU time", RANKS * lines / cpu_s, note)


def measure_read(sheet: Sheet, repeat: int, lines: int) -> None:
    for case in CASES:
        with tempfile.TemporaryDirectory(prefix="ascendrun-bench-") as folder:
            write_spool(Path(folder), streams_of(case, lines))
            argv = [sys.executable, "-c", READ, folder]
            done = subprocess.run(
                argv, stdout=subprocess.PIPE, check=True, env={**os.environ, "PYTHONPATH": str(CHECKOUT)}
            )
            count, cpu_s, peak_kib = done.stdout.split()
            assert int(count) == RANKS * lines
        add(sheet, "read", case, repeat, "lines/s of CPU time", int(count) / float(cpu_s), "")
        add(sheet, "read", case, repeat, "peak MB", int(peak_kib) * 1024 / 1e6, "of the whole process")


def write_spool(folder: Path, streams: Sequence[Sequence[LogLine]]) -> None:
    import struct

    for stream in streams:
        host = folder / stream[0].host
        host.mkdir(exist_ok=True)
        with (
            open(host / f"rank-{stream[0].rank}.out.0", "wb") as log,
            open(host / f"rank-{stream[0].rank}.out.times.0", "wb") as times,
        ):
            end = 0
            for line in stream:
                end += log.write(line.text.encode() + b"\n")
                times.write(struct.pack(">QQ", end, int((line.at_s or 0.0) * 1e9)))


def measure_latency(sheet: Sheet, repeat: int, bed: Bed, ours: Ours, seconds: float) -> None:
    path = write_job(bed, ours, "speak", SPEAKER, [str(seconds)], hosts=bed.cluster.hosts[:HOSTS], per_node=2)
    argv = bed.cluster.head_argv(ours.argv("submit", str(path)), cwd=str(bed.folder))
    late_s: list[float] = []
    with subprocess.Popen(argv, env=bed.environ(ours.environ()), stdout=subprocess.PIPE, text=True) as follower:
        assert follower.stdout is not None
        for line in follower.stdout:
            late_s.append(time.time() - int(line.split()[-1]) / 1e9)
    late_s.sort()
    for share in (0.5, 0.99, 1.0):
        value = late_s[min(len(late_s) - 1, int(share * len(late_s)))]
        add(sheet, "latency", f"p{share * 100:g}", repeat, "s", value, f"{len(late_s)} lines")


def measure_flood(sheet: Sheet, repeat: int, bed: Bed, ours: Ours, steps: int) -> None:
    host = bed.cluster.hosts[0]
    size = int(FLOOD_MB_S * 1e6 * STEP_S)
    path = bed.cluster.path(host, "/tmp/trainer.py")
    path.write_text(TRAINER)
    command = f"exec python3 /tmp/trainer.py {steps} {size} > /tmp/plain.log"
    done = bed.cluster.host_run(
        host, ["sh", "-c", command], capture_output=True, text=True, env=dict(bed.cluster.host_environ())
    )
    assert done.returncode == 0, done.stderr
    plain_s, plain_share = took(done.stderr)
    bed.cluster.path(host, "/tmp/plain.log").unlink()
    add(sheet, "flood", "a plain file", repeat, "s", plain_s, f"{steps} steps, {steps * size / 1e6:.0f} MB")
    add(sheet, "flood", "a plain file", repeat, "share of it in write", plain_share, "")

    job = start(bed, ours, write_job(bed, ours, "flood", TRAINER, [str(steps), str(size)], hosts=[host], per_node=1))
    peaks: dict[str, int] = {}
    state = ""
    while state not in ("SUCCEEDED", "FAILED", "STOPPED"):
        for name, pid in keepers(bed, ours, host):
            peaks[name] = max(peaks.get(name, 0), resident_bytes(pid))
        state = show(bed, ours, job)["job"]["state"]
        time.sleep(0.2)
    err = next((ours.state_dir / "jobs" / job).glob("attempt-*/*/rank-0.err.0")).read_text()
    seconds, share = took(err)
    add(sheet, "flood", "ascendrun", repeat, "s", seconds, state)
    add(sheet, "flood", "ascendrun", repeat, "share of it in write", share, "")
    add(sheet, "flood", "ascendrun", repeat, "slowed by writing, x a plain file", (1 - plain_share) / (1 - share), "")
    for runs in bed.cluster.path(host, f"{root_home()}/.ascendrun").glob("nodes/*/runs"):
        shutil.rmtree(runs)  # a host's disk is small
    for name, peak in sorted(peaks.items()):
        add(sheet, "flood", name, repeat, "peak MB", peak / 1e6, "")


def took(text: str) -> tuple[float, float]:
    """How long the trainer ran, and which share of that it spent in write: other work on the machine is in both."""
    seconds, writing_s = (float(text.split(f"{word} ")[1].split()[0]) for word in ("took", "writing"))
    return seconds, writing_s / seconds


def keepers(bed: Bed, ours: Ours, host: str) -> Iterator[tuple[str, int]]:
    controller = ours.controller()
    if controller is not None:
        yield "controller", controller.pid
    for process in bed.cluster.processes(host):
        for role, name in (("serve", "agent"), ("supervise", "supervisor")):
            if role in process.argv:
                yield name, process.pid


def resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (FileNotFoundError, ProcessLookupError):
        return 0


def write_job(
    bed: Bed, ours: Ours, name: str, script: str, words: Sequence[str], *, hosts: Sequence[str], per_node: int
) -> Path:
    """A job file that runs `script` on the hosts."""
    code = bed.folder / f"code-{name}"
    code.mkdir(exist_ok=True)
    (code / "main.py").write_text(script)
    path = bed.folder / f"{name}.yaml"
    path.write_text(
        f"name: {name}\ncommand: {json.dumps(['python3', 'main.py', *words])}\n"
        f"hostfile: {ours.hostfile(hosts).name}\nstage: {{dir: {code.name}}}\n"
        f"devices: {{type: cpu, per_node: {per_node}}}\n"
    )
    return path


def start(bed: Bed, ours: Ours, path: Path) -> str:
    """Starts the job and waits until it runs; its id."""
    said = call(bed, ours, "submit", str(path), "--detach", "-o", "json")
    job = str(json.loads(said)["id"])
    until = time.monotonic() + PATIENCE_S
    while show(bed, ours, job)["job"]["state"] not in ("RUNNING", "SUCCEEDED", "FAILED", "STOPPED"):
        assert time.monotonic() < until, "the job does not start"
        time.sleep(0.1)
    return job


def show(bed: Bed, ours: Ours, job: str) -> dict[str, dict[str, str]]:
    detail: dict[str, dict[str, str]] = json.loads(call(bed, ours, "show", job, "-o", "json"))
    return detail


def call(bed: Bed, ours: Ours, *arguments: str) -> str:
    argv = bed.cluster.head_argv(ours.argv(*arguments), cwd=str(bed.folder))
    done = subprocess.run(argv, env=bed.environ(ours.environ()), capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def add(sheet: Sheet, what: str, case: str, repeat: int, measure: str, value: float, note: str) -> None:
    sheet.add(
        what=what, case=case, repeat=repeat, measure=measure, value=value, note=note, load=f"{os.getloadavg()[0]:.1f}"
    )


def write_results(sheet: Sheet, command: str) -> None:
    rows = read_rows(sheet.path)
    kinds = dict.fromkeys((row["what"], row["case"], row["measure"]) for row in rows)

    def values(kind: tuple[str, str, str]) -> list[dict[str, str]]:
        return [dict(row) for row in rows if (row["what"], row["case"], row["measure"]) == kind]

    def most(kind: tuple[str, str, str]) -> float:
        return max(float(row["value"]) for row in values(kind))

    body = table(
        ["what", "case", "measure", "median", "most", "note"],
        ([*kind, shown(median(values(kind), "value")), shown(most(kind)), values(kind)[-1]["note"]] for kind in kinds),
    )
    says = (
        "What the logs of many ranks cost: merging and folding, reading them from the head's files, the way of one"
        " line to the screen, and a rank that writes a gigabyte a minute while it computes.\n\n"
        "On a machine with little rest of its own the wall clock says more about the other work than about us: the"
        " rates by CPU time are the ones to compare."
    )
    write_page(sheet, title="Logs", says=says, body=body, command=command)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.logs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--lines", type=int, default=10_000, help="of each of 64 ranks")
    parser.add_argument("--steps", type=int, default=6000, help="of 10 ms of computing and 167 kB of output")
    parser.add_argument("--seconds", type=float, default=15.0, help="how long lines are timed")
    parser.add_argument("--results", type=Path, default=RESULTS)
    choice = parser.parse_args(argv)
    with Sheet(choice.results, "logs", COLUMNS) as sheet:
        for repeat in range(choice.repeat):
            measure_fold(sheet, repeat, choice.lines)
            measure_read(sheet, repeat, choice.lines)
        with Bed(HOSTS, disk="4g") as bed:
            ours = Ours(bed)
            for repeat in range(choice.repeat):
                measure_latency(sheet, repeat, bed, ours, choice.seconds)
                measure_flood(sheet, repeat, bed, ours, choice.steps)
            ours.stop_controller()
    write_results(sheet, f"python -m benchmarks.logs --repeat {choice.repeat}")


if __name__ == "__main__":
    main()
