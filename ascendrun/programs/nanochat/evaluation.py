"""Quality of a model: bits per byte of documents, choices by letter, generated answers; and report.md of all stages.

All ranks share the work. Each task has a score from 0 to 1, and a centered one that is 0 for a model that guesses and 1
for one that is right. The report is made of the report.json and evaluation.json that the stages wrote.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import random
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ascendrun.programs import errors
from ascendrun.programs.errors import InvalidDataError, check_writable
from ascendrun.programs.generation.cache import of_model
from ascendrun.programs.generation.engine import Completion, Generator, Sampling, generate
from ascendrun.programs.nanochat import conversations, sandbox
from ascendrun.programs.nanochat import texts as words
from ascendrun.programs.nanochat.base import NextToken, make_rows
from ascendrun.programs.nanochat.conversations import Tools, decoded, stops_of
from ascendrun.programs.nanochat.inference import open_engine, open_model
from ascendrun.programs.nanochat.sizes import Horizon, settled
from ascendrun.programs.nanochat.tasks import Example, read_task
from ascendrun.programs.nanochat.texts import read_corpus
from ascendrun.programs.trainer.checkpoint import replace_json, replace_text
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.strategies.engine import Engine
from ascendrun.text import Text, listed

Options = Mapping[str, Any]
SHOWN_SAMPLES = 3
LETTER_TOKENS = 4
"""Tokens of a reply to a question with choices: a letter, and the end."""


@dataclass(frozen=True)
class Pupil:
    """The model that is asked."""

    engine: Engine
    tokenizer: Any
    context: int
    here: Runtime


def evaluate_stage(options: Options, here: Runtime) -> None:
    """Score a model on the documents and tasks of the options, and write evaluation.json on rank 0's node."""
    output = Path(options["output_dir"]).absolute()
    errors.check_writable(output)
    options = settled(options)
    tasks = open_tasks(options["mixture"], options["seed"])
    model, tokenizer = open_model(options)
    pupil = Pupil(open_engine(model, options, here), tokenizer, model.sizes.context, here)
    report: dict[str, Any] = {"model": str(options["model_dir"]), "tasks": {}}
    with here.phase("evaluate"):
        if options["data_path"]:
            report.update(evaluate_bpb(pupil, options))
        for name, examples in tasks.items():
            report["tasks"][name] = scores = score(pupil, examples, options)
            here.log(
                listed(
                    "program.task-score",
                    name=name,
                    count=scores["questions"],
                    score=scores["score"],
                    centered=scores["centered"],
                )
            )
    centered = [scores["centered"] for scores in report["tasks"].values()]
    if centered:
        report["mean_centered"] = sum(centered) / len(centered)
    final = {name: report[name] for name in ("bits_per_byte", "mean_centered") if name in report}
    final.update({name: scores["score"] for name, scores in report["tasks"].items()})
    if here.is_first:
        replace_json(output / "evaluation.json", report)
    here.log(listed("program.final", scores=" ".join(f"{name} {value:.4f}" for name, value in final.items())))
    here.record(done=True, **{f"final_{name}": value for name, value in final.items()})


def open_tasks(specs: Sequence[Mapping[str, Any]], seed: int) -> dict[str, Sequence[Example]]:
    """Open tasks by name. Raises InvalidDataError."""
    found: dict[str, Sequence[Example]] = {}
    refuse_tasks(specs)
    for spec in specs:
        examples = read_task(spec, seed)
        stem = Path(str(spec.get("file") or spec["kind"])).stem
        name = stem if stem not in found else f"{stem}-{len(found) + 1}"
        found[name] = examples
    return found


def refuse_tasks(specs: Sequence[Mapping[str, Any]]) -> None:
    """Raise InvalidDataError for tasks of code where programs of the model cannot be isolated."""
    if not any(spec.get("kind") == "code" for spec in specs):
        return
    try:
        sandbox.run("")
    except sandbox.NoSandboxError as error:
        raise InvalidDataError(listed("program.no-sandbox", machine=str(error))) from None


def evaluate_bpb(pupil: Pupil, options: Options) -> dict[str, float]:
    """Score the validation documents of `data_path`."""
    given = {**options, "max_seq_len": pupil.context}
    horizon = Horizon(0, pupil.context, 1, 1.0, 0.0)  # rows of one sequence
    corpus = read_corpus(given)
    pupil.here.check_same(corpus.digest)
    train, val = make_rows(corpus, pupil.tokenizer, horizon, given, pupil.here)
    task = NextToken(train, val, pupil.engine, words.token_bytes(pupil.tokenizer), given)
    with torch.no_grad():
        return task.evaluate("val", 0)


# --- tasks ---


