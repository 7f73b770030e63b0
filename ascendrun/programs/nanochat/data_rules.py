"""Rules of the program nanochat for what its stages read: documents, tokenizers, and tasks."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping

from ascendrun.facts.rows import FILE_KINDS
from ascendrun.planner import rules
from ascendrun.planner.training import PlanProblem, Raw, Training
from ascendrun.programs.nanochat.sizes import ON_CHATS, SPECIAL, Sizes
from ascendrun.text import Text

FORMS = (".parquet", ".jsonl", ".txt")
"""Of files with documents, as programs/nanochat/texts.py reads them."""
KINDS = (*FILE_KINDS, "spelling", "sums")
JSON_FAULTS = ("too-deep", "not-json", "line-not-json", "not-a-list")


# --- documents ---


def check_texts(training: Training) -> Iterator[PlanProblem]:
    """Refuse documents that cannot be read, and too few of them to train on some and to validate with others."""
    path = rules.data_file(training) if training.mode in ("tokenizer", "base", "evaluate") else ""
    for host, raw in training.found(path).items() if path else ():
        found = text_problem(path, raw) if "kind" in raw else None
        if found is not None:
            yield PlanProblem(*found, "data_path", (host,))


def text_problem(path: str, raw: Raw) -> tuple[str, Text, Text | None] | None:
    """Return (code, message, hint) of the first problem of the documents at a path, as a node has them."""
    files = [file for file in raw.get("files", ()) if raw["kind"] == "data" and file["name"].endswith(FORMS)]
    if not files and raw.get("texts"):
        return None
    if not files:
        message = Text(
            "plan.no-shards", "args.data_path: {path} has no file that ends in {forms}", path=path, forms=list(FORMS)
        )
        return "no-shards", message, Text("plan.shards", "set it to a file, or to a directory of files of one form")
    for file in files:
        found = file_problem(file, {"path": path, "file": file["name"]})
        if found is not None:
            return found
    known = [int(file["rows"]) for file in files if file.get("whole") or "fields" in file]
    if raw.get("more") or len(known) < len(files) or any(file["name"].endswith(".txt") for file in files):
        return None
    *others, last = known
    if (sum(others) and last) if others else last > 1:
        return None
    return "few-documents", few_documents(path, sum(known)), None


def few_documents(path: str, count: int) -> Text:
    return Text(
        "plan.few-documents",
        "args.data_path: {path}: {count:plural document documents}; expected some to train on and some to validate "
        "with",
        path=path,
        count=count,
    )


def file_problem(file: Raw, at: dict[str, str]) -> tuple[str, Text, Text | None] | None:
    if file.get("error") or "not_utf8" in file:
        reason = file.get("error") or Text("plan.file-not-utf8", "not valid UTF-8 at byte {at:,}", at=file["not_utf8"])
        message = Text(
            "plan.bad-file", "args.{option}: invalid {path}/{file}: {reason}", option="data_path", reason=reason, **at
        )
        return "unreadable", message, None
    if "fields" in file and "text" not in file["fields"]:
        message = Text(
            "plan.no-text-column",
            "args.data_path: {path}: {file} has no column text among {columns}",
            columns=list(file["fields"]),
            **at,
        )
        return "no-text-column", message, None
    row = first_other(file, "text") if file["name"].endswith(".jsonl") else None
    if row is not None:
        message = Text("plan.no-text", "args.data_path: {path}: {file}: row {row} has no text", row=row, **at)
        return "no-text", message, Text("plan.text-row", 'write {{"text": "…"}} for each document')
    return None


def first_other(file: Raw, kind: str) -> int | None:
    """Return the number of the first row that is not of a kind; None: none of those that were read."""
    broken = (int(fault[0]) for fault in file.get("faults", ()) if fault[1] in JSON_FAULTS)
    other: int | None = file.get("tasks", {}).get(kind)
    return next(broken, other)


# --- tokenizers ---


def check_tokenizer(training: Training) -> Iterator[PlanProblem]:
    """Refuse a directory without a tokenizer of this program, and a model with the tokenizer of another one."""
    for option in ("tokenizer_dir", "model_dir"):
        path = str(training.options[option] or "")
        for host, raw in training.found(path).items() if path else ():
            found = tokenizer_problem(raw, {"option": option, "path": path})
            if found is not None:
                yield PlanProblem(*found, None, option, (host,))
    yield from other_tokenizer(training)


def tokenizer_problem(raw: Raw, at: dict[str, str]) -> tuple[str, Text] | None:
    if "kind" not in raw:
        return None
    wanted = None
    if at["option"] == "model_dir":
        try:
            wanted = Sizes.of_config(raw.get("config") or {}).vocabulary
        except (KeyError, TypeError, ValueError):
            return None  # no model of this program, which another rule reports
    tokenizer = raw.get("tokenizer") or {}
    if not tokenizer.get("found"):
        return "no-tokenizer", Text(
            "plan.no-tokenizer", "args.{option}: {path} has no tokenizer (tokenizer.json)", **at
        )
    if tokenizer.get("error"):
        reason = tokenizer["error"]
        return "bad-tokenizer", Text(
            "plan.bad-tokenizer", "args.{option}: {path}/tokenizer.json: {reason}", reason=reason, **at
        )
    missing = [token for token in SPECIAL if token not in tokenizer.get("added", SPECIAL)]
    if missing:
        return "other-tokenizer", Text(
            "plan.tokenizer-lacks", "args.{option}: {path}/tokenizer.json: no tokens {missing}", missing=missing, **at
        )
    if wanted is None or tokenizer.get("tokens") in (None, wanted):
        return None
    return "foreign-tokenizer", foreign_tokenizer(at, tokenizer["tokens"], wanted)


def foreign_tokenizer(at: Mapping[str, str], tokens: int, vocabulary: int) -> Text:
    return Text(
        "plan.foreign-tokenizer",
        "args.{option}: {path}: the tokenizer has {tokens:,} tokens, the model {vocabulary:,}",
        tokens=tokens,
        vocabulary=vocabulary,
        **at,
    )


def other_tokenizer(training: Training) -> Iterator[PlanProblem]:
    """Refuse a tokenizer_dir that a stage after base has been given, if it is not that of the stage's model."""
    given, path = str(training.options["tokenizer_dir"] or ""), str(training.options["model_dir"] or "")
    if training.mode in ("tokenizer", "base", "export") or not given or not path:
        return
    stage = training.stage_at(path)
    while stage is not None and stage["mode"] in ON_CHATS:
        stage = training.stage_at(str(stage["model_dir"] or ""))
    is_other = stage is not None and posixpath.normpath(str(stage["tokenizer_dir"])) != posixpath.normpath(given)
    if stage is None:
        marks = [((training.first(each) or {}).get("tokenizer") or {}).get("mark") for each in (given, path)]
        is_other = None not in marks and marks[0] != marks[1]
    if is_other:
        message = Text(
            "plan.other-tokenizer", "args.tokenizer_dir: {path} is not the tokenizer of {model}", path=given, model=path
        )
        hint = Text("plan.model-has-tokenizer", "remove it: a model has its tokenizer in its own directory")
        yield PlanProblem("foreign-tokenizer", message, hint, "tokenizer_dir")


