"""Metrics files of an attempt's spool: whole, their newest part, and as they grow."""

from __future__ import annotations

import json
from pathlib import Path

from ascendrun.head.spool.metrics_reader import TAIL_BYTES, MetricsTail, find_metrics, iter_lines, newest_values


def write(attempt: Path, host: str, rank: int, text: str, *, generation: int = 0) -> Path:
    (attempt / host).mkdir(parents=True, exist_ok=True)
    path = attempt / host / f"rank-{rank}.metrics.{generation}"
    with open(path, "a") as file:
        file.write(text)
    return path


def steps(first: int, last: int, **more: object) -> str:
    return "".join(json.dumps({"step": step, **more}) + "\n" for step in range(first, last + 1))


def read_metrics(attempt: Path, **choice: object) -> dict[int, list[int | None]]:
    return {rank: [line.step for line in iter_lines(paths)] for rank, paths in find_metrics(attempt, **choice).items()}


def test_an_attempt_of_which_nothing_came_has_no_lines(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "nowhere") == {}
    write(tmp_path, "a", 0, "")
    assert read_metrics(tmp_path) == {0: []}


def test_the_ranks_of_all_hosts_are_read_each_over_its_generations(tmp_path: Path) -> None:
    write(tmp_path, "a", 0, steps(1, 2), generation=9)
    write(tmp_path, "a", 0, steps(3, 4), generation=10)
    write(tmp_path, "b", 1, steps(1, 3))
    write(tmp_path, "b", 7, steps(1, 1))
    (tmp_path / "b" / "rank-1.metrics.tmp").write_text("{}")
    (tmp_path / "complete").write_text("")
    assert read_metrics(tmp_path, ranks=(0, 1)) == {0: [1, 2, 3, 4], 1: [1, 2, 3]}


def test_a_torn_line_costs_itself_only(tmp_path: Path) -> None:
    write(tmp_path, "a", 0, '{"step": 1}\n{"step": 2, "lo{"step": 3}\n\x00\x00\n{"step": 4}\n{"step": 5, "lo')
    assert read_metrics(tmp_path) == {0: [1, 4]}


def test_of_a_long_file_the_newest_part_is_read_and_no_half_line(tmp_path: Path) -> None:
    write(tmp_path, "a", 0, steps(1, 1000))
    write(tmp_path, "a", 0, steps(1001, 1010), generation=1)
    got = [line.step for line in iter_lines(find_metrics(tmp_path)[0], last_bytes=1000)]
    assert got[-1] == 1010 and 30 < len(got) < 80
    assert got == list(range(1010 - len(got) + 1, 1011))


def test_lines_longer_than_the_limit_are_passed_over_wherever_a_chunk_ends(tmp_path: Path) -> None:
    path = write(tmp_path, "a", 0, '{"step": 1}\n{"step": 2, "pad": "' + "x" * 3_000_000 + '"}\n{"step": 3}\n')
    assert [line.step for line in iter_lines([path])] == [1, 3]
    assert [line.step for line in iter_lines([path], last_bytes=2_000_000)] == [3]


def test_a_thinned_reading_keeps_what_cannot_be_guessed(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "a",
        0,
        steps(1, 10)
        + '{"event": "checkpoint", "step": 10}\n{"step": 11, "loss": NaN}\n'
        + '{"step": 11, "eval_loss": 2}\n'
        + steps(12, 30),
    )
    lines = list(iter_lines([path], every=10))
    assert [(line.step, line.event, line.diverged, bool(line.evals)) for line in lines] == [
        (10, None, False, False),
        (10, "checkpoint", False, False),
        (11, None, True, False),
        (11, None, False, True),
        (21, None, False, False),
    ]


