"""The keeper of samples over a real store: pieces in any cut, crashes, a store that takes nothing."""

import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable

import psutil
import pytest

from ascendrun.core.samples import DeviceDetail, Newest
from ascendrun.head.spool import sample_ingest
from ascendrun.head.spool.sample_ingest import SampleIngest, Source
from ascendrun.head.state.sample_store import SampleStore
from ascendrun.node.sampler.sample import GENERATIONS
from tests.lib.vcluster.processes import await_that
from tests.lib.web_service import DEADLINE_S

T = int(time.time()) - 2500
"""Samples of this time are kept as they were measured, for two hours."""
SOURCE = Source("head-job.1", "a1", "j-0001", 1, 5.0)


def line(number: int) -> bytes:
    host = {"cpu": float(number % 100)}
    return (
        json.dumps({"at_ns": (T + number) * 10**9, "host": host, "ranks": [{"rank": 0, "cpu": 1.0}]}).encode() + b"\n"
    )


def lines(count: int, first: int = 0) -> bytes:
    return b"".join(line(number) for number in range(first, first + count))


def details(state_dir: Path, *, since_s: float) -> tuple[DeviceDetail, ...]:
    with SampleStore.open_for_reading(state_dir) as store:
        return store.details(since_s=since_s)


def seconds_in(state_dir: Path) -> list[int]:
    """The seconds for which the store has a sample of the host, in order, each as often as it is there."""
    with SampleStore.open_for_reading(state_dir) as store:
        return [int(sample.at_s) - T for sample in store.host_series(since_s=0, until_s=2 * T)]


@pytest.fixture
def keepers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], SampleIngest]]:
    monkeypatch.setattr(sample_ingest, "CLOSE_S", DEADLINE_S)  # its process may take long to start
    with ExitStack() as made:

        def make() -> SampleIngest:
            keeper = made.enter_context(closing(SampleIngest(tmp_path)))
            keeper.start()
            return keeper

        yield make


def test_pieces_cut_anywhere_and_sent_twice_give_every_line_once(keepers: Any, tmp_path: Path) -> None:
    keeper, data = keepers(), lines(50)
    for start in range(0, len(data), 37):
        assert keeper.take(SOURCE, 0, max(0, start - 20), data[max(0, start - 20) : start + 37], ahead_s=0.0)
    assert keeper.take(SOURCE, 0, 0, data, ahead_s=0.0), "all of it once more"
    assert keeper.offsets(SOURCE) == {"0": len(data)}
    await_that(lambda: seconds_in(tmp_path) == list(range(50)))


def test_hosts_that_train_separately_are_reported_once_for_each_attempt(tmp_path: Path) -> None:
    found: list[tuple[str, int, int]] = []
    keeper = SampleIngest(tmp_path, separate=lambda source, world: found.append((source.host, source.attempt, world)))
    keeper.start()
    again = Source("head-job.2", "a1", "j-0001", 2, 5.0)
    for source, worlds in ((SOURCE, [None, -1, "2", 10**9, 2, 2]), (again, [4])):
        data = b"".join(
            json.dumps({"at_ns": (T + n) * 10**9, "ranks": [], "own_world": world}).encode() + b"\n"
            for n, world in enumerate(worlds)
        )
        assert keeper.take(source, 0, 0, data, ahead_s=0.0)
    await_that(lambda: len(found) == 2)
    keeper.close()
    assert found == [("a1", 1, 2), ("a1", 2, 4)]


def test_a_rank_without_connections_is_reported_at_each_change(tmp_path: Path) -> None:
    found: list[tuple[int, bool]] = []
    keeper = SampleIngest(tmp_path, alone=lambda source, is_alone: found.append((source.attempt, is_alone)))
    keeper.start()
    rows = [{}, {"is_alone": True}, {"is_alone": 1}, {"is_alone": True}, {"is_alone": False}, {}]
    data = b"".join(json.dumps({"at_ns": T * 10**9, "ranks": [], **row}).encode() + b"\n" for row in rows)
    assert keeper.take(SOURCE, 0, 0, data, ahead_s=0.0)
    await_that(lambda: len(found) == 2)
    keeper.close()
    assert found == [(1, True), (1, False)]


