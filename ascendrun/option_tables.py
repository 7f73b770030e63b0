"""Reading of the option tables of programs: `options.json` in a bundled program, `FILE.json` of a user's program.

A program's `options.json` has two parts. Only `options` is required:

    "refused": {"use_amp": "set dtype"}     a name from other programs that is an error; the text is the hint
    "options": {"learning_rate": {"type": "float", "default": 1e-4, "help": "peak learning rate", "aliases": ["lr"]}}

Keys of an option: `type` (one of TYPES), `default`, `help`, `choices`, `min` and `max` (inclusive), `required`, and

    "aliases": ["lr"]                       other names, accepted without a warning; an error together with the name
    "words": ["generated"]                  values of a path that are not paths
    "keys": ["file", "kind"]                of the mappings of an option of the type maps
    "excludes": ["warmup_ratio"]            options that cannot be combined with this option
    "value_aliases": {"bf16": "bfloat16"}   other spellings of a value, accepted without a warning

A row without a type has the keys of `programs/trainer/shared_options.json`, where it has no others: `"save_steps": {}`.
Chinese texts have the keys `option.PROGRAM.NAME` (help), `option.trainer.NAME` (the help of a shared row) and
`option.PROGRAM.NAME.refused`; those of a bundled program are in its own zh.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from functools import cache
from importlib import resources
from typing import Any

from ascendrun.options import Option, ProgramOptions
from ascendrun.text import Text

TYPES = ("int", "float", "str", "bool", "path", "list", "maps")
"""`maps`: a list of mappings of scalars, which a command line has as JSON."""
ROW_KEYS = (
    *("type", "default", "help", "choices", "min", "max", "required", "words", "keys"),
    *("aliases", "excludes", "value_aliases"),
)
_NAME = re.compile(r"[a-z][a-z0-9_]*")


class InvalidTableError(ValueError):
    """A program's table is invalid; `faults` are the messages."""

    def __init__(self, faults: Collection[Text], line: int | None = None, column: int | None = None) -> None:
        super().__init__("; ".join(map(str, faults)))
        self.faults, self.line, self.column = tuple(faults), line, column


def read_table(program: str, json_text: str) -> ProgramOptions:
    """Return the table of one program. Raises InvalidTableError with every fault."""
    try:
        table = json.loads(json_text)
    except ValueError as error:
        text = Text("options.not-json", "invalid JSON: {error}", error=str(error))
        raise InvalidTableError([text], getattr(error, "lineno", None), getattr(error, "colno", None)) from error
    if not isinstance(table, dict) or not isinstance(table.get("options"), dict):
        raise InvalidTableError([Text("options.no-table", "expected an object with the key 'options'")], 1, 1)
    given = table["options"]
    table["options"] = {name: _with_shared(name, row) for name, row in given.items()}
    faults = list(_table_faults(table))
    if faults:
        raise InvalidTableError(faults)
    options = {
        name: _make_option(name, row, is_shared="help" not in given[name]) for name, row in table["options"].items()
    }
    return ProgramOptions(program, options, dict(table.get("refused", {})))


@cache
def shared_rows() -> Mapping[str, Mapping[str, Any]]:
    """Return the rows of the options that several programs have."""
    file = resources.files("ascendrun").joinpath("programs/trainer/shared_options.json")
    return dict(json.loads(file.read_text(encoding="utf-8")))


def _with_shared(name: str, row: Any) -> Any:
    is_partial = isinstance(row, dict) and "type" not in row
    return {**shared_rows().get(name, {}), **row} if is_partial else row


def _table_faults(table: Mapping[str, Any]) -> list[Text]:
    rows = table["options"]
    faults = [_unknown_key(key) for key in table if key not in ("options", "refused")]
    for name, row in rows.items():
        faults += [Text("options.row", "{option}: {fault}", option=name, fault=each) for each in _row_faults(name, row)]
    aliases = [each for row in rows.values() if isinstance(row, dict) for each in row.get("aliases", ())]
    taken = [*rows, *map(str, aliases), *table.get("refused", {})]
    faults += [
        Text("options.defined-twice", "{name} is defined twice", name=name)
        for name in dict.fromkeys(taken)
        if taken.count(name) > 1
    ]
    return faults


def _row_faults(name: str, row: Any) -> list[Text]:
    if not _NAME.fullmatch(name):
        return [Text("options.name", "invalid option name (expected a-z, 0-9, _)")]
    if not isinstance(row, dict):
        return [Text("options.row-form", "expected an object")]
    faults = [_unknown_key(key) for key in row if key not in ROW_KEYS]
    if row.get("type") not in TYPES:
        faults.append(Text("options.type", "type: expected one of {types}", types=list(TYPES)))
    if not isinstance(row.get("help"), str):
        faults.append(Text("options.no-help", "help is required"))
    for key in ("choices", "aliases", "excludes", "words", "keys"):
        if not isinstance(row.get(key, []), list):
            faults.append(Text("options.list-key", "{key}: expected a list", key=key))
    return faults


def _unknown_key(key: str) -> Text:
    return Text("options.unknown-key", "unknown key {key:quote}", key=key)


def _make_option(name: str, row: Mapping[str, Any], *, is_shared: bool) -> Option:
    default = row.get("default")
    return Option(
        name=name,
        type=row["type"],
        default=tuple(default) if isinstance(default, list) else default,
        help=row["help"],
        choices=tuple(row.get("choices") or ()),
        low=row.get("min"),
        high=row.get("max"),
        required=bool(row.get("required", False)),
        aliases=tuple(row.get("aliases", ())),
        excludes=tuple(row.get("excludes", ())),
        value_aliases=dict(row.get("value_aliases", {})),
        words=tuple(row.get("words", ())),
        keys=tuple(row.get("keys", ())),
        is_shared=is_shared,
    )
