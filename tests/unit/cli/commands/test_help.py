"""Help of commands and pages of the documentation by the names that messages give them."""

import re

import pytest

from ascendrun.carried import read_pages
from tests.lib.story_cluster import Desk
from tests.packaging.checkouts import CHECKOUT

NAMED = re.compile(r"docs/([\w/-]+\.md)")


@pytest.mark.parametrize("name", ["recovery", "recovery.md", "docs/recovery.md", "docs/guides/000.md"])
def test_a_page_is_printed_as_it_is(desk: Desk, name: str) -> None:
    page = name.removeprefix("docs/").removesuffix(".md")
    assert desk.say("help", name).out == (CHECKOUT / "docs" / f"{page}.md").read_text()


def test_the_pages_are_listed_with_their_titles(desk: Desk) -> None:
    rows = dict(line.split(maxsplit=1) for line in desk.say("help", "docs").out.splitlines())
    assert rows["recovery"] == "Recovery from failures" and rows.keys() == read_pages().keys()


def test_an_unknown_topic_is_refused_with_the_nearest(desk: Desk) -> None:
    refused = desk.say("help", "recovry")
    assert refused.code == 4 and "did you mean recovery?" in refused.err
    assert "ascendrun help docs" in desk.say("help", "zzzz").err


def test_every_page_that_a_message_names_is_in_the_package() -> None:
    sources = [path for path in (CHECKOUT / "ascendrun").rglob("*") if path.suffix in (".py", ".json", ".toml")]
    named = {name for path in sources for name in NAMED.findall(path.read_text(encoding="utf-8"))}
    foreign = {"en/faultdiag.md"}
    assert {name for name in named - foreign if name.removesuffix(".md") not in read_pages()} == set()
    assert "notices.md" in named
