"""Encoded data is built once, survives a kill at any time, and costs a further rank next to nothing."""

from __future__ import annotations

import os
import pickle
import signal
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from ascendrun.node.agent import prune
from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trainer import shards
from ascendrun.programs.trainer.data import IGNORED
from ascendrun.programs.trainer.shards import SHARD_ROWS, WAITING, Rows, Source, best_fit, open_or_build

COUNT = 2 * SHARD_ROWS + 100


class Encoder:
    """Row n has n % 7 tokens from n % 50 on, trained on from the second. Calls are noted; `stop`: it blocks there."""

    def __init__(self, notes: Path, *, stop: int | None = None, fails: bool = False) -> None:
        self.notes, self.stop, self.fails = notes, stop, fails

    def __call__(self, rows):
        with open(self.notes, "a") as file:
            file.write(f"{rows[0]}\n")
        if rows[0] == self.stop:
            if self.fails:
                raise OSError(28, "No space left on device")
            signal.pause()
        return [
            ([row % 50 + i for i in range(row % 7)], [i > 0 for i in range(row % 7)]) if row % 7 > 1 else ([], [])
            for row in rows
        ]


def source(tmp_path, *, count=COUNT, vocabulary=60, **given):
    groups = [(None, "easy", "hard")[row % 3] for row in range(count)]
    return Source(range(count), groups, Encoder(tmp_path / "notes", **given), vocabulary)


def open_(folder, tmp_path, **given):
    return open_or_build(folder, lambda: source(tmp_path, **given), log=lambda text: None)


def calls(tmp_path):
    return sorted(int(line) for line in (tmp_path / "notes").read_text().split())


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def one_core(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})


