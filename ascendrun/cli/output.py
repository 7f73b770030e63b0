"""Dataclasses as tables for people and as JSON, YAML or CSV for programs; sanitised; the only place with pretty units.

Output of a rank, a node or a file must not control the terminal that shows it.
"""

from __future__ import annotations

import dataclasses
import io
import json
import re
import sys
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ascendrun.core.errors import InvalidInputError, Problem
from ascendrun.core.metrics import seconds_left
from ascendrun.core.records import as_record
from ascendrun.output_file import write_bytes
from ascendrun.text import Text, language, template_of
from ascendrun.text.format import fold_hosts

if TYPE_CHECKING:
    from ascendrun.core.jobs.restart import Failure

SCHEMA_VERSION = 2
PEOPLE = (None, "table", "wide")
"""Values of `-o` that are for people; the others are for programs."""
LAST_COLUMN_CELLS = 36

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True)
class Column:
    """One column of a table: its title, and the text of its cell for one row.

    `dropped`: 0 never; a table that is wider than the terminal omits the columns with the highest number first.
    """

    title: str
    cell: Callable[[Any], str]
    is_wide: bool = False
    dropped: int = 0


# ---------------------------------------------------------------- for programs


def print_record(value: Any, output: str | None) -> bool:
    """Print a dataclass as json, jsonl, yaml or csv; False, without output, when `output` is for people."""
    if output is None or output in PEOPLE:
        return False
    sys.stdout.write(format_record(as_record(value), output))
    return True


def format_record(values: Mapping[str, Any], output: str) -> str:
    """Return one record (as_record) as json, jsonl, yaml or csv, with a newline at its end."""
    record = {"schema_version": SCHEMA_VERSION, **values}
    if output == "json":
        return _to_json(record, indent=2) + "\n"
    if output == "jsonl":
        return _to_json(record) + "\n"
    if output == "yaml":
        return _to_yaml(record)
    return _to_csv(list(record), [record])


def format_many(rows: Sequence[Any], output: str, *, name: str, kind: type) -> str:
    """Return dataclasses as json or yaml under `name`; as jsonl or csv one per line. `kind`: the class if empty."""
    names = [re.sub(r"(^|_)at_s$", r"\1at", field.name) for field in dataclasses.fields(kind)]
    return format_records([as_record(row) for row in rows], output, name=name, names=names)


def format_records(records: Sequence[Mapping[str, Any]], output: str, *, name: str, names: Sequence[str]) -> str:
    """Return records (as_record) as json or yaml under `name`; as jsonl or csv one per line. `names`: csv columns."""
    if output == "json":
        return _to_json({"schema_version": SCHEMA_VERSION, name: records}, indent=2) + "\n"
    if output == "jsonl":
        return "".join(_to_json({"schema_version": SCHEMA_VERSION, **record}) + "\n" for record in records)
    if output == "yaml":
        return _to_yaml({"schema_version": SCHEMA_VERSION, name: records})
    return _to_csv(names, records)


def _to_json(value: Any, *, indent: int | None = None) -> str:
    return escape_json(json.dumps(value, ensure_ascii=False, indent=indent))


def _to_yaml(value: Any) -> str:
    import yaml

    text = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=120)
    if escape_json(text) != text:  # it contains terminal control characters
        text = yaml.safe_dump(value, sort_keys=False, allow_unicode=False, width=120)
    return str(text)


def _to_csv(names: Sequence[str], records: Iterable[Mapping[str, Any]]) -> str:
    out = io.StringIO()
    import csv

    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    for record in records:
        writer.writerow([_csv_cell(record.get(name)) for name in names])
    return out.getvalue()


