"""What `ps` shows of a program's way."""

from __future__ import annotations

from pathlib import Path

from ascendrun.cluster import newest_metrics
from ascendrun.core.job import Job, NodeProgress


def test_the_mark_of_the_end_does_not_hide_the_last_step(tmp_path: Path) -> None:
    node = NodeProgress(host="a", node_rank=0, ranks=(0,))
    job = Job(id="j-0001", name="n", run="h-j-0001", hosts=("a",), grace_s=1, start_s=1, created_at_s=0.0,
              nodes=(node,))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "rank-0.metrics.0").write_text('{"step": 7, "loss": 0.5}\n{"done": true}\n{"step": 8, "lo')
    assert newest_metrics(tmp_path, job) == {"step": 7, "loss": 0.5}
