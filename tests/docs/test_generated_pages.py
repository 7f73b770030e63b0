"""The generated pages of docs/ are what the tables say."""

import pytest

from tests.lib.pages.__main__ import DOCS, PAGES


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_as_generated(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name](), "python -m tests.lib.pages"
