"""Following a job waits no longer than its lines do."""

import math
import struct
import time
from pathlib import Path

from ascendrun.core.logs.log_view import LogView
from ascendrun.head.spool.spool_files import StreamFiles
from ascendrun.query.log_follow import JOB_POLL_S, LIVE_WINDOW_S, AttemptLogs, job_poll_s


def test_a_line_that_waits_for_other_ranks_states_how_long_and_others_do_not(tmp_path: Path) -> None:
    ranks = [StreamFiles(tmp_path / "n1", "n1", rank, "out", 1) for rank in (0, 1)]
    ranks[0].folder.mkdir()
    for rank in ranks:
        rank.path(0).touch()
    logs = AttemptLogs(tmp_path, 1, LogView())
    logs.expect_ranks(2)
    assert list(logs.new_lines()) == [] and logs.due_in_s() == math.inf
    write(ranks[0], b"step 1\n")
    assert list(logs.new_lines()) == []
    assert logs.due_in_s() < LIVE_WINDOW_S
    write(ranks[1], b"step 1\n")
    assert [line.ranks for line in logs.new_lines()] == [(0, 1)]
    assert logs.due_in_s() == math.inf


def write(rank: StreamFiles, data: bytes) -> None:
    rank.times_path(0).write_bytes(struct.pack(">QQ", len(data), time.time_ns()))
    rank.path(0).write_bytes(data)


def test_a_new_job_is_read_soon_and_an_old_or_running_one_seldom() -> None:
    shortest_s, longest_s = JOB_POLL_S
    assert job_poll_s(0, -5.0) == job_poll_s(0, 0.0) == shortest_s
    assert shortest_s < job_poll_s(0, 0.5) < longest_s
    assert job_poll_s(0, 3600.0) == job_poll_s(1, 0.1) == longest_s
