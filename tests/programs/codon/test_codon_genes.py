"""What is read as genes, what is skipped and why, what is refused with its file and row; masks and their shares."""

import gzip
import json
import random
import sys

import numpy as np
import pytest

from ascendrun.programs.codon import genes as g
from ascendrun.programs.codon import rules as plan
from ascendrun.programs.codon import vocabulary as v
from ascendrun.programs.codon.model import batch_of, hidden, masked, masked_for
from ascendrun.programs.errors import InvalidDataError
from tests.programs.conftest import dna_in

OPTIONS = {
    "prepared_dir": "",
    "new_organisms": [],
    "organism": "",
    "codon_table": 0,
    "val_size": 0.3,
    "invalid_rows": "skip",
    "synthetic_sequences": 40,
    "seed": 3,
}
GOOD = "ATGGCTGTGTAA"


def dna_of(seed, residues=20):
    rng = random.Random(seed)
    inner = [codon for codon in v.CODONS if codon not in v.STOP_CODONS]
    return "ATG" + "".join(rng.choice(inner) for _ in range(residues)) + "TAA"


def read(path, **more):
    return g.read_genes({**OPTIONS, "data_path": str(path), **more}, v.ORGANISMS)


def table(rows, header="dna,protein,organism"):
    return "\n".join([header, *(",".join(row) for row in rows)]) + "\n"


def rows_of(count, organism="51"):
    return [(dna, v.translate(dna), organism) for dna in map(dna_of, range(count))]


@pytest.mark.parametrize(
    "dna, protein, reason",
    [
        ("", None, "empty"),
        ("ATGGCTGTGTA", None, "length"),
        ("ATGNNNGTGTAA", None, "letters"),
        ("ATGG-TGTGTAA", None, "letters"),
        ("GCTATGGTGTAA", None, "start"),
        ("ATGGCTGTGTCC", None, "stop"),
        ("ATGTAAGCTTAA", None, "inner-stop"),
        ("ATGATGATGTAA", None, "nucleotides"),
        (GOOD, "MAV", "ok"),
        (GOOD, "MAV*", "ok"),
        (GOOD, "MAA_", "mismatch"),
        (GOOD, "MA", "mismatch"),
        ("TTGGCTGTGTAAC"[:12], "MAV_", "ok"),
        ("ATGGATGTG", "MDV", "nucleotides"),
        ("ATGGCTGTGACC", "MAVT", "ok"),
        ("atg gct\tgug uaa", None, "ok"),
        ("ATG" + "GCC" * 2044 + "TAA", None, "ok"),
        ("ATG" + "GCC" * 2045 + "TAA", None, "long"),
    ],
)
def test_a_sequence_that_is_not_a_whole_gene_has_its_reason(dna, protein, reason):
    found = g.encode(g.Row(1, "51", dna, protein))
    assert found == reason if isinstance(found, str) else reason == "ok"


def test_a_missing_stop_becomes_a_stop_of_unknown_codon_and_a_start_codon_stays_itself():
    ids = g.encode(g.Row(1, "51", "TTGGCTGTGACC", "MAVT"))
    assert [v.TOKENS[token] for token in ids] == ["l_ttg", "a_gct", "v_gtg", "t_acc", "__unk"]


def test_all_problems_of_all_files_are_one_error_with_file_and_row(tmp_path):
    (tmp_path / "a.csv").write_text(table([(GOOD, "MAV_", "Escherichia coli"), (GOOD, "MAV_")]))
    (tmp_path / "b.csv").write_text(table([("x", "y")], header="sequence,protein"))
    (tmp_path / "c.jsonl").write_text('{"codons": "M_ATG", "organism": 51}\nno json\n{"codons": 5, "organism": 1}\n')
    (tmp_path / "d.csv").write_text("")
    (tmp_path / "e.csv.gz").write_bytes(gzip.compress(b"dna,protein,organism\n")[:-6])
    with pytest.raises(InvalidDataError) as error:
        read(tmp_path)
    text = str(error.value)
    for place in ("a.csv:2", "a.csv:3", "b.csv:1", "c.jsonl:2", "c.jsonl:3", "d.csv", "e.csv.gz"):
        assert f"{tmp_path}/{place}" in text


