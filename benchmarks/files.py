"""A file to many hosts: ascendrun, clush --copy, pdcp, rsync and scp in a loop; whichever is installed.

python -m benchmarks.files [--hosts 64,256] [--megabytes 5] [--peers clush,…] [--zram] [--repeat 3] [--results FOLDER]

`--zram`: the disks of the hosts are on one in compressed memory (benchmarks/ramdisk.py), for copies that would fit
nowhere else: 500 MB to 256 hosts are 128 GB. Results of other sizes than 5 MB are files-MEGABYTES.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import count as counted
from pathlib import Path
from typing import Callable

from ascendrun.text.format import fold_hosts
from benchmarks.bed import TIMEOUT_S, Bed, Cost
from benchmarks.ours import Ours
from benchmarks.ramdisk import pages, ram_disk
from benchmarks.results import RESULTS, Row, Sheet, median, read_rows, shown, table, without_paths, write_page
from tests.lib.vcluster.machines import HEAD
from tests.lib.vcluster.network import BRIDGE

COLUMNS = (
    "hosts", "megabytes", "what", "repeat", "wall_s", "head_cpu_s", "hosts_cpu_s", "copies", "status", "load", "note",
)  # fmt: skip
COLD, WARM, THERE = "ascendrun cp, cold", "ascendrun cp, warm", "ascendrun cp, file is there"
AT_ONCE = "32"
INTO = "files"
STORE = "/store"
"""Where hosts see the disk that has the copies, with one folder for each."""
USUAL_MB = 5
SLOWEST_MB_PER_S = 20.0
"""Of all hosts together; a command that is slower is ended."""
LOOP = ["xargs", "-P", AT_ONCE, "-I{}", "-a"]
Argv = Callable[[str, str, Sequence[str]], "list[str]"]
"""The command line for a file, the file with the names of the hosts, and the hosts."""
PEERS: dict[str, Argv] = {
    "clush": lambda file, names, hosts: ["clush", "-f", AT_ONCE, "-w", ",".join(hosts), "-c", file, "--dest", INTO],
    "pdcp": lambda file, names, hosts: ["pdcp", "-R", "ssh", "-w", ",".join(hosts), file, INTO],
    "rsync": lambda file, names, hosts: [*LOOP, names, "rsync", "-q", file, f"{{}}:{INTO}/"],
    "scp": lambda file, names, hosts: [*LOOP, names, "scp", "-q", file, f"{{}}:{INTO}/"],
}
"""By the program that each needs."""


def sent_bytes(bed: Bed) -> int:
    """What the head has sent to the hosts since it was started."""
    text = bed.cluster.host_run(HEAD, ["cat", "/proc/self/net/dev"], capture_output=True, text=True).stdout
    (fields,) = [line.split(":")[1].split() for line in text.splitlines() if line.strip().startswith(f"{BRIDGE}:")]
    return int(fields[8])


_TIMES = counted(1_000_000_000)


def renew(file: Path, megabytes: int) -> None:
    """Other bytes, of another second: rsync passes over a file of the same size and second."""
    with open(file, "wb") as out:
        out.writelines(pages(megabytes))
    second = next(_TIMES)
    os.utime(file, (second, second))


def remove_copies(bed: Bed, hosts: Sequence[str], name: str) -> None:
    for host in hosts:
        bed.cluster.path(host, f"/root/{INTO}/{name}").unlink(missing_ok=True)


def measure(bed: Bed, hosts: Sequence[str], megabytes: int, peers: Sequence[str]) -> Iterator[tuple[str, Cost]]:
    """Each of the peers once, with a new file that no host has; ascendrun without a controller, with one, and with a
    file that is there."""
    file, names = bed.folder / "file", bed.folder / "names"
    names.write_text("".join(f"{host}\n" for host in hosts))
    timeout_s = TIMEOUT_S + len(hosts) * megabytes / SLOWEST_MB_PER_S

    def run(argv: Sequence[str], env: Mapping[str, str] | None = None, *, is_new: bool = True) -> Cost:
        if is_new:
            remove_copies(bed, hosts, file.name)
            renew(file, megabytes)
            os.sync()  # what earlier copies left to be written is nothing of this one
        return bed.measure(argv, env=env, timeout_s=timeout_s)

    for program in peers:
        if shutil.which(program):
            yield program, run(PEERS[program](str(file), str(names), hosts))
    ours = Ours(bed)
    copy = ours.argv("cp", "-H", str(ours.hostfile(hosts)), str(file), f"{fold_hosts(hosts)}:{INTO}")
    ours.stop_controller()
    for what in (COLD, WARM, THERE):
        yield what, run(copy, ours.environ(), is_new=what != THERE)
    ours.stop_controller()


def run(count: int, megabytes: int, repeats: int, sheet: Sheet, *, peers: Sequence[str], is_zram: bool) -> None:
    with ExitStack() as stack:
        if is_zram:
            store = stack.enter_context(ram_disk(1024 + count * megabytes * 5 // 4))
            bed = stack.enter_context(Bed(count, shares={str(store): STORE}))
        else:
            bed = stack.enter_context(Bed(count, disk=f"{64 + 4 * megabytes}m"))
        for host in bed.cluster.hosts:
            bed.cluster.host_run(host, ["mkdir", "-p", f"/root/{INTO}", f"{STORE}/{host}"], check=True)
            if is_zram:
                bed.cluster.host_run(host, ["mount", "--bind", f"{STORE}/{host}", f"/root/{INTO}"], check=True)
        for repeat in range(repeats):
            before = sent_bytes(bed)
            for what, cost in measure(bed, bed.cluster.hosts, megabytes, peers):
                before, sent = sent_bytes(bed), sent_bytes(bed) - before
                sheet.add(
                    hosts=count,
                    megabytes=megabytes,
                    what=what,
                    repeat=repeat,
                    wall_s=cost.wall_s,
                    head_cpu_s=cost.head_cpu_s,
                    hosts_cpu_s=cost.hosts_cpu_s,
                    copies=sent / (megabytes << 20),
                    status=cost.status,
                    load=f"{os.getloadavg()[0]:.1f}",
                    note=without_paths(cost.tail) if cost.status else "",
                )


def ratio(rows: Sequence[Row], count: int, column: str = "wall_s") -> float | None:
    """Return a cold `cp` by the best peer; `column`: "cpu" for head and hosts together."""

    def value(what: str) -> float | None:
        mine = [row for row in rows if row["what"] == what and row["hosts"] == str(count) and row["status"] == "0"]
        columns = ("head_cpu_s", "hosts_cpu_s") if column == "cpu" else (column,)
        found = [median(mine, one) for one in columns]
        return None if None in found else sum(one for one in found if one is not None)

    peers = [one for one in map(value, PEERS) if one is not None]
    ours = value(COLD)
    return None if ours is None or not peers else ours / min(peers)


def render(rows: Sequence[Row]) -> str:
    lines = []
    for count in sorted({int(row["hosts"]) for row in rows}):
        for what in (*PEERS, COLD, WARM, THERE):
            mine = [row for row in rows if row["what"] == what and row["hosts"] == str(count)]
            cells = [shown(median(mine, column)) for column in ("wall_s", "head_cpu_s", "hosts_cpu_s", "copies")]
            failed = sum(row["status"] != "0" for row in mine)
            lines += [[str(count), what, *cells, f"{failed} failed" if failed else ""]] if mine else []
    head = ["hosts", "", "wall, s", "CPU of the head, s", "CPU of all hosts, s", "copies that the head sent", ""]
    return table(head, lines)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--hosts", default="64,256", metavar="N,…")
    options.add_argument("--megabytes", type=int, default=USUAL_MB, metavar="N")
    options.add_argument("--peers", default=",".join(PEERS), metavar="NAME,…", help="only these of the peers")
    options.add_argument("--zram", action="store_true", help="the copies are on a disk in compressed memory")
    options.add_argument("--repeat", type=int, default=3, metavar="N")
    options.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    given = options.parse_args()
    peers = [name for name in PEERS if name in given.peers.split(",")]
    name = "files" if given.megabytes == USUAL_MB else f"files-{given.megabytes}"
    with Sheet(given.results, name, COLUMNS) as sheet:
        for count in map(int, given.hosts.split(",")):
            run(count, given.megabytes, given.repeat, sheet, peers=peers, is_zram=given.zram)
    chosen = "" if len(peers) == len(PEERS) else f" --peers {','.join(peers)}"
    size = f"--hosts {given.hosts} --megabytes {given.megabytes}{chosen}{' --zram' * given.zram}"
    disk = " The copies are on a compressed disk in memory, faster than a real one." * given.zram
    write_page(
        sheet,
        title="files: one file to many hosts",
        says=f"{given.megabytes} MB to virtual hosts of one machine, all from the head; clush, rsync "
        f"and scp run {AT_ONCE} at once. Medians. Each page of the file repeats a random word: no tool compresses. "
        "*Cold*: without a controller and agents; *file is there*: a second time; before the others no host has it. "
        "All hosts share the processors of the head, and no link is slow: where it is, the copies that the head sends "
        f"decide.{disk}",
        body=render(read_rows(sheet.path)),
        command=f"python -m benchmarks.files {size} --repeat {given.repeat}",
    )


if __name__ == "__main__":
    main()