def test_what_is_remembered_of_a_file_does_not_grow_with_its_generations(keepers: Any, tmp_path: Path) -> None:
    keeper = keepers()
    for generation in range(200):
        assert keeper.take(SOURCE, generation, 0, line(generation), ahead_s=0.0)
    await_that(lambda: seconds_in(tmp_path) == list(range(200)))
    with sqlite3.connect(tmp_path / "samples.db") as db:
        in_store = [row[0] for row in db.execute("SELECT generation FROM progress ORDER BY generation")]
    assert sorted(map(int, keeper.offsets(SOURCE))) == in_store == list(range(200 - 2 * GENERATIONS, 200))
    assert not keeper.lacks(SOURCE, {"199": len(line(199)), "198": len(line(198))})


def test_a_hole_is_refused_and_nothing_behind_it_is_taken(keepers: Any, tmp_path: Path) -> None:
    keeper = keepers()
    assert not keeper.take(SOURCE, 0, 10, b"x", ahead_s=0.0)
    assert keeper.offsets(SOURCE) == {} and keeper.lacks(SOURCE, {"0": 1}) and not keeper.lacks(SOURCE, {"0": 0})


def test_a_half_line_at_the_end_is_asked_for_again_by_the_next_controller(keepers: Any, tmp_path: Path) -> None:
    first, data = keepers(), lines(3)
    assert first.take(SOURCE, 0, 0, data + b'{"at_ns": 17', ahead_s=0.0)
    first.close()
    second = keepers()
    assert second.offsets(SOURCE) == {"0": len(data)}
    assert second.take(SOURCE, 0, len(data), lines(2, first=3), ahead_s=0.0)
    second.close()
    assert seconds_in(tmp_path) == list(range(5))


def test_generations_follow_each_other(keepers: Any, tmp_path: Path) -> None:
    keeper = keepers()
    for generation in range(3):
        assert keeper.take(SOURCE, generation, 0, lines(2, first=2 * generation), ahead_s=0.0)
    keeper.close()
    assert seconds_in(tmp_path) == list(range(6))


def test_a_hosts_clock_is_taken_off(keepers: Any, tmp_path: Path) -> None:
    keeper = keepers()
    assert keeper.take(SOURCE, 0, 0, lines(1, first=90), ahead_s=90.0)
    keeper.close()
    assert seconds_in(tmp_path) == [0]


def test_lines_that_are_none_cost_nothing_but_themselves(keepers: Any, tmp_path: Path) -> None:
    keeper = keepers()
    strange = b'\0\xff\n[1,2]\n{"at_ns": 1e400}\n' + b"[" * 100_000 + b"\n"
    strange += b'{"at_ns": 5, "tool": "\\ud800", "text": "\\ud800"}\n\n'
    assert keeper.take(SOURCE, 0, 0, strange + lines(2), ahead_s=0.0)
    keeper.close()
    assert seconds_in(tmp_path) == [0, 1]


