"""Every claim of SECURITY.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_claim_has_a_test() -> None:
    page = (ROOT / "SECURITY.md").read_text()
    rows = re.findall(r"^\| ([A-Z].*) \| (.+) \|$", page, re.M)
    assert len(rows) >= 15 and all(re.findall(r"`(test_\w+)`", tests) for _, tests in rows)
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    missing = [name for name in re.findall(r"`(test_\w+)`", page) if f"def {name}(" not in tests]
    assert not missing, missing
