"""`--update-golden` writes the expected readings of the recordings anew; review them as code."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_addoption(parser):
    try:
        parser.addoption("--update-golden", action="store_true", help="write the expected results from what is now")
    except ValueError:
        pass  # another folder's conftest was read first


@pytest.fixture
def update_golden(request):
    return request.config.getoption("--update-golden", default=False)
