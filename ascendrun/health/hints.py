"""What a hint advises for a class of failures, and which of its steps fit a job: hints are written for any accelerator.

fixes_of(diagnosis, "en")    ["`ss -ltnp 'sport = :PORT'`; `nvidia-smi`"]
given = {**named_in(["bind: ('0.0.0.0', 29500) in use"], {"accelerator": "npu"}), "R": "3"}
fitting(["`ss -ltnp 'sport = :PORT'`; `nvidia-smi`"], given, "en")    "`ss -ltnp 'sport = :29500'`"
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from ascendrun.ascend.vocabularies import Value, alike, read_table, says
from ascendrun.health.what_differs import differing_in
from ascendrun.text import listed, translations

SHORT = 40
"""Characters: no hint sets a variable to a longer value."""
SENTENCE_WORDS, MOST_NAMES = 4, 20
_STEPS = re.compile("(?:; |；)(?=(?:[^`]*`[^`]*`)*[^`]*$)")  # not in a command
_ASSIGNED = re.compile(r"\b([A-Z][A-Z0-9_]{3,})=([\w.:/-]+)")
_COMMAND = re.compile(r"(?: ?[(（]`[A-Z]+`[)）])|`[^`]+`")
_ABOUT = re.compile("`([A-Z]+)`")
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
    caches = (variable for variable, pattern in table["caches"].items() if re.search(pattern, whole))
    found["CACHE"] = next(caches, "")
    hits = ((place, re.search(pattern, whole, re.M)) for place, pattern in table["places"].items())
    found.update({f"${name}": str(text) for name, text in (variables or {}).items() if len(str(text)) <= SHORT})
    proved = (setting.split("=") for setting, pattern in table["proves"].items() if re.search(pattern, whole))
    found.update({f"${name}": value for name, value in [*proved][::-1]})
    found.update(differing_in(whole))
    found.update({place: next(filter(None, hit.groups())) for place, hit in hits if hit is not None})
    named = [*dict.fromkeys(hit[1] for hit in re.finditer(table["places"]["KEY"], whole))][:MOST_NAMES]
    asked = [name for name in named if name in (variables or {}) or _is_set(name, whole)]
    return {**found, "KEY": next(iter(asked or named), ""), "PARAMETER": "" if asked else next(iter(named), "")}


def _is_set(name: str, text: str) -> bool:
    """Return whether a name is one that a user sets: an option, a value with the name before it, or in an advice."""
    pattern = read_table("hints")["is_set"].replace("NAME", re.escape(name).replace("_", "[_-]"))
    return re.search(pattern, text) is not None


def fitting(hints: Iterable[str], given: Mapping[str, str], lang: str) -> str:
    """Return the steps of hints that fit, each once: not those of another accelerator, engine, launcher, domain or work
    (training, inference), and none that sets a variable to the value that it has. `given`: of `named_in`, with the
    `domain` of the failure; the capitals in commands are replaced by its values, and a variable is $NAME."""
    given = {**given, "PLUGIN": _plugin_of(given)}
    steps = dict.fromkeys(step for hint in hints for step in _STEPS.split(hint) if step and _is_known(step, given))
    filled = ((step, _COMMAND.sub(lambda found: _filled(found[0], given), step)) for step in steps)
    between = listed("diagnosis.and", first="", second="").render(lang)
    return between.join(text for step, text in filled if _fits(step, text, given))


def _plugin_of(given: Mapping[str, str]) -> str:
    """Return what adds the accelerator of the job to the package that failed; "": nothing, or it is named itself."""
    plugins = read_table("hints")["plugins"].get(given.get("accelerator", ""), {})
    package = (given.get("PACKAGE") or given.get("SUSPECT", "")).partition(" ")[0]
    plugin = str(plugins.get(package, ""))
    return "" if plugin in given.get("PACKAGES", "") else plugin


def _is_known(step: str, given: Mapping[str, str]) -> bool:
    """Return whether the message has what a step speaks of at its start."""
    about = _ABOUT.match(step)
    return about is None or bool(given.get(about[1]))


def _filled(command: str, given: Mapping[str, str]) -> str:
    if not command.startswith("`") and not given.get(command.strip(" `()（）")):
        return ""  # a name in brackets that the message does not have
    return _PLACE.sub(lambda place: given.get(place[0]) or place[0], command)


def _fits(step: str, filled: str, given: Mapping[str, str]) -> bool:
    """Return whether a step is for this job, by its own text or by what was filled in, and sets no variable to the
    value that it has."""
    is_for = _is_for(step, given) or _is_for(filled, given)
    return is_for and not any(given.get(f"${name}") == value for name, value in _ASSIGNED.findall(filled))


def _is_for(step: str, given: Mapping[str, str]) -> bool:
    """Return whether a step is not only for another accelerator, engine, launcher, domain or work."""
    for kind, every in read_table("hints")["kinds"].items():
        named = [one for one in every if _is_of(kind, one, step)]
        if named and given.get(kind, "") not in ("", *named):
            return False
    return True


def _is_of(kind: str, one: str, text: str) -> bool:
    return re.search(read_table("hints")["kinds"][kind][one]["names"], text) is not None


# ---------------------------------------------------------------- the fix of a class


class Classified(Protocol):
    """A failure with its class (health.diagnosis.Diagnosis): `why`: its values, the deciding one first."""

    @property
    def domain(self) -> str: ...
    @property
    def scope(self) -> str: ...
    @property
    def phase(self) -> str: ...
    @property
    def why(self) -> tuple[Value, ...]: ...
    @property
    def given(self) -> Mapping[str, str]: ...
    @property
    def values(self) -> Mapping[str, object]: ...


def fixes_of(found: Classified, lang: str, *, of_domain: bool = True) -> list[str]:
    """Return what to check first: of the first value that has it, that of a missing path in any domain, else of the
    domain in its phase; then of the domain in its scope. Of the domain without these; [] for errors of no kind."""
    domain = found.domain
    if waited_of(found, lang) and of_domain:
        return waited_of(found, lang)
    owned = sorted(found.why, key=lambda one: one.vocabulary not in alike("knows-best"))
    owned = [one for one in owned if not (one.fix == "memory-held" and found.given.get("CROWD"))]
    restated = alike("restate") if found.values.get("advice") else ()
    fixes = [*served_by(found), *(_of_a_call(one.fix, found) for one in owned if one.domain == domain)]
    fixes = [fix for fix in fixes if fix not in restated]
    fixes += [one.fix for one in owned if one.fix == "path"]
    exact = first_text([*fixes, *[f"{domain}.{found.phase}"] * of_domain], lang)
    is_alone = of_domain and not exact
    wide = [f"{domain}.{found.scope}"] * (is_alone or found.scope in ("host", "group")) + [domain] * is_alone
    return exact + first_text(wide, lang) + first_text(["cut"] * bool(found.given.get("CUT")), lang)


def _of_a_call(fix: str, found: Classified) -> str:
    """Return a fix; of a setting that nothing shows to be one of the job (PARAMETER) that of a call's argument."""
    return "parameter" if fix == "setting" and found.given.get("PARAMETER") else fix


