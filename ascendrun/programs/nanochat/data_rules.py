"""Rules of the program nanochat for what its stages read: documents, tokenizers, and tasks."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping
from typing import Any

from ascendrun.facts.rows import FILE_KINDS
from ascendrun.planner import rules
from ascendrun.planner.training import PlanProblem, Raw, Training
from ascendrun.programs.nanochat.sizes import ON_CHATS, SPECIAL, Sizes
from ascendrun.text import Text, listed

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
            code, values = found
            yield PlanProblem.of(code, "data_path", (host,), **{"path": path, **values})


def text_problem(path: str, raw: Raw) -> tuple[str, dict[str, Any]] | None:
    """Return the code and values of the first problem of the documents at a path, as a node has them."""
    files = [file for file in raw.get("files", ()) if raw["kind"] == "data" and file["name"].endswith(FORMS)]
    if not files and raw.get("texts"):
        return None
    if not files:
        return "no-shards", {"forms": list(FORMS)}
    for file in files:
        found = file_problem(path, file)
        if found is not None:
            return found
    known = [int(file["rows"]) for file in files if file.get("whole") or "fields" in file]
    if raw.get("more") or len(known) < len(files) or any(file["name"].endswith(".txt") for file in files):
        return None
    *others, last = known
    if (sum(others) and last) if others else last > 1:
        return None
    return "few-documents", {"count": sum(known)}


def few_documents(path: str, count: int) -> Text:
    return listed("plan.few-documents", path=path, count=count)


def file_problem(path: str, file: Raw) -> tuple[str, dict[str, Any]] | None:
    if file.get("error") or "not_utf8" in file:
        not_utf8 = listed("plan.file-not-utf8", at=file.get("not_utf8"))
        return "unreadable", {"path": f"{path}/{file['name']}", "reason": file.get("error") or not_utf8}
    if "fields" in file and "text" not in file["fields"]:
        return "no-text-column", {"file": file["name"], "columns": list(file["fields"])}
    row = first_other(file, "text") if file["name"].endswith(".jsonl") else None
    return None if row is None else ("no-text", {"file": file["name"], "row": row})


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
            found = tokenizer_problem(raw, option)
            if found is not None:
                code, values = found
                yield PlanProblem.of(code, option, (host,), path=path, **values)
    yield from other_tokenizer(training)


def tokenizer_problem(raw: Raw, option: str) -> tuple[str, dict[str, Any]] | None:
    """Return the code and values of a directory whose tokenizer is not one of this program, or of another model."""
    if "kind" not in raw:
        return None
    wanted = None
    if option == "model_dir":
        try:
            wanted = Sizes.of_config(raw.get("config") or {}).vocabulary
        except (KeyError, TypeError, ValueError):
            return None  # no model of this program, which another rule reports
    tokenizer = raw.get("tokenizer") or {}
    if not tokenizer.get("found"):
        return "no-tokenizer", {}
    if tokenizer.get("error"):
        return "bad-tokenizer", {"reason": tokenizer["error"]}
    missing = [token for token in SPECIAL if token not in tokenizer.get("added", SPECIAL)]
    if missing:
        return "other-tokenizer", {"missing": missing}
    if wanted is None or tokenizer.get("tokens") in (None, wanted):
        return None
    return "foreign-tokenizer", {"tokens": tokenizer["tokens"], "vocabulary": wanted}


def foreign_tokenizer(at: Mapping[str, str], tokens: int, vocabulary: int) -> Text:
    return listed("plan.foreign-tokenizer", tokens=tokens, vocabulary=vocabulary, **at)


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
        yield PlanProblem.of("given-tokenizer", "tokenizer_dir", path=given, model=path)


# --- tasks ---


def check_tasks(training: Training) -> Iterator[PlanProblem]:
    """Refuse tasks of unknown kinds, and files of other kinds."""
    if training.mode not in (*ON_CHATS, "evaluate"):
        return
    tasks, is_scored = training.options["mixture"], training.mode in ("evaluate", "rl")
    may_lack = training.mode == "evaluate"
    if may_lack and not (tasks or training.options["data_path"]):
        yield PlanProblem.of("nothing-to-evaluate", "mixture")
    if not tasks and not may_lack:
        yield PlanProblem.of("no-mixture", "mixture", mode=training.mode)
    for at, task in enumerate(tasks):
        kind, path, option = task.get("kind"), str(task.get("file") or ""), f"mixture[{at}]"
        if kind not in KINDS:
            yield PlanProblem.of("task-kind", "mixture", option=option, kind=str(kind), kinds=list(KINDS))
        elif is_scored and kind == "messages":
            yield PlanProblem.of("no-answers", "mixture", option=option, kind=kind)
        elif bool(path) != (kind in FILE_KINDS):
            yield PlanProblem.of("task-generated" if path else "task-file", "mixture", option=option, kind=kind)
        for key in ("epochs", "rows"):
            if not isinstance(task.get(key, 1), int) or task.get(key, 1) < (key == "epochs"):
                yield PlanProblem.of("task-number", "mixture", option=option, key=key)
        for host, raw in training.found(path).items() if path and kind in FILE_KINDS else ():
            for file in raw.get("files", ()):
                row = first_other(file, str(kind))
                if row is not None or raw["kind"] != "data":
                    values = {"option": option, "path": path, "row": row, "kind": kind}
                    yield PlanProblem.of("task-row", "mixture", (host,), **values)
