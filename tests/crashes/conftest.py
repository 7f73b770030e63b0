"""The option that sweeps over every step; modules of this folder may import each other."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-crash", action="store_true", help="kill the controller at every step, not at a few")
