"""`true` on many hosts, cold and warm: ascendrun, pdsh, clush, asyncssh, ssh with ControlMaster.

python -m benchmarks.exec [--hosts 1,8,64,256] [--repeat 5] [--results FOLDER]
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Optional

from benchmarks.bed import Bed, Cost
from benchmarks.ours import Ours
from benchmarks.results import RESULTS, Row, Sheet, median, read_rows, shown, table, without_paths, write_page

COLUMNS = ("hosts", "what", "repeat", "wall_s", "head_cpu_s", "hosts_cpu_s", "controller_mb", "status", "load", "note")
CURVE = "KexAlgorithms=curve25519-sha256"
ASYNCSSH_FAN = Path(__file__).with_name("peers") / "asyncssh_fan.py"
MASTERS_AT_ONCE = 8
"""ssh clients at once over live masters: more only fight for the two cores."""

FIRST, COLD, WARM = "ascendrun, first time", "ascendrun, cold", "ascendrun, warm"
PDSH, PDSH_CURVE = "pdsh", "pdsh, curve25519"
CLUSH, CLUSH_CURVE = "clush -f64", "clush -f64, curve25519"
ASYNCSSH, SSH, SSH_CURVE, MASTER = "asyncssh", "ssh", "ssh, curve25519", "ssh over ControlMasters"
IDLE = "ascendrun, idle"
WARM_ONES = (MASTER, WARM)
ORDER = (SSH, SSH_CURVE, PDSH, PDSH_CURVE, CLUSH, CLUSH_CURVE, ASYNCSSH, COLD, FIRST, *WARM_ONES)

IDLE_S = 5.0

Measured = Iterator[tuple[str, Cost, Optional[int]]]
"""What was measured, its cost, and the controller's memory in bytes (None: no controller of ours)."""


@dataclass(frozen=True)
class Group:
    """Measurements that belong together, in their order; `measure` leaves the bed as it found it."""

    needs: str
    measure: Callable[[Bed, Sequence[str]], Measured]
    most_hosts: int | None = None

    @property
    def is_installed(self) -> bool:
        return shutil.which(self.needs) is not None or importlib.util.find_spec(self.needs) is not None


def plain(
    what: str, argv: Callable[[Sequence[str]], list[str]], env: Mapping[str, str] | None = None
) -> Callable[[Bed, Sequence[str]], Measured]:
    """A peer that keeps nothing between two commands."""

    def measure(bed: Bed, hosts: Sequence[str]) -> Measured:
        yield what, bed.measure(argv(hosts), env=env), None

    return measure


def pdsh_argv(hosts: Sequence[str]) -> list[str]:
    return ["pdsh", "-S", "-R", "ssh", "-w", ",".join(hosts), "true"]


def clush_argv(hosts: Sequence[str]) -> list[str]:
    return ["clush", "-S", "-f", "64", "-w", ",".join(hosts), "true"]


def clush_curve_argv(hosts: Sequence[str]) -> list[str]:
    return ["clush", "-S", "-f", "64", "-o", f"-o {CURVE}", "-w", ",".join(hosts), "true"]


def control_master(bed: Bed, hosts: Sequence[str]) -> Measured:
    """Warm as OpenSSH offers it: a live master for each host, a client process for each command."""
    names = bed.folder / "masters"
    names.write_text("".join(f"{host}\n" for host in hosts))
    clients = ["xargs", "-a", str(names), "-P", str(MASTERS_AT_ONCE), "-I{}"]
    clients += ["ssh", "-o", f"ControlPath={bed.folder}/%h"]
    opened = bed.run([*clients, "-o", CURVE, "-o", "ControlMaster=yes", "-o", "ControlPersist=300", "-fN", "{}"])
    if opened.status:
        raise RuntimeError(f"ssh opened no masters: {opened.tail}")
    try:
        yield MASTER, bed.measure([*clients, "{}", "true"]), None
    finally:
        bed.run([*clients, "-O", "exit", "{}"])


