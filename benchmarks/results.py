"""Where measurements go: a CSV of every single one, and a Markdown page of medians beside it."""

from __future__ import annotations

import argparse
import csv
import datetime
import os
import platform
import re
import shutil
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Callable, TextIO

from ascendrun import __version__

RESULTS = Path(__file__).with_name("results")
_VERSION = re.compile(r"\d+\.\d+[\w.]*")
PROGRAMS = {
    "OpenSSH": ("ssh", "-V"),
    "pdsh": ("pdsh", "-V"),
    "clush": ("clush", "--version"),
    "Open MPI": ("mpirun", "--version"),
}
NOTE_CHARS = 300
PACKAGES = ("paramiko", "asyncssh", "torch", "deepspeed", "submitit")

Row = Mapping[str, str]


class Sheet:
    """The CSV of one run; each row is on the disk as soon as it is measured, and shown.

    `revision`: of the code when the run began.
    """

    def __init__(self, folder: Path, name: str, columns: Sequence[str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{name}.csv"
        self.revision = revision()
        self._file: TextIO = open(self.path, "w", newline="", encoding="utf-8")
        self._writer = csv.DictWriter(self._file, columns, lineterminator="\n")
        self._writer.writeheader()

    def __enter__(self) -> Sheet:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, **values: object) -> None:
        """None becomes an empty cell: not measured."""
        texts = {name: _cell(value) for name, value in values.items()}
        self._writer.writerow(texts)
        self._file.flush()
        print("  ".join(f"{name}={text}" for name, text in texts.items() if text), flush=True)


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def without_paths(text: str) -> str:
    """The end of `text` on one line, absolute paths cut to their last part: results say nothing of where they ran."""
    return re.sub(r"(?<![\w.])/(?:[^\s/;:,'\"]+/)+", "", " ".join(text.split()))[-NOTE_CHARS:]


def read_rows(path: Path) -> list[Row]:
    """Raises FileNotFoundError when that benchmark has not run."""
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def median(rows: Iterable[Row], column: str) -> float | None:
    """None when no row has a number there."""
    values = [float(row[column]) for row in rows if row[column]]
    return statistics.median(values) if values else None


def shown(value: float | None, unit: str = "") -> str:
    """Three digits, "–" for None; with `unit` "ms" the value is in seconds, with "%" a share of 1."""
    if value is None:
        return "–"
    number = value * {"": 1, "ms": 1000, "%": 100}[unit]
    digits = 0 if abs(number) >= 100 else 1 if abs(number) >= 10 else 2
    return f"{number:.{digits}f}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def write_page(sheet: Sheet, *, title: str, says: str, body: str, command: str) -> None:
    """The page beside the sheet's CSV, whole or not at all."""
    load = shown(median(read_rows(sheet.path), "load"))
    text = (
        f"# {title}\n\n{says}\n\n{body}\n{provenance(command, sheet.revision)}\n"
        f"Load of the machine meanwhile, this run's own and other work together: {load} (median).\n"
    )
    fresh = sheet.path.with_suffix(".new")
    fresh.write_text(text, encoding="utf-8")
    os.replace(fresh, sheet.path.with_suffix(".md"))


def repeated(
    doc: str | None,
    name: str,
    columns: Sequence[str],
    run: Callable[[int, Sheet], None],
    render: Callable[[Sequence[Row]], str],
    *,
    title: str,
    says: str,
    repeat: int,
) -> None:
    """The command of a benchmark whose only size is the number of its repetitions, `repeat` unless it has another."""
    options = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--repeat", type=int, default=repeat, metavar="N", help="repetitions  [default: %(default)s]")
    options.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    given = options.parse_args()
    with Sheet(given.results, name, columns) as sheet:
        run(given.repeat, sheet)
    command = f"python -m benchmarks.{name} --repeat {given.repeat}"
    write_page(sheet, title=title, says=says, body=render(read_rows(sheet.path)), command=command)


def provenance(command: str, began: str) -> str:
    """On what, with what and when it was measured; no name or path of the machine. `began`: the revision then."""
    now = revision()
    code = began if began == now else f"{began}, {now} at the end: the code changed during the run"
    versions = {**program_versions(), **package_versions()}
    listed = ", ".join(f"{name} {version}" for name, version in versions.items())
    python = f"{platform.python_implementation()} {platform.python_version()}"
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return (
        f"Measured {date} by `{command}`: ascendrun {__version__} ({code}), {python}, {listed}.\nMachine: {machine()}."
    )


def machine() -> str:
    """Its kind: cores, processor, memory, kernel."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    release = ".".join(platform.release().split("-")[0].split(".")[:2])
    model = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return (
        f"{os.cpu_count()} cores ({model.group(1) if model else platform.machine()}), {memory_gib:.0f} GiB, "
        f"Linux {release}"
    )


def program_versions() -> dict[str, str]:
    """Of the peers that are programs; those not installed are left out."""
    found = {}
    for name, argv in PROGRAMS.items():
        if shutil.which(argv[0]):
            done = subprocess.run(argv, capture_output=True, text=True, timeout=30)
            match = _VERSION.search(done.stdout + done.stderr)
            found[name] = match.group() if match else "of unknown version"
    return found


def package_versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def revision() -> str:
    """ "commit 1a2b3c4", with "and changes" where tracked code differs; outside a checkout "no commit known"."""
    root = Path(__file__).resolve().parents[1]

    def ask(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=30)
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = ask("rev-parse", "--short", "HEAD")
    changed = " and changes" if ask("status", "--porcelain", "--untracked-files=no", "--", "ascendrun") else ""
    return f"commit {commit}{changed}" if commit else "no commit known"