def limit_of(found: Classified, lang: str) -> list[str]:
    """Return what to do about the limit that ended a wait (health.wait_limits), where nothing else explains it."""
    waited = waited_of(found, lang) if found.given.get("WAIT") in ("early", "one") else []
    is_limited = found.given.get("LIMITED") and not waited and found.domain == "silent"
    return [*waited, *first_text(["ended-by"] * bool(is_limited), lang)]


def waited_of(found: Classified, lang: str) -> list[str]:
    """Return what to do about the call in which ranks waited, by what is known of it, and first about its limit if that
    is short and a rank is missing (health.wait_limits)."""
    wait = found.given.get("WAIT", "") if found.domain == "silent" else ""
    is_short = bool(found.given.get("SHORT")) and wait not in ("", "all")
    return [*first_text(["silent.call-short"] * is_short, lang), *first_text([f"silent.call-{wait}"], lang)]


def known_of(found: Classified, lang: str) -> list[str]:
    """Return what to do first by the facts of the job: what to install where two packages do not fit
    (health.package_pairs), what the ranks do unlike (health.what_differs), which limit of a resource was reached, what
    a launcher only suspects, how devices are numbered (health.output_facts), and that the disk was not full."""
    pair = [f"pair.{found.given.get('PAIR')}"] if found.domain in alike("of-packages") else []
    limits = [one.fix for one in found.why if one.vocabulary == "variants" and one.domain == found.domain]
    field = [f"differs.{found.given.get('FIELD')}"] if found.domain == "collectives" else []
    crowd = ["crowd"] if found.given.get("CROWD") and found.domain == "device-memory" else []
    listed_only = ["listed"] if found.given.get("LISTED") and found.domain == "outside" else []
    kind = found.given.get("NUMBERED", "")
    numbered = [f"device-number.{kind}"] if found.domain == ("resource" if kind == "shared" else "program") else []
    virtual = ["interfaces"] if found.given.get("VIRTUAL") and found.domain == "network" else []
    room = ["has-room"] if found.given.get("FREE") and found.domain == "storage" else []
    return first_text([*pair, *field, *crowd, *numbered, *virtual, *limits, *listed_only, *room], lang)


