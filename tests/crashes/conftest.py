"""The option that sweeps over every step."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-crash", action="store_true", help="kill the controller at every step, not at a few")
