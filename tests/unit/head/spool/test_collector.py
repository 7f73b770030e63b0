"""The head's copy: exact bytes, once, whatever comes twice or too early; and its limits."""

import os
import random
from pathlib import Path

import pytest

from ascendrun.core.retention import Retention
from ascendrun.head.spool import collector
from ascendrun.head.spool.collector import NodeSpool, Pause, PullLimits, SpoolGapError, allocated_bytes
from ascendrun.node.agent.prune import release
from ascendrun.node.layout import attempt_dir
from tests.lib.vcluster.processes import await_true

CHUNK = 1 << 16


def test_bytes_that_come_twice_are_written_once(tmp_path: Path) -> None:
    spool = NodeSpool(tmp_path)
    spool.write("rank-0.out", 0, 0, b"hello ")
    spool.write("rank-0.out", 0, 0, b"hello world")
    spool.write("rank-0.out", 0, 3, b"lo")
    assert (tmp_path / "rank-0.out.0").read_bytes() == b"hello world"


def test_a_gap_is_refused_so_that_it_is_asked_for_again(tmp_path: Path) -> None:
    spool = NodeSpool(tmp_path)
    spool.write("rank-0.out", 0, 0, b"abc")
    with pytest.raises(SpoolGapError):
        spool.write("rank-0.out", 0, 4, b"e")
    assert spool.offsets() == {"rank-0.out": {"0": 3}}


def test_what_is_here_is_known_without_reading_the_directory_again(tmp_path: Path) -> None:
    NodeSpool(tmp_path).write("events", 1, 0, b'{"seq": 1}\n')
    spool = NodeSpool(tmp_path)
    assert spool.offsets() == {"events": {"1": 11}}
    spool.write("events", 1, 11, b'{"seq": 2}\n')
    spool.write("rank-0.out", 0, 0, b"abc")
    assert [event["seq"] for event in spool.new_events()] == [1, 2]
    os.rename(tmp_path, tmp_path.with_name("elsewhere"))
    assert spool.offsets() == {"events": {"1": 22}, "rank-0.out": {"0": 3}}


def test_a_file_that_somebody_removed_is_requested_from_its_start_and_is_not_safe(tmp_path: Path) -> None:
    spool = NodeSpool(tmp_path)
    spool.write("rank-0.out", 0, 0, b"abc")
    spool.write("rank-0.out", 1, 0, b"x")
    assert spool.safe_logs() == {"rank-0.out": {"0": 3}} and spool.offsets()["rank-0.out"]["0"] == 3
    (tmp_path / "rank-0.out.0").unlink()
    assert spool.safe_logs() == {}, "the node keeps it"
    with pytest.raises(SpoolGapError):
        spool.write("rank-0.out", 0, 3, b"de")
    assert spool.offsets() == {"rank-0.out": {"0": 0, "1": 1}}


@pytest.mark.parametrize("name", ["../../etc/passwd", "rank-0.out/../x", "state.db", "", "rank-0.out\n", "complete"])
def test_a_node_cannot_name_a_file_that_is_not_its_to_write(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError):
        NodeSpool(tmp_path / "node").write(name, 0, 0, b"x")
    assert list(tmp_path.iterdir()) == []


def test_a_symlink_planted_in_the_spool_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"")
    (tmp_path / "node").mkdir()
    (tmp_path / "node" / "rank-0.out.0").symlink_to(victim)
    with pytest.raises(OSError):
        NodeSpool(tmp_path / "node").write("rank-0.out", 0, 0, b"x")
    assert victim.read_bytes() == b""


def test_events_are_told_once_and_only_when_their_line_is_whole(tmp_path: Path) -> None:
    spool = NodeSpool(tmp_path)
    spool.write("events", 0, 0, b'{"seq": 1}\n{"se')
    assert spool.new_events() == [{"seq": 1}]
    assert spool.new_events() == []
    spool.write("events", 0, 15, b'q": 2}\n')
    assert spool.new_events() == [{"seq": 2}]
    assert NodeSpool(tmp_path).new_events() == [{"seq": 1}, {"seq": 2}]


