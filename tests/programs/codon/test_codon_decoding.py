"""DNA belongs to its protein, keeps every constraint, and is the best where that can be proven."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascendrun.programs.codon.asked import Drawing
from ascendrun.programs.codon.constraints import Constraints, GCRange, read_constraints
from ascendrun.programs.codon.decoding import LEAST, InfeasibleError, decode, nucleus
from ascendrun.programs.codon.vocabulary import CODONS, MAX_RESIDUES

AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"

# --- a checker of its own: it has the genetic code, the letters and the rules once more, and reads strings only ---

CODE = {
    "F": "TTT TTC", "L": "TTA TTG CTT CTC CTA CTG", "I": "ATT ATC ATA", "M": "ATG", "V": "GTT GTC GTA GTG",
    "S": "TCT TCC TCA TCG AGT AGC", "P": "CCT CCC CCA CCG", "T": "ACT ACC ACA ACG", "A": "GCT GCC GCA GCG",
    "Y": "TAT TAC", "_": "TAA TAG TGA", "H": "CAT CAC", "Q": "CAA CAG", "N": "AAT AAC", "K": "AAA AAG",
    "D": "GAT GAC", "E": "GAA GAG", "C": "TGT TGC", "W": "TGG", "R": "CGT CGC CGA CGG AGA AGG",
    "G": "GGT GGC GGA GGG",
}  # fmt: skip
RESIDUE_OF = {codon: residue for residue, codons in CODE.items() for codon in codons.split()}
LETTERS = {"R": "[AG]", "Y": "[CT]", "S": "[CG]", "W": "[AT]", "K": "[GT]", "M": "[AC]", "N": "[ACGT]",
           "B": "[CGT]", "D": "[AGT]", "H": "[ACT]", "V": "[ACG]"}  # fmt: skip
OTHER_STRAND = {"A": "T", "C": "G", "G": "C", "T": "A"}


def broken(dna: str, constraints: Constraints) -> list[str]:
    """What of the constraints this DNA does not keep."""
    other = "".join(OTHER_STRAND[base] for base in reversed(dna))
    found = []
    for site in constraints.avoid:
        pattern = "(?=" + "".join(LETTERS.get(letter, letter) for letter in site) + ")"
        found += [f"{site} at {hit.start()}" for strand in (dna, other) for hit in re.finditer(pattern, strand)]
    most = constraints.longest_homopolymer
    found += [run.group() for run in re.finditer(r"(.)\1*", dna) if most and len(run.group()) > most]
    if constraints.gc:
        size = min(constraints.gc.window or len(dna), len(dna))
        for at in range(len(dna) - size + 1):
            window = dna[at : at + size]
            share = 100 * sum(base in "GC" for base in window) / size
            if not constraints.gc.low - 1e-6 <= share <= constraints.gc.high + 1e-6:
                found.append(f"{share} % at {at}")
    if constraints.repeat:
        stretches = [dna[at : at + constraints.repeat] for at in range(len(dna) - constraints.repeat + 1)]
        found += [each for each in set(stretches) if stretches.count(each) > 1]
    return found


def translation(dna: str) -> str:
    return "".join(RESIDUE_OF[dna[at : at + 3]] for at in range(0, len(dna), 3))


def by_brute_force(protein: str, scores: np.ndarray, constraints: Constraints) -> float | None:
    """The log-probability of the best of all sequences, None where none keeps the constraints."""
    best = None
    for codons in itertools.product(*(CODE[residue].split() for residue in protein)):
        if not broken("".join(codons), constraints):
            score = sum(max(scores[at, CODONS.index(codon)], LEAST) for at, codon in enumerate(codons))
            best = score if best is None else max(best, score)
    return best


def random_probs(seed: int, residues: int, spread: float = 0.3) -> np.ndarray:
    chances = np.random.default_rng(seed).dirichlet(np.full(64, spread), residues)
    return np.log(np.maximum(chances, 1e-12))


SITES = st.lists(st.text("ACGTRYSWKMN", min_size=2, max_size=6), max_size=2)
PROTEINS = st.text(AMINO_ACIDS, min_size=1, max_size=4)
WINDOWS = st.one_of(
    st.none(), st.builds(GCRange, st.integers(0, 50), st.integers(50, 100), st.sampled_from([0, 4, 7, 9, 20]))
)


def best_or_none(protein: str, log_probs: np.ndarray, constraints: Constraints) -> Any:
    try:
        return decode(protein, log_probs, constraints)
    except InfeasibleError as error:
        assert error.is_certain, error
        assert protein[error.position - 1] == error.residue
        return None


@settings(max_examples=40)
@given(PROTEINS, SITES, WINDOWS, st.sampled_from([0, 2, 3, 5]), st.sampled_from([0, 0, 6, 7]), st.integers(0, 9))
def test_no_sequence_is_better_than_the_decoded_one(
    protein: str, sites: list[str], gc: GCRange | None, run: int, repeat: int, seed: int
) -> None:
    constraints = Constraints(tuple(sites), gc, run, repeat)
    log_probs = random_probs(seed, len(protein))
    best, decoded = by_brute_force(protein, log_probs, constraints), best_or_none(protein, log_probs, constraints)
    assert (decoded is None) == (best is None)
    if decoded is not None:
        assert decoded.log_prob == pytest.approx(best)
        assert decoded.is_best
        assert translation(decoded.dna) == protein
        assert not broken(decoded.dna, constraints)


@pytest.mark.thorough
@settings(max_examples=60)
@given(st.text(AMINO_ACIDS + "_", min_size=5, max_size=8), SITES, WINDOWS, st.sampled_from([0, 3]), st.integers(0, 9))
def test_no_sequence_of_eight_residues_is_better(
    protein: str, sites: list[str], gc: GCRange | None, run: int, seed: int
) -> None:
    if math.prod(len(CODE[residue].split()) for residue in protein) > 8000:
        return
    constraints = Constraints(tuple(sites), gc, run)
    log_probs = random_probs(seed, len(protein))
    best, decoded = by_brute_force(protein, log_probs, constraints), best_or_none(protein, log_probs, constraints)
    assert (None if decoded is None else pytest.approx(decoded.log_prob)) == best


EVERY: tuple[dict[str, Any], ...] = (
    {},
    {"avoid": "GAATTC,GGTCTC,GCCNNNNNGGC", "longest_homopolymer": 6},
    {"gc": "35-65/60", "avoid": "GAATTC"},
    {"gc": "40-60"},
    {"repeat": 16},
    {"gc": "30-70/50", "avoid": "GGTCTC", "longest_homopolymer": 8, "repeat": 20},
)
DRAWINGS = (None, Drawing(seed=3), Drawing(temperature=0.8, top_p=0.9, seed=4), Drawing(temperature=2.0, top_p=1.0))


def proteins(count: int, longest: int) -> list[str]:
    random = np.random.default_rng(5)
    sizes = random.integers(20, longest, count)
    return ["M" + "".join(random.choice(list(AMINO_ACIDS), size)) + "_" for size in sizes]


@pytest.mark.parametrize("drawing", DRAWINGS, ids=("likeliest", "cool", "nucleus", "hot"))
def test_every_protein_is_kept_with_every_constraint(drawing: Drawing | None) -> None:
    check_all(proteins(4, 80), drawing)


@pytest.mark.thorough
@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("drawing", DRAWINGS, ids=("likeliest", "cool", "nucleus", "hot"))
def test_two_thousand_proteins_are_kept_with_every_constraint(drawing: Drawing | None, part: int) -> None:
    check_all(proteins(2000, 120)[part::8], drawing)


def check_all(these: list[str], drawing: Drawing | None) -> None:
    for number, protein in enumerate(these):
        log_probs = random_probs(number, len(protein))
        for options in EVERY:
            constraints, problems = read_constraints(**options)
            assert not problems
            try:
                dna = decode(protein, log_probs, constraints, drawing).dna
            except InfeasibleError as error:
                assert error.is_certain, (protein, options, str(error))  # such as many K and N in a GC window
                continue
            assert translation(dna) == protein
            assert not broken(dna, constraints), (protein, options)


def test_the_longest_protein_is_decoded_with_sites_and_runs() -> None:
    protein = "M" + "ACDEFGHIKLNPQRSTVWY" * 200
    protein = protein[: MAX_RESIDUES - 1] + "_"
    constraints = Constraints(("GAATTC", "RCCGGY"), longest_homopolymer=5)
    decoded = decode(protein, random_probs(0, len(protein)), constraints)
    assert translation(decoded.dna) == protein
    assert not broken(decoded.dna, constraints)
    assert decoded.is_best


def test_the_likeliest_codons_are_chosen_without_constraints() -> None:
    log_probs = random_probs(1, 3)
    decoded = decode("MK_", log_probs)
    for at, residue in enumerate("MK_"):
        codons = CODE[residue].split()
        likeliest = codons[int(log_probs[at, [CODONS.index(codon) for codon in codons]].argmax())]
        assert decoded.dna[3 * at : 3 * at + 3] == likeliest


def chi_square(counts: np.ndarray, chances: np.ndarray) -> float:
    expected = chances * counts.sum()
    assert not counts[expected == 0].any()
    return float((((counts - expected) ** 2)[expected > 0] / expected[expected > 0]).sum())


def test_draws_have_the_probabilities_of_the_nucleus() -> None:
    """Leucine of 6 codons: .4 .3 .15 .1 .04 .01; up to .8 are .4 .3 .15, which becomes .4706 .3529 .1765."""
    row = np.full(64, -30.0)
    given_chances = dict(zip(CODE["L"].split(), (0.4, 0.3, 0.15, 0.1, 0.04, 0.01)))
    for codon, chance in given_chances.items():
        row[CODONS.index(codon)] = math.log(chance)
    residues, draws = 2000, 50
    log_probs = np.repeat(row[None], residues, axis=0)
    for drawing, wanted in (
        ({"temperature": 1.0, "top_p": 0.8}, (0.4 / 0.85, 0.3 / 0.85, 0.15 / 0.85, 0, 0, 0)),
        ({"temperature": 1.0, "top_p": 1.0}, (0.4, 0.3, 0.15, 0.1, 0.04, 0.01)),
        ({"temperature": 0.5, "top_p": 1.0}, tuple(each**2 / 0.2842 for each in given_chances.values())),
    ):
        counts = dict.fromkeys(given_chances, 0)
        for seed in range(draws):
            dna = decode("L" * residues, log_probs, drawing=Drawing(seed=seed, **drawing)).dna
            for codon in counts:
                counts[codon] += [dna[at : at + 3] for at in range(0, len(dna), 3)].count(codon)
        assert sum(counts.values()) == 100_000
        assert chi_square(np.array(list(counts.values())), np.array(wanted)) < 20.5  # 5 degrees of freedom, p .001


def test_a_draw_depends_on_seed_and_protein_only() -> None:
    log_probs = random_probs(2, 40, spread=5.0)
    protein = "M" + "LSRA" * 9 + "GG_"
    draw = Drawing(temperature=1.0, top_p=1.0, seed=11)
    one = decode(protein, log_probs, drawing=draw).dna
    np.random.seed(1)
    decode("MLLL_", log_probs[:5], drawing=draw)
    assert decode(protein, log_probs, drawing=draw).dna == one
    assert decode(protein, log_probs, drawing=Drawing(1.0, 1.0, 12)).dna != one


def test_codons_outside_the_nucleus_are_used_where_a_site_leaves_no_others() -> None:
    row = np.full((2, 64), -30.0)
    row[0, CODONS.index("ATG")] = 0
    row[1, CODONS.index("AAA")], row[1, CODONS.index("AAG")] = math.log(0.99), math.log(0.01)
    drawing = Drawing(temperature=1.0, top_p=0.5)
    assert nucleus(row[1:, [CODONS.index("AAA"), CODONS.index("AAG")]], drawing)[0, 1] < -1000
    assert decode("MK", row, drawing=drawing).dna == "ATGAAA"
    assert decode("MK", row, Constraints(("GAAA",)), drawing).dna == "ATGAAG"


@pytest.mark.parametrize(
    ("protein", "constraints", "position"),
    [
        ("MKW_", Constraints(("TGG",)), 3),
        ("MAW_", Constraints(("CAT",)), 1),  # ATG on the other strand
        ("MAMW_", Constraints(("GTGG",)), 4),  # after ATG, W can only be TGG
        ("MAKKKKKKKKKKKKKKKKK_", Constraints(gc=GCRange(40, 60, 30)), 2),
        ("MAAA_", Constraints(gc=GCRange(0, 20)), 1),
        ("MKKKKKKKK_", Constraints(repeat=6), 6),
    ],
)
def test_impossible_constraints_name_the_residue(protein: str, constraints: Constraints, position: int) -> None:
    with pytest.raises(InfeasibleError) as error:
        decode(protein, random_probs(0, len(protein)), constraints)
    assert (error.value.residue, error.value.is_certain) == (protein[error.value.position - 1], True)
    assert error.value.position == position


def test_all_problems_of_the_constraints_are_reported_together() -> None:
    _, problems = read_constraints("GAAXTC,GGJ", "60-40/50", repeat=3)
    keys = [problem.key.removeprefix("program.codon-") for problem in problems]
    assert keys == ["site", "site", "gc-range", "repeat"]
    assert [problem.key for problem in read_constraints(gc="40%")[1]] == ["program.codon-gc"]
    assert [problem.key for problem in read_constraints(gc="45-49/10")[1]] == ["program.codon-gc-empty"]


def test_a_site_that_forbids_an_amino_acid_is_reported_without_a_protein() -> None:
    _, problems = read_constraints("CAT,TGG")
    assert [(problem.key, problem.values["residue"]) for problem in problems] == [
        ("program.codon-no-codon", "M"),
        ("program.codon-no-codon", "W"),
    ]


def test_a_site_of_too_many_states_is_refused() -> None:
    assert [each.key for each in read_constraints("A" + "N" * 18 + "T")[1]] == ["program.codon-sites-large"]
