"""The steps of a hint that fit a job: hints are written for any accelerator, launcher and host.

given = {**named_in(["bind: ('0.0.0.0', 29500) in use"], {"accelerator": "npu"}), "R": "3"}
fitting(["`ss -ltnp 'sport = :PORT'`; `nvidia-smi`"], given, "en")    "`ss -ltnp 'sport = :29500'`"
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ascendrun.ascend.vocabularies import read_table
from ascendrun.text import listed

SHORT = 40
"""Characters: no hint sets a variable to a longer value."""
_STEPS = re.compile("; |；")
_ASSIGNED = re.compile(r"\b([A-Z][A-Z0-9_]{3,})=([\w.:/-]+)")
_COMMAND = re.compile(r"`[^`]+`")
_PLACE = re.compile(r"(?<![\w$-])[A-Z]+\b(?![_.=])")


def named_in(
    texts: Iterable[str], known: Mapping[str, str], variables: Mapping[str, object] | None = None
) -> Mapping[str, str]:
    """Return what hints may name by what was printed: values for the places in commands (PORT, PATH, SMI), and the
    accelerator, the engine and the launcher, "" if unknown. `known`: those of them that are known. `variables`: of the
    environment; short ones are $NAME."""
    whole, table = "\n".join(texts), read_table("hints")
    found: dict[str, str] = {}
    for kind, every in table["kinds"].items():
        seen = [known[kind]] if known.get(kind) in every else [one for one in every if _is_of(kind, one, whole)]
        found[kind] = seen[0] if len(seen) == 1 else ""
        rows = [every[found[kind]]] if found[kind] else list(every.values())
        tools = dict.fromkeys(name for row in rows for name in row if name != "names")
        found.update({name: " / ".join(row[name] for row in rows) for name in tools})
    hits = ((place, re.search(pattern, whole, re.M)) for place, pattern in table["places"].items())
    found.update({f"${name}": str(text) for name, text in (variables or {}).items() if len(str(text)) <= SHORT})
    return {**found, **{place: next(filter(None, hit.groups())) for place, hit in hits if hit is not None}}


def fitting(hints: Iterable[str], given: Mapping[str, str], lang: str) -> str:
    """Return the steps of hints that fit, each once: not those of another accelerator, engine, launcher or domain, and
    none that sets a variable to the value that it has. `given`: of `named_in`, with the `domain` of the failure; the
    capitals in commands are replaced by its values, and a variable is $NAME."""
    steps = dict.fromkeys(step for hint in hints for step in _STEPS.split(hint) if step)
    filled = (_COMMAND.sub(lambda found: _filled(found[0], given), step) for step in steps)
    between = listed("diagnosis.and", first="", second="").render(lang)
    return between.join(step for step in filled if _fits(step, given))


def _filled(command: str, given: Mapping[str, str]) -> str:
    return _PLACE.sub(lambda place: given.get(place[0]) or place[0], command)


def _fits(step: str, given: Mapping[str, str]) -> bool:
    if any(given.get(f"${name}") == value for name, value in _ASSIGNED.findall(step)):
        return False
    for kind, every in read_table("hints")["kinds"].items():
        named = [one for one in every if _is_of(kind, one, step)]
        if named and given.get(kind, "") not in ("", *named):
            return False
    return True


def _is_of(kind: str, one: str, text: str) -> bool:
    return re.search(read_table("hints")["kinds"][kind][one]["names"], text) is not None