@pytest.mark.parametrize("seed", range(4))
def test_events_are_told_once_however_their_bytes_arrive(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(f'{{"seq": {number}, "pad": "{"x" * rng.randrange(900)}"}}\n' for number in range(400)).encode()
    spool, have, told = NodeSpool(tmp_path), 0, []
    while have < len(text):
        start = max(0, have - rng.choice([0, 0, 700]))  # sent again after a lost connection
        end = min(len(text), have + rng.choice([1, 300, 5_000, 90_000]))
        spool.write("events", 0, start, text[start:end])
        have = end
        told += spool.new_events() if rng.random() < 0.5 else []
    told += spool.new_events()
    assert [event["seq"] for event in told] == list(range(400))


def test_a_copy_torn_and_resumed_at_random_equals_the_original(tmp_path: Path) -> None:
    rng = random.Random(7)
    original = rng.randbytes(50_000) if hasattr(rng, "randbytes") else bytes(rng.randrange(256) for _ in range(50_000))
    position = 0
    while position < len(original):
        spool = NodeSpool(tmp_path)  # a new controller each time
        have = int(spool.offsets().get("rank-3.err", {}).get("1", 0))
        start = max(0, have - rng.randrange(200))
        position = min(len(original), start + rng.randrange(1, 5000))
        spool.write("rank-3.err", 1, start, original[start:position])
    assert (tmp_path / "rank-3.err.1").read_bytes() == original
    assert NodeSpool(tmp_path).differs_from({"rank-3.err": {"1": len(original)}}) == ()
    assert NodeSpool(tmp_path).differs_from({"rank-3.err": {"1": 50_001}}) == ("rank-3.err.1",)


def test_only_generations_that_another_follows_are_given_up(tmp_path: Path) -> None:
    spool = NodeSpool(tmp_path)
    for generation in range(3):
        spool.write("rank-0.out", generation, 0, b"x")
        spool.write("rank-0.out.times", generation, 0, b"y" * 16)
    spool.write("rank-1.err", 4, 0, b"x")
    spool.write("rank-0.metrics", 0, 0, b"{}")
    assert spool.has_closed_logs()
    assert spool.safe_logs() == {"rank-0.out": {"0": 1, "1": 1}, "rank-0.out.times": {"0": 16, "1": 16}}


def test_a_node_gives_up_no_arrival_times_that_have_not_come(tmp_path: Path) -> None:
    node = Path(attempt_dir(str(tmp_path / "node"), "head-job.1"))
    node.mkdir(parents=True)
    spool = NodeSpool(tmp_path / "head")
    for generation in range(2):
        spool.write("rank-0.out", generation, 0, b"x")
        (node / f"rank-0.out.{generation}").write_bytes(b"x")
        (node / f"rank-0.out.times.{generation}").write_bytes(b"y" * 16)
    spool.write("rank-0.out.times", 0, 0, b"y" * 8)
    release(str(tmp_path / "node"), {"tag": "head-job.1", "have": spool.safe_logs(), "keep_bytes": 0})
    assert len(list(node.iterdir())) == 4


def test_nothing_is_given_up_before_a_second_generation_is_here(tmp_path: Path) -> None:
    spool = NodeSpool(tmp_path)
    spool.write("rank-0.out", 0, 0, b"x" * 100)
    assert not spool.has_closed_logs() and spool.safe_logs() == {}


def test_a_sparse_file_of_a_node_stays_sparse_and_ends_at_its_limit(tmp_path: Path) -> None:
    limits = Retention(pull_metrics_bytes=10 * CHUNK + 5).file_limits()
    spool = NodeSpool(tmp_path / "npu1", limits)
    for i in range(12):  # a node that does not keep the limit
        spool.write("rank-0.metrics", 0, i * CHUNK, b"\0" * CHUNK if i < 8 else b"x" * CHUNK)
    path = tmp_path / "npu1" / "rank-0.metrics.0"
    assert path.stat().st_size == 10 * CHUNK + 5
    assert path.read_bytes() == b"\0" * 8 * CHUNK + b"x" * (2 * CHUNK + 5)
    assert allocated_bytes(tmp_path) <= 4 * CHUNK
    sizes = {"rank-0.metrics": {"0": 12 * CHUNK}, "rank-0.out": {"0": 1}}
    assert spool.differs_from(sizes) == ("rank-0.out.0",)


def test_a_job_that_used_its_share_pauses_for_good_and_only_its_events_are_expected(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(collector, "LOOK_S", 0.0)
    limits = PullLimits(tmp_path / "j-0001", Retention(pull_job_bytes=CHUNK))
    assert not limits.look() and limits.pause is None
    spool = NodeSpool(tmp_path / "j-0001" / "attempt-1" / "npu1")
    spool.write("rank-0.out", 0, 0, os.urandom(CHUNK))
    assert await_true(limits.look, deadline_s=60) and limits.pause is Pause.JOB
    assert limits.of_files()["out"] == 0 and limits.of_files()["events"] > 0
    sizes = {"events": {"0": 10}, "rank-0.out": {"0": 1 << 40}}
    assert limits.expected(sizes) == {"events": {"0": 10}}
    os.unlink(tmp_path / "j-0001" / "attempt-1" / "npu1" / "rank-0.out.0")
    assert not limits.look() and limits.pause is Pause.JOB


def test_a_full_disk_pauses_until_twice_the_limit_is_free_and_everything_stays_expected(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(collector, "LOOK_S", 0.0)
    monkeypatch.setattr(collector, "SMALL_DISK", 1)
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    nearly, plenty = Retention(min_free_bytes=free + (64 << 20)), Retention(min_free_bytes=1)
    limits = PullLimits(tmp_path / "j-0001", nearly)
    assert limits.look() and limits.pause is Pause.DISK
    sizes = {"rank-0.out": {"0": 5}}
    assert limits.expected(sizes) == sizes and limits.of_files()["metrics"] == 0
    limits._retention = Retention(min_free_bytes=int(free * 0.75))
    assert not limits.look(), "not yet twice as much"
    limits._retention = plenty
    assert limits.look() and limits.pause is None and "out" not in limits.of_files()