def _csv_cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, (dict, list)):
        return _to_json(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    return sanitise_line(str(value))


# ---------------------------------------------------------------- for people


def format_table(
    rows: Sequence[Any], columns: Sequence[Column], *, wide: bool = False, width: int | None = None
) -> str:
    """Return aligned columns under their titles. `width`: truncate lines to these terminal cells, None: never."""
    shown = [column for column in columns if wide or not column.is_wide]
    table = [[title_of(column) for column in shown]]
    table.extend([sanitise_line(column.cell(row)) or "-" for column in shown] for row in rows)
    widths = [max(width_of(line[index]) for line in table) for index in range(len(shown))]
    while width is not None and _least_width(widths) > width:
        index = max(range(len(shown)), key=lambda index: shown[index].dropped)
        if not shown[index].dropped:
            break
        del shown[index], widths[index]
        for cells in table:
            del cells[index]
    lines = []
    for cells in table:
        padded = [cell + " " * (widths[index] - width_of(cell)) for index, cell in enumerate(cells)]
        line = "  ".join(padded).rstrip()
        lines.append(line if width is None else cut(line, width))
    return "\n".join(lines) + "\n"


def title_of(column: Column) -> str:
    """Return the title of a column in the language of the process: the key of SET BY is `column.set-by`."""
    return template_of(f"column.{column.title.lower().replace(' ', '-')}", column.title, language())


def named(id: str, name: str) -> str:
    """Return j-0001 (train), with the brackets of the language."""
    return str(Text("cli.named", "{id} ({name})", id=id, name=name))


def labelled(label: object, message: object) -> str:
    """Return `RUNNING: 4 ranks running`, with the language's colon; without a message only the label."""
    return str(Text("cli.at", "{place}: {message}", place=label, message=message)) if message else str(label)


def _least_width(widths: Sequence[int]) -> int:
    """Return a table's minimum width: the last column may shrink to LAST_COLUMN_CELLS."""
    return sum(widths[:-1]) + 2 * (len(widths) - 1) + min(widths[-1], LAST_COLUMN_CELLS)


def format_pairs(pairs: Sequence[tuple[str, str]]) -> str:
    """Return names and values, the values aligned; a value of several lines has no name before its later ones."""
    widest = max((width_of(name) for name, _ in pairs), default=0)
    rows = [
        (name if number == 0 else "", line) for name, value in pairs for number, line in enumerate(value.split("\n"))
    ]
    return "".join(f"{name}{' ' * (widest - width_of(name))}  {sanitise_line(line)}\n" for name, line in rows)


def print_rows(
    rows: Sequence[Any], columns: Sequence[Column], output: str | None, *, name: str, kind: type, is_cut: bool = True
) -> None:
    """Print to stdout in this format; None: a table, truncated to the terminal width unless `is_cut` is false.

    `name`: the ids of rows that have one."""
    if output == "name":
        sys.stdout.write("".join(f"{sanitise_line(row.id)}\n" for row in rows))
    elif output is None or output in PEOPLE:
        width = terminal_width(output) if is_cut else None
        sys.stdout.write(format_table(rows, columns, wide=output == "wide", width=width))
    else:
        sys.stdout.write(format_many(rows, output, name=name, kind=kind))


def print_for_programs(rows: Sequence[Any], output: str | None, *, name: str, kind: type) -> None:
    """Print what a command changed as json, jsonl, yaml or csv; nothing when `output` is for people."""
    if output is not None and output not in PEOPLE:
        sys.stdout.write(format_many(rows, output, name=name, kind=kind))


def write_file(path: Path, content: bytes) -> None:
    """Write through links and devices, see output_file. Raises InvalidInputError naming the file."""
    try:
        write_bytes(path, content)
    except OSError as error:
        message = Text("cli.cannot-write", "cannot write: {reason}", reason=error.strerror or str(error))
        raise InvalidInputError([Problem(str(path), None, None, message)]) from error


def terminal_width(output: str | None) -> int | None:
    """Return the cells of the terminal; None where nothing may be truncated: in a pipe, or with -o wide."""
    if output == "wide" or not sys.stdout.isatty():
        return None
    return screen_columns()


def screen_columns() -> int:
    """Return the columns of the terminal, or 80."""
    from shutil import get_terminal_size

    return get_terminal_size().columns


def width_of(text: str) -> int:
    """Return the number of terminal cells of the text."""
    if text.isascii():
        return len(text)
    return sum(_character_width(character) for character in text)


@cache
def _character_width(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def cut(text: str, width: int) -> str:
    """Truncate the text to at most `width` cells, with an ellipsis for the omitted part."""
    if width_of(text) <= width:
        return text
    used = 0
    kept = []
    for character in text:
        used += _character_width(character)
        if used > width - 1:
            break
        kept.append(character)
    return "".join(kept).rstrip() + "…"


def wrap(text: str, width: int, *, indent: int = 2) -> list[str]:
    """Return lines of at most `width` cells, broken at spaces and between Chinese characters; nothing is truncated.

    Later lines are indented. A token that is wider than a line, such as a path, is not broken.
    """
    lines, line, used = [], "", 0
    for piece in re.findall(r"[ \t]+|[^\s\u2e80-\u9fff\uff00-\uffef]+[，。：；）、]?|.", text):
        cells = width_of(piece)
        if line.strip() and used + cells > width and not piece.isspace() and piece not in "，。：；）、":
            lines.append(line.rstrip())
            line, used = " " * indent, indent
        line, used = line + piece, used + cells
    return [*lines, line.rstrip()]


def describe_seconds(seconds: float | None) -> str:
    """Return 4s, 3m12s, 2h05m, 3d04h; "-" for None."""
    if seconds is None:
        return "-"
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def describe_memory(count: int | None) -> str:
    """Format in powers of 1024, as memory is sold; "-" for None."""
    if count is None:
        return "-"
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit in ("B", "KiB") else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def describe_hours(hours: float | None) -> str:
    return "-" if hours is None else f"{hours:,.2f}"


def describe_time(at_s: float | None) -> str:
    """Return local time to the second; "-" for None."""
    return "-" if at_s is None else datetime.fromtimestamp(at_s).strftime("%Y-%m-%d %H:%M:%S")


def describe_progress(progress: Mapping[str, Any] | None) -> str:
    """Return step 120/900 · 2h5m left · loss 2.31 · 15.3k tokens/s · phase evaluation; "": it reports none of these."""
    if not progress:
        return ""
    parts = []
    if "step" in progress:
        of = f"/{progress['total_steps']}" if progress.get("total_steps") is not None else ""
        parts.append(f"step {progress['step']}{of}")
        left_s = seconds_left(*(progress.get(name) for name in ("step", "total_steps", "step_s")))
        parts += [] if left_s is None else [str(Text("cli.left", "{time} left", time=describe_seconds(left_s)))]
    for name in ("epoch", "loss", "eval_macro_f1"):
        if progress.get(name) is not None:
            parts.append(f"{name} {short_number(progress[name])}")
    if progress.get("tokens_per_s") is not None:
        parts.append(f"{short_number(progress['tokens_per_s'])} tokens/s")
    if isinstance(progress.get("phase"), str):
        parts.append(f"phase {progress['phase']}"[:40])
    return " · ".join(sanitise_line(part) for part in parts)


def short_number(value: Any) -> str:
    """Return 2.314, 15.3k, 1.2M; nan as reported."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)[:20]
    if abs(value) >= 10_000:
        return f"{value / 1000:.1f}k" if abs(value) < 10_000_000 else f"{value / 1e6:.1f}M"
    return f"{value:.4g}"


def describe_attempt_failure(failure: Failure | None) -> str:
    """Return text such as: oom: host-oom on npu02 [certain]; "-" for an attempt that was not diagnosed."""
    if failure is None:
        return "-"
    where = f" ({fold_hosts(failure.hosts)})" if failure.hosts else ""
    sure = template_of(f"confidence.{failure.confidence}", failure.confidence, language())
    return f"{failure.kind.value}: {failure.code}{where} [{sure}]"


ESCAPE_SEQUENCE = re.compile(
    "\x1b\\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor moves
    "|\x1b[\\]PX^_][^\x07\x1b\x9c]*(?:\x07|\x1b\\\\|\x9c)"  # OSC, DCS, SOS, PM, APC: titles, clipboard
    "|\x1b[ -/]*[0-NQ-WYZ\\\\`-~]"  # two characters and charset choices
)
HOSTILE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but tab and newline; DEL; C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # bidirectional controls
    "\u2028\u2029\ud800-\udfff]"  # invalid line ends; surrogates
)


def sanitise(text: str) -> str:
    """Remove complete escape sequences and show every other control as an escape such as \\x07 or \\u202e.

    Tab and newline stay.
    """
    if HOSTILE.search(text) is None:
        return text
    return HOSTILE.sub(_visible, ESCAPE_SEQUENCE.sub("", text))


def sanitise_line(text: str) -> str:
    """Sanitise for a table's cell: one line, no tab."""
    return sanitise(text).replace("\n", "\\n").replace("\t", " ")


def headline(text: str) -> str:
    """Return only the first line, as `sanitise_line`, and a mark if there are more."""
    first, _, rest = text.strip().partition("\n")
    return sanitise_line(first) + (" …" if rest else "")


def escape_json(text: str) -> str:
    """Escape JSON text: strings contain control characters only as \\u escapes."""
    return HOSTILE.sub(_json_escape, text)


def _json_escape(match: re.Match[str]) -> str:
    code = ord(match.group())
    return match.group() if code < 32 else f"\\u{code:04x}"  # below 32 occurs only between values


def _visible(match: re.Match[str]) -> str:
    code = ord(match.group())
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
