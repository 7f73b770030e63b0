"""The head's copy: exact bytes, once, whatever comes twice or too early."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from ascendrun.head.spool.collector import NodeSpool, SpoolGapError
from ascendrun.node.agent.prune import release
from ascendrun.node.layout import attempt_dir


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
