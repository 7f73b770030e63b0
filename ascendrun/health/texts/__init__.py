"""The message, hint and fix of every finding by its code (findings.json); Chinese in ascendrun/text/zh.json.

Keys of the catalogue: `finding.CODE.message`, `finding.CODE.hint`. A fix is a shell command and is not translated.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from ascendrun.core.dataclass import dataclass
from ascendrun.core.findings import Finding
from ascendrun.text import Text


@dataclass(frozen=True)
class FindingText:
    """English templates of one code. `hint`: "" for none. `fix`: a shell command for the finding's hosts, or None."""

    message: str
    hint: str = ""
    fix: str | None = None


@cache
def finding_texts() -> Mapping[str, FindingText]:
    rows = json.loads(resources.files(__name__).joinpath("findings.json").read_text(encoding="utf-8"))
    return {code: FindingText(**row) for code, row in rows.items()}


def templates() -> Mapping[str, str]:
    """Return every English template by its key in the catalogue."""
    found = {f"finding.{code}.message": row.message for code, row in finding_texts().items()}
    found.update((f"finding.{code}.hint", row.hint) for code, row in finding_texts().items() if row.hint)
    return found


def message_of(finding: Finding) -> Text:
    """Return the message of a finding, without the hosts."""
    key, english = f"finding.{finding.code}.message", finding_texts()[finding.code].message
    return Text(key, english, **finding.values)


def hint_of(finding: Finding) -> Text | None:
    """Return a command or an edit as a hint; None without one."""
    english = finding_texts()[finding.code].hint
    if not english or (english == "{hint}" and not finding.values.get("hint")):
        return None
    key = f"finding.{finding.code}.hint"
    return Text(key, english, **finding.values)


def fix_of(finding: Finding) -> str | None:
    """Return the shell command for the finding's hosts; None if a person has to decide first."""
    command = finding_texts()[finding.code].fix
    return (
        None
        if command is None
        else command.format_map({name: _quoted(value) for name, value in finding.values.items()})
    )


def _quoted(value: Any) -> str:
    return " ".join(shlex.quote(str(part)) for part in value) if isinstance(value, tuple) else shlex.quote(str(value))
