"""DNA of proteins by a model: from a file on all ranks to a file and a report, and the function for scripts."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ascendrun.programs import errors
from ascendrun.programs.codon import vocabulary as v
from ascendrun.programs.codon.asked import Asked, Drawing, read_ambiguity, read_asked
from ascendrun.programs.codon.constraints import NO_CONSTRAINTS, Constraints
from ascendrun.programs.codon.decoding import InfeasibleError, decode, decode_freely
from ascendrun.programs.codon.files import Stored, load_stored
from ascendrun.programs.codon.measures import CodonTable, measures, similarity, summary, table_choice, uniform_choice
from ascendrun.programs.codon.model import CodonModel, batch_of
from ascendrun.programs.codon.sequences import Protein, complete, read_proteins
from ascendrun.programs.codon.train import read_counts
from ascendrun.programs.codon.vocabulary import MAX_RESIDUES, ORGANISMS, Organisms
from ascendrun.programs.devices import accelerator
from ascendrun.programs.devices.accelerator import Accelerator, Precision, choose_precision, open_accelerator
from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trainer.checkpoint import replace_json, replacing
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.text import listed

COLUMNS = ("id", "organism", "protein", "predicted_dna", "log_prob", "is_best", "error")
BACKGROUND = Drawing(temperature=1.0, top_p=1.0)
LEAST_FILLED = 0.75
CPU_TOKENS = 1024
"""Tokens of a pass on a CPU: more are slower, they leave its caches (benchmarks/codon/upstream.py)."""


def passes_of(lengths: Sequence[int], *, rows: int, most: int | None = None) -> Iterator[list[int]]:
    """Yield the places of each pass, long ones first: at least LEAST_FILLED of a row is no padding.

    `most`: tokens of a pass, if it has more than one row.
    """
    order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    while order:
        longest = lengths[order[0]]
        size = rows if most is None else max(1, min(rows, most // longest))
        places = [place for place in order[:size] if lengths[place] >= LEAST_FILLED * longest]
        order = order[len(places) :]
        yield places


def log_probs_of(
    model: CodonModel, proteins: Sequence[tuple[str, int]], device: Accelerator, precision: Precision, rows: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (place, log-probabilities [residues, 64]) of proteins with their organisms' numbers, long ones first.

    Proteins of similar length are computed together, up to `rows` at a time.
    """
    most = CPU_TOKENS if device.family == "cpu" else None
    for places in passes_of([len(protein) for protein, _ in proteins], rows=rows, most=most):
        ids = [np.array(v.ids_of(v.merge(proteins[place][0]))) for place in places]
        batch = batch_of(
            ids,
            [(own, np.where(own >= v.FIRST_RESIDUE, own, -1)) for own in ids],
            np.array([proteins[place][1] for place in places]),
        )
        tensors = {name: tensor.to(device.device) for name, tensor in batch.tensors.items() if name != "targets"}
        with torch.no_grad(), device.autocast(precision.compute):
            logits = model(**tensors)
        found = torch.log_softmax(logits.float(), -1)[:, v.FIRST_CODON :].double().cpu().numpy()
        ends = np.cumsum([len(proteins[place][0]) for place in places])
        yield from zip(places, np.split(found, ends[:-1]))


@dataclass(frozen=True)
class Optimizer:
    """A model on its device, with the codon tables of its organisms. `rows`: proteins in a pass."""

    model: CodonModel
    organisms: Organisms
    tables: Mapping[str, CodonTable]
    accelerator: Accelerator
    precision: Precision
    rows: int

    @classmethod
    def of(cls, stored: Stored, options: Mapping[str, Any], here: Runtime) -> Optimizer:
        """Move a model that was read from `model_path` to this rank's device."""
        tables = {name: CodonTable(tuple(counts)) for name, counts in read_counts(Path(options["model_path"])).items()}
        precision = accelerator.precision_of(options, here.accelerator)
        model = stored.make().to(here.device).eval()
        return cls(model, stored.organisms, tables, here.accelerator, precision, options["eval_batch_size"])

    def log_probs_of(self, proteins: Sequence[Protein]) -> Iterator[tuple[int, np.ndarray]]:
        given = [(each.residues, each.organism) for each in proteins]
        return log_probs_of(self.model, given, self.accelerator, self.precision, self.rows)

    def sequences_of(self, protein: Protein, log_probs: np.ndarray, asked: Asked) -> list[dict[str, Any]]:
        """Return a row with measures for each sequence of a protein. Raises InfeasibleError."""
        organism = self.organisms.names[protein.organism]
        rows = []
        for number, drawing in enumerate(asked.drawings, start=1):
            decoded = decode(protein.residues, log_probs, asked.constraints, drawing)
            row = row_of(protein, organism, number if len(asked.drawings) > 1 else None)
            row.update(predicted_dna=decoded.dna, log_prob=round(decoded.log_prob, 6), is_best=decoded.is_best)
            found = measures(decoded.dna, self.tables.get(organism))
            row.update({key: round(value, 4) for key, value in found.items()})
            if len(protein.dna) == len(decoded.dna):
                row["similarity"] = round(similarity(protein.dna, decoded.dna), 4)
            rows.append(row)
        return rows

    def rows_of(self, protein: Protein, log_probs: np.ndarray, asked: Asked) -> list[dict[str, Any]]:
        """Return the sequences of a protein, or one row with the error where there are none."""
        try:
            return self.sequences_of(protein, log_probs, asked)
        except InfeasibleError as error:
            return [{**row_of(protein, self.organisms.names[protein.organism]), "error": str(error)}]


