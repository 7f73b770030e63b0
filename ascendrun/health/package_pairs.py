"""Two packages that do not fit: which one uses or requires what of the other, their versions, and the direction.

    said, frames = ["cannot import name 'Plan' from 'peft.core'"], 'File "/x/site-packages/trl/a.py", line 3'
    pair_in(said, frames, {"peft": "0.11.1"}, "train.py:3")
    {"PAIR": "lacks", "CALLER": "trl", "CALLEE": "peft 0.11.1", "LACKS": "Plan", "ABOVE": "peft>0.11.1", …}

The versions are those that a message or the host has; no other is ever proposed.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from typing import Protocol

from ascendrun.ascend.vocabularies import alike, lacking_in, read_table, says, value_of, wording
from ascendrun.health.whose_code import Installed
from ascendrun.text.format import numbers_in

_PACKAGE = re.compile(r"(?:site|dist)-packages/(?!_)([A-Za-z]\w*)(?=/|\.py\b|[.\w-]*\.so\b)")
_BOUND = re.compile(r"([<>=!~]=?)\s?([\w.]+)")
_PASSES = ("*args", "**kw")


class Thrown(Protocol):
    """An exception: its class without the module, the files of its frames below the program's own, the deepest first,
    and the code that raised it."""

    @property
    def short_type(self) -> str: ...
    @property
    def below(self) -> Sequence[str]: ...
    @property
    def statement(self) -> str: ...


def pair_in(
    texts: Sequence[str], frames: str, packages: Mapping[str, str | None], where: str, raised: Thrown | None = None
) -> Mapping[str, str]:
    """Return the kind of misfit (PAIR: the end of diagnosis.fix.pair.PAIR) and what its text names; {}: none is known.
    `frames`: of the traceback, the deepest last; `packages`: versions on the host; `where`: the line of the program."""
    mixed = next(filter(None, map(mixed_in, texts)), None)
    if mixed is not None:
        return mixed
    for kind, patterns in read_table("package_pairs")["forms"].items():
        for pattern in patterns:
            found = re.search(pattern, "\n".join(texts), re.M)
            if found is not None:
                named = {name: text for name, text in found.groupdict().items() if text}
                files = _PACKAGE.findall(frames)[::-1] or _PACKAGE.findall("\n".join(raised.below if raised else ()))
                inside = [*dict.fromkeys(files)]
                if kind == "argument" and len(inside) > 1:  # the deepest only passes it on, or is the caller itself
                    named["callee"] = inside[0 if raised and any(one in raised.statement for one in _PASSES) else 1]
                return _places(kind, named, Installed(packages), inside, where)
    return {}


def mixed_in(text: str) -> Mapping[str, str]:
    """Return two directories of different releases of one toolkit in a message, as a misfit; {}: it has none."""
    for toolkit, pattern in read_table("package_pairs")["toolkits"].items():
        places = {found["release"]: found["place"] for found in re.finditer(pattern, text)}
        if len(places) > 1:
            first, second = [*places.values()][:2]
            return {"PAIR": "mixed", "CALLER": first, "CALLEE": second, "CALLEENAME": toolkit}
    return {}


def _places(
    kind: str, named: Mapping[str, str], installed: Installed, inside: Sequence[str], where: str
) -> Mapping[str, str]:
    owner = next(lacking_in(f"undefined symbol: {named['lacks']}"), None) if kind == "symbol" else None
    of_file = _PACKAGE.search(named.get("file", ""))
    caller = named.get("caller") or (of_file[1] if of_file else named.get("file", "").rpartition("/")[2])
    above = [one for one in inside if one != named.get("callee")]
    caller = caller or (above[0] if above else "")
    provider = "" if owner is None else read_table("package_pairs")["providers"].get(owner.fix, "")
    callee = named.get("callee") or provider
    has = named.get("has", "").rstrip(".,") or installed.version(callee)
    needs = f"{callee}{named.get('needs', '')}".replace(" ", "").rstrip(".,")
    kind = _kind_of(kind, named, caller=caller, callee=callee, has=has, is_inside=bool(inside) and not above)
    release = has.partition("+")[0]
    places = {
        "PAIR": kind,
        "CALLER": installed.shown(caller, named.get("caller_has", "")) or ("program" if where == "?" else where),
        "CALLERNAME": caller,
        "CALLEE": installed.shown(callee, has),
        "CALLEENAME": callee,
        "LACKS": named.get("lacks", "")[:80],
        "FUNCTION": named.get("function", ""),
        "NEEDS": needs,
        "ABOVE": f"{callee}>{release}",
        "BELOW": f"{callee}<{release}",
        "SAME": f"{callee}=={named.get('built') or release}",
        "BOTH": "known" if has and (named.get("caller_has") or installed.version(caller)) else "",
    }
    return places if kind else {}


def _kind_of(kind: str, named: Mapping[str, str], *, caller: str, callee: str, has: str, is_inside: bool) -> str:
    """Return the text that fits; "": none, or the owner of the module has a better one."""
    owner = value_of("owners", callee) if kind == "lacks" else None
    is_known = kind == "lacks" and (is_inside or (owner is not None and owner.fix not in _of_pip(named["lacks"])))
    if is_known or (kind in ("argument", "symbol") and not caller):
        return ""
    if kind == "symbol" and not (callee and has):
        return "symbol-unversioned" if callee else "symbol-alone"
    if kind == "argument" and not callee:
        return "argument"
    if kind in ("lacks", "argument"):
        return f"lacks{'' if has else '-unversioned'}{'' if caller else '-program'}"
    is_for_pip = callee.lower() not in read_table("package_pairs")["not_pip"]
    if kind == "requires" and is_for_pip:
        return direction(has, named["needs"]) if caller else "requires"
    return {"requires": "not-pip", "built": "match"}.get(kind, kind) if not is_for_pip else kind


def _of_pip(lacks: str) -> Container[str]:
    """Return the owners of packages that pip installs, where one lacks a name (`lacks`) and is itself there."""
    return () if "." in lacks else read_table("package_pairs")["of_pip"]


def direction(has: str, needs: str) -> str:
    """Return "older" or "newer" for a version outside of a requirement, "requires" where the numbers do not show it."""
    own = _numbers(has)
    for sign, bound in _BOUND.findall(needs):
        limit = _numbers(bound)
        if own < limit and sign[0] in ">=~":
            return "older"
        if (own > limit and sign[0] in "<=") or (own == limit and sign == "<"):
            return "newer"
    return "requires"


def _numbers(version: str) -> list[int]:
    """Return the numbers of a release: 2.5.1+cpu as [2, 5, 1]; trailing zeros do not count."""
    numbers = numbers_in(re.split(r"[+a-zA-Z]", version)[0])
    while numbers and not numbers[-1]:
        numbers.pop()
    return numbers


# ---------------------------------------------------------------- whether it is one of packages at all


def is_of_versions(text: str, frames: str, raised: Thrown | None, *, is_wide: bool) -> bool:
    """Return whether an exception tells that two packages or the driver do not fit: a package without an attribute that
    is not the program's own, on whichever ranks; and where all ranks of their hosts have it (`is_wide`), a library that
    passes another one arguments that it does not have."""
    missing = wording("no-attribute").search(text)
    if missing is not None and not says(text, "being-imported"):
        own = (f"/{missing[1]}/", f"/{missing[1]}.")
        of_program = (line for line in frames.splitlines() if not says(line, "library"))
        is_elsewhere = not any(name in line for line in of_program for name in own)
        is_between = value_of("owners", missing[1]) is not None or bool(raised and raised.below)
        return is_elsewhere and (is_wide or is_between)  # a name that only one rank uses may be misspelt there
    if not is_wide:
        return False
    if says(text, "driver-version", "lost-part") or mixed_in(text):
        return True
    if raised is None or not raised.below:
        return False
    packages = set(wording("package").findall("\n".join(raised.below)))
    is_between = len(packages) > 1 and "NoneType" not in text and raised.short_type in alike("between-packages")
    return is_between or says(text, "unexpected-argument") or (bool(packages) and says(text, "part-of-library"))