def test_nothing_usable_names_every_row_and_refuse_does_so_for_some(tmp_path):
    (tmp_path / "a.csv").write_text(table([("ATGA", "M", "51")]))
    with pytest.raises(InvalidDataError) as error:
        read(tmp_path / "a.csv")
    assert "a.csv:2" in str(error.value)
    (tmp_path / "b.csv").write_text(table([*rows_of(9), ("ATGA", "M", "51")]))
    assert read(tmp_path / "b.csv").skipped == {"length": 1}
    with pytest.raises(InvalidDataError) as error:
        read(tmp_path / "b.csv", invalid_rows="refuse")
    assert "b.csv:11" in str(error.value)
    for path in (tmp_path / "none.csv", tmp_path / "none"):
        with pytest.raises(InvalidDataError):
            read(path)


def test_one_protein_cannot_be_split(tmp_path):
    (tmp_path / "a.csv").write_text(table(rows_of(1) * 3))
    with pytest.raises(InvalidDataError):
        read(tmp_path / "a.csv")


def test_tables_fasta_and_lines_of_the_same_genes_are_equal(tmp_path):
    pytest.importorskip("Bio")
    rows = [(dna, protein, "Homo sapiens") for dna, protein, _ in rows_of(12)]
    (tmp_path / "t.csv").write_text(table(rows))
    fasta = "".join(f">a gene [organism=Homo sapiens]\n{dna[:30]}\n{dna[30:]}\n" for dna, _, _ in rows)
    with gzip.open(tmp_path / "f.fa.gz", "wt") as file:
        file.write(fasta)
    lines = [
        json.dumps({"idx": number, "codons": " ".join(v.merge(protein, dna)), "organism": 59})
        for number, (dna, protein, _) in enumerate(rows)
    ]
    (tmp_path / "l.jsonl").write_text("\n".join(lines) + "\n")
    found = [read(tmp_path / name) for name in ("t.csv", "f.fa.gz", "l.jsonl")]
    assert len({each.digest for each in found}) == 1 and len(found[0]) == 12
    assert dna_in(found[0][0]) == rows[0][0] and set(found[0].organisms) == {59}

    (tmp_path / "f.fa").write_text(">gene\n" + rows[0][0] + "\n")
    with pytest.raises(InvalidDataError):
        read(tmp_path / "f.fa")
    assert g.encode(g.Row(1, "51", "ATGGCTCTGTAA"), g.strange_codons(3)) == "code"
    assert g.strange_codons(11) == frozenset()
    with pytest.raises(InvalidDataError):
        g.strange_codons(7)


def test_another_genetic_code_without_biopython_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "Bio.Data", None)
    with pytest.raises(InvalidDataError) as error:
        g.strange_codons(3)
    assert "ascendrun[codon]" in str(error.value)


def test_a_protein_is_in_one_part_whatever_the_order_and_new_organisms_get_the_next_number(tmp_path):
    rows = rows_of(30)
    twice = [*rows, *((dna, protein, "Yarrowia lipolytica") for dna, protein, _ in rows)]
    random.Random(5).shuffle(twice)
    (tmp_path / "a.csv").write_text(table(twice))
    with pytest.raises(InvalidDataError) as error:
        read(tmp_path / "a.csv")
    assert "Yarrowia lipolytica" in str(error.value)
    found = read(tmp_path / "a.csv", new_organisms=["Yarrowia lipolytica"])
    assert set(found.organisms) == {51, 164}
    proteins = [{v.translate(dna_in(found[number])) for number in found.numbers(val=val)} for val in (False, True)]
    assert proteins[0] and proteins[1] and not proteins[0] & proteins[1]
    small = v.Organisms(("Yarrowia lipolytica",))
    assert found.known_to(small).names.names == ("Yarrowia lipolytica", "Escherichia coli general")
    assert found.known_to(small).organisms.tolist() == [0 if number == 164 else 1 for number in found.organisms]


def test_prepared_genes_are_read_back_and_damage_is_refused(tmp_path):
    genes = g.generated(30, seed=1, val_size=0.2)
    g.save(genes, tmp_path)
    again = g.load(tmp_path)
    assert again.digest == genes.digest and again[3].tolist() == genes[3].tolist()
    tokens = np.load(tmp_path / "tokens.npy")
    tokens[5] ^= 1
    np.save(tmp_path / "tokens.npy", tokens)
    for damage in (lambda: None, (tmp_path / "tokens.npy").unlink, (tmp_path / g.PREPARED).unlink):
        damage()
        with pytest.raises(InvalidDataError):
            g.load(tmp_path)


