"""Every message of the product: from calls of Text(…) in the code, and from the tables."""

from __future__ import annotations

import ast
import json
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "ascendrun"
TAKES_TEXT = re.compile(r"Text\(|listed\(|fault\(|\w+Error(\.of)?\(|(self\._)?ctx\.say\(|self\._explain\(")
CHINESE = re.compile(r"[\u4e00-\u9fff]")


@dataclass(frozen=True)
class Message:
    """A template. `values`: the names given at the call; None: they are not known there (a table, or `**values`)."""

    key: str
    english: str
    values: frozenset[str] | None
    place: str


def fields(template: str) -> frozenset[str]:
    """The names of a template's placeholders. `{path: .}` is none, but YAML in the hint of a signature."""
    parsed = string.Formatter().parse(template)
    return frozenset(
        re.split(r"[.\[]", name)[0] for _, name, spec, _ in parsed if name and not (spec or "").startswith(" ")
    )


@cache
def inline() -> Sequence[Message]:
    """Every call of `Text("key", "English")` in the package, of errors and `say` that take the same, and of
    `listed("key")`. Raises KeyError for one that is in no en.json.

    `Error.of` and `fault` take the English of its hint, too.
    """
    return tuple(_found_in_code())


def _found_in_code() -> Iterator[Message]:
    english_by_key = _once([row for path in files_of("en") for row in templates(path).items()])
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if not TAKES_TEXT.search(source):
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and TAKES_TEXT.fullmatch(f"{ast.unparse(node.func)}("):
                place = f"{path.relative_to(PACKAGE.parent)}:{node.lineno}"
                names = [keyword.arg for keyword in node.keywords]
                values = None if None in names else frozenset(filter(None, names))
                words = [argument.value for argument in node.args[:2] if isinstance(argument, ast.Constant)]
                if ast.unparse(node.func) == "listed" and words:
                    yield Message(words[0], english_by_key[words[0]], values, place)
                if len(words) < 2:
                    continue  # a table's row, or a copy of another text: its key is checked where it is written
                key, english = words
                if "." not in str(key):
                    continue  # the code of an error on a node
                yield Message(key, english, values, place)
                hint = (
                    node.args[2] if ast.unparse(node.func).endswith((".of", "fault")) and len(node.args) > 2 else None
                )
                if isinstance(hint, ast.Constant):
                    yield Message(f"{key}.hint", str(hint.value), values, place)


def files_of(lang: str) -> list[Path]:
    """The catalogue's own file and those of programs."""
    return [PACKAGE / "text" / f"{lang}.json", *sorted((PACKAGE / "programs").glob(f"*/{lang}.json"))]


def templates(path: Path) -> Mapping[str, str]:
    """Every template of a file of the catalogue. Raises ValueError for a key that is there twice."""
    rows: dict[str, str] = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
    return rows


def chinese() -> Mapping[str, str]:
    return _once([row for path in files_of("zh") for row in templates(path).items()])


def _once(found: list[tuple[str, str]]) -> dict[str, str]:
    rows = dict(found)
    if len(rows) != len(found):
        raise ValueError("a key is there twice")
    return rows


def tables() -> Iterator[Message]:
    """The rows of tables that keep English next to their codes."""
    from ascendrun.ascend.signatures import signatures
    from ascendrun.ascend.tables import load_table
    from ascendrun.core.jobfile.spec import parse_program_options
    from ascendrun.head.ssh.openssh import OUTPUTS
    from ascendrun.planner.training import load_programs
    from ascendrun.text import translations

    for key, english in translations("en").items():
        if not key.endswith(".fix"):  # a shell command
            yield Message(key, english, None, "text/en.json")
    for _, _, key, english, hint_key, hint in OUTPUTS:
        yield Message(key, english, None, "head/ssh/openssh.py")
        yield Message(hint_key, hint, None, "head/ssh/openssh.py")
    for row in signatures():
        for part in ("message", "cause", "hint"):
            english = getattr(row.english, part)
            yield Message(f"signature.{row.code}.{part}", english, None, "ascend/signatures.toml")
    for error in load_table("tool_errors")["rows"]:
        yield Message(f"tool-error.{error['name']}", error["message"], None, "ascend/tables/tool_errors.json")
        if "hint" in error:
            yield Message(f"tool-error.{error['name']}.hint", error["hint"], None, "ascend/tables/tool_errors.json")
    for program, table in load_programs(parse_program_options).items():
        for option in table.options.values():
            help_ = table.help(option)
            yield Message(help_.key, help_.english, None, f"programs/{program}/options.json")