def test_a_line_that_our_reader_stumbles_over_is_kept_raw_and_told_and_costs_no_other(
    keepers: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    keeper, answers = keepers(), []
    stumble = {"at_ns": T * 10**9, "tool": "npu-ports", "code": 0, "text": f"@@ stat {'9' * 5000}\nnothing\n@@= 0\n"}
    both = line(0) + json.dumps(stumble).encode() + b"\n" + line(1)
    assert keeper.take(SOURCE, 0, 0, both + json.dumps(stumble).encode() + b"\n", ahead_s=0.0)
    keeper.take_lines("b2", [stumble, {"at_ns": T * 10**9, "host": {"cpu": 5.0}}], ahead_s=0.0, done=answers.append)
    await_that(lambda: answers)
    newest: Newest = answers[0]
    keeper.close()
    assert [one.cpu for one in newest.hosts] == [5.0] and seconds_in(tmp_path) == [0, 0, 1]
    store = SampleStore.open(tmp_path)
    assert store.all_progress()[SOURCE.name] == {0: len(both) + len(json.dumps(stumble)) + 1}
    raw, asked = (store.raw(hosts=[host], tool="sampler") for host in ("a1", "b2"))
    store.close()
    assert json.loads(raw[-1].text) == stumble and raw[-1].why.startswith("reading it failed: ValueError")
    assert [json.loads(one.text) for one in asked] == [stumble], "kept once, though it is read twice"
    told = [one for one in capfd.readouterr().err.splitlines() if "could not be read" in one]
    assert ["of a1" in one for one in told] == [True, False]  # once a host


def test_of_what_is_said_beyond_figures_the_newest_is_kept(keepers: Any, tmp_path: Path) -> None:
    assert details(tmp_path, since_s=0) == ()
    said = (Path(__file__).parents[3] / "recordings/ascend/npu_smi_info/L1-910B3-busy.txt").read_text()
    keeper, data = keepers(), b""
    for second in (0, 40):
        data += json.dumps({"at_ns": (T + second) * 10**9, "tool": "npu-smi", "code": 0, "text": said}).encode() + b"\n"
    assert keeper.take(SOURCE, 0, 0, data, ahead_s=0.0)
    keeper.close()
    found = details(tmp_path, since_s=0)
    assert len(found) >= 2 and {one.at_s for one in found} == {T + 40.0} and found[0].bus_id
    assert any(one.processes for one in found) and details(tmp_path, since_s=T + 41) == ()


def test_what_was_received_is_not_asked_for_again_after_the_attempt(keepers: Any, tmp_path: Path) -> None:
    keeper = keepers()
    assert keeper.take(SOURCE, 0, 0, lines(2), ahead_s=0.0)
    keeper.finish(SOURCE)
    keeper.close()
    store = SampleStore.open(tmp_path)
    assert store.all_progress() == {} and len(store.host_series(since_s=0, until_s=2 * T)) == 2
    store.close()


def test_a_host_without_a_job_is_answered_and_kept(keepers: Any, tmp_path: Path) -> None:
    keeper, answers = keepers(), []
    keeper.take_lines("b2", [{"at_ns": T * 10**9, "host": {"cpu": 5.0}}, "nonsense"], ahead_s=0.0, done=answers.append)
    await_that(lambda: answers)
    newest: Newest = answers[0]
    assert [(one.host, one.cpu) for one in newest.hosts] == [("b2", 5.0)]
    await_that(lambda: seconds_in(tmp_path) == [0])


def test_what_it_writes_is_private_whatever_the_umask(keepers: Any, tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        assert keepers().take(SOURCE, 0, 0, lines(2), ahead_s=0.0)
        await_that(lambda: seconds_in(tmp_path) == [0, 1])
    finally:
        os.umask(before)
    assert not [path.name for path in tmp_path.iterdir() if path.stat().st_mode & 0o077]


# Bad days

KILLED = """
import sys, pathlib, time
from ascendrun.head.spool.sample_ingest import SampleIngest, Source
keeper = SampleIngest(pathlib.Path(sys.argv[1]))
keeper.start()
assert keeper.take(Source("head-job.1", "a1", "j-0001", 1, 5.0), 0, 0, sys.stdin.buffer.read(), ahead_s=0.0)
while True:
    time.sleep(1)
"""


def test_a_controller_that_is_killed_leaves_no_process_and_loses_nothing(keepers: Any, tmp_path: Path) -> None:
    data = lines(2000)
    killed = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdin=subprocess.PIPE)
    assert killed.stdin is not None
    killed.stdin.write(data[:-2000])
    killed.stdin.close()
    await_that(lambda: psutil.Process(killed.pid).children())
    (writer,) = psutil.Process(killed.pid).children()
    killed.kill()
    killed.wait()
    keeper = keepers()
    await_that(lambda: feed(keeper, data) and seconds_in(tmp_path) == list(range(2000)))
    await_that(lambda: not writer.is_running())


@pytest.mark.parametrize("failpoint", ["samples.before_add", "samples.after_add"])
def test_killed_around_the_commit_every_line_still_counts_once(
    keepers: Any,
    tmp_path: Path,
    quick_retries: None,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    failpoint: str,
) -> None:
    monkeypatch.setenv("ASCENDRUN_FAILPOINT", f"{failpoint}:2=kill")
    keeper, data = keepers(), lines(2000)
    assert keeper.take(SOURCE, 0, 0, data[:50_000], ahead_s=0.0)
    await_that(lambda: seconds_in(tmp_path))
    monkeypatch.delenv("ASCENDRUN_FAILPOINT")
    assert keeper.take(SOURCE, 0, 50_000, data[50_000:100_000], ahead_s=0.0)
    await_that(lambda: feed(keeper, data) and seconds_in(tmp_path) == list(range(2000)))
    assert "no samples are kept for now" in capfd.readouterr().err


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_ingest, "RETRY_S", 0.05)


