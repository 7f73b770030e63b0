"""Rules of the program trajectory, and the size of its steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ascendrun.facts.columns import ALIASES, missing_columns
from ascendrun.options import GENERATED
from ascendrun.planner import model_rules, rules
from ascendrun.planner.models import RowsOfRanks, Shape, Workload, shape_of, steps_of
from ascendrun.planner.training import PlanProblem, Raw, Rule, Training
from ascendrun.programs.trajectory.data_rules import TEXTS, column_map, table_problems
from ascendrun.text import listed

TRAINS = ("train", "pretrain", "finetune")
USES_MODEL = ("evaluate", "predict", "serve")
TOKENS_PER_POINT = 7.0
"""Of the grammar compact on the sample data, with the clock; other grammars have 4 to 25."""
VOCABULARY = 3000
"""Tokens of data that is not prepared yet: assumed."""
CLASSES, SUMMARY, BINS = 10, 35, 16
"""Of data that is not prepared yet: classes (assumed), numbers of a track's summary, and bins of each."""
ADD_SHIPS = listed("plan.add-ships")
INPUTS = ("place", "size", "summary")
"""Inputs beside the motion of each point: each may be left out."""
METHODS = ("forest", "boosting", "tokens")
"""Simpler methods that a report compares with."""
CPU_MICRO_TOKENS = 2048
"""A pass then fits in a core's cache: 6,400 tokens per CPU second instead of 4,400, hidden size 128."""


def inputs(training: Training) -> dict[str, str]:
    """Return the paths that the stage reads, by option."""
    options = training.options
    names = ["prepared_dir"] if options["prepared_dir"] else ["data_path"]
    names += ["base_model"] if training.mode in TRAINS else []
    found = {name: str(options[name]) for name in names if options[name] not in ("", None, "-", GENERATED)}
    models = options["model_path"] if training.mode in USES_MODEL else ()
    return {**found, **({"model_path": str(models[0])} if models else {})}


def check_inputs(training: Training) -> Iterator[PlanProblem]:
    options = training.options
    for option, path in inputs(training).items():
        yield from rules.input_problems(training, option, path)
    if not options["prepared_dir"] and training.mode != "serve":
        yield from rules.data_problems(training)
    path = rules.data_file(training)
    if path and not options["prepared_dir"]:
        if path.endswith(TEXTS):
            yield from rules.rows_problems(training, "data_path", path, "text")
        yield from rules.same_data(training, "data_path", path)
        yield from table_problems(training, path)
    if options["prepared_dir"]:
        for host, raw in training.found(str(options["prepared_dir"])).items():
            if "kind" in raw and raw["kind"] != "prepared":
                yield PlanProblem.of("not-prepared", "prepared_dir", (host,), path=str(options["prepared_dir"]))


def prepared(training: Training) -> Mapping[str, Any]:
    """Return the facts of the prepared directory; empty: unknown, or there is none."""
    path = str(training.options["prepared_dir"])
    raw = training.first(path) if path else None
    return (raw or {}).get("facts") or {}


def splits(training: Training) -> tuple[str, ...]:
    """Return the parts of prepared data that the stage trains on."""
    return ("train", "unlabelled") if training.mode == "pretrain" else ("train",)


def counts(training: Training) -> dict[str, Any]:
    """Return what the data has, where it was read whole: `ships`, `classes`, `rows`; missing: unknown."""
    options = training.options
    if options["prepared_dir"]:
        segments = prepared(training).get("segments") or {}
        count = sum(segments.get(split, 0) for split in splits(training))
        return {"segments": count} if count else {}
    if options["data_path"] == GENERATED:
        return {"segments": int(options["synthetic_tracks"] * 0.7)}
    raw = training.first(str(options["data_path"])) or {}
    files: Sequence[Raw] = raw.get("files") or ()
    if len(files) != 1 or not files[0].get("whole") or files[0].get("faults"):
        return {}
    file = files[0]
    if "labels" in file:
        classes = [label for label in file["labels"] if label]
        return {"ships": file["ships"], "classes": classes, "segments": int(file["rows"] * 0.7)}
    if not file.get("columns"):
        return {}
    wanted, _ = column_map(options["column_map"])
    found, missing, _ = missing_columns(dict(zip(file["columns"], file["values"])), wanted)
    if missing or "different" not in file:
        return {}
    result: dict[str, Any] = {"rows": file["rows"], "segments": int(0.7 * file["rows"] / options["segment_size"])}
    name = found.get("ship")
    if name in file["columns"]:
        result["ships"] = file["different"][file["columns"].index(name)]
    name = found.get("class") if "type_code" not in found else None
    if name in file["columns"] and file["classes"][file["columns"].index(name)] is not None:
        unknown = ("", "nan", "none", "undefined", "unknown")
        result["classes"] = [
            each for each in file["classes"][file["columns"].index(name)] if each.lower() not in unknown
        ]
    return result


