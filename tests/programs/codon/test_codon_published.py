"""Files that CodonTransformer published, where they are available: sample proteins and predictions, and weights."""

import csv
import hashlib
import os
from pathlib import Path

import pytest

from ascendrun.programs.codon import vocabulary as v
from ascendrun.programs.codon.asked import Ambiguity
from ascendrun.programs.codon.genes import read_genes
from ascendrun.programs.codon.optimize import predict_dna_sequence
from ascendrun.programs.codon.sequences import read_proteins
from tests.programs.conftest import dna_in, options_of

ROOT = Path(__file__).parents[3]
DATA = Path(os.environ.get("TESTS_SHARED_DATA", ROOT.parent / "shared" / "data")).absolute() / "codon"
WEIGHTS = "TESTS_CODON_WEIGHTS"
INSULIN = "MALWMRLLPLLALLALWGPDPAAAFVNQHLCGSHLVEALYLVCGERGFFYTPKTRREAEDLQVGQVELGG"
INSULIN_DNA = "45ee26c2808e09d2ccba2ae0fbd267204c17a041444de7874775f28032aa9424"
"""SHA-256 of the 213 bases that the page of CodonTransformer prints."""


def test_the_sample_proteins_are_read_and_the_sample_predictions_translate():
    dataset, predictions = (DATA / f"orig_sample_{name}.csv" for name in ("dataset", "predictions"))
    if not predictions.exists():
        pytest.skip(f"no sample files of CodonTransformer in {DATA}")
    rows = list(csv.DictReader(predictions.open(encoding="utf-8")))
    proteins, problems = read_proteins(str(dataset), "", v.ORGANISMS, Ambiguity())
    assert not problems and [each.residues for each in proteins] == [row["protein_sequence"] for row in rows]
    assert [v.translate(row["predicted_dna"]) for row in rows] == [each.residues for each in proteins]
    genes = read_genes(options_of("codon", f"--data_path={predictions}"), v.ORGANISMS)
    assert len(genes) == len(rows) and not genes.skipped
    assert [dna_in(genes[number]) for number in range(len(genes))] == [row["predicted_dna"] for row in rows]


def test_the_published_weights_give_the_printed_dna_of_insulin():
    """C-31. The variable names the directory of the published model."""
    if WEIGHTS not in os.environ:
        pytest.skip(f"{WEIGHTS} is not set: the directory of CodonTransformer's weights")
    found = predict_dna_sequence(INSULIN, "Escherichia coli general", model=os.environ[WEIGHTS])
    assert hashlib.sha256(found.predicted_dna.encode()).hexdigest() == INSULIN_DNA
