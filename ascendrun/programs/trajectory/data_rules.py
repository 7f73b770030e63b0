"""Rules of the program trajectory for tables of AIS points: their form and columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ascendrun.facts.columns import ALIASES, missing_columns, unknown_names
from ascendrun.planner.training import PlanProblem, Raw, Training

TABLES = (".csv", ".csv.gz", ".parquet")
TEXTS = (".jsonl", ".jsonl.gz")


def table_problems(training: Training, path: str) -> Iterator[PlanProblem]:
    """Report files that are no tables, and columns that cannot be found, with the line to add."""
    wanted, _ = column_map(training.options["column_map"])
    for host, raw in training.found(path).items():
        if raw.get("kind") not in (None, "data"):
            yield PlanProblem.of("no-data-file", "data_path", (host,), path=path)
        files = raw.get("files") or ()
        is_folder = "names" in raw
        for file in files:
            name = file["name"]
            if name.endswith(TEXTS) or (is_folder and not name.endswith(TABLES)):
                continue
            at = f"{path}/{name}" if is_folder else path
            unreadable = _unreadable(file)
            columns = None if unreadable is not None else _column_problem(file, wanted)
            if unreadable is not None:
                code, reason = unreadable
                yield PlanProblem.of(code, "data_path", (host,), path=at, reason=reason)
            elif columns is not None:
                code, values = columns
                yield PlanProblem.of(code, "column_map", (host,), path=at, **values)


def _unreadable(file: Raw) -> tuple[str, str | None] | None:
    """Return the code and perhaps the reason of what makes a file no table; None: it is one."""
    if not file["name"].endswith(TABLES):
        return "data-form", None
    if "error" in file:
        return "data-unreadable", file["error"]
    if "not_utf8" in file:
        return "table-not-utf8", None
    if "columns" in file and not file["columns"]:
        return "table-empty", None
    return ("bad-csv", file["bad_csv"]) if file.get("bad_csv") else None


def _column_problem(file: Raw, wanted: Mapping[str, str]) -> tuple[str, dict[str, Any]] | None:
    """Return the code and values of columns that cannot be found, with the line to add; None: all are found."""
    if "columns" not in file:
        return None
    table = dict(zip(file["columns"], file["values"]))
    unknown = unknown_names(table, wanted)
    if unknown:
        return "unknown-columns", {"unknown": unknown, "columns": list(table), "known": list(ALIASES)}
    _, missing, proposal = missing_columns(table, wanted)
    if missing:
        return "no-column", {"missing": missing, "columns": list(table), "proposal": proposal.replace(",", ", ")}
    return None


def column_map(entries: Sequence[str] | None) -> tuple[dict[str, str], list[str]]:
    """Return (columns by internal name, entries of another form)."""
    pairs = [str(pair) for pair in entries or ()]
    known = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    return {ours.strip(): yours.strip() for ours, yours in known.items()}, [pair for pair in pairs if "=" not in pair]