def score(pupil: Pupil, examples: Sequence[Example], options: Options) -> dict[str, Any]:
    """Ask the questions of a task. Returns {questions, score, chance, centered, …} on every rank.

    Choices have the score of their letters' probabilities, and `generated`, that of replies; others have `pass@k`.
    """
    here, count = pupil.here, len(examples)
    mine = [(number, examples[number]) for number in range(here.rank, count, here.world_size)]
    has_letters = examples[0].letters is not None
    samples = 1 if has_letters else options["num_samples"]
    rewards, texts = replies(pupil, mine, options, samples=samples, limit=LETTER_TOKENS if has_letters else None)
    sums = passes(rewards, samples)
    if has_letters:
        sums["letters"] = float(sum(likeliest(pupil, [example for _, example in mine], options)))
        sums["chance"] = sum(1 / len(example.letters or ()) for _, example in mine)
    names = list(sums)
    means = {name: value / count for name, value in zip(names, here.sum([sums[name] for name in names]))}
    shown = sorted(sample for part in here.gather(texts[:SHOWN_SAMPLES]) for sample in part)[:SHOWN_SAMPLES]
    chance = means.pop("chance", 0.0)
    found = means.pop("letters") if has_letters else means["pass@1"]
    return {
        "questions": count,
        "score": found,
        "chance": chance,
        "centered": (found - chance) / (1 - chance),
        **({"generated": means["pass@1"]} if has_letters else means),
        "samples": [{"number": number, "reply": text, "answer": answer} for number, text, answer in shown],
    }


def passes(rewards: Sequence[Sequence[int]], samples: int) -> dict[str, float]:
    """Return pass@k of these questions, summed, for each k."""
    return {f"pass@{k}": sum(passed(samples, sum(each), k) for each in rewards) for k in range(1, samples + 1)}


def passed(samples: int, right: int, k: int) -> float:
    """Return the chance that at least one of `k` of the samples is right, drawn without order (arXiv 2107.03374)."""
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def replies(
    pupil: Pupil, asked: Sequence[tuple[int, Example]], options: Options, *, samples: int, limit: int | None = None
) -> tuple[list[list[int]], list[tuple[int, str, str]]]:
    """Return (rewards of the samples of each question, the first replies as (number, text, answer)).

    A question that does not fit into the context is wrong.
    """
    texts = completions(pupil, asked, options, samples=samples, limit=limit)
    rewards, shown = [], []
    for number, example in asked:
        replied = [
            decoded(pupil.tokenizer, texts[key].tokens) for key in ((number, s) for s in range(samples)) if key in texts
        ]
        rewards.append([int(example.reward(text) >= 1.0) for text in replied] or [0])
        shown.append((number, replied[0] if replied else "", str(example.answer)))
    return rewards, shown


def completions(
    pupil: Pupil, asked: Sequence[tuple[int, Example]], options: Options, *, samples: int, limit: int | None = None
) -> dict[tuple[int, int], Completion]:
    """Return the replies by (number of the question, number of the sample); none to a question that does not fit into
    the context.

    One sample is greedy; several are drawn, from seeds that follow from the question's number.
    """
    call, tokenizer = of_model(pupil.engine.module), pupil.tokenizer
    generator = Generator.of(pupil.engine, call, context=pupil.context, rows=options["max_num_seqs"])
    tools, stop = Tools(tokenizer), stops_of(tokenizer)
    temperature = options["temperature"] if samples > 1 else 0.0
    texts: dict[tuple[int, int], Completion] = {}
    for number, example in asked:
        prompt = conversations.render_for_completion(tokenizer, example.messages)
        for sample in range(samples if len(prompt) < pupil.context else 0):
            sampling = Sampling(
                temperature, options["top_k"], options["top_p"], seed_of(options["seed"], number, sample)
            )
            most = limit or options["max_new_tokens"] or pupil.context
            texts[number, sample] = Completion(prompt, most, sampling, stop, tools)
    generate(generator, list(texts.values()))
    return texts


def seed_of(*parts: int) -> int:
    return random.Random(" ".join(map(str, parts))).getrandbits(48)


def likeliest(pupil: Pupil, asked: Sequence[Example], options: Options) -> list[bool]:
    """Return for each question whether the letter of its answer is the most likely first token among its letters."""
    here, tokenizer, size = pupil.here, pupil.tokenizer, options["max_num_seqs"]
    prompts = [conversations.render_for_completion(tokenizer, each.messages) for each in asked]
    order = sorted((n for n in range(len(asked)) if len(prompts[n]) <= pupil.context), key=lambda n: len(prompts[n]))
    right = [False] * len(asked)
    for start in range(0, len(order), size):
        rows = order[start : start + size]
        lengths = [len(prompts[n]) for n in rows]
        ids = torch.zeros(len(rows), max(lengths), dtype=torch.int64)
        for row, n in enumerate(rows):
            ids[row, : lengths[row]] = torch.tensor(prompts[n])
        kept = sorted(set(lengths))
        with torch.no_grad(), pupil.engine.autocast():
            logits = pupil.engine.module(ids.to(here.device), keep=torch.tensor(kept).to(here.device) - 1).cpu()
        for row, n in enumerate(rows):
            letters = asked[n].letters or ()
            numbers = [tokenizer.encode(letter, add_special_tokens=False).ids[0] for letter in letters]
            best = int(logits[row, kept.index(lengths[row]), numbers].argmax())
            right[n] = letters[best] == asked[n].answer
    return right


Facts = Mapping[str, Any]
LIBRARIES = ("ascendrun", "torch", "torch_npu", "tokenizers", "transformers")
UNKNOWN = "-"