def ascendrun(bed: Bed, hosts: Sequence[str]) -> Measured:
    """First on hosts never used, then without a controller, then with it and agents, then at rest."""
    ours = Ours(bed)
    argv = ours.argv("exec", "-H", str(ours.hostfile(hosts)), "--", "true")
    ours.forget(hosts)
    try:
        yield FIRST, bed.measure(argv, env=ours.environ()), None
        ours.stop_controller()
        yield COLD, bed.measure(argv, env=ours.environ()), None
        ours.stop_controller()
        for _ in range(2):
            bed.run(argv, env=ours.environ())  # the second one brings the agents
        yield WARM, bed.measure(argv, env=ours.environ()), None
        yield IDLE, bed.rest(IDLE_S), ours.controller_memory_bytes()
    finally:
        ours.stop_controller()


GROUPS = (
    Group("ssh", plain(SSH, lambda hosts: ["ssh", hosts[0], "true"]), most_hosts=1),
    Group("ssh", plain(SSH_CURVE, lambda hosts: ["ssh", "-o", CURVE, hosts[0], "true"]), most_hosts=1),
    Group("pdsh", plain(PDSH, pdsh_argv)),
    Group("pdsh", plain(PDSH_CURVE, pdsh_argv, {"PDSH_SSH_ARGS_APPEND": f"-o {CURVE}"})),
    Group("clush", plain(CLUSH, clush_argv)),
    Group("clush", plain(CLUSH_CURVE, clush_curve_argv)),
    Group("asyncssh", plain(ASYNCSSH, lambda hosts: [sys.executable, str(ASYNCSSH_FAN), *hosts])),
    Group("ssh", control_master),
    Group("ascendrun", ascendrun),
)


def run(counts: Sequence[int], repeats: int, sheet: Sheet) -> None:
    """Every repetition goes through all contenders, each time beginning with another one."""
    with Bed(max(counts)) as bed:
        for count in counts:
            hosts = bed.cluster.hosts[:count]
            able = [one for one in GROUPS if one.is_installed and count <= (one.most_hosts or count)]
            for repeat in range(repeats):
                turn = repeat % len(able)
                for group in able[turn:] + able[:turn]:
                    for what, cost, memory_bytes in group.measure(bed, hosts):
                        add(sheet, count, what, repeat, cost, memory_bytes)


def add(sheet: Sheet, count: int, what: str, repeat: int, cost: Cost, memory_bytes: int | None) -> None:
    note = without_paths(cost.tail) if cost.status else ""
    sheet.add(
        hosts=count,
        what=what,
        repeat=repeat,
        wall_s=cost.wall_s,
        head_cpu_s=cost.head_cpu_s,
        hosts_cpu_s=cost.hosts_cpu_s,
        controller_mb=None if memory_bytes is None else memory_bytes / 1e6,
        status=cost.status,
        load=f"{os.getloadavg()[0]:.1f}",
        note=note,
    )


def render(rows: Sequence[Row]) -> str:
    counts = sorted({int(row["hosts"]) for row in rows})
    pages = [f"## {count} host{'s' if count > 1 else ''}\n\n{_render_count(rows, count)}\n" for count in counts]
    return "".join(pages) + _render_idle(rows, counts)


def _render_count(rows: Sequence[Row], count: int) -> str:
    header = ["", "wall s", "from–to", "÷ ours", "CPU s", "÷ ours", "head CPU ms a host", "hosts CPU ms a host"]
    names = [what for what in ORDER if any(row["hosts"] == str(count) and row["what"] == what for row in rows)]
    return table(header, (_line(rows, count, what) for what in names))


