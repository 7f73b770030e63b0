"""`--update-golden` writes the expected problems of the bad files anew; review them as code."""

import pytest


def pytest_addoption(parser):
    try:
        parser.addoption("--update-golden", action="store_true", help="write the expected results from what is now")
    except ValueError:
        pass  # the golden plans' conftest was read first


@pytest.fixture
def update_golden(request):
    return request.config.getoption("--update-golden", default=False)
