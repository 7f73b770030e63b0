"""DNA of proteins by a model: from a file on all ranks to a file and a report, and the function for scripts."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ascendrun.programs.codon import vocabulary as v
from ascendrun.programs.codon.constraints import NO_CONSTRAINTS, Constraints, read_constraints
from ascendrun.programs.codon.decoding import Drawing, InfeasibleError, decode, decode_freely
from ascendrun.programs.codon.files import load_stored
from ascendrun.programs.codon.masking import batch_of
from ascendrun.programs.codon.measures import CodonTable, measures, similarity, summary, table_choice, uniform_choice
from ascendrun.programs.codon.model import CodonModel
from ascendrun.programs.codon.proteins import Ambiguity, Protein, complete, read_proteins
from ascendrun.programs.codon.scores import read_counts
from ascendrun.programs.codon.vocabulary import ORGANISMS, Organisms
from ascendrun.programs.trainer import errors
from ascendrun.programs.trainer.checkpoint import replace_text, replacing
from ascendrun.programs.trainer.devices import accelerator
from ascendrun.programs.trainer.devices.accelerator import Accelerator, Precision, choose_precision, open_accelerator
from ascendrun.programs.trainer.errors import InvalidDataError
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.text import Text

FORMS = (".csv", ".fasta", ".jsonl")
COLUMNS = ("id", "organism", "protein", "predicted_dna", "log_prob", "is_best", "error")
BACKGROUND = Drawing(temperature=1.0, top_p=1.0)


def log_probs_of(
    model: CodonModel, proteins: Sequence[tuple[str, int]], device: Accelerator, precision: Precision, rows: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (place, log-probabilities [residues, 64]) of proteins with their organisms' numbers, long ones first.

    Proteins of similar length are computed together, `rows` at a time.
    """
    order = sorted(range(len(proteins)), key=lambda place: -len(proteins[place][0]))
    for start in range(0, len(order), rows):
        places = order[start : start + rows]
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
class Wanted:
    """What of each protein is made. `drawings`: one sequence each; None: the likeliest."""

    constraints: Constraints
    drawings: tuple[Drawing | None, ...]

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> tuple[Wanted, list[Text]]:
        constraints, problems = read_constraints(
            ",".join(options["avoid"]), options["gc"], options["max_homopolymer"], options["no_repeat_bases"]
        )
        count = options["num_sequences"]
        if options["deterministic"] and count > 1:
            problems.append(
                Text("program.codon-several", "--num_sequences={count} requires --deterministic=false", count=count)
            )
        first = None if options["deterministic"] else Drawing(options["temperature"], options["top_p"], options["seed"])
        drawings = tuple(first and replace(first, seed=first.seed + number) for number in range(count))
        return cls(constraints, drawings), problems


def optimize_stage(options: Mapping[str, Any], here: Runtime) -> None:
    """Make DNA of the proteins of --input and write it with a report."""
    output = Path(options["output_dir"]).absolute()
    target = output / options["output"]
    path = Path(options["model_path"])
    wanted, problems = Wanted.of(options)
    if target.suffix not in FORMS:
        problems.append(
            Text(
                "program.codon-output",
                "--output={got}: expected a name that ends in {forms}",
                got=options["output"],
                forms=list(FORMS),
            )
        )
    if not options["model_path"]:
        problems.append(Text("program.codon-model-required", "--model_path is required: the directory of a model"))
        raise InvalidDataError.of(problems)
    stored = load_stored(path)
    try:
        ambiguity = Ambiguity.of(options["ambiguous"], seed=options["seed"])
        proteins, found = read_proteins(options["input"], options["organism"], stored.organisms, ambiguity)
        problems += found
    except InvalidDataError as error:
        problems.append(error.args[0])
        proteins = []
    positions = stored.config.max_position_embeddings
    problems += [
        Text(
            "program.codon-protein-positions",
            "{name}: {count} residues with the stop (the model has positions for {most})",
            name=each.name,
            count=len(each.residues),
            most=positions - 2,
        )
        for each in proteins
        if len(each.residues) + 2 > positions
    ]
    if problems:
        raise InvalidDataError.of(problems)
    errors.check_writable(target.parent)
    precision = accelerator.precision_of(options, here.accelerator)
    model = stored.make().to(here.device).eval()
    tables = {name: CodonTable(tuple(counts)) for name, counts in read_counts(path).items()}
    started_s = time.monotonic()
    mine = range(here.rank, len(proteins), here.world_size)
    given = [(proteins[place].residues, proteins[place].organism) for place in mine]
    made = {
        mine[at]: rows_of(proteins[mine[at]], log_probs, wanted, stored.organisms, tables)
        for at, log_probs in log_probs_of(model, given, here.accelerator, precision, options["eval_batch_size"])
    }
    every = {place: rows for part in here.gather(made) for place, rows in part.items()}
    seconds = time.monotonic() - started_s
    rows = [row for place in range(len(proteins)) for row in every[place]]
    failed = [row for row in rows if row["error"]]
    if here.is_first:
        write_rows(target, rows)
        report = report_of(rows, proteins, tables, stored.organisms)
        replace_text(target.with_suffix(".report.json"), json.dumps(report, indent=1) + "\n")
    residues = sum(len(each.residues) for each in proteins)
    here.record(done=True, proteins=len(proteins), duration_s=seconds, residues_per_s=residues / seconds)
    here.log(
        "program.codon-optimized",
        "{made:plural sequence sequences} of {count:plural protein proteins} in {seconds:.2f} s: {path}",
        made=len(rows) - len(failed),
        count=len(proteins),
        seconds=seconds,
        path=target,
    )
    if failed:
        raise InvalidDataError.of([f"{row['id']}: {row['error']}" for row in failed])


