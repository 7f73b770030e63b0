"""Rules of the program trajectory for tables of AIS points: their form and columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ascendrun.facts.columns import ALIASES, missing_columns, unknown_names
from ascendrun.planner.training import PlanProblem, Raw, Training
from ascendrun.text import Text

TABLES = (".csv", ".csv.gz", ".parquet")
TEXTS = (".jsonl", ".jsonl.gz")


def table_problems(training: Training, path: str) -> Iterator[PlanProblem]:
    """Report files that are no tables, and columns that cannot be found, with the line to add."""
    wanted, _ = column_map(training.options["column_map"])
    for host, raw in training.found(path).items():
        if raw.get("kind") not in (None, "data"):
            message = Text(
                "plan.no-data-file", "args.data_path: {path} has no .csv, .csv.gz or .parquet file", path=path
            )
            yield PlanProblem("no-data-file", message, None, "data_path", (host,))
        files = raw.get("files") or ()
        is_folder = "names" in raw
        for file in files:
            name = file["name"]
            if name.endswith(TEXTS) or (is_folder and not name.endswith(TABLES)):
                continue
            at = {"path": f"{path}/{name}" if is_folder else path}
            unreadable = _unreadable(file, at)
            columns = None if unreadable is not None else _column_problem(file, at, wanted)
            if unreadable is not None:
                yield PlanProblem(*unreadable, "data_path", (host,))
            elif columns is not None:
                yield PlanProblem(*columns, "column_map", (host,))


def _unreadable(file: Raw, at: Mapping[str, str]) -> tuple[str, Text, Text | None] | None:
    """Return (code, message, hint) of what makes a file no table; None: it is one."""
    if not file["name"].endswith(TABLES):
        message = Text(
            "plan.data-form", "args.data_path: {path}: expected .csv, .csv.gz, .parquet, .jsonl or .jsonl.gz", **at
        )
        return "data-form", message, None
    if "error" in file:
        message = Text(
            "plan.data-unreadable", "args.data_path: {path} cannot be read: {reason}", reason=file["error"], **at
        )
        return "data-unreadable", message, None
    if "not_utf8" in file:
        message = Text("plan.table-not-utf8", "args.data_path: {path} is not valid UTF-8", **at)
        return "table-not-utf8", message, Text("plan.iconv", "convert the file: iconv -f ENCODING -t UTF-8")
    if "columns" in file and not file["columns"]:
        message = Text(
            "plan.table-empty", "args.data_path: {path} is empty; the first line must name the columns", **at
        )
        return "table-empty", message, None
    if file.get("bad_csv"):
        message = Text(
            "plan.bad-csv",
            "args.data_path: {path}: {reason} (possibly an unclosed quote)",
            reason=file["bad_csv"],
            **at,
        )
        return "bad-csv", message, None
    return None


def _column_problem(file: Raw, at: Mapping[str, str], wanted: Mapping[str, str]) -> tuple[str, Text, Text] | None:
    """Return (code, message, hint) of columns that cannot be found, with the line to add; None: all are found."""
    if "columns" not in file:
        return None
    table = dict(zip(file["columns"], file["values"]))
    unknown = unknown_names(table, wanted)
    if unknown:
        message = Text(
            "plan.unknown-columns",
            "args.column_map: unknown names {unknown}; {path} has the columns {columns}",
            unknown=unknown,
            columns=list(table),
            **at,
        )
        hint = Text("plan.known-columns", "known names are {known}", known=list(ALIASES))
        return "unknown-columns", message, hint
    _, missing, proposal = missing_columns(table, wanted)
    if missing:
        message = Text(
            "plan.no-column",
            "args.data_path: {path}: no column for {missing} among {columns}",
            missing=missing,
            columns=list(table),
            **at,
        )
        hint = Text("plan.write-column-map", "write column_map: [{proposal}]", proposal=proposal.replace(",", ", "))
        return "no-column", message, hint
    return None


def column_map(entries: Sequence[str] | None) -> tuple[dict[str, str], list[str]]:
    """Return (columns by internal name, entries of another form)."""
    pairs = [str(pair) for pair in entries or ()]
    known = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    return {ours.strip(): yours.strip() for ours, yours in known.items()}, [pair for pair in pairs if "=" not in pair]
