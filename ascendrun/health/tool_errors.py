"""What an exception's output has beyond its message: what it advises, and the line of a compiler, a linker or another
tool that has the reason, where an exception only reports that it failed.

innermost(["CalledProcessError: … returned non-zero exit status 1."], ["a.c:1:10: fatal error: plan.h: No such file"])
"a.c:1:10: fatal error: plan.h: No such file"
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ascendrun.ascend.vocabularies import is_warning, says, wording

LAST_LINES = 400
MESSAGE_CHARACTERS = 300


def innermost(said: Iterable[str], printed: Sequence[str]) -> str:
    """Return the first error that a tool printed before or after an exception (`said`) that reports its end, and not
    the summaries that follow; "" if there is none, or it is the exception's own line."""
    reports = [text for text in said if says(text, "of-a-tool")]
    if not reports:
        return ""
    own = [text.strip() for text in printed[-LAST_LINES:] if not says(text, "tool-summary")]
    found = [text for kind in ("tool-error", "tool-report") for text in own if says(text, kind)]
    return next((text[:MESSAGE_CHARACTERS] for text in found if text not in map(str.strip, reports)), "")


def advised_in(said: Iterable[str]) -> str:
    """Return the first sentence that advises something, "" without one: not of a warning among the lines, nor of a list
    of what may be the reason."""
    own = (wording("usual-reasons").split(text)[0] for text in said if not is_warning(text))
    return next((found[1] for found in map(wording("advice").search, own) if found is not None), "")
