from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ascendrun.node import layout, procs
from ascendrun.node.layout import PULLED_FILE
from ascendrun.node.sampler import rank_metrics, sample
from ascendrun.node.sampler.rank_metrics import Leader, RankFigures
from ascendrun.node.sampler.sample import SPACE_CHECK_S, Leaders, SampleFile
from ascendrun.node.supervisor.sampler_process import ForkedRanks


def test_cpu_is_what_is_neither_idle_nor_waiting() -> None:
    text = "cpu  10 1 5 100 20 1 2 3 4 5\ncpu0 1 2 3\n"
    assert sample.parse_cpu(text) == (22, 142)
    assert sample.parse_cpu("") is None and sample.parse_cpu("intr 5") is None


def test_memory_that_could_be_had_is_not_used() -> None:
    assert sample.parse_memory("MemTotal: 100 kB\nMemFree: 1 kB\nMemAvailable: 60 kB\n") == (40960, 102400)
    assert sample.parse_memory("MemTotal: 100 kB\n") == (None, 102400)
    assert sample.parse_memory("") == (None, None)


def test_only_whole_disks_count() -> None:
    text = (
        "   8  0 sda 10 0 100 5 20 0 300 5 0 5 5\n   8  1 sda1 10 0 100 5 20 0 300 5 0 5 5\n"
        " 253  0 dm-0 1 0 7 5 1 0 9 5 0 5 5\n"
    )
    assert sample.parse_disks(text, frozenset({"sda"})) == (51200, 153600)
    assert sample.parse_disks(text, None) == (-1, -1)


def test_the_loopback_is_no_network() -> None:
    text = (
        "Inter-|   Receive\n face |bytes\n    lo: 500 1 0 0 0 0 0 0 500 1 0 0 0 0 0 0\n"
        "  no-such-if0: 70 1 0 0 0 0 0 0 30 1 0 0 0 0 0 0\nno-such-if1:5 1 0 0 0 0 0 0 6 1 0 0 0 0 0 0\n"
    )
    assert sample.parse_net(text) == (75, 36)


def test_the_first_look_has_no_rates_and_the_second_has(tmp_path: Path) -> None:
    figures = sample.HostFigures(str(tmp_path))
    assert figures.take(10.0)["net_rx_bytes_s"] is None
    second = figures.take(11.0)
    assert second["net_rx_bytes_s"] is not None and second["load1"] is not None
    assert figures.take(11.0)["net_rx_bytes_s"] is None, "no time has passed"


def test_a_folder_that_cannot_be_looked_at_has_no_free_bytes() -> None:
    assert sample.HostFigures("/no/such/folder").take(1.0)["disk_free_bytes"] is None


def test_a_process_is_read_whatever_its_name_is() -> None:
    line = (
        b"42 (a) b (c) R 7 42 42 0 -1 4194560 100 200 0 0 11 22 33 44 20 0 5 0 987654 1000 250 1844674407 "
        b"0 0 0 0 0 0 0 0 0 0 17 1 0 0\n"
    )
    stat = procs.Stat(line)
    assert (stat.pid, stat.state, stat.ppid, stat.cpu_ticks + stat.ended_ticks) == (42, "R", 7, 110)
    assert (stat.threads, stat.start) == (5, 987654)


def totals(at_s: float, **ticks: int) -> rank_metrics._Totals:
    """By pid: p1=100 is 100 ticks of a process that started at tick 0; q2: that started just now."""
    made = rank_metrics._Totals(at_s, boot_ticks=1000.0 * at_s)
    for name, value in ticks.items():
        start = 0 if name[0] == "p" else int(1000 * at_s) - 1
        made.add(
            procs.Stat(b"%d (x) R" % int(name[1:]) + b" 0" * 10 + b" %d" % value + b" 0" * 7 + b" %d" % start), None
        )
    return made


