"""Progress in output: what it costs the head node to read text that has no steps.

    python -m benchmarks.progress [--repeat 5] [--mb 32] [--results FOLDER]

Each text is a file as the head node stores it, and is read by the function that `ps` and `report` use. grep, which
searches the same file for one pattern, takes turns with it. Time is CPU time of user and kernel.

logs       the recorded outputs without a step (tests/recordings/progress), again and again: they were chosen because
           most of their lines look like progress
words      lines of random words with a time in front, as servers write them
downloads  bars of downloads, drawn again with carriage returns
prose      text with `loss` and `step` in each line, none of a training
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml

from ascendrun.head.spool.output_progress import read_log
from benchmarks.results import RESULTS, Sheet, median, read_rows, shown, table, write_page

COLUMNS = ("text", "what", "repeat", "ms_per_mb", "load")
RECORDED = Path(__file__).resolve().parents[1] / "tests" / "recordings" / "progress" / "no_steps.yaml"
PATTERN = r"step [0-9]+.*loss"
GOAL_MS = 3.0


def texts(size: int) -> dict[str, bytes]:
    """Return the texts, each of at least `size` bytes."""
    luck = random.Random(1)
    recorded = "\n".join(row["text"] for row in yaml.safe_load(RECORDED.read_text(encoding="utf-8")))
    names = ["".join(luck.choices("abcdefghijklmnoprstuvw", k=luck.randint(3, 9))) for _ in range(2000)]
    words = "".join(
        f"2026-11-23 12:00:{number % 60:02d},{number % 1000:03d} INFO {' '.join(luck.choices(names, k=10))}\n"
        for number in range(10_000)
    )
    bars = "".join(
        f"\rmodel-0000{number % 9}.safetensors: {percent:3d}%|{'█' * (percent // 10):<10}| "
        f"{percent * 49.7:.0f}M/4.97G [00:{number % 60:02d}<01:12, 41.2MB/s]"
        for number in range(100)
        for percent in range(0, 101, 1)
    )
    prose = "".join(
        f"the next step explains the loss of {name}, which no step of the loss function had shown before\n"
        for name in names
    )
    kinds = {"logs": recorded, "words": words, "downloads": bars, "prose": prose}
    return {name: text.encode() * (size // len(text.encode()) + 1) for name, text in kinds.items()}


def cpu_s() -> float:
    """Return the CPU time of this process and of those that it has waited for."""
    own, others = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + others.ru_utime + others.ru_stime


def measure(sheet: Sheet, repeat: int, name: str, path: Path) -> None:
    size_mb = path.stat().st_size / 1e6
    for what in ("grep", "ascendrun"):
        began_s = cpu_s()
        if what == "grep":
            subprocess.run(["grep", "-cE", PATTERN, str(path)], stdout=subprocess.DEVNULL, check=False)
        else:
            rows = read_log(path)
            assert not any("step" in row for row in rows), rows[:3]
        ms = (cpu_s() - began_s) * 1000 / size_mb
        sheet.add(text=name, what=what, repeat=repeat, ms_per_mb=ms, load=f"{os.getloadavg()[0]:.1f}")


def write_results(sheet: Sheet, command: str) -> None:
    rows = read_rows(sheet.path)

    def of(name: str, what: str) -> float | None:
        return median([row for row in rows if (row["text"], row["what"]) == (name, what)], "ms_per_mb")

    lines = []
    for name in dict.fromkeys(row["text"] for row in rows):
        ours = of(name, "ascendrun")
        is_met = ours is not None and ours <= GOAL_MS
        lines.append([name, shown(ours), shown(of(name, "grep")), "met" if is_met else "**not met yet**"])
    header = ["text", "ascendrun, ms a MB", f"grep -E '{PATTERN}', ms a MB", f"goal: ≤ {GOAL_MS:g} ms"]
    says = "CPU time that reading progress from output without steps takes, a megabyte of text. Medians."
    write_page(sheet, title="Progress in output", says=says, body=table(header, lines), command=command)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.progress", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--mb", type=int, default=32, help="size of each text")
    parser.add_argument("--results", type=Path, default=RESULTS)
    choice = parser.parse_args(argv)
    with Sheet(choice.results, "progress", COLUMNS) as sheet, tempfile.TemporaryDirectory() as folder:
        paths = {}
        for name, data in texts(choice.mb * 1_000_000).items():
            paths[name] = Path(folder, name)
            paths[name].write_bytes(data)
        for repeat in range(choice.repeat):
            for name, path in paths.items():
                measure(sheet, repeat, name, path)
    write_results(sheet, f"python -m benchmarks.progress --repeat {choice.repeat} --mb {choice.mb}")


if __name__ == "__main__":
    main()
