"""Proteins in, DNA out: from files on one rank and two, and by the function for scripts."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascendrun.programs.codon.asked import Ambiguity, Drawing, read_ambiguity, read_asked
from ascendrun.programs.codon.constraints import Constraints
from ascendrun.programs.codon.decoding import InfeasibleError
from ascendrun.programs.codon.files import save_model
from ascendrun.programs.codon.model import CodonModel, Config, make_model
from ascendrun.programs.codon.optimize import log_probs_of, optimize_stage, passes_of, predict_dna_sequence, write_rows
from ascendrun.programs.codon.sequences import complete, read_proteins
from ascendrun.programs.codon.train import write_counts
from ascendrun.programs.codon.vocabulary import CODONS, ORGANISMS, translate
from ascendrun.programs.devices.accelerator import choose_precision, open_accelerator
from ascendrun.programs.errors import InvalidDataError
from tests.programs.conftest import options_of

PROTEIN = "MKTVRQERLKSIVRILERSKEPVSGAQLAEELSVSRQVIVQDIAYLRSLGYNIVATPRGYVLA"
ECOLI = "Escherichia coli general"


@pytest.fixture(scope="module")
def model() -> CodonModel:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return make_model(Config(**sizes, max_position_embeddings=128, initializer_range=0.5), seed=1).eval()


@pytest.fixture
def folder(model: CodonModel, tmp_path: Path) -> Path:
    save_model(model, ORGANISMS, tmp_path / "model")
    write_counts({ECOLI: [1 + place % 5 for place in range(64)]}, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def fasta(tmp_path: Path) -> Path:
    path = tmp_path / "proteins.fasta"
    records = [f">p{at} [organism={51 if at % 2 else ECOLI}]\n{PROTEIN[: 12 + 9 * at]}\n" for at in range(5)]
    path.write_text("".join(records))
    return path


def test_a_file_of_proteins_has_the_same_dna_on_one_rank_and_two(launch: Any, folder: Path, fasta: Path) -> None:
    options = ["--mode=optimize", f"--model={folder}", f"--input={fasta}", "--output_dir=out", "--dtype=float32"]
    options += ["--avoid=GAATTC,GGTCTC", "--gc=30-70/30", "--deterministic=false", "--num_sequences=2"]
    tables = []
    for ranks in (1, 2):
        run = launch("codon", [*options, f"--eval_batch_size={ranks}"], name=f"ranks-{ranks}", ranks=ranks).succeed()
        with open(run.folder / "out" / "optimized.csv", newline="") as file:
            tables.append(list(csv.DictReader(file)))
    one, two = tables
    assert [row["predicted_dna"] for row in one] == [row["predicted_dna"] for row in two]
    assert [row["id"] for row in one[:3]] == ["p0.1", "p0.2", "p1.1"]
    for row in one:
        assert translate(row["predicted_dna"]) == row["protein"]
        assert not re.search("GAATTC|GGTCTC|GAGACC", row["predicted_dna"])
        assert 0 < float(row["csi"]) <= 1 and row["error"] == ""
    report = json.loads((run.folder / "out" / "optimized.report.json").read_text())
    assert set(report[ECOLI]) == {"sequences", "model", "highest_frequency", "background", "uniform"}
    assert report[ECOLI]["highest_frequency"]["csi"] == 1.0


def test_problems_of_options_and_proteins_are_one_error_before_any_output(folder: Path, tmp_path: Path) -> None:
    bad = ["--input=MAAK1", f"--organism={ECOLI}", "--avoid=CAT", "--output=out.txt", f"--output_dir={tmp_path}/bad"]
    options = options_of("codon", "--mode=optimize", f"--model={folder}", *bad)
    with pytest.raises(InvalidDataError) as error:
        optimize_stage(options, None)  # type: ignore[arg-type]  # it ends before it uses the rank
    assert len(str(error.value).splitlines()) == 3
    assert not (tmp_path / "bad").exists()


def test_all_problems_of_all_proteins_are_reported_together(tmp_path: Path) -> None:
    path = tmp_path / "proteins.csv"
    path.write_text(
        f"protein,organism\nMA1K,51\nMAK*A,{ECOLI}\n{'M' * 2046},51\nMAX,Escherichia coli genral\n,51\nMK,51\n"
    )
    proteins, problems = read_proteins(str(path), "", ORGANISMS, Ambiguity())
    assert [each.residues for each in proteins] == ["MK_"]
    found = [(each.values["place"].rsplit(":", 1)[1], getattr(each.values["problem"], "key", "")) for each in problems]
    assert found == [
        ("2", "program.codon-residues"),
        ("3", "program.codon-inner-stops"),
        ("4", "program.codon-long"),
        ("5", "program.codon-residues"),
        ("5", "program.codon-ambiguous"),
        ("5", "program.codon-organism"),
        ("6", "program.codon-no-protein"),
    ]
    assert ECOLI in str(problems[5])


def test_proteins_of_each_form_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": 7, "protein": "mk*", "organism": 51, "dna": "atgaaataa"}\n\n')
    (tmp_path / "b.csv").write_text("protein_sequence,name\nMKA_,first\n")
    line, row = (
        read_proteins(str(tmp_path / name), ECOLI, ORGANISMS, Ambiguity())[0][0] for name in ("a.jsonl", "b.csv")
    )
    assert (line.name, line.residues, line.organism, line.dna) == ("7", "MK_", 51, "ATGAAATAA")
    assert (row.name, row.residues, row.organism) == ("first", "MKA_", 51)
    assert read_proteins("MKA", "51", ORGANISMS, Ambiguity())[0][0].residues == "MKA_"
    (tmp_path / "c.csv").write_text("sequence\nMKA\n")
    for protein in (str(tmp_path / "c.csv"), str(tmp_path / "none.fasta"), "proteins.txt", ""):
        with pytest.raises(InvalidDataError):
            read_proteins(protein, "51", ORGANISMS, Ambiguity())


def ambiguity(text: str, *, seed: int = 0) -> Ambiguity:
    found, problems = read_ambiguity(text, seed=seed)
    assert not problems
    return found


def test_ambiguous_residues_are_an_error_or_take_the_place_that_is_asked_for() -> None:
    assert [each.key for each in complete("MBX", Ambiguity())[1]] == [
        "program.codon-residues",
        "program.codon-ambiguous",
    ]
    assert complete("MBZXJUO", ambiguity("deterministic")) == ("MNQALCK_", [])
    assert complete("MBX", ambiguity("x=G, b=D")) == ("MDG_", [])
    assert [each.values["places"] for each in complete("MBX", ambiguity("X=G"))[1][:1]] == [["B2"]]
    drawn = {complete("MBZJ", ambiguity("random", seed=seed))[0] for seed in range(40)}
    assert drawn == {f"M{b}{z}{j}_" for b in "ND" for z in "QE" for j in "LI"}
    assert complete("MBZJ", ambiguity("random", seed=3)) == complete("MBZJ", ambiguity("random", seed=3))
    for wrong in ("perhaps", "X=1", "A=G"):
        assert [each.key for each in read_ambiguity(wrong)[1]] == ["program.codon-ambiguous-option"]


def test_probabilities_do_not_depend_on_the_batch(model: CodonModel) -> None:
    cpu = open_accelerator("cpu", 0)
    given = [(PROTEIN[:size] + "_", organism) for size, organism in ((40, 51), (3, 59), (62, 120), (17, 51))]
    precision = choose_precision("float32", cpu)
    alone = {place: next(log_probs_of(model, [each], cpu, precision, 1))[1] for place, each in enumerate(given)}
    for place, found in log_probs_of(model, given, cpu, precision, 3):
        assert found.shape == (len(given[place][0]), 64)
        assert np.abs(found - alone[place]).max() < 1e-5


def test_the_function_for_scripts_has_the_arguments_errors_and_result_of_the_original(
    model: CodonModel, folder: Path
) -> None:
    """S4-B8: a stop inside a protein is an error; the original's probabilities were not numbers there."""
    one = predict_dna_sequence(PROTEIN, 51, "cpu", None, folder, match_protein=True)
    assert not isinstance(one, list)
    assert (one.organism, one.protein) == (ECOLI, PROTEIN)
    assert one.processed_input.startswith("M_UNK K_UNK") and one.processed_input.endswith("A_UNK __UNK")
    assert translate(one.predicted_dna) == PROTEIN + "_"
    assert predict_dna_sequence(PROTEIN, ECOLI, "cpu", model=model, match_protein=True) == one
    assert len(predict_dna_sequence(PROTEIN, ECOLI, model=model).predicted_dna) == len(one.predicted_dna)  # type: ignore[union-attr]

    drawn = predict_dna_sequence(
        PROTEIN, 51, model=model, deterministic=False, temperature=0.8, num_sequences=3, match_protein=True, seed=5
    )
    assert isinstance(drawn, list) and len({each.predicted_dna for each in drawn}) == 3
    again = predict_dna_sequence(
        PROTEIN, 51, model=model, deterministic=False, temperature=0.8, match_protein=True, seed=6
    )
    assert again == drawn[1]

    kept = predict_dna_sequence(PROTEIN, 51, model=model, constraints=Constraints(("CTG",)))
    assert "CTG" not in kept.predicted_dna  # type: ignore[union-attr]
    with pytest.raises(InfeasibleError):
        predict_dna_sequence("MW", 51, model=model, constraints=Constraints(("TGG",)))

    wrong: list[dict[str, Any]] = [
        {"protein": ""}, {"organism": "nobody"}, {"organism": 164}, {"organism": None}, {"temperature": 0},
        {"temperature": "hot"}, {"top_p": 0}, {"top_p": 1.5}, {"num_sequences": 0}, {"num_sequences": 2},
        {"model": None}, {"protein": "MA*K", "match_protein": True}, {"protein": "MA1"}, {"attention_type": "sparse"},
    ]  # fmt: skip
    for each in wrong:
        with pytest.raises(ValueError, match="."):
            predict_dna_sequence(**{"protein": PROTEIN, "organism": 51, "model": model, **each})