def row_of(protein: Protein, organism: str, number: int | None = None) -> dict[str, Any]:
    name = protein.name if number is None else f"{protein.name}.{number}"
    return {**dict.fromkeys(COLUMNS, ""), "id": name, "organism": organism, "protein": protein.residues}


def most_residues(stored: Stored) -> int:
    """Return the number of residues with the stop that the model can read."""
    return min(MAX_RESIDUES, stored.config.max_position_embeddings - 2)


def optimize_stage(options: Mapping[str, Any], here: Runtime) -> None:
    """Make DNA of the proteins of --input and write it with a report."""
    target = Path(options["output_dir"]).absolute() / options["output"]
    asked, problems = read_asked(options)
    stored = load_stored(Path(options["model_path"]))
    proteins: list[Protein] = []
    try:
        proteins, found = read_proteins(
            options["input"], options["organism"], stored.organisms, asked.ambiguity, most=most_residues(stored)
        )
        problems += found
    except InvalidDataError as error:
        problems.append(error.args[0])
    if problems:
        raise InvalidDataError.of(problems)
    errors.check_writable(target.parent)
    optimizer = Optimizer.of(stored, options, here)
    started_s = time.monotonic()
    mine = range(here.rank, len(proteins), here.world_size)
    made = {
        mine[at]: optimizer.rows_of(proteins[mine[at]], log_probs, asked)
        for at, log_probs in optimizer.log_probs_of([proteins[place] for place in mine])
    }
    every = {place: rows for part in here.gather(made) for place, rows in part.items()}
    seconds = time.monotonic() - started_s
    rows = [row for place in range(len(proteins)) for row in every[place]]
    failed = [row for row in rows if row["error"]]
    if here.is_first:
        write_rows(target, rows)
        report = report_of(rows, proteins, optimizer.tables, stored.organisms)
        replace_json(target.with_suffix(".report.json"), report)
    residues = sum(len(each.residues) for each in proteins)
    here.record(done=True, proteins=len(proteins), duration_s=seconds, residues_per_s=residues / seconds)
    here.log(
        listed(
            "program.codon-optimized", made=len(rows) - len(failed), count=len(proteins), seconds=seconds, path=target
        )
    )
    if failed:
        raise InvalidDataError.of([f"{row['id']}: {row['error']}" for row in failed])


