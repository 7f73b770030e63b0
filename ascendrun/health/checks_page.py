"""The page of all checks, made from their table: `python -m ascendrun.health.checks_page > docs/checks.md`."""

from __future__ import annotations

from ascendrun.health.checks import CHECKS
from ascendrun.health.texts import texts

HEAD = """# What `ascendrun doctor` checks

Made from the table of checks by `python -m ascendrun.health.checks_page > docs/checks.md`; do not edit.

The light checks gate every start: a FAIL means that nothing is started. A job file leaves some out, or has more done:

    checks: {skip: [clock], require: [torch]}

`{…}` stands for what was found. Where nothing could be looked at, nothing is found: unknown is never taken for a fault.
"""


def render_page() -> str:
    rows = texts("en")
    lines: list[str] = [HEAD.rstrip()]
    for check in CHECKS:
        when = "doctor only, unless required" if check.is_full else "gates every start"
        lines += [
            "",
            f"## {check.name}",
            "",
            f"{check.looks_at[0].upper()}{check.looks_at[1:]}. ({when})",
            "",
            "| code | says | way out |",
            "|---|---|---|",
        ]
        lines += [f"| `{code}` | {_cell(rows[code]['says'])} | {_cell(rows[code]['advice'])} |" for code in check.codes]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(render_page(), end="")
