"""Progress of programs without a metrics file: from the stored output of the first or the last rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from ascendrun.cli.output import describe_progress
from ascendrun.head.spool.metrics_reader import find_progress, iter_lines, newest_progress, read_first_rank
from ascendrun.head.spool.output_progress import HEAD_BYTES, TAIL_BYTES
from ascendrun.head.spool.spool_files import TIME_RECORD

BEGAN_S = 1_790_000_000.0


def spool(attempt: Path, name: str, pieces: list[tuple[float, str]], *, host: str = "a", generation: int = 0) -> Path:
    """Write a stream as a supervisor does: its bytes, and when each piece of them arrived, in seconds after BEGAN_S."""
    folder = attempt / host
    folder.mkdir(parents=True, exist_ok=True)
    data, times = b"", b""
    for at_s, text in pieces:
        data += text.encode()
        times += TIME_RECORD.pack(len(data), int((BEGAN_S + at_s) * 1e9))
    (folder / f"{name}.{generation}").write_bytes(data)
    (folder / f"{name}.times.{generation}").write_bytes(times)
    return folder / f"{name}.{generation}"


def bar(step: int, total: int = 40) -> str:
    return f"\r {100 * step // total:3d}%|██        | {step}/{total} [00:0{step % 10}<00:10,  1.10it/s]"


def logged(loss: float) -> str:
    return f"{{'loss': {loss}, 'grad_norm': 1.5, 'learning_rate': 5e-05, 'epoch': 0.5}}\n"


def read(attempt: Path) -> list[tuple[int | None, float | None, float | None]]:
    lines = [line for paths in find_progress(attempt).values() for line in iter_lines(paths)]
    return [(line.step, line.loss, None if line.at_s is None else round(line.at_s - BEGAN_S, 3)) for line in lines]


def test_a_dictionary_on_standard_output_has_the_step_of_the_bar_on_standard_error(tmp_path: Path) -> None:
    spool(tmp_path, "rank-0.out", [(5.0, logged(2.5)), (10.0, logged(2.0))])
    spool(tmp_path, "rank-0.err", [(1.0, bar(1)), (4.0, bar(4)), (5.0005, bar(5)), (9.0, bar(9)), (10.0005, bar(10))])
    found = [(step, loss) for step, loss, _ in read(tmp_path) if loss is not None]
    assert found == [(5, 2.5), (10, 2.0)]
    assert [step for step, _, _ in read(tmp_path)][:2] == [1, 4]
    values = newest_progress(tmp_path, host="a")
    assert values is not None and (values["step"], values["total_steps"], values["loss"]) == (10, 40, 2.0)


def test_the_node_may_read_the_bar_before_the_dictionary(tmp_path: Path) -> None:
    spool(tmp_path, "rank-0.out", [(5.001, logged(2.5)), (6.0, "saving\n")])
    spool(tmp_path, "rank-0.err", [(4.0, bar(4)), (5.0, bar(5) + bar(5)), (6.0, bar(6))])
    assert [(step, loss) for step, loss, _ in read(tmp_path) if loss is not None] == [(5, 2.5)]


def test_steps_have_the_time_at_which_their_line_arrived(tmp_path: Path) -> None:
    spool(tmp_path, "rank-0.out", [(3.0, "iter 10: loss 3.5, time 90ms\n"), (7.5, "iter 20: loss 3.25\n")])
    assert read(tmp_path) == [(10, 3.5, 3.0), (20, 3.25, 7.5)]


def test_output_without_its_times_has_steps_without_times(tmp_path: Path) -> None:
    spool(tmp_path, "rank-0.out", [(3.0, "iter 10: loss 3.5\n")])
    (tmp_path / "a" / "rank-0.out.times.0").unlink()
    assert read(tmp_path) == [(10, 3.5, None)]


def test_the_last_rank_is_read_where_the_first_prints_no_step(tmp_path: Path) -> None:
    line = " iteration {}/ 500 | consumed samples: 8 | elapsed time per iteration (ms): 500.0 | lm loss: 2.5E+00 |\n"
    spool(tmp_path, "rank-0.out", [(1.0, "building the dataset\n")])
    spool(tmp_path, "rank-3.out", [(1.0, "building the dataset\n")])
    spool(tmp_path, "rank-15.out", [(2.0, line.format(7)), (3.0, line.format(8))], host="b")
    values = newest_progress(tmp_path, host="a")
    assert values is not None and (values["step"], values["total_steps"], values["loss"]) == (8, 500, 2.5)
    assert [(line.step, line.step_s) for line in read_first_rank(tmp_path)[0]] == [(7, 0.5), (8, 0.5)]
    assert set(find_progress(tmp_path)) == {0, 15} and set(find_progress(tmp_path, ranks=[15])) == {15}


def test_metrics_of_any_rank_are_used_instead_of_output(tmp_path: Path) -> None:
    spool(tmp_path, "rank-0.out", [(1.0, "iter 10: loss 3.5\n")])
    (tmp_path / "a" / "rank-1.metrics.0").write_text('{"step": 4, "loss": 1.5}\n')
    assert read(tmp_path) == [(4, 1.5, None)]
    assert newest_progress(tmp_path, host="a") is None


def test_a_line_that_is_still_being_written_is_not_read(tmp_path: Path) -> None:
    spool(tmp_path, "rank-0.out", [(1.0, "iter 10: loss 3.5\niter 11: loss 3.0")])
    assert [step for step, _, _ in read(tmp_path)] == [10]
    assert newest_progress(tmp_path, host="b") is not None  # the host only says where metrics are


def test_of_long_output_the_end_is_read_and_the_start_says_what_bars_mean(tmp_path: Path) -> None:
    noise = "data loader worker started, nothing to see here\n"
    start = "  Total optimization steps = 9,000\n" + noise * (HEAD_BYTES // len(noise))
    middle = noise * (5 * TAIL_BYTES[0] // len(noise))
    end = "".join(bar(step, 9000) for step in range(7000, 7003)) + "\n"
    spool(tmp_path, "rank-0.out", [(1.0, start), (2.0, middle)])
    spool(tmp_path, "rank-0.err", [(3.0, end)])
    values = newest_progress(tmp_path, host="a")
    assert values is not None and (values["step"], values["total_steps"]) == (7002, 9000)


def test_newest_steps_before_much_other_output_are_found(tmp_path: Path) -> None:
    noise = "checkpoint shard written\n"
    long = noise * (2 * TAIL_BYTES[0] // len(noise))
    spool(tmp_path, "rank-0.out", [(1.0, "iter 1: loss 4\n" + long), (2.0, "iter 2: loss 3\n"), (3.0, long)])
    values = newest_progress(tmp_path, host="a")
    assert values is not None and (values["step"], values["loss"]) == (2, 3)
    assert newest_progress(tmp_path / "none", host="a") is None


def test_generations_are_one_text(tmp_path: Path) -> None:
    spool(tmp_path, "rank-0.out", [(1.0, "iter 1: loss 4\n")])
    spool(tmp_path, "rank-0.out", [(2.0, "iter 2: loss 3\n")], generation=1)
    assert read(tmp_path) == [(1, 4.0, 1.0), (2, 3.0, 2.0)]


@pytest.mark.parametrize("pattern", [None, r"epoch done (?P<step>\d+): (?P<loss>\S+)"])
def test_the_pattern_of_the_job_decides(tmp_path: Path, pattern: str | None) -> None:
    spool(tmp_path, "rank-0.out", [(1.0, "iter 1: loss 4\nepoch done 12: 0.5 with a loss below 1\n")])
    values = newest_progress(tmp_path, host="a", pattern=pattern)
    assert values is not None and values["step"] == (1 if pattern is None else 12)


def test_the_pace_of_the_newest_steps_gives_the_time_that_is_left(tmp_path: Path) -> None:
    spool(tmp_path, "rank-0.out", [(10.0 * n, f"step {n}/9: loss 3.{n}\n") for n in range(1, 6)])
    values = newest_progress(tmp_path, host="a")
    assert values is not None and values["step_s"] == pytest.approx(10.0)
    assert describe_progress(values) == "step 5/9 · 40s left · loss 3.5"


def test_a_counter_that_begins_again_in_each_epoch_gives_no_step(tmp_path: Path) -> None:
    lines = [(1.0 * e, f"epoch {e} step {n}: loss {e}.{n}\n") for e in (0, 1) for n in (0, 200)]
    spool(tmp_path, "rank-0.out", lines)
    values = newest_progress(tmp_path, host="a")
    assert values is not None and "step" not in values and (values["epoch"], values["loss"]) == (1, 1.2)