def check_data(training: Training) -> Iterator[PlanProblem]:
    """Report data with too few classes or ships for a training."""
    found = counts(training)
    if training.mode not in (*TRAINS, "prepare") or training.options["prepared_dir"]:
        return
    if "classes" in found and len(found["classes"]) < 2:
        yield PlanProblem.of("one-class", "data_path", found=found["classes"] or None)
    if "ships" in found and found["ships"] < 3 and training.options["split"] == "ship":
        yield PlanProblem.of("few-ships", "data_path", hint=ADD_SHIPS, ships=found["ships"])


def check_options(training: Training) -> Iterator[PlanProblem]:
    options = training.options
    hidden, heads = int(options["hidden_size"]), int(options["num_attention_heads"])
    if not options["base_model"] and training.mode in (*TRAINS, "plan") and hidden % (2 * heads):
        near = sorted({max(2 * heads, hidden // (2 * heads) * 2 * heads), (hidden // (2 * heads) + 1) * 2 * heads})
        yield PlanProblem.of("hidden-heads", "hidden_size", hidden=hidden, heads=heads, near=near)
    if training.mode == "pretrain" and (options["objective"], options["attention"]) == ("clm", "bidirectional"):
        yield PlanProblem.of("clm-bidirectional", "objective")
    if options["min_segment_size"] > options["segment_size"]:
        yield PlanProblem.of(
            "segment-sizes", "min_segment_size", least=options["min_segment_size"], most=options["segment_size"]
        )
    if training.mode in USES_MODEL and not options["model_path"]:
        yield PlanProblem.of("model-required", "model_path", mode=training.mode)


def check_names(training: Training) -> Iterator[PlanProblem]:
    """Report names that options cannot have, and folds that cannot be made."""
    options = training.options
    wrong = column_map(options["column_map"])[1]
    if wrong:
        yield PlanProblem.of("column-map", "column_map", wrong=wrong, known=list(ALIASES))
    for name, known in (("inputs", INPUTS), ("baselines", METHODS)):
        strange = [each for each in options[name] if each not in known]
        if strange:
            yield rules.unknown_names(name, strange, list(known))
    folds, fold = options["folds"], options["fold"]
    if folds and options["prepared_dir"]:
        yield PlanProblem.of("folds-prepared", "folds")
    if folds and options["split"] != "ship":
        yield PlanProblem.of("folds-split", "folds")
    is_known = folds >= 2 and fold < folds and (fold >= 0 or training.mode == "train")
    if (folds or fold >= 0) and not is_known:
        yield PlanProblem.of("bad-folds", "folds", folds=folds, fold=fold)


def check_base(training: Training) -> Iterator[PlanProblem]:
    path = str(training.options["base_model"])
    if not path or training.mode not in TRAINS:
        return
    own = ("pretrained.pt", "best")
    for host, raw in training.found(path).items():
        names = raw.get("names", ())
        if "kind" not in raw or any(name in names for name in own):
            continue
        model = Training(**{**vars(training), "files": {host: {path: raw}}})
        yield from model_rules.model_problems(model, path, needs_tokenizer=False)
        kind = (raw.get("config") or {}).get("model_type") if isinstance(raw.get("config"), Mapping) else None
        if kind is not None and kind not in ("qwen2", "qwen3"):
            yield PlanProblem.of("model-type", "base_model", (host,), kind=str(kind))


def steps(training: Training) -> int | None:
    segments = counts(training).get("segments")
    options = training.options
    if segments is None:
        return int(options["max_steps"]) or None
    return steps_of(options, -(-max(1, segments) // int(options["global_batch_size"])))


def check_steps(training: Training) -> Iterator[PlanProblem]:
    if training.mode in TRAINS:
        yield from rules.steps_problems(training, steps(training))
        yield from rules.data_size_problems(training, counts(training).get("segments"))


def check_batch(training: Training) -> Iterator[PlanProblem]:
    if training.mode in TRAINS:
        yield from rules.batch_problems(training)
        yield from rules.strategy_problems(training)


def vocabulary(training: Training) -> int:
    """Return the number of tokens: of prepared data, else a usual one."""
    return len(prepared(training).get("vocabulary") or ()) or VOCABULARY


def lengths(training: Training) -> tuple[float, int]:
    """Return the tokens of a track, in the mean and at most: of prepared data, else usual ones."""
    options, tokens = training.options, prepared(training).get("tokens") or {}
    found, segments = [tokens[split] for split in splits(training) if split in tokens], counts(training).get("segments")
    if found and segments:
        return sum(part["total"] for part in found) / segments, max(part["longest"] for part in found)
    points = (int(options["segment_size"]) + int(options["min_segment_size"])) / 2
    return TOKENS_PER_POINT * points, int(TOKENS_PER_POINT * int(options["segment_size"]))


@dataclass(frozen=True)
class TrackShape(Shape):
    """A decoder without a head over its vocabulary. `head_weights`: of the head, and of the layers of the summary."""

    head_weights: int

    @property
    def outside(self) -> int:
        return self.embedding + self.hidden + self.head_weights

    @property
    def of_loss(self) -> int:
        return self.head_weights


def shape(training: Training) -> TrackShape | None:
    options, facts = training.options, prepared(training)
    text = facts.get("text") or {"inputs": options["inputs"] if options["grammar"] == "motion" else (), "edges": True}
    has_summary = "summary" in text.get("inputs", ()) and text.get("edges")
    head: dict[str, Any] = {
        "mode": training.mode,
        "classes": len(facts.get("names") or ()) or CLASSES,
        "numbers": SUMMARY if has_summary else 0,
        "bins": BINS,
    }
    config = config_of(training)
    return None if config is None else shape_of_config({**config, "vocab_size": vocabulary(training)}, **head)


def config_of(training: Training) -> Mapping[str, Any] | None:
    """Return the config.json of the model that the training begins with, or makes; None: unknown."""
    options, base = training.options, str(training.options["base_model"] or "")
    stage = training.stage_at(base)
    if base and (stage is None or stage["base_model"] or stage["mode"] != "pretrain"):
        config = (training.first(base) or {}).get("config")
        return config if isinstance(config, Mapping) else None
    sizes = stage or options
    return {
        "hidden_size": int(sizes["hidden_size"]),
        "intermediate_size": round(int(sizes["hidden_size"]) / 3) * 8,
        "num_hidden_layers": sizes["num_hidden_layers"],
        "num_attention_heads": int(sizes["num_attention_heads"]),
    }


def shape_of_config(
    config: Mapping[str, Any], *, mode: str, classes: int, numbers: int, bins: int
) -> TrackShape | None:
    """Return the sizes of a model; None: config.json lacks some. `numbers`, `bins`: of the summary, 0: it has none."""
    found = shape_of({**config, "tie_word_embeddings": True})
    if found is None:
        return None
    wide = found.hidden
    if mode == "pretrain":
        head = wide * (wide + 3) + found.vocabulary * (wide + 1)
    else:
        summary = 2 * wide * (numbers * (bins + 1) + 2 * wide + 2) if numbers else 0
        head = summary + classes * ((3 if numbers else 1) * wide + 1)
    return TrackShape(**vars(found), head_weights=head)


def workload(training: Training) -> Workload | None:
    model = shape(training)
    if model is None or training.mode not in TRAINS:
        return None
    mean, longest = lengths(training)
    mean *= 1 - 0.25 * training.options["random_crop_prob"]
    rows = RowsOfRanks(training.ranks, training.family, steps(training), mean, longest)
    return work_of(training.options, model, rows)


def micro_tokens_of(options: Mapping[str, Any], family: str) -> int:
    """Return the tokens per pass; 0: no limit. Accelerators need few large passes, of few shapes."""
    asked = int(options["max_tokens_per_micro_batch"])
    return asked if asked >= 0 else CPU_MICRO_TOKENS if family == "cpu" else 0


def work_of(options: Mapping[str, Any], model: Shape | None, rows: RowsOfRanks) -> Workload | None:
    """Return the work of a training with these options on such tracks."""
    if model is None:
        return None
    learned = 0.0
    if options["mode"] == "pretrain":
        learned = 1.0 if options["objective"] == "clm" else options["mlm_probability"]
    return Workload.of_rows(options, model, rows, learned=learned, most_tokens=micro_tokens_of(options, rows.family))


RULES: tuple[Rule, ...] = (
    check_inputs,
    check_options,
    check_names,
    check_base,
    check_data,
    check_steps,
    check_batch,
    rules.device_problems,
    rules.chip_problems,
)
ON_RANKS: tuple[Rule, ...] = (check_options, check_names)
"""Those that need no files of the nodes: the ranks check them too."""