def report_of(
    rows: Sequence[Mapping[str, Any]],
    proteins: Sequence[Protein],
    tables: Mapping[str, CodonTable],
    organisms: Organisms,
) -> dict[str, Any]:
    """Return the means of the measures by organism, beside those of choices that know only the codon table."""
    report: dict[str, Any] = {}
    for number in dict.fromkeys(each.organism for each in proteins):
        name = organisms.names[number]
        good = [row for row in rows if row["organism"] == name and not row["error"]]
        own = [{key: value for key, value in row.items() if key not in COLUMNS} for row in good]
        report[name] = {"sequences": len(own), "model": summary(own)}
        if name not in tables:
            continue
        those = [each.residues for each in proteins if each.organism == number]
        choices = {
            "highest_frequency": [decode(each, table_choice(each, tables[name])) for each in those],
            "background": [decode(each, table_choice(each, tables[name]), drawing=BACKGROUND) for each in those],
            "uniform": [decode(each, uniform_choice(each), drawing=BACKGROUND) for each in those],
        }
        for kind, made in choices.items():
            report[name][kind] = summary([measures(each.dna, tables[name]) for each in made])
    return report


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a table, FASTA records, or JSON lines, by the ending of the path; FASTA has only the sequences."""
    with replacing(path) as fresh, open(fresh, "w", encoding="utf-8", newline="") as file:
        if path.suffix == ".csv":
            names = dict.fromkeys(name for row in rows for name in row)
            writer = csv.DictWriter(file, list(names), restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        for row in rows:
            if path.suffix == ".jsonl":
                file.write(json.dumps(row) + "\n")
            elif path.suffix == ".fasta" and row["predicted_dna"]:
                file.write(f">{row['id']} [organism={row['organism']}]\n{row['predicted_dna']}\n")


# --- for scripts ---


@dataclass(frozen=True)
class DNASequencePrediction:
    """`processed_input`: the words that the model reads, as in M_UNK."""

    organism: str
    protein: str
    processed_input: str
    predicted_dna: str

    as_dict = asdict


def predict_dna_sequence(
    protein: str,
    organism: int | str,
    device: torch.device | str = "cpu",
    tokenizer: Any = None,
    model: str | Path | CodonModel | None = None,
    attention_type: str = "original_full",
    deterministic: bool = True,
    temperature: float = 0.2,
    top_p: float = 0.95,
    num_sequences: int = 1,
    match_protein: bool = False,
    *,
    constraints: Constraints = NO_CONSTRAINTS,
    ambiguous: str = "random",
    seed: int = 0,
) -> DNASequencePrediction | list[DNASequencePrediction]:
    """Return the DNA of a protein, its stop included; a list for several sequences.

    Arguments, errors and result are those of CodonTransformer's function. `model`: a path, loaded once for each device,
    or a model; it is not downloaded. `tokenizer` is not used: its words are fixed. `constraints` require and imply
    `match_protein`; `ambiguous` and `seed` are as the options. Raises ValueError, and InfeasibleError for constraints.
    """
    _check_arguments(protein, deterministic, temperature, top_p, num_sequences, attention_type, model)
    where = torch.device(device)
    machine = open_accelerator(where.type, where.index or 0)
    ready, organisms = (model, ORGANISMS) if isinstance(model, CodonModel) else _loaded(str(model), where)
    ready = ready.to(where).eval()
    number = organisms.find(organism)
    ambiguity, wrong = read_ambiguity(ambiguous, seed=seed)
    residues, more = complete(protein, ambiguity)
    if number is None:
        more.append(organisms.unknown(organism))
    if number is None or wrong or more:
        raise ValueError("\n".join(map(str, [*wrong, *more])))
    [(_, log_probs)] = log_probs_of(ready, [(residues, number)], machine, choose_precision("float32", machine), 1)
    found = []
    for place in range(num_sequences):
        drawing = None if deterministic else Drawing(temperature, top_p, seed + place)
        if match_protein or constraints != NO_CONSTRAINTS:
            dna = decode(residues, log_probs, constraints, drawing).dna
        else:
            dna = decode_freely(residues, log_probs, drawing)
        words = " ".join(v.merge(residues))
        found.append(DNASequencePrediction(organisms.names[number], protein, words, dna))
    return found[0] if num_sequences == 1 else found


def _check_arguments(
    protein: str,
    deterministic: bool,
    temperature: float,
    top_p: float,
    num_sequences: int,
    attention_type: str,
    model: Any,
) -> None:
    """Raise ValueError with all problems."""
    is_count = isinstance(num_sequences, int) and num_sequences >= 1
    checks = (
        ("protein is empty", bool(protein)),
        (f"temperature {temperature!r}: expected a number above 0", _is_in(temperature, float("inf"))),
        (f"top_p {top_p!r}: expected a number above 0, at most 1", _is_in(top_p, 1.0)),
        (f"num_sequences {num_sequences!r}: expected a whole number above 0", is_count),
        ("several sequences require deterministic=False", not deterministic or num_sequences == 1),
        (f"attention_type {attention_type!r}: expected 'original_full'", attention_type == "original_full"),
        ("model is required: the path of a model's directory or file", model is not None),
    )
    problems = [sentence for sentence, holds in checks if not holds]
    if problems:
        raise ValueError("\n".join(problems))


def _is_in(value: Any, most: float) -> bool:
    return isinstance(value, (float, int)) and 0 < value <= most


@lru_cache(maxsize=2)
def _loaded(path: str, device: torch.device) -> tuple[CodonModel, Organisms]:
    stored = load_stored(Path(path))
    return stored.make().to(device).eval(), stored.organisms