def _line(rows: Sequence[Row], count: int, what: str) -> list[str]:
    mine = [row for row in rows if row["hosts"] == str(count) and row["what"] == what]
    good = list(filter(is_good, mine))
    ours = WARM if what in WARM_ONES else COLD
    failed = "" if len(good) == len(mine) else f" ({len(mine) - len(good)} of {len(mine)} failed)"
    spread = "" if len(good) < 2 else f"{shown(min(_walls(good)))}–{shown(max(_walls(good)))}"
    a_host = [
        cpu_s / count if cpu_s is not None else None
        for cpu_s in (median(good, "head_cpu_s"), median(good, "hosts_cpu_s"))
    ]
    return [
        f"{what}{failed}",
        shown(wall(rows, count, what)),
        spread,
        shown(ratio(wall(rows, count, what), wall(rows, count, ours))),
        shown(cpu(rows, count, what)),
        shown(ratio(cpu(rows, count, what), cpu(rows, count, ours))),
        *(shown(cpu_s, "ms") for cpu_s in a_host),
    ]


def _render_idle(rows: Sequence[Row], counts: Sequence[int]) -> str:
    lines = [
        [
            str(count),
            shown(idle_share(rows, count, "head_cpu_s"), "%"),
            shown(controller_mb(rows, count)),
            shown(ratio(idle_share(rows, count, "hosts_cpu_s"), float(count)), "%"),
        ]
        for count in counts
    ]
    header = ["hosts", "head, % of a core", "controller, MB", "each host, % of a core"]
    return f"## ascendrun at rest, all connections open\n\n{table(header, lines)}"


def ratio(one: float | None, other: float | None) -> float | None:
    """None when either was not measured."""
    return None if one is None or not other else one / other


def _walls(rows: Sequence[Row]) -> list[float]:
    return [float(row["wall_s"]) for row in rows]


def is_good(row: Row) -> bool:
    """Whether the work was done on all hosts."""
    return row["status"] == "0"


def wall(rows: Sequence[Row], count: int, what: str, column: str = "wall_s") -> float | None:
    """The median of the repetitions that did the work on all hosts; None when none did."""
    return median((row for row in rows if row["hosts"] == str(count) and row["what"] == what and is_good(row)), column)


def cpu(rows: Sequence[Row], count: int, what: str) -> float | None:
    """Head and hosts together; what other work the machine does changes it little, unlike the wall."""
    sides = [wall(rows, count, what, column) for column in ("head_cpu_s", "hosts_cpu_s")]
    return None if None in sides else sum(side for side in sides if side is not None)


def idle_share(rows: Sequence[Row], count: int, column: str) -> float | None:
    """Of one core, 1.0 for all of it."""
    return ratio(wall(rows, count, IDLE, column), wall(rows, count, IDLE))


def controller_mb(rows: Sequence[Row], count: int) -> float | None:
    return wall(rows, count, IDLE, "controller_mb")


SAYS = (
    "One command, `true`, on every host; medians. *First time*: no controller runs and no host has the agent. "
    "*Cold*: no controller runs, so Python, controller and connections all start. *Warm*: the third command, given "
    "at rest: the agents came up behind the second. “÷ ours” compares cold with ascendrun cold and warm with ascendrun "
    "warm; above 1 the peer is slower. CPU s counts everything on the head and on all hosts until both rest; other "
    "work on the machine does not change it."
)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--hosts", default="1,8,64,256", metavar="N,N", help="host counts  [default: %(default)s]")
    options.add_argument("--repeat", type=int, default=5, metavar="N", help="repetitions  [default: %(default)s]")
    options.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    given = options.parse_args()
    with Sheet(given.results, "exec", COLUMNS) as sheet:
        run([int(count) for count in given.hosts.split(",")], given.repeat, sheet)
    write_page(
        sheet,
        title="exec: one command on many hosts",
        says=SAYS,
        body=render(read_rows(sheet.path)),
        command=f"python -m benchmarks.exec --hosts {given.hosts} --repeat {given.repeat}",
    )


if __name__ == "__main__":
    main()
