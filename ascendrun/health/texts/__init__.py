"""The words of every finding by language and code ([AREA.]en.json, [AREA.]zh.json): what is wrong, and the way out."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import resources

from ascendrun.core.findings import Finding
from ascendrun.text import Text

LANGUAGES = ("en", "zh")
_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")


@dataclass(frozen=True)
class Words:
    """`says`: the fact, without the hosts. `advice`: a command or a sentence, "" for none."""

    says: str
    advice: str


def render(finding: Finding, lang: str = "en") -> Words:
    """The finding in words; a code without words (of a newer release, say) shows itself and its values."""
    row = texts(lang).get(finding.code) or texts("en").get(finding.code)
    if row is None:
        values = ", ".join(f"{name}={value}" for name, value in rendered(finding, lang).items())
        return Words(f"{finding.code} {values}".strip(), "")
    told = rendered(finding, lang)
    return Words(fill(row["says"], told), fill(row.get("advice", ""), told))


def rendered(finding: Finding, lang: str) -> Mapping[str, str]:
    """The values of a finding with its nested texts in a language."""
    return {name: value.render(lang) if isinstance(value, Text) else value for name, value in finding.values.items()}


def fix_of(finding: Finding) -> str | None:
    """The shell command for the finding's hosts that mends it; None: a person has to think first."""
    command = fixes().get(finding.code)
    return (
        None
        if command is None
        else fill(command, {name: shlex.quote(str(value)) for name, value in finding.values.items()})
    )


@lru_cache(maxsize=1)
def fixes() -> Mapping[str, str]:
    """Shell commands by code (fixes.json)."""
    rows: Mapping[str, str] = json.loads(resources.files(__name__).joinpath("fixes.json").read_text(encoding="utf-8"))
    return rows


def fill(text: str, values: Mapping[str, str]) -> str:
    """Each {name} by its value; one without a value shows as "?": a message must never fail for want of a word."""
    return _PLACEHOLDER.sub(lambda match: values.get(match.group(1), "?"), text)


def placeholders(text: str) -> frozenset[str]:
    return frozenset(_PLACEHOLDER.findall(text))


@cache
def texts(lang: str) -> Mapping[str, Mapping[str, str]]:
    """Every code's {"says", "advice"} in a language of LANGUAGES."""
    rows: dict[str, Mapping[str, str]] = {}
    for file in sorted(resources.files(__name__).iterdir(), key=lambda one: one.name):
        if file.name == f"{lang}.json" or file.name.endswith(f".{lang}.json"):
            rows.update(json.loads(file.read_text(encoding="utf-8")))
    return rows


def language_of(environ: Mapping[str, str] = os.environ) -> str:
    """What the locale asks for: zh for any Chinese, else en."""
    for name in ("LC_ALL", "LC_MESSAGES", "LANG"):
        if environ.get(name):
            return "zh" if environ[name].lower().startswith("zh") else "en"
    return "en"
