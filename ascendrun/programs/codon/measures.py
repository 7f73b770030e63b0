"""Measures of coding sequences beside an organism's codon table, and the choices that know only this table.

A `CodonTable` is counted from coding sequences. The measures have the definitions and values of CodonTransformer's, in
percent where it has percent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ascendrun.programs.codon.vocabulary import CODONS, FIRST_CODON, RESIDUES, STANDARD, STOP, codons_of

RARE = 0.3
"""CFD: a codon is rare below this share of the frequency of its residue's most frequent codon."""
WINDOW = 18
"""%MinMax: codons of a window."""
UNSEEN = 0.5
"""CSI: count of a codon that the reference does not have, as in Sharp and Li's CAI."""
PLACES = {codon: place for place, codon in enumerate(CODONS)}
OWN = {residue: np.array(codons_of(residue)) - FIRST_CODON for residue in RESIDUES}


@dataclass(frozen=True)
class CodonTable:
    """How often each codon is in the coding sequences of an organism, in the order of CODONS."""

    counts: tuple[float, ...]

    @classmethod
    def of(cls, sequences: Iterable[str]) -> CodonTable:
        """Count the codons of sequences; those with other letters than ACGT are left out."""
        counts = np.zeros(len(CODONS))
        for dna in sequences:
            for codon in _codons(dna):
                if codon in PLACES:
                    counts[PLACES[codon]] += 1
        return cls(tuple(counts.tolist()))

    @cached_property
    def frequencies(self) -> np.ndarray:
        """Of each codon among those of its residue; equal ones for a residue that was not seen."""
        found, counts = np.zeros(len(CODONS)), np.array(self.counts)
        for own in OWN.values():
            total = counts[own].sum()
            found[own] = counts[own] / total if total else 1 / len(own)
        return found

    @cached_property
    def adaptiveness(self) -> np.ndarray:
        """CSI's weight of each codon: its frequency over that of its residue's most frequent codon."""
        counts, found = np.array(self.counts, dtype=np.float64), np.zeros(len(CODONS))
        counts[counts == 0] = UNSEEN
        for own in OWN.values():
            found[own] = counts[own] / counts[own].max()
        return found


# --- choices by the table alone: log-probabilities that decoding.decode takes ---


def table_choice(protein: str, table: CodonTable) -> np.ndarray:
    """Return the log-frequencies of a table. The likeliest codons are the highest frequency choice; a draw with
    temperature 1 and top_p 1 is the background frequency choice."""
    with np.errstate(divide="ignore"):
        row = np.log(table.frequencies)
    return np.repeat(row[None], len(protein), axis=0)


def uniform_choice(protein: str) -> np.ndarray:
    """Return equal log-probabilities of all codons; a draw is the uniform choice."""
    return np.zeros((len(protein), len(CODONS)))


# --- measures ---


def csi(dna: str, table: CodonTable) -> float:
    """Return the codon similarity index: the geometric mean of the codons' adaptiveness, 0 to 1.

    Stops and residues with one codon do not count; without any other, it is 1.
    """
    places = [PLACES[codon] for codon in _codons(dna) if STANDARD[codon] not in (STOP, "M", "W")]
    return float(np.exp(np.log(table.adaptiveness[places]).mean())) if places else 1.0


def gc_content(dna: str) -> float:
    """Return G and C in percent of the bases."""
    return 100 * (dna.count("G") + dna.count("C")) / len(dna)


def cfd(dna: str, table: CodonTable, *, rare: float = RARE) -> float:
    """Return the codon frequency distribution: rare codons in percent of the codons, the stop included."""
    most = {residue: float(table.frequencies[own].max()) for residue, own in OWN.items()}
    codons = _codons(dna)
    count = sum(bool(table.frequencies[PLACES[codon]] / most[STANDARD[codon]] < rare) for codon in codons)
    return 100 * count / len(codons)


def min_max(dna: str, table: CodonTable, *, window: int = WINDOW) -> np.ndarray:
    """Return %MinMax of each window of codons, -100 (rarest ones) to 100; empty for a sequence shorter than a window.

    Windows in which all codons of each residue are equally frequent have 0.
    """
    codons = _codons(dna)
    if len(codons) < window:
        return np.zeros(0)
    own = [table.frequencies[OWN[STANDARD[codon]]] for codon in codons]
    rows = np.array(
        [(table.frequencies[PLACES[codon]], each.max(), each.min(), each.mean()) for codon, each in zip(codons, own)]
    )
    sums = np.concatenate([np.zeros((1, 4)), np.cumsum(rows, axis=0)])
    actual, most, least, mean = ((sums[window:] - sums[:-window]) / window).T
    above, is_above = actual - mean, actual >= mean
    scale = np.where(is_above, most - mean, mean - least)
    is_flat = scale < 1e-12
    values: np.ndarray = np.where(is_flat, 0.0, 100 * above / np.where(is_flat, 1.0, scale))
    return values


def similarity(original: str, predicted: str, *, window: int = 3) -> float:
    """Return equal windows (3: codons, 1: letters) in percent of those of `predicted`; `original` may be longer."""
    if len(original) < len(predicted):
        raise ValueError(f"{len(original)} letters, expected at least {len(predicted)}")
    starts = range(0, len(predicted) - window + 1, window)
    equal = sum(original[at : at + window] == predicted[at : at + window] for at in starts)
    return 100 * equal / (len(predicted) / window)


def complexity(dna: str) -> float:
    """Return the number of different subsequences in percent of n (n - 1) / 2 + min(n, 4) for n bases.

    Of the ends of the sequence in alphabetical order, each has its own beginnings but those that it shares with the one
    before; what the next shorter end shares is at most one letter less (Kasai et al., 2001).
    """
    order = sorted(range(len(dna)), key=lambda at: dna[at:])
    before = dict(zip(order[1:], order))
    ended, shared, count = f"{dna} ", 0, 0
    for at in range(len(dna)):
        other = before.get(at)
        shared = max(0, shared - 1) if other is not None else 0
        while other is not None and ended[at + shared] == ended[other + shared]:
            shared += 1
        count += len(dna) - at - shared
    bases = len(dna)
    return 100 * count / (bases * (bases - 1) // 2 + min(bases, 4) if bases > 1 else 2)


def measures(dna: str, table: CodonTable | None) -> dict[str, float]:
    """Return the measures of one sequence; table None: those that need no organism."""
    found = {"gc": gc_content(dna), "complexity": complexity(dna)}
    if table is None:
        return found
    windows = min_max(dna, table)
    by_window = {"min_max": float(windows.mean()), "lowest_min_max": float(windows.min())} if len(windows) else {}
    return {"csi": csi(dna, table), "cfd": cfd(dna, table), **found, **by_window}


def summary(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each measure of a set of sequences."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: round(float(np.mean([row[name] for row in rows if name in row])), 4) for name in names}


def _codons(dna: str) -> list[str]:
    return [dna[at : at + 3] for at in range(0, len(dna) - 2, 3)]
