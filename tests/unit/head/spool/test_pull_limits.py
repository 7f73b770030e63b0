"""What is copied from nodes has limits: of a file, of a job, and of the space that stays free on the head node."""

from __future__ import annotations

import os
from pathlib import Path

from ascendrun.core.retention import Retention
from ascendrun.head.spool import pull_limits
from ascendrun.head.spool.collector import NodeSpool
from ascendrun.head.spool.pull_limits import Pause, PullLimits, allocated_bytes

CHUNK = 1 << 16


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
    monkeypatch.setattr(pull_limits, "LOOK_S", 0.0)
    limits = PullLimits(tmp_path / "j-0001", Retention(pull_job_bytes=CHUNK))
    assert not limits.look() and limits.pause is None
    spool = NodeSpool(tmp_path / "j-0001" / "attempt-1" / "npu1")
    spool.write("rank-0.out", 0, 0, os.urandom(CHUNK))
    assert limits.look() and limits.pause is Pause.JOB
    assert limits.of_files()["out"] == 0 and limits.of_files()["events"] > 0
    sizes = {"events": {"0": 10}, "rank-0.out": {"0": 1 << 40}}
    assert limits.expected(sizes) == {"events": {"0": 10}}
    os.unlink(tmp_path / "j-0001" / "attempt-1" / "npu1" / "rank-0.out.0")
    assert not limits.look() and limits.pause is Pause.JOB


def test_a_full_disk_pauses_until_twice_the_limit_is_free_and_everything_stays_expected(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(pull_limits, "LOOK_S", 0.0)
    monkeypatch.setattr(pull_limits, "SMALL_DISK", 1)
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