def test_generated_genes_translate_and_have_their_frequencies():
    genes = g.generated(1500, seed=2, val_size=0.1)
    counts = np.zeros((len(v.TOKENS),))
    for number in np.flatnonzero(genes.organisms == 59):
        assert g.encode(g.Row(0, "59", words=[v.TOKENS[token] for token in genes[number][1:-1]])).tolist() == (
            genes[number][1:-1].tolist()
        )
        counts += np.bincount(genes[number], minlength=len(v.TOKENS))
    for place, residue in enumerate(v.RESIDUES[:-1]):
        often = place % g.STYLES
        expected = (g.frequencies(59).sum(0) + g.frequencies(59)[often]) / (g.STYLES + 1)
        tokens = np.array(v.codons_of(residue))
        wanted = expected[place][tokens - v.FIRST_CODON]
        assert counts[tokens] / counts[tokens].sum() == pytest.approx(wanted, abs=0.08)


def test_shares_of_masked_codons_over_a_million_positions():
    """S4-B6: 15 % of the codons; of these 80 % masked, 10 % another codon (1 in 64 the same), 10 % kept."""
    ids = np.random.default_rng(0).integers(v.FIRST_CODON, 90, size=1_000_000)
    inputs, targets = masked(ids, rate=0.15, key=(1, 2, 3))
    chosen = targets >= 0
    assert chosen.mean() == pytest.approx(0.15, abs=0.003)
    own = inputs[chosen]
    assert (own < v.FIRST_CODON).mean() == pytest.approx(0.8, abs=0.003)
    assert (own == targets[chosen]).mean() == pytest.approx(0.1 + 0.1 / 64, abs=0.003)
    other = own[(own >= v.FIRST_CODON) & (own != targets[chosen])]
    assert len(other) / len(own) == pytest.approx(0.1 * 63 / 64, abs=0.003)
    assert np.bincount(other, minlength=90)[26:].min() > 100
    assert (inputs[~chosen] == ids[~chosen]).all() and (targets[chosen] == ids[chosen]).all()
    assert (inputs[inputs < 26] == np.array(v.MASK_OF)[ids[inputs < 26]]).all()


@pytest.mark.parametrize("schedule, mean", plan.MEAN_RATES.items())
def test_a_drawn_rate_masks_all_that_it_selects_and_its_mean_is_that_of_the_plan(schedule, mean):
    ids, options = np.full(400, 40), {"mask_schedule": schedule, "mlm_probability": 0.15}
    made = [masked_for(options, ids, key=(1, 2, number)) for number in range(2000)]
    rates = np.array([(targets >= 0).mean() for _, targets in made])
    assert all((inputs == np.where(targets >= 0, v.MASK_OF[40], 40)).all() for inputs, targets in made)
    assert rates.mean() == pytest.approx(mean, abs=0.02) and rates.max() > 0.99
    assert rates.min() < 0.1 or schedule == "full"
    assert plan.selected(options) == mean


def test_masks_follow_from_seed_step_and_row_and_never_hide_other_tokens():
    ids = np.array([v.CLS, *range(5, 90), v.SEP])
    first = masked(ids, rate=0.5, key=(1, 2, 3))
    assert all((a == b).all() for a, b in zip(first, masked(ids, rate=0.5, key=(1, 2, 3))))
    for key in ((2, 2, 3), (1, 3, 3), (1, 2, 4)):
        assert (masked(ids, rate=0.5, key=key)[1] != first[1]).any()
    assert (first[1][ids < 26] == -1).all() and (first[0][ids < 26] == ids[ids < 26]).all()
    inputs, targets = hidden(ids)
    assert (inputs < 26).all() and (targets >= 0).sum() == 64


def test_a_batch_is_padded_and_its_places_are_those_of_the_targets():
    rows = [np.array([1, 40, 74, 2]), np.array([1, 40, 65, 72, 74, 2])]
    batch = batch_of(rows, [hidden(row) for row in rows], np.array([51, 59]), multiple=4)
    ids, places = batch.tensors["ids"], batch.tensors["places"]
    assert ids.shape == (2, 8) and ids[0].tolist() == [1, 15, 25, 2, 3, 3, 3, 3]
    assert places.tolist() == [1, 2, 9, 10, 11, 12] and batch.tensors["targets"].tolist() == [40, 74, 40, 65, 72, 74]
    assert batch.tensors["segments"].lengths == (4, 4, 6, 2)
    assert (batch.weight, batch.tokens, batch.samples) == (6.0, 10, 2)
    assert "segments" not in batch_of(rows[:1], [hidden(rows[0])], np.array([51])).tensors