def is_sentence(message: str) -> bool:
    """Return whether an exception has a sentence behind its class, which explains more than the class."""
    words = message.partition(": ")[2].split()
    return len(words) >= SENTENCE_WORDS and words[0] != "assert" and not says(message, "points-elsewhere")


def of_class(hint: str, values: Mapping[str, str]) -> list[str]:
    """Return the hint for the class of an exception whose message does not explain more."""
    return [] if is_sentence(values.get("message", "")) else [hint]


def stated_of(found: Classified, message: str, lang: str) -> list[str]:
    """Return the message of an exception that states what the program does not accept, if nothing better is known."""
    is_stated = is_sentence(message) and says(message, "requirement") and found.domain in alike("of-packages")
    is_vague = all(fix in alike("restate") for fix in fixes_in(found))
    stated = message.partition(": ")[2].rstrip(".")
    return [listed("diagnosis.stated", stated=stated).render(lang)] if is_stated and is_vague else []


def fixes_in(found: Classified) -> list[str]:
    """Return the fixes of the values that have the failure's domain."""
    return [one.fix for one in found.why if one.fix and one.domain == found.domain]


def raised_by_of(found: Classified, lang: str) -> list[str]:
    """Return what to do about the package that raised an exception, and about what called it (CALLED) where its code
    itself is not at fault."""
    fixes = fixes_in(found)
    may_raise = ("program", "data", "environment")[: 2 if fixes else 3]
    alone = "raised-tree" if found.given.get("TREE") else "raised-by"
    called = found.given.get("CALLED", "") if "code" not in fixes else ""
    name = ("raised-called" if ":" in called else "raised-between") if called else alone
    is_raised = bool(found.given.get("PACKAGE")) and found.domain in may_raise
    return [*first_text([name], lang), *first_text(["plugin"], lang)] if is_raised else []


def place_of(found: Classified, where: str, lang: str) -> list[str]:
    """Return where to read on about an exception: at `where`, "?": unknown. Then it may be of any package."""
    if where != "?":
        return [listed("diagnosis.see-traceback", where=where).render(lang)]
    may_be_any = found.domain == "program" and not found.given.get("PACKAGE")
    suspected = suspected_of(found, lang) or first_text(["raised-unknown"] * may_be_any, lang)
    return [*suspected, listed("diagnosis.see-output").render(lang)]


class Row(Protocol):
    """A row of the catalogue (ascend.signatures)."""

    @property
    def role(self) -> str: ...
    @property
    def family(self) -> str: ...


def suspected_of(found: Classified, lang: str, row: Row | None = None) -> list[str]:
    """Return what to do about the package that may have the defect: by a cut traceback, or the process that printed.
    Of a known row of the program the one that raised it; else only if that is what a caller of a runtime sees.
    Neither if something better is known."""
    is_open = row is None or row.role == "symptom" or row.family == "acl"
    is_known = row is not None and bool(fixes_in(found) or known_of(found, lang))
    if row is not None and not is_known and found.domain == "program" and found.given.get("PACKAGE"):
        return raised_by_of(found, lang)
    is_likely = bool(found.given.get("SUSPECT")) and found.domain in alike("of-packages")
    is_suspected = is_likely and is_open and not is_known
    return [text for name in ("suspected", "plugin") for text in first_text([name] * is_suspected, lang)]


def is_owned(found: Classified) -> bool:
    """Return whether the fix is known by numbers or by the owner: it comes before what the program advises."""
    return any(one.vocabulary in alike("knows-best") and one.domain == found.domain for one in found.why)


def is_of_a_call(found: Classified) -> bool:
    """Return whether the call that failed, or a refused setting, explains it better than its message."""
    return any(
        one.vocabulary in alike("give-retry") and one.depth > 0 and one.domain == found.domain for one in found.why
    )


def served_by(found: Classified) -> list[str]:
    """Return the fixes of services that could not be reached over the network, of a hub before those of a download."""
    served = (one.fix for one in found.why if one.vocabulary in alike("outside"))
    return sorted(served, key="download".__eq__) if found.domain == "network" else []


def first_text(fixes: Sequence[str], lang: str) -> list[str]:
    """Return the first text (diagnosis.fix.NAME) that is there; [] without one."""
    known = (f"diagnosis.fix.{name}" for name in fixes)
    return [listed(key).render(lang) for key in known if key in translations("en")][:1]
