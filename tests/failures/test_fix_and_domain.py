"""A fix belongs to the domain that the class line names: a property over the corpus."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from ablation import share_of_rows
from corpus import case_files, case_of, load

from ascendrun.ascend.vocabularies import DOMAINS, alike, read_table, value_of, vocabulary
from ascendrun.health.diagnosis import Diagnosis, diagnose, render
from ascendrun.text import translations

FOLDER = Path(__file__).parents[2] / "ascendrun/ascend/vocabularies"
KEY = "diagnosis.fix."
ANYWHERE = {"path", "peers", "elsewhere", "cut"}
"""What to check in any domain: a path that is not there, whom ranks waited for, an error in other output, a cut one."""
MEASURED = {
    **{f"differs.{name}": {"collectives"} for name in [*read_table("hints")["fields"], "elements"]},
    "crowd": {"device-memory"},
    "fragmented": {"device-memory"},
    "memory-held": {"device-memory"},
    "has-room": {"storage"},
    "listed": {"outside"},
    "interfaces": {"network"},
    **{f"device-number.{name}": {"program"} for name in ("physical", "beyond")},
    "device-number.shared": {"resource"},
}
OF_PACKAGE = {"program", "data", "environment"}
OWN = {
    "raised-by": OF_PACKAGE,
    "raised-between": OF_PACKAGE,
    "raised-called": OF_PACKAGE,
    "raised-tree": OF_PACKAGE,
    "plugin": OF_PACKAGE,
    "parameter": {"program"},
    "suspected": set(alike("of-packages")),
    "raised-unknown": {"program"},
    "ended-by": {"silent"},
    "versions": {"environment"},
}


def domains() -> dict[str, set[str]]:
    """The domains in which a fix is shown, by the values that have it, or by its own name."""
    found: dict[str, set[str]] = {**MEASURED, **{name: set(every) for name, every in OWN.items()}}
    for name in (path.stem for path in FOLDER.glob("*.toml")):
        if "values" in read_table(name):
            for value in vocabulary(name).values():
                places = {value.domain} | ({"network"} if name in alike("outside") else set())
                found.setdefault(value.fix, set()).update(places)
        for fix, keys in read_table(name).get("fixes", {}).items():
            known = (value_of(name, key) for key in keys)
            found.setdefault(fix, set()).update(value.domain for value in known if value is not None)
    for row in read_table("conclusions")["at"]:
        found.setdefault(row.get("fix", ""), set()).add(row["domain"])
    for key in translations("en"):
        name = key.removeprefix(KEY)
        if key.startswith(KEY) and name.split(".")[0] in DOMAINS:
            found.setdefault(name, set()).add(name.split(".")[0])
        elif key.startswith(f"{KEY}pair."):
            found[name] = set(alike("of-packages"))
    return found


def first_step(text: str) -> re.Pattern[str]:
    """The first step of a fix, with anything in the places that are filled in."""
    step = re.split("; |: ", text)[0]
    return re.compile(".{1,200}?".join(map(re.escape, re.split(r"(?: ?\(`[A-Z]+`\))|`[^`]+`", step))))


FIXES = {key.removeprefix(KEY): text for key, text in translations("en").items() if key.startswith(KEY)}
STEPS = {name: first_step(text) for name, text in FIXES.items() if len(text.split("; ")[0]) > 30}
DOMAINS_OF = domains()


def test_every_fix_has_a_domain() -> None:
    assert not [name for name in FIXES if name not in DOMAINS_OF and name not in ANYWHERE]


def contradicting(found: Diagnosis) -> tuple[str, list[str]] | None:
    """The domain and the fixes that a hint begins with, if none of them is of that domain."""
    shown = [name for name, step in STEPS.items() if step.match(found.hint)]
    own = [name for name in shown if name in ANYWHERE or found.domain in DOMAINS_OF[name]]
    return (found.domain, shown) if shown and found.domain and not own else None


def test_a_fix_is_of_the_domain_also_without_the_catalogue() -> None:
    with share_of_rows(0.0, seed=1):
        found = {path.stem: contradicting(render(diagnose(load(path).evidence), "en")) for path in case_files()}
    assert not {name: what for name, what in found.items() if what is not None}


@pytest.mark.parametrize("path", case_files(), ids=lambda path: path.stem)
def test_the_fix_is_of_the_domain_of_the_class_line(path: Path) -> None:
    assert contradicting(render(case_of(path)[1], "en")) is None