def rows_of(
    protein: Protein, log_probs: np.ndarray, wanted: Wanted, organisms: Organisms, tables: Mapping[str, CodonTable]
) -> list[dict[str, Any]]:
    """Return a row for each sequence of a protein, with its measures; one row with the error where there is none."""
    organism = organisms.names[protein.organism]
    rows = []
    for number, drawing in enumerate(wanted.drawings, start=1):
        name = protein.name if len(wanted.drawings) == 1 else f"{protein.name}.{number}"
        row: dict[str, Any] = dict.fromkeys(COLUMNS, "")
        row.update(id=name, organism=organism, protein=protein.residues)
        try:
            decoded = decode(protein.residues, log_probs, wanted.constraints, drawing)
        except InfeasibleError as error:
            return [{**row, "id": protein.name, "error": str(error)}]
        row.update(predicted_dna=decoded.dna, log_prob=round(decoded.log_prob, 6), is_best=decoded.is_best)
        row.update({key: round(value, 4) for key, value in measures(decoded.dna, tables.get(organism)).items()})
        if len(protein.dna) == len(decoded.dna):
            row["similarity"] = round(similarity(protein.dna, decoded.dna), 4)
        rows.append(row)
    return rows


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
    problems = [
        sentence
        for sentence, is_wrong in (
            ("protein is empty", not protein),
            (f"temperature {temperature!r}: expected a number above 0", not _is_in(temperature, float("inf"))),
            (f"top_p {top_p!r}: expected a number above 0, at most 1", not _is_in(top_p, 1.0)),
            (
                f"num_sequences {num_sequences!r}: expected a whole number above 0",
                not isinstance(num_sequences, int) or num_sequences < 1,
            ),
            ("several sequences require deterministic=False", deterministic and num_sequences != 1),
            (f"attention_type {attention_type!r}: expected 'original_full'", attention_type != "original_full"),
            ("model is required: the path of a model's directory or file", model is None),
        )
        if is_wrong
    ]
    if problems:
        raise ValueError("\n".join(problems))
    where = torch.device(device)
    machine = open_accelerator(where.type, where.index or 0)
    ready, organisms = (model, ORGANISMS) if isinstance(model, CodonModel) else _loaded(str(model), where)
    ready = ready.to(where).eval()
    try:
        number = organisms.number_of(organism)
        residues, wrong = complete(protein, Ambiguity.of(ambiguous, seed=seed))
    except InvalidDataError as error:
        raise ValueError(str(error)) from error
    if wrong:
        raise ValueError("\n".join(map(str, wrong)))
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


def _is_in(value: Any, most: float) -> bool:
    return isinstance(value, (float, int)) and 0 < value <= most


@lru_cache(maxsize=2)
def _loaded(path: str, device: torch.device) -> tuple[CodonModel, Organisms]:
    stored = load_stored(Path(path))
    return stored.make().to(device).eval(), stored.organisms
