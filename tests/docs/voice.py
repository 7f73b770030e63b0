"""What the voice lint reads, and the words that it forbids. The rules and their reasons: docs/style.md."""

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __import__("sys").version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CHECKOUT = Path(__file__).resolve().parents[2]
PACKAGE = CHECKOUT / "ascendrun"
GENERATED = tuple(f"docs/{name}.md" for name in ("failures", "checks", "events", "cli", "job-file", "program-options"))
"""Made from texts that are read at their source."""
ALLOW = re.compile(r"voice: ok (\S.*)")

FORBIDDEN = (
    r"\b(told|tells?|telling)\b",
    r"\bmend(ed|s|ing)?\b",
    r"\bways? out\b",
    r"\breckon(s|ed|ing)?\b",
    r"\b(go|goes|went|going|gone) on\b(?! to)",
    r"\b(stands|stood)\b(?! for| out)",
    r"\b(wants?|wanted)\b",
    r"\b(nobody|somebody)\b",
    r"\bagain and again\b",
    r"\b(not|is|are|ended) well\b",
    r"\b(leave|leaves) (\S+ )?out\b|\bleft out\b",
    r"\bg(ive|ives|ave) way\b",
    r"\b(takes?|took) no\b",
    r"\bfolders?\b",
    r"\b(we|(?-i:us)|our|ours)\b",
    r"\b(keepers?|kin|errands?|deeds?|desk)\b",
    r"\bplease\b",
    r"\b(says?|said|saying)\b",
    r"\bwish(es|ed)?\b",
    r"\b(anew|afresh)\b",
    r"\bbeside\b",
    r"(?<!there )\b(is|are|was|were) no (?!longer|more)\w+",
    r"\blies?\b",
    r"\b(hears?|heard)\b",
    r"\bof (its|our|their|your) own\b",
    r"\b(fell|falls) silent\b|\bsilent\b",
    r"\bmade[- ]up\b",
    r"\bc(ome|omes|ame) up\b",
    r"\blets? us in\b",
    r"\b(odd|story|stories|skeletons?)\b",
    r"\b(look|looks|looked) (at|for|after|around)\b|\ba look\b",
    r"\bfor ever\b|\bfor want of\b|\bin vain\b",
    r"\w\(s\)",
    r"\bwords?\b",
)
"""Case-insensitive."""
_PATTERNS = tuple(re.compile(pattern, re.IGNORECASE) for pattern in FORBIDDEN)
_TWO_WORDS = re.compile(r"[A-Za-z]{2,}[,;:]? +[A-Za-z]{2,}")
_CODE_SPAN = re.compile(r"`[^`]*`")


@dataclass(frozen=True)
class Line:
    """One text that a person reads. `pattern`: what it matches of FORBIDDEN."""

    place: str
    text: str
    pattern: str

    def __str__(self) -> str:
        return f"{self.place}: {self.text.strip()[:160]}   [{self.pattern}]"


def matches(text: str) -> Iterator[str]:
    bare = _CODE_SPAN.sub("", text)
    for pattern in _PATTERNS:
        if pattern.search(bare):
            yield pattern.pattern


def message_lines() -> list[Line]:
    """String literals of two and more English words in the package; of docstrings only those of commands."""
    return [
        Line(f"{path.relative_to(CHECKOUT)}:{number}", text, pattern)
        for path in sorted(PACKAGE.rglob("*.py"))
        for number, text in literals(path)
        for pattern in matches(text)
    ]


def literals(path: Path) -> Iterator[tuple[int, str]]:
    source = path.read_text(encoding="utf-8")
    allowed = {number for number, line in enumerate(source.splitlines(), 1) if ALLOW.search(line)}
    tree = ast.parse(source)
    skipped = _not_for_people(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            if _TWO_WORDS.search(node.value) and not allowed.intersection(lines):
                yield node.lineno, node.value


def _not_for_people(tree: ast.AST) -> set[int]:
    """Docstrings (but of click's commands), strings that stand alone, annotations, keys of texts."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(id(node.value))
        if isinstance(node, ast.Call) and _name(node.func) == "compile":
            skipped.update(id(inner) for inner in ast.walk(node))
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and any(map(_is_command, node.decorator_list)):
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                skipped.discard(id(first.value))
    return skipped


def _is_command(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Call) and _name(decorator.func) in ("command", "cli_command", "group")


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def doc_lines() -> list[Line]:
    """Lines of README, docs and CHANGELOG outside code."""
    pages = [CHECKOUT / "README.md", CHECKOUT / "CHANGELOG.md", *sorted((CHECKOUT / "docs").rglob("*.md"))]
    pages += [path for name in ("CONTRIBUTING.md", "SECURITY.md") if (path := CHECKOUT / name).exists()]
    found: list[Line] = []
    for page in pages:
        name = str(page.relative_to(CHECKOUT))
        if name in GENERATED or name.endswith(".zh.md"):
            continue
        fenced = False
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            if line.lstrip().startswith("```"):
                fenced = not fenced
            elif not fenced and not line.startswith("    ") and not ALLOW.search(line):
                found += [Line(f"{name}:{number}", line, pattern) for pattern in matches(line)]
    return found


def table_lines() -> list[Line]:
    """English of the tables: signatures, findings, options."""
    found: list[Line] = []
    signatures = PACKAGE / "ascend" / "signatures.toml"
    for row in tomllib.loads(signatures.read_text(encoding="utf-8"))["signature"]:
        for name in ("message", "cause", "hint"):
            text = row.get(name, "")
            found += [Line(f"signatures.toml {row['code']}.{name}", text, pattern) for pattern in matches(text)]
    for path in sorted(PACKAGE.rglob("*.json")):
        if "zh" in path.name or "zh" in path.parts:
            continue
        if path.name == "options.json" or "tables" in path.parts:
            for where, text in _strings(json.loads(path.read_text(encoding="utf-8"))):
                if where.endswith(("help", "message", "hint")):
                    found += [Line(f"{path.relative_to(CHECKOUT)} {where}", text, pattern) for pattern in matches(text)]
    return found


def _strings(value: Any, where: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _strings(inner, f"{where}.{name}" if where else str(name))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _strings(inner, f"{where}[{number}]")


def allowed_lines() -> list[str]:
    """Every line that is excused, with its reason."""
    pages = [*(CHECKOUT / "docs").rglob("*.md"), CHECKOUT / "README.md", CHECKOUT / "CHANGELOG.md"]
    return [
        f"{path.relative_to(CHECKOUT)}:{number}: {found.group(1)}"
        for path in sorted([*PACKAGE.rglob("*.py"), *pages])
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if (found := ALLOW.search(line))
    ]


if __name__ == "__main__":  # python -m tests.docs.voice [PATH PREFIX]: what is still to be reworded
    import sys

    prefix = sys.argv[1] if len(sys.argv) > 1 else ""
    for line in (*message_lines(), *doc_lines(), *table_lines()):
        if line.place.startswith(prefix):
            print(line)
