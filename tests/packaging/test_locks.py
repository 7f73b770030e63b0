"""The locks with hashes fit constraints.txt and setup.cfg."""

import configparser
import os
import re
import subprocess
import sys
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


@pytest.mark.parametrize("name", EXTRAS)
def test_a_lock_has_a_hash_of_everything_in_the_versions_of_the_constraints(name: str) -> None:
    path, allowed = LOCKS / f"{name}.txt", pins(CHECKOUT / "constraints.txt")
    assert LOCKED.sub("", path.read_text()).strip() == "", "lines without a hash"
    differing = {one: version for one, version in pins(path).items() if allowed.get(one, version) != version}
    assert not differing, "python -m tests.lib.locks"


@pytest.mark.parametrize("name", EXTRAS)
def test_a_lock_has_everything_that_setup_requires(name: str) -> None:
    lines = SETUP["options"]["install_requires"].split("\n")
    lines += SETUP["options.extras_require"]["train"].split("\n") if name == "train" else []
    required = [Requirement(line) for line in map(str.strip, lines) if line]
    names = {canonicalize_name(one.name) for one in required if one.marker is None or one.marker.evaluate()}
    assert len(names) > 5 and names <= set(pins(LOCKS / f"{name}.txt"))


def test_an_audit_without_a_network_is_skipped_with_the_reason() -> None:
    nowhere = dict.fromkeys(("PIP_INDEX_URL", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), "http://127.0.0.1:9")
    environ = {**os.environ, **nowhere, "PIP_RETRIES": "0", "PIP_NO_CACHE_DIR": "1", "PIP_CONFIG_FILE": os.devnull}
    environ = {name: value for name, value in environ.items() if name not in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS")}
    argv = [sys.executable, "-m", "tests.lib.audit"]
    done = subprocess.run(argv, cwd=CHECKOUT, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.startswith("skipped: pip install failed: "), done.stdout + done.stderr
