"""Measures have the values of their published formulas, computed by hand or by the definition."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascendrun.programs.codon import measures as m
from ascendrun.programs.codon.decoding import Drawing, decode
from ascendrun.programs.codon.vocabulary import CODONS

LYSINES = m.CodonTable.of(["AAA" * 6 + "AAG" * 2 + "CTG" * 8 + "CTC" * 2 + "TAA"])
"""K: AAA .75, AAG .25. L: CTG .8, CTC .2, four others 0. Other residues: equal frequencies."""


def test_a_table_counts_codons_and_leaves_out_other_letters() -> None:
    table = m.CodonTable.of(["ATGAAANNNAAG", "AAATA"])
    assert {codon: count for codon, count in zip(CODONS, table.counts) if count} == {"ATG": 1, "AAA": 2, "AAG": 1}
    assert table.frequencies[CODONS.index("AAA")] == pytest.approx(2 / 3)
    assert table.frequencies[CODONS.index("TGC")] == 0.5


def test_csi_is_the_geometric_mean_without_stops_and_single_codons() -> None:
    """AAG has 2 / 6, CTC 2 / 8, and CTA, never seen, .5 / 8."""
    assert m.csi("ATGAAAAAGTGGTAA", LYSINES) == pytest.approx(math.sqrt(1 * 2 / 6))
    assert m.csi("CTGCTCCTA", LYSINES) == pytest.approx((1 * 0.25 * 0.0625) ** (1 / 3))
    assert m.csi("ATGTGGTAA", LYSINES) == 1.0
    counted = m.CodonTable(tuple(map(int, LYSINES.counts)))  # as in the file beside a model
    assert m.csi("CTGCTCCTA", counted) == m.csi("CTGCTCCTA", LYSINES)


def test_gc_content_is_in_percent() -> None:
    assert m.gc_content("ATGC") == 50.0
    assert m.gc_content("GGGA") == 75.0


def test_cfd_is_the_share_of_rare_codons() -> None:
    """AAG has a third of AAA's frequency, which is not below .3; CTC a quarter of CTG's; CTA none."""
    assert m.cfd("AAAAAGCTGCTCCTA", LYSINES) == pytest.approx(40.0)
    assert m.cfd("AAAAAG", LYSINES, rare=0.34) == pytest.approx(50.0)


def test_min_max_is_between_the_rarest_and_the_most_frequent_codons() -> None:
    """K: mean .5, most .75, least .25. L: mean 1 / 6, most .8, least 0."""
    assert m.min_max("AAAAAA", LYSINES, window=2).tolist() == pytest.approx([100.0])
    assert m.min_max("AAGAAG", LYSINES, window=2).tolist() == pytest.approx([-100.0])
    assert m.min_max("AAAAAG", LYSINES, window=2).tolist() == pytest.approx([0.0], abs=1e-9)
    mean, most, least = 0.5 + 1 / 6, 0.75 + 0.8, 0.25
    above = 100 * (0.25 + 0.8 - mean) / (most - mean)
    below = -100 * (mean - 0.25 - 0.2) / (mean - least)
    assert m.min_max("AAGCTGAAG", LYSINES, window=2).tolist() == pytest.approx([above, above])
    assert m.min_max("AAGCTC", LYSINES, window=2).tolist() == pytest.approx([below])
    assert len(m.min_max("AAA" * 20, LYSINES)) == 3
    assert m.min_max("ATG" * 18, LYSINES).tolist() == [0.0]
    assert len(m.min_max("ATG", LYSINES)) == 0


def test_similarity_counts_equal_codons_or_letters() -> None:
    assert m.similarity("ATGAAATAA", "ATGAAGTAA") == pytest.approx(200 / 3)
    assert m.similarity("ATGAAATAA", "ATGAAGTAA", window=1) == pytest.approx(800 / 9)
    assert m.similarity("ATGAAATAA", "ATG") == 100.0
    with pytest.raises(ValueError, match="letters"):
        m.similarity("ATG", "ATGAAA")


@given(st.text("ACGT", min_size=2, max_size=40))
def test_complexity_counts_different_subsequences(dna: str) -> None:
    size = len(dna)
    different = len({dna[a:b] for a in range(size) for b in range(a + 1, size + 1)})
    assert m.complexity(dna) == pytest.approx(100 * different / (sum(range(size)) + min(size, 4)))


def test_complexity_of_a_long_sequence_needs_no_recursion() -> None:
    """S4-B8: the original fails above about 1000 bases."""
    assert m.complexity("A" * 6141) == pytest.approx(100 * 6141 / (6141 * 6140 / 2 + 4))


def test_choices_by_the_table_are_the_most_frequent_the_background_and_equal_ones() -> None:
    protein = "K" * 4000
    assert decode("MKL_", m.table_choice("MKL_", LYSINES)).dna == "ATGAAACTGTAA"
    whole = Drawing(temperature=1.0, top_p=1.0, seed=1)
    for log_probs, share in ((m.table_choice(protein, LYSINES), 0.75), (m.uniform_choice(protein), 0.5)):
        dna = decode(protein, log_probs, drawing=whole).dna
        counts = Counter(dna[at : at + 3] for at in range(0, len(dna), 3))
        assert set(counts) == {"AAA", "AAG"}
        expected = {"AAA": 4000 * share, "AAG": 4000 * (1 - share)}
        assert sum((counts[each] - n) ** 2 / n for each, n in expected.items()) < 10.8  # 1 degree of freedom, p .001


def test_a_set_is_reported_by_the_means_of_its_sequences() -> None:
    rows = [m.measures("ATG" + "AAA" * 20 + "TAA", LYSINES), m.measures("ATGAAG", LYSINES)]
    assert set(rows[0]) == {"csi", "cfd", "gc", "complexity", "min_max", "lowest_min_max"}
    assert "min_max" not in rows[1]
    found = m.summary(rows)
    assert found["csi"] == pytest.approx((1 + 1 / 3) / 2, abs=1e-4)
    assert found["min_max"] == pytest.approx(rows[0]["min_max"], abs=1e-4)
    assert np.isfinite(list(found.values())).all()
    assert set(m.measures("ATGAAG", None)) == {"gc", "complexity"}
