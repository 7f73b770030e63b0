"""Tables of codons by organism that know nothing of a model: frequencies, and pairs with a neighbouring residue.

Losses are nats, a sum for each gene, among the codons of each residue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ascendrun.programs.codon import vocabulary as v
from ascendrun.programs.codon.genes import MASKS, Array, Genes

PREVIOUS, NEXT = -1, 1
SMOOTHINGS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
RESIDUES = MASKS[v.FIRST_CODON :].astype(int) - v.FIRST_RESIDUE
"""Of each codon."""
NONE = len(v.RESIDUES)
"""The neighbour of an end."""


@dataclass(frozen=True)
class Seen:
    """All codons of some genes, one after another: number of the organism, codon, neighbours, and place of the gene."""

    organisms: Array
    codons: Array
    neighbours: dict[int, Array]
    owners: Array

    @classmethod
    def of(cls, genes: Genes, numbers: Sequence[int]) -> Seen:
        own = [np.asarray(genes.tokens[genes.starts[each] : genes.starts[each + 1]], dtype=int) for each in numbers]
        residues = [RESIDUES[each - v.FIRST_CODON] for each in own]
        sizes = [len(each) for each in own]
        return cls(
            np.repeat(np.asarray(genes.organisms)[list(numbers)], sizes),
            np.concatenate(own) - v.FIRST_CODON,
            {
                PREVIOUS: np.concatenate([[NONE, *each[:-1]] for each in residues]),
                NEXT: np.concatenate([[*each[1:], NONE] for each in residues]),
            },
            np.repeat(np.arange(len(own)), sizes),
        )

    def by_gene(self, probabilities: Array) -> Array:
        return np.bincount(self.owners, weights=-np.log(probabilities))


def frequencies(train: Seen, organisms: int) -> Array:
    """Return organisms x codons: the fraction of each codon among those of its residue; none is 0."""
    counts = np.ones((organisms, len(RESIDUES)))
    np.add.at(counts, (train.organisms, train.codons), 1)
    return counts / totals(counts)


def totals(counts: Array) -> Array:
    """Return for each codon the sum over the codons of its residue."""
    return counts @ (RESIDUES[:, None] == RESIDUES[None, :])


def pairs(train: Seen, val: Seen, plain: Array, side: int) -> tuple[Array, float]:
    """Return organisms x neighbours x codons, drawn towards the frequencies `plain` as far as suits `val`; and how."""
    counts = np.zeros((len(plain), NONE + 1, len(RESIDUES)))
    np.add.at(counts, (train.organisms, train.neighbours[side], train.codons), 1)
    sums = totals(counts)
    found = {weight: (counts + weight * plain[:, None]) / (sums + weight) for weight in SMOOTHINGS}
    best = min(SMOOTHINGS, key=lambda weight: float(-np.log(at(found[weight], val, side)).mean()))
    return found[best], best


def at(table: Array, seen: Seen, side: int) -> Array:
    return table[seen.organisms, seen.neighbours[side], seen.codons]


def losses(train: Seen, val: Seen, test: Seen, organisms: int) -> tuple[dict[str, Array], dict[str, float]]:
    """Return the loss of each gene of `test` by table, and the smoothing of each."""
    plain = frequencies(train, organisms)
    found = {"frequencies": test.by_gene(plain[test.organisms, test.codons])}
    smoothing = {}
    for name, side in (("previous", PREVIOUS), ("next", NEXT)):
        table, smoothing[name] = pairs(train, val, plain, side)
        found[name] = test.by_gene(at(table, test, side))
    return found, smoothing
