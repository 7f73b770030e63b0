"""A program's options: one JSON table, read as data by the head and turned into a command line here."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, NoReturn

TRUE_WORDS = ("true", "yes", "on", "1")
FALSE_WORDS = ("false", "no", "off", "0")


class BadOptions(Exception):
    """Some options are wrong; `problems` holds one line for each of them."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class Parser(argparse.ArgumentParser):
    """Tells what is wrong in a line, without the usage of a hundred options before it."""

    def error(self, message: str) -> NoReturn:
        raise BadOptions(
            [f"{message[len('argument ') :] if message.startswith('argument ') else message}; write --option=value"]
        )


@dataclass(frozen=True)
class Option:
    """One row of the table. `low`, `high`: inclusive bounds, None: none. `choices` empty: any value."""

    name: str
    type: str
    default: Any
    help: str
    choices: tuple[Any, ...]
    low: Any
    high: Any
    required: bool


def read_table(path: Path) -> dict[str, Option]:
    """The options of one program by name, in the order of the file."""
    rows: Mapping[str, Mapping[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return {
        name: Option(
            name,
            row["type"],
            row.get("default"),
            row["help"],
            tuple(row.get("choices", ())),
            row.get("min"),
            row.get("max"),
            bool(row.get("required", False)),
        )
        for name, row in rows.items()
    }


def parse(argv: Sequence[str], table: Mapping[str, Option]) -> dict[str, Any]:
    """Values by option name. Raises BadOptions with every problem of the command line; exits 0 after --help."""
    parser = make_parser(table)
    known, unknown = parser.parse_known_args(list(argv))
    problems = [explain_unknown(text, table) for text in unknown if text.startswith("-") or text == unknown[0]]
    values: dict[str, Any] = {}
    for option in table.values():
        text = getattr(known, option.name)
        if text is None:
            values[option.name] = option.default
            if option.required:
                problems.append(f"--{option.name}: missing; {option.help}")
            continue
        try:
            values[option.name] = convert(text, option)
        except ValueError as error:
            problems.append(f"--{option.name}={text}: {error}")
    if problems:
        raise BadOptions(problems)
    return values


def make_parser(table: Mapping[str, Option]) -> argparse.ArgumentParser:
    """All values stay text here, so that `parse` can judge them together."""
    package = getattr(sys.modules["__main__"], "__package__", None)
    parser = Parser(
        prog=f"python -m {package}" if package else None,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for option in table.values():
        shown = option.default if option.default not in (None, "") else "none"
        choices = f" [{', '.join(map(str, option.choices))}]" if option.choices else ""
        parser.add_argument(
            f"--{option.name}",
            metavar=option.type.upper(),
            help=f"{option.help}{choices} (default {shown})".replace("%", "%%"),
        )
    return parser


def explain_unknown(text: str, table: Mapping[str, Option]) -> str:
    name = text.lstrip("-").split("=", 1)[0]
    close = difflib.get_close_matches(name, list(table), n=1)
    way_out = f"did you mean --{close[0]}?" if close else "--help lists all options"
    return f"{text}: no such option; {way_out}"


def convert(text: str, option: Option) -> Any:
    """The value of one option. Raises ValueError with what would be right."""
    value = READERS[option.type](text)
    if option.choices and value not in option.choices:
        raise ValueError(f"must be one of {', '.join(map(str, option.choices))}")
    if option.low is not None and value < option.low:
        raise ValueError(f"must be at least {option.low}")
    if option.high is not None and value > option.high:
        raise ValueError(f"must be at most {option.high}")
    return value


def read_int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("must be a whole number") from None


def read_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError("must be a number") from None
    if value != value or value in (float("inf"), float("-inf")):
        raise ValueError("must be a finite number")
    return value


def read_bool(text: str) -> bool:
    if text.lower() in TRUE_WORDS:
        return True
    if text.lower() in FALSE_WORDS:
        return False
    raise ValueError("must be true or false")


def read_list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


READERS: dict[str, Callable[[str], Any]] = {
    "int": read_int,
    "float": read_float,
    "bool": read_bool,
    "str": str,
    "path": str,
    "list": read_list,
}


def parse_or_exit(argv: Sequence[str], table: Mapping[str, Option]) -> dict[str, Any]:
    """As `parse`; a wrong command line ends the process with code 2 after all problems were shown."""
    try:
        return parse(argv, table)
    except BadOptions as error:
        print(f"{len(error.problems)} problem(s) in the options:", file=sys.stderr)
        for problem in error.problems:
            print(f"  {problem}", file=sys.stderr)
        raise SystemExit(2) from None
