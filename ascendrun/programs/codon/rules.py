"""Rules of the program codon, and the size of its steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ascendrun.facts.proteins import COLUMNS, TABLES, form_of
from ascendrun.options import GENERATED
from ascendrun.planner import rules
from ascendrun.planner.models import RowsOfRanks, Shape, Workload, shape_of, steps_of
from ascendrun.planner.training import PlanProblem, Raw, Rule, Training
from ascendrun.programs.codon.asked import OPTIMIZES, check_optimization, is_file
from ascendrun.programs.codon.vocabulary import CODONS, FIRST_CODON, LONGEST, ORGANISMS, TOKENS

TRAINS = ("pretrain", "finetune")
MEAN_TOKENS = 350.0
"""Of coding sequences that are not prepared yet: assumed."""
GENERATED_TOKENS, GENERATED_LONGEST = 71.0, 122


def inputs(training: Training) -> dict[str, str]:
    """Return the paths that the stage reads, by option."""
    if training.mode in OPTIMIZES:
        given = str(training.options["input"]) if training.mode == "optimize" else ""
        found = {"model_path": str(training.options["model_path"]), "input": given if is_file(given) else ""}
        return {name: path for name, path in found.items() if path}
    names = ["prepared_dir", "data_path"]
    names += ["base_model"] if training.mode in (*TRAINS, "prepare") else ["model_path"]
    found = {name: str(training.options.get(name) or "") for name in names}
    return {name: path for name, path in found.items() if path not in ("", GENERATED)}


def check_inputs(training: Training) -> Iterator[PlanProblem]:
    for option, path in inputs(training).items():
        yield from rules.input_problems(training, option, path)
    if training.mode in OPTIMIZES:
        return
    if not training.options["prepared_dir"]:
        yield from rules.data_problems(training)
    path = rules.data_file(training)
    for host, raw in training.found(path).items() if path else ():
        for file in raw.get("files", ()):
            missing = missing_columns(file, has_organism=bool(training.options["organism"]))
            if missing:
                yield PlanProblem.of(
                    "codon-columns", "data_path", (host,), path=path, missing=missing, columns=list(file["columns"])
                )


def missing_columns(file: Raw, *, has_organism: bool) -> list[str]:
    """Return the columns that a table lacks; []: none, or it is not a table."""
    if form_of(file["name"]) not in TABLES or not file.get("columns"):
        return []
    names = [str(name).strip().lower() for name in file["columns"]]
    return [
        column
        for column in ("dna", "organism")
        if not set(COLUMNS[column]) & set(names) and not (column == "organism" and has_organism)
    ]


def check_options(training: Training) -> Iterator[PlanProblem]:
    options = training.options
    if training.mode == "finetune" and not options["base_model"]:
        yield PlanProblem.of("codon-base", "base_model")
    if training.mode in ("evaluate", *OPTIMIZES) and not options["model_path"]:
        yield PlanProblem.of("model-required", "model_path", mode=training.mode)
    if training.mode == "optimize" and not options["input"]:
        yield PlanProblem.of("codon-input", "input")


def check_sizes(training: Training) -> Iterator[PlanProblem]:
    options = training.options
    if training.mode not in TRAINS or options["base_model"]:
        return
    hidden, heads = int(options["hidden_size"]), int(options["num_attention_heads"])
    if hidden % heads:
        near = sorted({max(heads, hidden // heads * heads), (hidden // heads + 1) * heads})
        yield PlanProblem.of("codon-heads", "hidden_size", hidden=hidden, heads=heads, near=near)
    longest, positions = lengths(training)[1], int(options["max_position_embeddings"])
    if facts(training).get("longest") and longest > positions:
        yield too_long(longest, positions)


def too_long(longest: int, positions: int) -> PlanProblem:
    return PlanProblem.of("codon-positions", "max_position_embeddings", longest=longest, positions=positions)


def facts(training: Training) -> Mapping[str, Any]:
    """Return what the prepared data says of itself; {}: unknown."""
    raw = training.first(str(training.options["prepared_dir"])) if training.options["prepared_dir"] else None
    return (raw or {}).get("facts") or {}


def lengths(training: Training) -> tuple[float, int]:
    """Return the mean and the largest number of tokens of a sequence: of prepared data, else usual ones."""
    found = facts(training)
    if found.get("mean_tokens") and found.get("longest"):
        return float(found["mean_tokens"]), int(found["longest"])
    is_generated = training.options["data_path"] == GENERATED
    return (GENERATED_TOKENS, GENERATED_LONGEST) if is_generated else (MEAN_TOKENS, LONGEST)


def sequences(training: Training) -> int | None:
    """Return the number of training sequences; None: unknown.

    Prepared data that is not there yet is that of data_path.
    """
    options, found = training.options, facts(training)
    if found:
        return (found.get("sequences") or {}).get("train") or None
    share = 1 - float(options["val_size"])
    if options["data_path"] == GENERATED:
        return int(options["synthetic_sequences"] * share)
    files = (training.first(str(options["data_path"])) or {}).get("files") or ()
    if not files or any(not file.get("whole") or "rows" not in file for file in files):
        return None
    return int(sum(file["rows"] for file in files) * share) or None


def steps(training: Training) -> int | None:
    options, count = training.options, sequences(training)
    if count is None:
        return int(options["max_steps"]) or None
    return steps_of(options, -(-count // int(options["global_batch_size"])))


def check_batch(training: Training) -> Iterator[PlanProblem]:
    if training.mode in TRAINS:
        yield from rules.batch_problems(training)
        yield from rules.strategy_problems(training)


# --- the size of a step ---


FULL, BLOCK_SPARSE = "full", "block_sparse"
BLOCK, RANDOM_BLOCKS = 64, 3
"""Tokens of a block of sparse attention, and how many blocks by chance each attends to, unless the model has others."""


def sparse_from(block: int = BLOCK, count: int = RANDOM_BLOCKS) -> int:
    """Return the length above which sequences have enough blocks; up to it they attend to all their tokens."""
    return (5 + 2 * count) * block


def attended(length: float, attention: str, *, block: int = BLOCK, count: int = RANDOM_BLOCKS) -> float:
    """Return the number of tokens that a token of a sequence of `length` attends to in training, on average.

    block_sparse: the first and the last block attend to all, each other one to both, to three around it and to `count`.
    """
    if attention != BLOCK_SPARSE or length <= sparse_from(block, count):
        return length
    ends = 2 * block
    return (ends * length + (length - ends) * (5 + count) * block) / length


def flops_per_token(hidden: int, inner: int, layers: int, attended: float, learned: float) -> float:
    """Return FLOPs of forward and backward pass. `attended`: tokens that a token attends to. `learned`: fraction of the
    tokens that the last layers see."""
    matrices = layers * (4 * hidden * hidden + 2 * hidden * inner) + learned * hidden * (hidden + len(TOKENS))
    return 6.0 * matrices + 12.0 * layers * hidden * attended


@dataclass(frozen=True)
class CodonShape(Shape):
    """A BigBird: biases everywhere, two norms a layer, embeddings of positions and organisms, a layer of no use. With
    `context_residues` on each side, also a table of codons by organism, distance and residue, which is not trained."""

    organisms: int
    context_residues: int = 0

    @property
    def layer_weights(self) -> int:
        hidden, inner = self.hidden, self.inner
        return 4 * hidden * (hidden + 1) + hidden * (inner + 1) + inner * (hidden + 1) + 4 * hidden

    @property
    def outside(self) -> int:
        rows = self.vocabulary + (self.positions or 0) + self.organisms
        own = rows * self.hidden + 2 * self.hidden * (self.hidden + 1) + 4 * self.hidden + self.vocabulary
        return own + self.context

    @property
    def context(self) -> int:
        distances = 2 * self.context_residues + 1 if self.context_residues else 0
        return self.organisms * distances * FIRST_CODON * len(CODONS)


@dataclass(frozen=True)
class CodonWorkload(Workload):
    attention: str = FULL

    @property
    def flops_per_token(self) -> float:
        model = self.model
        share = self.micro_learned / max(1, self.micro_rows * self.micro_length)
        seen = attended(self.mean_length, self.attention)
        return flops_per_token(model.hidden, model.inner, model.layers, seen, share)


def shape(training: Training) -> CodonShape | None:
    """Return the sizes of the model; None: those of its base are not known."""
    options = training.options
    config: Mapping[str, Any] = {
        "hidden_size": options["hidden_size"],
        "intermediate_size": options["intermediate_size"] or 4 * int(options["hidden_size"]),
        "num_hidden_layers": options["num_hidden_layers"],
        "num_attention_heads": options["num_attention_heads"],
        "max_position_embeddings": options["max_position_embeddings"],
        "type_vocab_size": len(ORGANISMS.with_new(options["new_organisms"])),
        "context_residues": options["context_residues"],
    }
    if options["base_model"]:
        raw = training.first(str(options["base_model"])) or {}
        if not isinstance(raw.get("config"), Mapping):
            return None
        config = raw["config"]
    return shape_of_config(config)


def shape_of_config(config: Mapping[str, Any]) -> CodonShape | None:
    """Return the sizes that a config.json describes; None: it lacks some."""
    found = shape_of({**config, "vocab_size": len(TOKENS), "tie_word_embeddings": True})
    organisms = int(config.get("type_vocab_size") or len(ORGANISMS))
    context = int(config.get("context_residues") or 0)
    return None if found is None else CodonShape(**vars(found), organisms=organisms, context_residues=context)


def workload(training: Training) -> Workload | None:
    model = shape(training)
    if model is None or training.mode not in TRAINS:
        return None
    rows = RowsOfRanks(training.ranks, training.family, steps(training), *lengths(training))
    return work_of(training.options, model, rows)


MEAN_RATES = {"uniform": 1 / 2, "cosine": 2 / math.pi, "full": 1.0}
"""By mask schedule: the fraction of the codons that are selected on average; one sequence may have all."""


def selected(options: Mapping[str, Any]) -> float:
    return MEAN_RATES.get(options["mask_schedule"], float(options["mlm_probability"]))


def work_of(options: Mapping[str, Any], model: CodonShape | None, rows: RowsOfRanks) -> Workload | None:
    """Return the work of a training with these options on such sequences."""
    if model is None:
        return None
    return CodonWorkload.of_rows(
        options,
        model,
        rows,
        learned=1.0 if options["mask_schedule"] in MEAN_RATES else options["mlm_probability"],
        trained=model.weights - model.hidden * (model.hidden + 1) - model.context,
        weight_bytes_saved=2 * 4 * model.weights,
        attention=str(options["attention"]),
    )


RULES: tuple[Rule, ...] = (
    check_inputs,
    check_options,
    check_optimization,
    check_sizes,
    check_batch,
    rules.device_problems,
    rules.chip_problems,
)
ON_RANKS: tuple[Rule, ...] = (check_options,)
"""Those that need no files of the nodes: the ranks check them too."""