@pytest.mark.parametrize(
    "before, now, cpu",
    [
        ({"p1": 100}, {"p1": 150}, 50.0),
        ({"p1": 100, "p2": 500}, {"p1": 600}, 0.0),  # the second ended; its parent has its time now, nobody used any
        ({"p1": 100}, {"p1": 110, "p2": 9000}, 10.0),  # an old process, found only now
        ({"p1": 100}, {"p1": 110, "q2": 30}, 40.0),  # a new process
        ({"p1": 100, "p2": 500}, {"p1": 100}, 0.0),  # the second was adopted away with all its time
    ],
)
def test_a_ranks_cpu_is_that_of_its_family_without_counting_twice(before, now, cpu) -> None:
    ticks = rank_metrics.procs.TICKS_PER_S
    scaled = [{name: value * ticks // 100 for name, value in one.items()} for one in (before, now)]
    assert totals(11.0, **scaled[1]).since(totals(10.0, **scaled[0]))[0] == cpu
    assert totals(11.0, **scaled[1]).since(None) == (None, None, None)


def test_what_may_not_be_read_is_not_known() -> None:
    assert rank_metrics.read_io(0) is None and rank_metrics.read_memory(0) is None
    assert procs.read_stat(0) is None
    assert procs.read_stat(os.getpid()) is not None


@pytest.mark.parametrize(
    "environ, world",
    [
        (b"WORLD_SIZE=2\0LOCAL_WORLD_SIZE=2", 2),
        (b"WORLD_SIZE=4\0LOCAL_WORLD_SIZE=2", None),
        (b"WORLD_SIZE=8\0LOCAL_SIZE=8\0LOCAL_WORLD_SIZE=1", 8),
        (b"WORLD_SIZE=16\0LOCAL_SIZE=8\0LOCAL_WORLD_SIZE=1", None),
        (b"WORLD_SIZE=2", None),
        (b"WORLD_SIZE=x\0LOCAL_WORLD_SIZE=2", None),
        (b"", None),
    ],
)
def test_a_world_of_one_node_is_seen_in_the_environment(environ: bytes, world: int | None) -> None:
    assert rank_metrics.own_world(environ) == world


@pytest.mark.parametrize("world, may_launch, expected", [("2", True, 2), ("2", False, None), ("4", True, None)])
def test_the_ranks_of_a_launcher_below_a_rank_show_their_world(
    world: str, may_launch: bool, expected: int | None
) -> None:
    env = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": "2", "RANK": "0"}
    process = subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=env)
    try:
        while not procs.read_environ(process.pid):  # empty for a moment after `exec`, as in the kernel
            time.sleep(0.001)
        found = procs.read_stat(process.pid)
        assert found is not None
        leader = Leader(process.pid, found.start, 0, 0, may_launch=may_launch)
        figures = RankFigures(lambda: [leader], group=None, devices=None)
        figures.take(time.monotonic())
        assert figures.own_world == expected
    finally:
        process.communicate()


@pytest.mark.parametrize(
    "environ, expected",
    [
        (b"RANK=3\0LOCAL_RANK=1", (3, 1)),
        (b"HOME=/\0", (None, None)),
        (b"RANK=1\0WORLD_SIZE=2\0LOCAL_WORLD_SIZE=1\0LOCAL_RANK=0\0ASCENDRUN_FORKS=1 2 1\0", (None, None)),
        (b"RANK=1\0WORLD_SIZE=4\0LOCAL_WORLD_SIZE=2\0LOCAL_RANK=1\0ASCENDRUN_FORKS=1 2 1\0", (1, 1)),
    ],
)
def test_a_rank_is_known_by_its_own_variables(environ: bytes, expected: tuple[int | None, int | None]) -> None:
    assert layout.rank_in(environ) == expected


@pytest.mark.parametrize("child_world, expected", [("4", [2]), ("2", [1])])
def test_the_process_that_forks_ranks_is_a_rank_only_without_them(child_world: str, expected: list[int]) -> None:
    env = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "ASCENDRUN_FORKS": "1 2 1"}
    rank = "2" if child_world == "4" else "1"
    command = ["/bin/sh", "-c", f"RANK={rank} WORLD_SIZE={child_world} /bin/cat; exit"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
    try:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"x")
        process.stdin.flush()
        assert os.read(process.stdout.fileno(), 1) == b"x"  # cat has its environment
        found = procs.read_stat(process.pid)
        assert found is not None
        leader = Leader(process.pid, found.start, 1, 0, forks=True)
        rows = RankFigures(lambda: [leader], group=None, devices=None).take(time.monotonic())
        assert [row["rank"] for row in rows] == expected
    finally:
        process.communicate()


def start_of(pid: int) -> tuple[int, int]:
    found = procs.read_stat(pid)
    assert found is not None
    return pid, found.start


class Records(list[tuple[str, dict[str, Any]]]):
    def __call__(self, event: str, values: dict[str, Any]) -> None:
        self.append((event, values))

    def ends(self) -> dict[int, tuple[int | None, int | None]]:
        return {row["rank"]: (row["code"], row["signal"]) for event, row in self if event == "forked_rank_exited"}


