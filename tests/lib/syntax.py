"""The statements of a module without their expressions: tests of the whole tree look at nothing else, and save time."""

import ast
from collections.abc import Iterator
from pathlib import Path


def statements(file: Path) -> Iterator[ast.stmt]:
    """Yield each statement of a file, also those inside others."""
    waiting: list[ast.stmt] = list(ast.parse(file.read_text(encoding="utf-8")).body)
    while waiting:
        statement = waiting.pop()
        yield statement
        for part in ("body", "orelse", "finalbody"):
            waiting += getattr(statement, part, ())
        for branch in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
            waiting += branch.body
