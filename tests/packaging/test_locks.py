"""The locks with hashes fit constraints.txt, setup.cfg and what is installed here."""

from __future__ import annotations

import configparser
import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.lib.locks import CHECKOUT, EXTRAS, LOCKS

SETUP = configparser.ConfigParser()
SETUP.read(CHECKOUT / "setup.cfg")
PIN = r"^([\w.-]+)==([^ ;\\\n]+)(?: *; ([^\\\n]+?))?"
LOCKED = re.compile(PIN + r" \\\n(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n?)+", re.MULTILINE)


def pins(path: Path) -> dict[str, str]:
    """Return the versions for this Python and machine by name."""
    rows = re.findall(PIN + r"(?: \\)?$", path.read_text(), re.MULTILINE)
    return {canonicalize_name(name): version for name, version, why in rows if not why or Marker(why).evaluate()}


def needed(requirements: list[str]) -> set[str]:
    """Return the names of what is installed here for requirements, with all that they need."""
    found: set[str] = set()
    waiting = [Requirement(line) for line in requirements]
    while waiting:
        one = waiting.pop()
        name = canonicalize_name(one.name)
        if name in found or (one.marker is not None and not one.marker.evaluate({"extra": ""})):
            continue
        try:
            waiting += [Requirement(line) for line in distribution(name).requires or ()]
            found.add(name)
        except PackageNotFoundError:
            continue  # this environment has no training stack
    return found


@pytest.mark.parametrize("name", EXTRAS)
def test_a_lock_has_a_hash_of_everything_in_the_versions_of_the_constraints(name: str) -> None:
    path, allowed = LOCKS / f"{name}.txt", pins(CHECKOUT / "constraints.txt")
    assert LOCKED.sub("", path.read_text()).strip() == "", "lines without a hash"
    differing = {one: version for one, version in pins(path).items() if allowed.get(one, version) != version}
    assert not differing, "python -m tests.lib.locks"


@pytest.mark.parametrize("name", EXTRAS)
def test_a_lock_has_everything_that_is_required_and_installed_for_it(name: str) -> None:
    lines = SETUP["options"]["install_requires"].split("\n")
    lines += SETUP["options.extras_require"]["train"].split("\n") if name == "train" else []
    required = needed([line for line in map(str.strip, lines) if line])
    assert required and required <= set(pins(LOCKS / f"{name}.txt"))