# --- tasks ---


def check_tasks(training: Training) -> Iterator[PlanProblem]:
    """Refuse tasks of unknown kinds, and files of other kinds."""
    if training.mode not in (*ON_CHATS, "evaluate"):
        return
    tasks, is_scored = training.options["mixture"], training.mode in ("evaluate", "rl")
    may_lack = training.mode == "evaluate"
    if may_lack and not (tasks or training.options["data_path"]):
        message = Text("plan.nothing-to-evaluate", "args.data_path or args.mixture is required with mode: evaluate")
        yield PlanProblem("no-mixture", message, Text("plan.mixture-form", "write - {{kind: sums}}"), "mixture")
    if not tasks and not may_lack:
        message = Text("plan.no-mixture", "args.mixture is required with mode: {mode}", mode=training.mode)
        yield PlanProblem("no-mixture", message, Text("plan.mixture-form", "write - {{kind: sums}}"), "mixture")
    for at, task in enumerate(tasks):
        kind, path, option = task.get("kind"), str(task.get("file") or ""), f"mixture[{at}]"
        if kind not in KINDS:
            message = Text(
                "plan.task-kind",
                "args.{option}: unknown kind {kind:quote}; expected one of {kinds}",
                option=option,
                kind=str(kind),
                kinds=list(KINDS),
            )
            yield PlanProblem("task-kind", message, None, "mixture")
        elif is_scored and kind == "messages":
            message = Text(
                "plan.no-answers", "args.{option}: {kind} has no answers to compare", option=option, kind=kind
            )
            yield PlanProblem("no-answers", message, None, "mixture")
        elif bool(path) != (kind in FILE_KINDS):
            at_task = {"option": option, "kind": kind}
            message = Text("plan.task-file", "args.{option}: {kind} requires a file", **at_task)
            if path:
                message = Text("plan.task-generated", "args.{option}: {kind} is generated and has no file", **at_task)
            yield PlanProblem("task-file", message, None, "mixture")
        for key in ("epochs", "rows"):
            if not isinstance(task.get(key, 1), int) or task.get(key, 1) < (key == "epochs"):
                message = Text("plan.task-number", "args.{option}.{key}: expected a number", option=option, key=key)
                yield PlanProblem("task-number", message, None, "mixture")
        for host, raw in training.found(path).items() if path and kind in FILE_KINDS else ():
            for file in raw.get("files", ()):
                row = first_other(file, str(kind))
                if row is not None or raw["kind"] != "data":
                    message = Text(
                        "plan.task-row",
                        "args.{option}: {path}: row {row} is not of the kind {kind}",
                        option=option,
                        path=path,
                        row=row,
                        kind=kind,
                    )
                    fix = Text("plan.fix-rows", "fix or remove the sample")
                    yield PlanProblem("task-row", message, fix, "mixture", (host,))
