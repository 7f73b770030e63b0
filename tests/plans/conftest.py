"""`pytest tests/plans --update-golden` writes the golden plans anew; review them as code."""

import pytest


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="write tests/plans/*.json from what is planned now")


@pytest.fixture
def update_golden(request):
    return request.config.getoption("--update-golden", default=False)