def forked(body):
    """Run the function in a forked process; return its pid."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
        finally:
            os._exit(0)
    return pid


@pytest.mark.parametrize("vocabulary", [60, 1 << 20])
def test_samples_come_back_with_their_labels_groups_and_lengths(tmp_path, vocabulary):
    tokens = open_(tmp_path / "key", tmp_path, vocabulary=vocabulary)
    assert (len(tokens), tokens.names) == (COUNT, ["easy", "hard"])
    wanted = [row % 7 if row % 7 > 1 else 0 for row in range(COUNT)]
    assert tokens.lengths.tolist() == wanted and tokens.levels.tolist() == [row % 3 for row in range(COUNT)]
    for row in (2, 5, SHARD_ROWS - 1, SHARD_ROWS, 2 * SHARD_ROWS + 99):
        sample = tokens[row]
        assert sample.ids.tolist() == [row % 50 + i for i in range(wanted[row])]
        assert sample.labels.tolist() == [row % 50 + i if i else IGNORED for i in range(wanted[row])]
    assert len(tokens.parts[0]["tokens"]) == sum(wanted[:SHARD_ROWS])
    assert tokens.parts[0]["tokens"].itemsize == (2 if vocabulary == 60 else 4)
    assert tokens.manifest["tokens"] == sum(wanted) and tokens.manifest["learned"] == sum(max(0, n - 1) for n in wanted)


def test_some_of_the_samples_and_a_copy_in_another_process_are_the_same(tmp_path):
    tokens = open_(tmp_path / "key", tmp_path)
    some = tokens.select(np.array([8005, 2, 4099]), np.array([1, 0, 1], dtype=np.uint8))
    sent = pickle.dumps(some)
    assert len(sent) < 2000
    for each in (some, pickle.loads(sent)):
        assert each.lengths.tolist() == [4, 2, 4] and each.levels.tolist() == [1, 0, 1]
        assert [sample.ids.tolist()[0] for sample in each] == [5, 2, 49] and each[0].level == 1


def test_a_build_that_was_killed_continues_and_gives_the_same_bytes(tmp_path, one_core):
    whole = tmp_path / "whole"
    open_(whole, tmp_path)
    (tmp_path / "notes").unlink()
    folder, fresh = tmp_path / "cut", tmp_path / "cut.building"
    pid = forked(lambda: open_(folder, tmp_path, stop=SHARD_ROWS))
    while not (fresh / "00000.json").exists() or len(calls(tmp_path)) < 2:
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert not shards.is_built(folder)
    (fresh / "00002.tokens").write_bytes(b"torn")
    open_(folder, tmp_path)
    assert calls(tmp_path) == [0, SHARD_ROWS, SHARD_ROWS, 2 * SHARD_ROWS]
    assert files(folder) == files(whole)


def test_a_build_that_failed_names_the_error_and_the_next_one_continues(tmp_path, one_core):
    with pytest.raises(OSError, match="No space left"):
        open_(tmp_path / "key", tmp_path, stop=SHARD_ROWS, fails=True)
    assert not shards.is_built(tmp_path / "key")
    open_(tmp_path / "key", tmp_path)
    assert calls(tmp_path).count(0) == 1


def test_several_processes_that_need_the_same_data_build_it_once(tmp_path):
    pids = [forked(lambda: open_(tmp_path / "key", tmp_path)) for _ in range(3)]
    for pid in pids:
        os.waitpid(pid, 0)
    assert calls(tmp_path) == [0, SHARD_ROWS, 2 * SHARD_ROWS] and shards.is_built(tmp_path / "key")


def test_whoever_waits_takes_over_when_the_builder_is_killed(tmp_path, one_core):
    builder = forked(lambda: open_(tmp_path / "key", tmp_path, stop=SHARD_ROWS))
    while not (tmp_path / "notes").exists() or len(calls(tmp_path)) < 2:
        time.sleep(0.01)
    waiting = forked(lambda: open_(tmp_path / "key", tmp_path))
    os.kill(builder, signal.SIGKILL)
    os.waitpid(builder, 0)
    os.waitpid(waiting, 0)
    assert shards.is_built(tmp_path / "key") and calls(tmp_path).count(0) == 1


class Long(Encoder):
    def __call__(self, rows):
        return [([1] * 200, [True] * 200)] * len(rows)


def test_a_further_rank_holds_a_tenth_of_the_tokens_at_most(tmp_path):
    made = Source(range(COUNT), [None] * COUNT, Long(tmp_path / "notes"), 60)
    open_or_build(tmp_path / "key", lambda: made, log=lambda text: None)
    tracemalloc.start()
    tokens = open_(tmp_path / "key", tmp_path)
    some = tokens.select(np.arange(COUNT, dtype=np.int32))
    assert sum(len(sample.ids) for sample in (some[i] for i in range(0, COUNT, 97))) > 0
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak <= 0.1 * 2 * tokens.manifest["tokens"]


def test_what_is_in_a_cache_is_listed_with_its_size_and_age(tmp_path):
    assert shards.directories(tmp_path / "absent", now_s=0.0) == []
    open_(tmp_path / "cache" / "key", tmp_path)
    (held,) = shards.directories(tmp_path / "cache", now_s=time.time() + 60)
    assert (held.key, held.rows) == ("key", COUNT) and held.bytes > COUNT and 59 < held.age_s < 600


def test_prune_takes_what_no_process_uses_and_the_next_start_builds_it_again(tmp_path, monkeypatch, one_core):
    """Of four directories one is in use, one is being built, and one is asked for after the list was made."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    home = shards.default_cache()
    old, used, building, asked = (home / (letter * 32) for letter in "abcd")
    kept = open_(used, tmp_path)
    for folder in (old, asked):
        open_(folder, tmp_path)
        os.utime(folder / shards.MANIFEST, (1e9, 1e9))
    (tmp_path / "notes").unlink()
    builder = forked(lambda: open_(building, tmp_path, stop=SHARD_ROWS))
    while not (tmp_path / "notes").exists() or len(calls(tmp_path)) < 2:
        time.sleep(0.01)

    listed = prune.usage(str(tmp_path), "head")["trees"]
    assert set(listed) == {f"data/{folder.name}" for folder in (old, asked)}
    assert all(size > COUNT and idle_s > 1e6 for size, idle_s in listed.values())
    unused = {name: idle_s for name, (_, idle_s) in listed.items()}
    assert len(open_(asked, tmp_path)) == COUNT
    assert set(prune.prune(str(tmp_path), {"trees": unused}, forget=lambda tag: None)["removed"]) == {
        f"data/{old.name}"
    }
    assert not old.exists() and shards.is_built(asked) and kept[2].ids.tolist() == [2, 3]

    os.kill(builder, signal.SIGKILL)
    os.waitpid(builder, 0)
    assert f"data/{building.name}.building" in prune.usage(str(tmp_path), "head")["trees"]
    assert len(open_(old, tmp_path)) == COUNT


