"""The tokens and organisms of codon, compared with Biopython's genetic codes and with what the format says."""

import hashlib
import json

import pytest

from ascendrun.programs.codon import vocabulary as v
from ascendrun.programs.codon.genes import read_genes
from tests.programs.codonlines import digest, lines
from tests.programs.conftest import options_of

IDS = "4c6fd45cf296c7a1f1eca82450788a1c8814e62e8204f55e9ca4c38af9107dd4"
"""Of the ids of codonlines.lines() by CodonTransformer's tokenizer file: printed by codonlines.py."""


def test_there_are_90_tokens_in_the_order_of_the_published_model():
    assert len(v.TOKENS) == len(set(v.TOKENS)) == 90
    assert v.TOKENS[:6] == ("[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]", "a_unk") and v.TOKENS[25] == "__unk"
    assert v.TOKENS[26:30] == ("k_aaa", "n_aac", "k_aag", "n_aat") and v.TOKENS[-1] == "f_ttt"
    assert [v.TOKENS.index(word) for word in ("__taa", "__tag", "__tga", "m_atg", "w_tgg")] == [74, 76, 82, 40, 84]
    digest = hashlib.sha256("\n".join(v.TOKENS).encode()).hexdigest()
    assert digest[:16] == "5198ab98f40a8c3d"  # of the vocabulary of the published tokenizer


def test_token_ids_of_10000_lines_equal_those_of_the_published_tokenizer(tmp_path):
    """C-01, C-02: as `predict` makes them, and as a training reads them."""
    assert digest(v.ids_of(line.split(" ")) for line in lines()) == IDS
    (tmp_path / "lines.jsonl").write_text(
        "".join(json.dumps({"codons": line, "organism": 51}) + "\n" for line in lines())
    )
    genes = read_genes(options_of("codon", f"--data_path={tmp_path / 'lines.jsonl'}"), v.ORGANISMS)
    assert not genes.skipped
    assert digest(genes[number].tolist() for number in range(len(genes))) == IDS


@pytest.mark.parametrize("table", [1, 11])
def test_codons_translate_as_in_the_tables_of_ncbi(table):
    code = pytest.importorskip("Bio.Data.CodonTable").unambiguous_dna_by_id[table]
    assert {codon: v.STANDARD[codon] for codon in v.CODONS} == {
        **code.forward_table, **dict.fromkeys(code.stop_codons, v.STOP),
    }  # fmt: skip


def test_each_codon_belongs_to_one_residue_and_its_mask_token():
    found = [token for residue in v.RESIDUES for token in v.codons_of(residue)]
    assert sorted(found) == list(range(26, 90))
    assert all(v.TOKENS[v.MASK_OF[token]] == v.TOKENS[token][0] + "_unk" for token in range(5, 90))
    assert v.MASK_OF[:26] == tuple(range(26))
    assert [v.CODONS[token - v.FIRST_CODON] for token in v.codons_of("_")] == ["TAA", "TAG", "TGA"]


def test_a_merged_sequence_and_its_tokens():
    assert v.merge("MAV_", "ATGGCTGTGTAA") == ["M_ATG", "A_GCT", "V_GTG", "__TAA"]
    assert v.merge("QHH_") == ["Q_UNK", "H_UNK", "H_UNK", "__UNK"]
    ids = v.ids_of(v.merge("MAV_", "ATGGCTGTGTAA"))
    assert ids == [1, 40, 65, 72, 74, 2]
    assert v.ids_of(["X_UNK", "W_TGA"]) == [1, 0, 0, 2]
    assert v.translate("ATGGCTGTGTAA") == "MAV_" and v.translate("ATGNNN") == "MX"
    with pytest.raises(ValueError):
        v.merge("MA_", "ATGTAA")


def test_organisms_are_found_by_name_and_by_number():
    organisms = v.ORGANISMS
    assert len(organisms) == 164
    assert [organisms.find(each) for each in ("Escherichia coli general", "52", 59)] == [51, 52, 59]
    assert organisms.names[120] == "Saccharomyces cerevisiae" and v.table_of("Saccharomyces cerevisiae") == 1
    assert v.table_of("Escherichia coli general") == 11
    more = organisms.with_new(["Yarrowia lipolytica", "Homo sapiens", "Yarrowia lipolytica"])
    assert len(more) == 165 and more.find("Yarrowia lipolytica") == 164


@pytest.mark.parametrize("organism", ["Escherichia", "164", -1, ""])
def test_an_unknown_organism_is_refused_with_similar_names(organism):
    assert v.ORGANISMS.find(organism) is None
    near = v.ORGANISMS.unknown(organism).values["near"]
    assert near and (organism != "Escherichia" or near[0].startswith("Escherichia"))