@pytest.fixture
def patient_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store waits for a lock longer than any stall of the machine."""
    monkeypatch.setattr(SampleStore, "BUSY_S", 2 * DEADLINE_S)


@contextmanager
def locked(state_dir: Path, *pragmas: str) -> Iterator[None]:
    """The store, held by another process for less than it is waited for."""
    holder = sqlite3.connect(state_dir / "samples.db", isolation_level=None)
    for statement in (*pragmas, "BEGIN EXCLUSIVE"):
        holder.execute(statement)
    began = time.monotonic()
    yield
    assert time.monotonic() - began < SampleStore.BUSY_S
    holder.execute("ROLLBACK")
    holder.close()


def feed(keeper: SampleIngest, data: bytes) -> bool:
    """As a follow does: from where the keeper stands, to the end."""
    place = keeper.offsets(SOURCE).get("0", 0)
    return keeper.take(SOURCE, 0, place, data[place:], ahead_s=0.0)


def test_a_broken_file_is_said_once_and_replaced(
    keepers: Any, tmp_path: Path, quick_retries: None, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "samples.db").write_bytes(b"nonsense" * 1000)
    keeper, data = keepers(), lines(20)
    await_that(lambda: feed(keeper, data) and any(tmp_path.glob("damaged/*/samples.db")))
    await_that(lambda: feed(keeper, data) and seconds_in(tmp_path) == list(range(20)))
    assert [path.read_bytes()[:8] for path in tmp_path.glob("damaged/*/samples.db")] == [b"nonsense"]
    said = capfd.readouterr().err
    assert said.count("no samples are kept for now") == 1
    assert said.count("samples are kept again") == 1


def test_a_locked_store_keeps_nobody_waiting(keepers: Any, tmp_path: Path, patient_store: None) -> None:
    keeper = keepers()
    await_that(lambda: feed(keeper, lines(1)) and seconds_in(tmp_path) == [0])
    with locked(tmp_path):
        for count in range(2, 200):
            assert feed(keeper, lines(count))
    await_that(lambda: feed(keeper, lines(200)) and seconds_in(tmp_path) == list(range(200)))


def test_a_store_that_is_locked_at_the_start_delays_no_controller(
    keepers: Any, tmp_path: Path, patient_store: None
) -> None:
    first = keepers()
    assert feed(first, lines(3))
    first.close()
    with locked(tmp_path, "PRAGMA locking_mode = EXCLUSIVE"):
        second = keepers()
        assert feed(second, lines(5)), "from the start, since nobody could say how far the first one was"
    await_that(lambda: feed(second, lines(6)) and seconds_in(tmp_path) == list(range(6)))


def test_what_waits_is_limited_also_if_pieces_become_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_ingest, "MOST_WAITING_BYTES", 1000)
    keeper, other = SampleIngest(tmp_path), replace(SOURCE, host="n2")  # not started: it passes nothing on
    assert keeper.take(SOURCE, 0, 0, b"x" * 900, ahead_s=0.0)
    assert keeper.take(SOURCE, 0, 900, b"x" * 100, ahead_s=0.0)
    assert not keeper.take(SOURCE, 0, 1000, b"x", ahead_s=0.0), "no more waits, however short"
    assert keeper.take(other, 0, 0, b"x" * 5000, ahead_s=0.0), "one piece of each source"
    assert not keeper.take(other, 0, 5000, b"x", ahead_s=0.0)


def test_more_than_fits_into_memory_is_refused_and_comes_later(
    keepers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_ingest, "MOST_WAITING_BYTES", 1000)
    keeper, data = keepers(), lines(500)
    place, refused = 0, 0
    until = time.monotonic() + DEADLINE_S
    while place < len(data):
        assert time.monotonic() < until
        if keeper.take(SOURCE, 0, place, data[place : place + 600], ahead_s=0.0):
            place += 600
        else:
            refused += 1
            time.sleep(0.01)
    assert refused
    keeper.close()
    assert seconds_in(tmp_path) == list(range(500))