def test_ranks_that_a_script_forks_end_with_their_code_or_signal() -> None:
    """The parent is another process, which fetches the exit status as soon as it looks for it."""
    launcher = (
        "import os, subprocess, sys, time\n"
        "start = lambda end: subprocess.Popen(['/bin/sh', '-c', f'read x; {end}'], stdin=subprocess.PIPE)\n"
        "ranks = list(map(start, sys.argv[1:]))\n"
        "print(*(rank.pid for rank in ranks), flush=True)\n"
        "sys.stdin.readline()\n"
        "for rank in ranks: rank.stdin.close()\n"
        "sys.stdin.readline()\n"
        "for rank in ranks: rank.wait()\n"
    )
    command = [sys.executable, "-c", launcher, "exit 0", "exit 7", "kill -9 $$"]
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdin is not None and parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    poll, records = select.poll(), Records()
    forked = ForkedRanks(records, poll)
    for rank, pid in [*enumerate(pids), *enumerate(pids)]:
        forked.add(rank, *start_of(pid))
    assert records == [("forked_rank_started", {"rank": rank, "pid": pid}) for rank, pid in enumerate(pids)]
    parent.stdin.write("\n")
    parent.stdin.flush()
    deadline_s = time.monotonic() + 30.0
    while len(records.ends()) < 3:
        assert time.monotonic() < deadline_s, records
        assert all(forked.handle(fd) for fd, _ in poll.poll(1000))
    parent.communicate("\n")
    assert records.ends() == {0: (0, None), 1: (7, None), 2: (None, 9)} and poll.poll(0) == []


def test_a_rank_whose_exit_was_missed_has_ended_without_a_code() -> None:
    process = subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE)
    records = Records()
    forked = ForkedRanks(records, select.poll())
    forked.add(3, *start_of(process.pid))
    process.communicate()
    forked.check()
    assert records.ends() == {3: (None, None)}
    assert not forked.handle(0)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_generations_are_whole_lines_and_the_oldest_go(tmp_path: Path) -> None:
    file = SampleFile(str(tmp_path), limit=100, keep=3)
    for number in range(40):
        file.write({"number": number, "pad": "x" * 20}, 0.0)
    kept = sorted(tmp_path.iterdir(), key=lambda path: int(path.suffix[1:]))
    assert len(kept) <= 3 and all(PULLED_FILE.match(path.name) for path in kept)
    numbers = [json.loads(line)["number"] for path in kept for line in path.read_text().splitlines()]
    assert numbers == list(range(numbers[0], 40)), "what is left is whole and the newest"


def test_a_disk_without_space_costs_samples_until_there_is_space_again(tmp_path: Path, monkeypatch) -> None:
    free = {"bytes": 1 << 20}
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((1, 1, 0, 0, free["bytes"], 0, 0, 0, 0, 255)))
    file = SampleFile(str(tmp_path))
    file.write({"a": 1}, 0.0)
    assert names(tmp_path) == []
    free["bytes"] = 1 << 30
    file.write({"a": 2}, SPACE_CHECK_S / 2)
    assert names(tmp_path) == [], "nobody asks the disk at each line"
    file.write({"a": 3}, SPACE_CHECK_S)
    assert (tmp_path / "samples.0").read_text() == '{"a":3}\n'


CONNECTS = """
import os, socket, sys, time
rank, port, grouped = int(os.environ["RANK"]), int(sys.argv[1]), sys.argv[2] == "grouped"
if rank == 0:
    store = socket.create_server(("127.0.0.1", port))
print("ready", flush=True)
sys.stdin.readline()
ends = [socket.create_connection(("127.0.0.1", port)) for _ in range(grouped or rank == 0)]
ends += [store.accept()[0] for _ in range(2 if grouped else 1)] if rank == 0 else []
print("done", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("kind, world, alone", [("grouped", "2", False), ("apart", "2", True), ("grouped", "1", None)])
def test_ranks_of_one_training_are_connected_and_those_of_two_are_not(kind, world, alone) -> None:
    """As Lightning with a world size of 1: each rank has a store, to which only itself connects."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", CONNECTS, port, kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": world},
        )
        for rank in range(2)
    ]
    try:
        for word in ("ready", "done"):
            assert {rank.stdout.readline() for rank in ranks} == {f"{word}\n"}
            if word == "ready":
                for rank in ranks:
                    rank.stdin.write("go\n")
                    rank.stdin.flush()
        leaders = [Leader(one.pid, procs.read_stat(one.pid).start, rank, rank) for rank, one in enumerate(ranks)]
        figures = RankFigures(lambda: leaders, group=None, devices=None)
        figures.take(time.monotonic())
        assert figures.is_alone is alone
    finally:
        for rank in ranks:
            rank.communicate("end\n")


def test_ranks_that_a_launcher_starts_late_are_found_when_they_start(tmp_path: Path) -> None:
    """torchrun imports torch for longer than a sampler needs to start."""
    plans = [{"rank": rank, "local_rank": rank, "env": {}} for rank in range(2)]
    leaders = Leaders(str(tmp_path), {"ranks": plans})
    found = []
    for seq, rank in enumerate((-1, 0, 1)):
        with open(tmp_path / "events.0", "a") as file:
            print(json.dumps({"seq": seq, "event": "rank_started", "rank": rank, "pid": 7, "start": 8}), file=file)
        found.append([leader.rank for leader in leaders()])
    assert found == [[], [0], [0, 1]]