def test_sequences_are_numbered_by_seed() -> None:
    draws = ["--temperature=0.5", "--top_p=0.9", "--num_sequences=2", "--seed=7"]
    asked, problems = read_asked(options_of("codon", "--mode=optimize", "--deterministic=false", *draws))
    assert asked.drawings == (Drawing(0.5, 0.9, 7), Drawing(0.5, 0.9, 8)) and not problems
    wrong = options_of("codon", "--mode=optimize", "--gc=x", "--ambiguous=B=1", "--output=a", *draws)
    assert [each.key.partition("codon-")[2] for each in read_asked(wrong)[1]] == [
        "gc",
        "ambiguous-option",
        "several",
        "output",
    ]


def test_results_are_written_by_the_ending_of_the_file(tmp_path: Path) -> None:
    good = {"id": "a", "organism": ECOLI, "protein": "MK_", "predicted_dna": CODONS[14] + "AAATAA", "error": ""}
    rows = [good, {**good, "id": "b", "predicted_dna": "", "error": "no"}]
    for ending in ("fasta", "jsonl"):
        write_rows(tmp_path / f"out.{ending}", rows)
    assert (tmp_path / "out.fasta").read_text() == f">a [organism={ECOLI}]\nATGAAATAA\n"
    assert [json.loads(line)["id"] for line in (tmp_path / "out.jsonl").read_text().splitlines()] == ["a", "b"]


@given(st.lists(st.integers(1, 2047), max_size=60), st.integers(1, 20), st.sampled_from([None, 64, 1024]))
def test_a_pass_has_proteins_of_similar_length_and_on_a_cpu_few_tokens(lengths, rows, most):
    found = list(passes_of(lengths, rows=rows, most=most))
    assert sorted(place for each in found for place in each) == list(range(len(lengths)))
    for each in found:
        own = [lengths[place] for place in each]
        assert own == sorted(own, reverse=True) and 1 <= len(own) <= rows and own[-1] >= 0.75 * own[0]
        assert most is None or len(own) == 1 or len(own) * own[0] <= most
