"""Grammars that convert a track to tokens: one function for each, by name."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trajectory.grammars.guide import cell_based, digits_of, make_words
from ascendrun.programs.trajectory.grammars.motion import INPUTS, fit_edges, motion_words
from ascendrun.programs.trajectory.points.summary import FEATURES
from ascendrun.programs.trajectory.points.tracks import Track
from ascendrun.programs.trajectory.tokens import Words

GUIDES = {"guide": digits_of, "cell_based": cell_based}
GRAMMARS = ("motion", *GUIDES)
"""A grammar never reads the track's label."""
TEXTS = "texts"
"""In place of a grammar: the data were texts, whose tokens are used as they are."""


def fit_text(
    tracks: Sequence[Track], *, grammar: str, resolution: int, inputs: Sequence[str] = INPUTS
) -> dict[str, Any]:
    """Return all that makes tokens of any track, to be kept with the model: for `motion` the bins, from `tracks`."""
    text: dict[str, Any] = {"grammar": grammar, "resolution": resolution}
    return {**text, "inputs": list(inputs), "edges": fit_edges(tracks)} if grammar == "motion" else text


def as_texts(
    tracks: Sequence[Track],
    *,
    grammar: str,
    resolution: int,
    edges: Mapping[str, Sequence[float]] | None = None,
    inputs: Sequence[str] = INPUTS,
) -> list[Words]:
    """Return the text of each track. `edges` None: bins from these tracks alone."""
    if grammar == TEXTS and tracks:
        raise InvalidDataError(
            "program.text-model",
            "the model was trained on texts; it knows no grammar that makes tokens of points\n"
            "hint: use texts of the same form, or train a model on points (.csv, .csv.gz or .parquet)",
        )
    if grammar == TEXTS:
        return []
    if grammar == "motion":
        known = fit_edges(tracks) if edges is None else edges
        return [motion_words(track, edges=known, inputs=inputs) for track in tracks]
    words = partial(make_words, cell_words=GUIDES[grammar], resolution=resolution)
    return [words(track) for track in tracks]


def summary_of_text(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the text for a message, with a hash in place of the bins."""
    bins = hashlib.sha256(repr(text.get("edges")).encode()).hexdigest()[:8]
    return {**{name: value for name, value in text.items() if name != "edges"}, "bins": bins}


def knots_of(text: Mapping[str, Any]) -> list[list[float]]:
    """Return the quantiles of each number of a summary; empty: the texts have no summary."""
    has_summary = "summary" in text.get("inputs", ()) and text["edges"]
    return [list(text["edges"][name]) for name in FEATURES] if has_summary else []
