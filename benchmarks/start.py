"""What a word to ascendrun costs before anything happens: --version, --help, ps, beside Python's own start.

python -m benchmarks.start [--repeat 20] [--results FOLDER]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ascendrun.core.settings import STATE_VARIABLE
from ascendrun.node.layout import ROOT_VARIABLE
from benchmarks.ours import CHECKOUT
from benchmarks.results import Row, Sheet, median, repeated, shown, table

COLUMNS = ("what", "repeat", "wall_s", "cpu_s", "status", "load")
PYTHON, BARE_PYTHON = "python -c pass", "python -I -S -c pass"
HELP, VERSION, PS, PS_ALL = "ascendrun --help", "ascendrun --version", "ascendrun ps", "ascendrun ps --all"
OURS = (sys.executable, "-m", "ascendrun")
COMMANDS: Mapping[str, Sequence[str]] = {
    BARE_PYTHON: (sys.executable, "-I", "-S", "-c", "pass"),
    PYTHON: (sys.executable, "-c", "pass"),
    VERSION: (*OURS, "--version"),
    HELP: (*OURS, "--help"),
    PS: (*OURS, "ps"),
    PS_ALL: (*OURS, "ps", "--all"),
}
JOB = "name: nothing\ncommand: ['true']\nnodes: 1\nhostfile: one.hosts\n"
ONE_HOST = "here addr=local slots=1\n"
JOB_DEADLINE_S = 60.0


@dataclass(frozen=True)
class Cost:
    """One process of this machine. `cpu_s`: its own CPU time, user and system. `status`: its exit code."""

    wall_s: float
    cpu_s: float
    status: int


def run(repeats: int, sheet: Sheet) -> None:
    with tempfile.TemporaryDirectory(prefix="ascendrun-bench-") as folder:
        env = make_environ(Path(folder))
        leave_one_job(Path(folder), env)
        for argv in COMMANDS.values():
            measure(argv, env)  # its files are in memory from here on
        for repeat in range(repeats):
            for what, argv in COMMANDS.items():
                cost = measure(argv, env)
                sheet.add(
                    what=what,
                    repeat=repeat,
                    wall_s=cost.wall_s,
                    cpu_s=cost.cpu_s,
                    status=cost.status,
                    load=f"{os.getloadavg()[0]:.1f}",
                )


def make_environ(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ASCENDRUN_", "XDG_"))}
    ours = {STATE_VARIABLE: str(folder / "state"), ROOT_VARIABLE: str(folder / "node"), "PYTHONDONTWRITEBYTECODE": ""}
    return {**kept, **ours, "HOME": str(folder), "PYTHONPATH": str(CHECKOUT)}


def leave_one_job(folder: Path, env: Mapping[str, str]) -> None:
    """A job that ran here and ended, and no controller: what `ps` finds the day after."""
    (folder / "job.yaml").write_text(JOB)
    (folder / "one.hosts").write_text(ONE_HOST)
    try:
        subprocess.run(
            [*OURS, "submit", "--wait", str(folder / "job.yaml")],
            env=env,
            check=True,
            capture_output=True,
            timeout=JOB_DEADLINE_S,
        )
    finally:
        subprocess.run([*OURS, "controller", "stop"], env=env, capture_output=True, timeout=JOB_DEADLINE_S)


def measure(argv: Sequence[str], env: Mapping[str, str]) -> Cost:
    with open(os.devnull, "r+b") as null:
        files = [(os.POSIX_SPAWN_DUP2, null.fileno(), fd) for fd in (0, 1, 2)]
        began_s = time.perf_counter()
        pid = os.posix_spawn(argv[0], list(argv), dict(env), file_actions=files)
        _, status, used = os.wait4(pid, 0)
        wall_s = time.perf_counter() - began_s
    return Cost(wall_s, used.ru_utime + used.ru_stime, os.WEXITSTATUS(status) if os.WIFEXITED(status) else -1)


def render(rows: Sequence[Row]) -> str:
    base_s = wall(rows, PYTHON)
    return table(["", "wall ms", "CPU ms", "÷ python"], (_line(rows, what, base_s) for what in COMMANDS))


def _line(rows: Sequence[Row], what: str, base_s: float | None) -> tuple[str, str, str, str]:
    wall_s, cpu_s = wall(rows, what), median((row for row in rows if row["what"] == what), "cpu_s")
    ratio = None if wall_s is None or not base_s else wall_s / base_s
    return f"`{what}`", shown(wall_s, "ms"), shown(cpu_s, "ms"), shown(ratio)


def wall(rows: Sequence[Row], what: str) -> float | None:
    """The median over repetitions that exited 0; None when none did."""
    return median((row for row in rows if row["what"] == what and row["status"] == "0"), "wall_s")


SAYS = (
    "Start to end of one process with warm file caches, medians; `ps` finds one ended job (`--all` shows it) and no "
    "controller."
)


def main() -> None:
    repeated(
        __doc__, "start", COLUMNS, run, render, title="start: what a word to ascendrun costs", says=SAYS, repeat=20
    )


if __name__ == "__main__":
    main()
