"""A row of the catalogue is needed: without it a case has another domain or another hint (needed.toml)."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from ablation import rows
from corpus import FOLDER, case_of, load

from ascendrun.ascend.signatures import signatures
from ascendrun.health.diagnosis import Diagnosis, diagnose, render

toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
TABLE = toml.loads((Path(__file__).parent / "needed.toml").read_text(encoding="utf-8"))
MOST_WITHOUT_A_CASE = 212
"""May only be lowered: a new row comes with a case that needs it. Better hints make a few more rows needless."""


def test_every_row_has_a_case_or_is_listed_without_one() -> None:
    listed = [*TABLE["needed"], *TABLE["without-a-case"]]
    assert sorted(listed) == sorted(row.code for row in signatures())


def test_few_rows_change_neither_domain_nor_hint_of_a_case() -> None:
    def told(found: Diagnosis) -> tuple[str, str]:
        return found.domain, render(found, "en").hint

    needless = [*TABLE["without-a-case"]]
    for code, name in TABLE["needed"].items():
        path = FOLDER / f"{name}.yaml"
        with rows(lambda row, code=code: row.code != code):  # type: ignore[misc]
            without = told(diagnose(load(path).evidence))
        if without == told(case_of(path)[1]):
            needless.append(code)
    assert len(needless) <= MOST_WITHOUT_A_CASE, needless