def report_stage(options: Facts, here: Runtime) -> None:
    """Write report.md of the directories of `report_dirs`, on rank 0's node, where the evaluations are."""
    if here.is_first:
        output = Path(options["output_dir"]).absolute()
        check_writable(output)
        replace_text(output / "report.md", page_of([read_stage(Path(path)) for path in options["report_dirs"]]))
        here.log(listed("program.report", file=output / "report.md"))
    here.record(done=True)


def read_stage(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return (path, what the stage wrote). Raises InvalidDataError."""
    for name in ("evaluation.json", "report.json"):
        try:
            found = json.loads((folder / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise InvalidDataError(listed("program.bad-report", file=folder / name, reason=repr(error))) from error
        if isinstance(found, dict):
            return str(folder), found
    raise InvalidDataError(listed("program.no-stage-report", directory=folder))


def page_of(stages: Sequence[tuple[str, Facts]]) -> str:
    trained = [(path, found) for path, found in stages if "training" in found]
    scored = [found for _, found in stages if "tasks" in found]
    parts = [f"# {listed('program.report-title')}", section(listed("program.report-system"), table(("", ""), system()))]
    if trained:
        names = [
            listed("program.report-stage"),
            listed("program.report-parameters"),
            listed("program.report-steps"),
            listed("program.report-tokens"),
            "tokens/s",
            "MFU",
            listed("program.report-devices"),
            listed("program.report-hours"),
        ]
        parts.append(section(listed("program.report-stages"), table(names, map(work, trained))))
        parts.append(str(listed("program.report-note")))
    data = [(path, facts) for path, found in stages for facts in [found.get("data")] if isinstance(facts, dict)]
    if data:
        rows = ((path, ", ".join(f"{name} {shown(value)}" for name, value in facts.items())) for path, facts in data)
        parts.append(section(listed("program.report-data"), table(("", ""), rows)))
    if any(found.get("evaluations") for _, found in trained):
        parts.append(section(listed("program.report-validation"), validation(trained)))
    if scored:
        parts.append(section(listed("program.report-scores"), scores(scored)))
        parts.append(section(listed("program.report-samples"), samples(scored[-1])))
    return "\n\n".join(parts) + "\n"


def section(title: Text, body: str) -> str:
    return f"## {title}\n\n{body}"


def table(names: Iterable[Any], rows: Iterable[Sequence[Any]]) -> str:
    head = [str(name) for name in names]
    lines = [head, ["---"] * len(head), *([str(cell) for cell in row] for row in rows)]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines
    )


def shown(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return UNKNOWN if value is None else str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"


def system() -> list[tuple[str, str]]:
    """Return facts of this node and of the code: the commit of the working directory, with a mark if files differ."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        commit = UNKNOWN
    found = [("git", commit), ("Python", platform.python_version())]
    for name in LIBRARIES:
        try:
            found.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            continue
    return [*found, ("OS", platform.platform()), ("CPU", f"{platform.machine()}, {os.cpu_count()}")]


def work(stage: tuple[str, Facts]) -> list[str]:
    path, found = stage
    model, training, run = (found.get(name) or {} for name in ("model", "training", "run"))
    hours, used = run.get("device_hours"), run.get("mfu")
    return [
        path,
        shown(model.get("weights")),
        shown(training.get("steps")),
        shown(training.get("tokens_seen")),
        UNKNOWN if run.get("tokens_per_s") is None else f"{run['tokens_per_s']:,.0f}",
        UNKNOWN if used is None else f"{used:.1%}",
        f"{run['ranks']} x {run['device']}" if run else UNKNOWN,
        UNKNOWN if hours is None else f"{hours:.3f}",
    ]


def validation(trained: Sequence[tuple[str, Facts]]) -> str:
    """Return a table of the first and the last evaluation of each training."""
    names = [listed("program.report-stage"), listed("program.report-steps"), listed("program.report-scores")]
    rows = []
    for path, found in trained:
        every = found.get("evaluations") or []
        for each in every[:1] + every[1:][-1:]:
            values = ", ".join(f"{name} {shown(value)}" for name, value in each.items() if name != "step")
            rows.append((path, each["step"], values))
    return table(names, rows)


def scores(scored: Sequence[Facts]) -> str:
    """Return a table with a column for each model, in order: what each stage changed."""
    columns = [
        {
            **{name: value for name, value in found.items() if name in ("bits_per_byte", "loss", "mean_centered")},
            **{
                f"{name} {key}": scores[key] for name, scores in found["tasks"].items() for key in ("score", "centered")
            },
        }
        for found in scored
    ]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = ([name, *(shown(column.get(name)) for column in columns)] for name in names)
    return table(["", *(found.get("model", UNKNOWN) for found in scored)], rows)


def samples(found: Facts) -> str:
    names = [listed("program.report-task"), listed("program.report-reply"), listed("program.report-answer")]
    every = (
        (task, each["reply"], each["answer"])
        for task, each_task in found["tasks"].items()
        for each in each_task["samples"]
    )
    return table(names, every)
