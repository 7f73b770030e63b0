"""The size of what one person must hold in the head: ceilings that only fall. Of the tests, that of a file."""

import ast
import json
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.lib.syntax import statements

CHECKOUT = Path(__file__).resolve().parents[2]
METHODS, FILE_LINES, FUNCTION_LINES = 25, 450, 60
EXCUSED: dict[str, str] = {}
"""`file` or `file:name`, and why it is larger."""
RUFF = {"ANN401": 508, "BLE001": 39}
"""Rules that ruff does not bound by itself, and how often the tree breaks them. Lower it with every commit that can."""


def test_classes_files_and_functions_are_small() -> None:
    large = {}
    for path in [*(CHECKOUT / "ascendrun").rglob("*.py"), *(CHECKOUT / "tests").rglob("*.py")]:
        file = str(path.relative_to(CHECKOUT))
        if (lines := path.read_bytes().count(b"\n")) > FILE_LINES:
            large[file] = f"{lines} lines"
        for node in statements(path) if file.startswith("ascendrun") else ():
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                size = (node.end_lineno or 0) - node.lineno + 1
                if size > FUNCTION_LINES:
                    large[f"{file}:{node.name}"] = f"{size} lines"
            elif isinstance(node, ast.ClassDef):
                count = sum(isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)) for each in node.body)
                if count > METHODS:
                    large[f"{file}:{node.name}"] = f"{count} methods"
    assert {name: size for name, size in large.items() if name not in EXCUSED} == {}


@pytest.mark.skipif(find_spec("ruff") is None, reason="the environment of another Python has no ruff")
def test_any_and_blind_excepts_become_fewer() -> None:
    argv = [sys.executable, "-m", "ruff", "check", "--select", ",".join(RUFF), "--output-format", "json", "ascendrun"]
    found = subprocess.run(argv, cwd=CHECKOUT, text=True, capture_output=True, check=False).stdout
    counts = Counter(problem["code"] for problem in json.loads(found))
    assert all(counts[code] <= most for code, most in RUFF.items()), counts
