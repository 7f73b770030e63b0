"""Rows of documents: best fit, full, the same in every process, indexed once."""

from __future__ import annotations

import numpy as np
import pytest

from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trainer.packing import IGNORED
from ascendrun.programs.trainer.rows import WAITING, Rows, best_fit
from ascendrun.programs.trainer.shards import Source, open_or_build

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
