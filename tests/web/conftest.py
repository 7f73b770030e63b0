"""Pages in a real browser. In CI a machine without one is a failure, elsewhere a skip that says so."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from browser import Browse, find_browser, open_page


@pytest.fixture
def browse(tmp_path: Path) -> Browse:
    found = find_browser()
    if found is None:
        reason = "no Chromium here; on Debian apt install chromium"
        if os.environ.get("CI") == "true":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    return partial(open_page, found, folder=tmp_path)