def test_the_name_of_a_directory_follows_from_all_that_shapes_it():
    assert shards.key_of("a", 1) == shards.key_of("a", 1)
    assert len({shards.key_of("a", 1), shards.key_of("a", 2), shards.key_of("a1"), shards.key_of("a", 1, "")}) == 4


# --- rows of documents: best fit, full, the same in every process, indexed once ---


LENGTHS = np.random.default_rng(1).integers(0, 60, 3000)


def encode(rows):
    """Document n begins with 1000 + n % 100, then its positions; all is trained on."""
    return [([1000 + row % 100, *range(1, LENGTHS[row])][: LENGTHS[row]], [True] * LENGTHS[row]) for row in rows]


@pytest.fixture
def tokens(tmp_path):
    source = Source(range(len(LENGTHS)), [None] * len(LENGTHS), encode, 2000)
    return open_or_build(tmp_path / "key", lambda: source, log=lambda text: None)


def plainly(lengths, size, *, crop):
    """The same by looking at all waiting documents for each piece."""
    coming = [(min(int(length), size), number) for number, length in enumerate(lengths) if length]
    waiting, coming = coming[:WAITING], coming[WAITING:]
    rows, row, room = [], [], size
    while waiting:
        fitting = [pair for pair in waiting if pair[0] <= room]
        if room == 0 or not fitting and not crop:
            rows.append(row)
            row, room = [], size
            continue
        length, document = chosen = max(fitting) if fitting else min(waiting)
        waiting.remove(chosen)
        waiting += coming[:1]
        coming = coming[1:]
        row.append((document, min(length, room)))
        room -= row[-1][1]
    return rows + ([row] if row and (room == 0 or not crop) else [])


@pytest.mark.parametrize("crop", [True, False])
def test_the_largest_document_that_fits_comes_next(crop):
    rows = {}
    for row, document, take in best_fit(LENGTHS, 101, crop=crop):
        rows.setdefault(row, []).append((document, take))
    assert list(rows.values()) == plainly(LENGTHS, 101, crop=crop)


def test_every_row_begins_with_a_document_and_is_full(tokens):
    plan = Rows(tokens, seq_len=100, batch_size=8, seed=3)
    seen = [unit for step in range(plan.steps_per_epoch) for unit in plan.units(step)]
    ids, labels = plan.read(seen)
    assert ids.shape == (len(set(seen)), 101) and (ids[:, 0] >= 1000).all() and (labels == ids).all()
    assert len(seen) > 0.95 * LENGTHS.sum() / 101 - 8 - 0.4 * len(seen)


def test_rows_that_are_not_cropped_have_padding_without_targets(tokens):
    plan = Rows(tokens, seq_len=100, batch_size=8, seed=3, crop=False)
    used = [document for row in range(plan.count) for document, _ in plan.documents(row)]
    assert sorted(used) == [number for number, length in enumerate(LENGTHS) if length]
    ids, labels = plan.read([(row,) for row in range(plan.count)])
    assert int((labels != IGNORED).sum()) == LENGTHS.sum() and (ids[labels == IGNORED] == 0).all()


def test_the_order_follows_from_seed_and_step_alone(tokens):
    first, again, other = (Rows(tokens, seq_len=50, batch_size=4, seed=seed) for seed in (1, 1, 2))
    steps = (0, 7, first.steps_per_epoch, 3, 2 * first.steps_per_epoch + 1)
    assert [first.units(step) for step in steps] == [again.units(step) for step in reversed(steps)][::-1]
    assert first.units(0) != other.units(0) and first.units(0) != first.units(first.steps_per_epoch)


def test_the_index_is_made_once_for_documents_and_length(tokens):
    def stamp():
        return {path.name: path.stat().st_mtime_ns for path in tokens.folder.glob("rows-*.npy")}

    Rows(tokens, seq_len=50, batch_size=4, seed=1)
    made = stamp()
    Rows(tokens, seq_len=50, batch_size=8, seed=9)
    assert stamp() == made and len(made) == 1
    Rows(tokens.select(np.arange(2000)), seq_len=50, batch_size=8, seed=9)
    Rows(tokens, seq_len=60, batch_size=8, seed=9)
    assert len(stamp()) == 3


def test_documents_that_do_not_fill_a_step_are_an_error(tokens):
    with pytest.raises(InvalidDataError) as caught:
        Rows(tokens.select(np.arange(5)), seq_len=100, batch_size=64, seed=1)
    assert caught.value.args[0].key == "program.few-rows"