def test_a_growing_file_gives_every_whole_line_once(tmp_path: Path) -> None:
    tail = MetricsTail(tmp_path)
    assert dict(tail.new_lines()) == {}
    write(tmp_path, "a", 0, '{"step": 1}\n{"st')
    assert [line.step for line in dict(tail.new_lines())[0]] == [1]
    assert dict(tail.new_lines()) == {}
    write(tmp_path, "a", 0, 'ep": 2}\n')
    write(tmp_path, "b", 1, steps(1, 2))
    assert {rank: [line.step for line in lines] for rank, lines in tail.new_lines()} == {0: [2], 1: [1, 2]}
    write(tmp_path, "a", 0, '{"step": 3}\n', generation=1)
    assert {rank: [line.step for line in lines] for rank, lines in tail.new_lines()} == {0: [3]}


def test_who_looks_rarely_gets_the_newest_lines_only(tmp_path: Path) -> None:
    tail = MetricsTail(tmp_path)
    write(tmp_path, "a", 0, steps(1, 60_000))
    first = [line.step for line in dict(tail.new_lines())[0]]
    assert first[-1] == 60_000 and len(first) < TAIL_BYTES / len('{"step": 60000}')
    assert first == list(range(60_000 - len(first) + 1, 60_001))


def test_a_line_that_never_ends_stops_nobody(tmp_path: Path) -> None:
    tail = MetricsTail(tmp_path)
    write(tmp_path, "a", 0, '{"pad": "' + "x" * (2 * TAIL_BYTES))
    assert dict(tail.new_lines()) == {}
    write(tmp_path, "a", 0, '"}\n{"step": 9}\n')
    assert [line.step for line in dict(tail.new_lines())[0]] == [9]


def test_the_mark_of_the_end_does_not_hide_the_last_step(tmp_path: Path) -> None:
    write(
        tmp_path,
        "a",
        0,
        '{"step": 7, "loss": 0.5}\n{"event": "checkpoint", "step": 7}\n{"event": "end"}\n'
        '{"done": true}\n{"step": 8, "lo',
    )
    assert newest_values(tmp_path, 0, host="a") == {"step": 7, "loss": 0.5}
    assert newest_values(tmp_path, 0, host="b") is None


def test_the_goal_told_at_the_start_stands_beside_the_last_step(tmp_path: Path) -> None:
    write(tmp_path, "a", 0, '{"event": "start", "total_steps": 50}\n' + steps(1, 3))
    assert newest_values(tmp_path, 0, host="a") == {"step": 3, "total_steps": 50}


def phase(name: str, state: str) -> str:
    return json.dumps({"event": "phase", "phase": name, "state": state}) + "\n"


def test_the_phase_is_told_while_it_lasts_also_before_the_first_step(tmp_path: Path) -> None:
    begun, ended = phase("data", "begin"), phase("data", "end")
    start = '{"event": "start", "total_steps": 50}\n'
    for text, newest in [
        (begun, {"phase": "data"}),
        (ended, None),
        (start, None),
        (steps(1, 3), {"step": 3, "total_steps": 50}),
        (phase("evaluation", "begin"), {"step": 3, "total_steps": 50, "phase": "evaluation"}),
        (phase("data", "begin"), {"step": 3, "total_steps": 50, "phase": "data"}),
        (phase("data", "end"), {"step": 3, "total_steps": 50, "phase": "evaluation"}),
        (phase("evaluation", "end"), {"step": 3, "total_steps": 50}),
        ('{"event": "phase", "phase": 5, "state": "begin"}\n', {"step": 3, "total_steps": 50}),
        (steps(4, 4), {"step": 4, "total_steps": 50}),
    ]:
        write(tmp_path, "a", 0, text)
        assert newest_values(tmp_path, 0, host="a") == newest, text


def test_links_out_of_the_spool_are_not_followed(tmp_path: Path) -> None:
    write(tmp_path / "elsewhere", "a", 0, steps(1, 1))
    (tmp_path / "attempt").mkdir()
    (tmp_path / "attempt" / "a").symlink_to(tmp_path / "elsewhere" / "a")
    assert find_metrics(tmp_path / "attempt") == {}
