"""Closed vocabularies: what a code, an errno, the class of an exception or a kernel line says of a failure.

    [one.domain for one in values_in("RuntimeError: error code is 207001")]    ["device-memory"]

One TOML file per vocabulary, with its source and date. They are few, since their owners number them; a message that
nobody has entered in signatures.toml usually has one of them.
"""

from __future__ import annotations

import builtins
import errno
import importlib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import resources
from re import Pattern
from typing import Any

from ascendrun.core.dataclass import dataclass

DOMAINS = (
    "program", "data", "environment", "host-memory", "device-memory", "device", "network", "storage", "resource",
    "access", "outside", "silent", "collectives",
)  # fmt: skip
"""Where a failure lies. environment: versions, libraries, paths; resource: ports, limits, held devices; access: logins
and services; outside: signals and schedulers; silent: waits and hangs; collectives: ranks that disagree."""
PROOFS = ("outer", "hint", "usual", "hard")
"""How much a value proves of its domain, in ascending order. outer: nothing, it may hide another value. hint: words, a
range of codes, a library; they suggest it. usual: an exact value, but failures of other domains have it too. hard: no
failure of another domain has it. A table states that of its values, or a value its own; hint without either."""


@dataclass(frozen=True)
class Value:
    """One value. `party`: whose failure it is: self, peer or network. `retry`: whether another attempt helps, "": not
    known. `depth`: of several values of one failure the deepest counts; below 0 it says nothing of its own. `proof`:
    of PROOFS. `kind`: of the restart, "": by domain and scope. `fix`: of the texts diagnosis.fix.FIX, "": that of the
    domain."""

    vocabulary: str
    key: str
    domain: str
    party: str = "self"
    retry: str = ""
    depth: int = 0
    proof: str = "hint"
    kind: str = ""
    fix: str = ""

    @property
    def is_exact(self) -> bool:
        """Return whether it contradicts values of other domains: what waits, or has no depth, has a deeper reason."""
        return self.depth > 0 and self.domain != "silent" and self.proof in ("usual", "hard")

    @property
    def is_hard(self) -> bool:
        """Return whether it proves its domain."""
        return self.is_exact and self.proof == "hard"

    @property
    def as_hint(self) -> Value:
        """Return the value where it is known by less than itself: by its range, by a part of its name."""
        return replace(self, proof=min(self.proof, "hint", key=PROOFS.index))


@cache
def read_table(name: str) -> Mapping[str, Any]:
    """Return a file of this folder."""
    toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    found: Mapping[str, Any] = toml.loads(
        resources.files(__name__).joinpath(f"{name}.toml").read_text(encoding="utf-8")
    )
    return found


@cache
def vocabulary(name: str) -> Mapping[str, Value]:
    """Return the values of a vocabulary by key; a key of a range ends in *."""
    table = read_table(name)
    fixes = _fixes(name)
    found = {}
    for row in table["values"]:
        given = {field: value for field, value in row.items() if field not in ("keys", "source", "because")}
        made = Value(name, "", **{"depth": table.get("depth", 0), "proof": table.get("proof", "hint"), **given})
        found.update({key: replace(made, key=key, fix=fixes.get(key, made.fix)) for key in row["keys"]})
    return found


@cache
def _fixes(name: str) -> Mapping[str, str]:
    """Return the fixes of single values of a vocabulary, also of those that only a range has."""
    return {key: fix for fix, keys in read_table(name).get("fixes", {}).items() for key in keys}


def value_of(name: str, key: str) -> Value | None:
    """Return a value of a vocabulary; of ranges the longest. None: the vocabulary has no such value."""
    table = vocabulary(name)
    for end in range(len(key), 0, -1):
        found = (table.get(key) if end == len(key) else None) or table.get(f"{key[:end]}*")
        if found is not None:
            known = found if key in table else found.as_hint
            return replace(known, key=key, fix=_fixes(name).get(key, known.fix))
    return None


def value_of_row(code: str, family: str) -> Value | None:
    """Return the value of a row of the catalogue: its own, that of its error id or return code, or its family's."""
    name, _, number = code.partition("-")
    own = value_of("rows", code) or (value_of("acl", number) if name == "ACL" else value_of("cann", code))
    return own or value_of("rows", family)


def usual(field: str, family: str, domain: str) -> Any:
    """Return what a row of the catalogue has that does not state it; `field` may be one of a role: "retry.cause"."""
    table = read_table("rows")["usual"]
    for name in field.split("."):
        table = table[name]
    return next(table[name] for name in (f"{family} {domain}", f"* {domain}", f"{family} *", "*") if name in table)


def strength_of(observation: str) -> int:
    """Return how certainly an observation of ascendrun gives the reason of a failure."""
    return int(read_table("conclusions")["strength"][observation])


def code_of_cause(cause: str) -> str | None:
    """Return the code of an attempt that was stopped for this cause (core.job.Cause); None: its failure decides."""
    code: str | None = read_table("conclusions")["causes"].get(cause)
    return code


def following(domain: str) -> Mapping[str, Any]:
    """Return what follows from a domain: the kind of the restart, whether a node may have it, and facts that fit."""
    known: Mapping[str, Any] = read_table("conclusions")["domains"].get(domain, {})
    return known


def retry_without_row(code: str, values: Sequence[Value]) -> str:
    """Return whether another attempt helps, by the deciding value where the code gives no reason; "": not known."""
    return next((one.retry for one in values[:1] if is_open(code) and one.vocabulary in alike("same-everywhere")), "")


def kind_of(facts: Mapping[str, str]) -> str:
    """Return the kind of a restart by a failure's domain, scope, retry and row (conclusions.toml)."""
    rows = read_table("conclusions")["kinds"]
    fitting = (row["kind"] for row in rows if all(facts[name] in row[name] for name in facts if name in row))
    return str(next(fitting, following(facts["domain"]).get("kind", "unknown")))


def phase_of(frames: str) -> str:
    """Return the phase of a program by frames of a traceback; "" if they do not show it."""
    phases: Mapping[str, str] = read_table("conclusions")["phases"]
    return next((name for name, pattern in phases.items() if re.search(pattern, frames, re.M)), "")


@cache
def alike(name: str) -> frozenset[str]:
    """Return names that a rule treats alike: families, codes, domains, kinds of messages (groups.toml)."""
    return frozenset(read_table("groups")[name])


def is_kind(name: str, kind: str) -> bool:
    """Return whether an exception is of a class that states, asks or ends (exceptions.toml)."""
    return name.rpartition(".")[2] in read_table("exceptions")["kinds"][kind]


def may_raise(statement: str, name: str, message: str) -> bool:
    """Return whether a line of code itself may raise this exception: else the frames of what it calls are missing."""
    pattern, lacking = read_table("exceptions")["raised_by"].get(name, ""), wording("no-name").findall(message)[:1]
    missing = pattern.replace("NAME", "".join(lacking))
    return not (statement[:1].isidentifier() and pattern) or re.search(rf"{missing}|\braise\b", statement) is not None


def is_of_several(code: str) -> bool:
    """Return whether a row of the catalogue concerns several ranks."""
    return code in read_table("rows")["several"]


def is_open(code: str) -> bool:
    """Return whether a diagnosis's code says how a rank ended, and not why."""
    return code in read_table("conclusions")["open"] or code in read_table("rows")["general"]


def is_documentation(host: str) -> bool:
    """Return whether a web server has documentation or source: a message that names it advises to read there."""
    return any(host.endswith(known) for known in read_table("conclusions")["documentation"])


# ---------------------------------------------------------------- values of one text

_CODES = re.compile(
    r"(?:\bHCCL (?:function )?error\b|\b[Hh]ccl[A-Z]).{0,300}?(?:[eE]rror(?: code is| [nN]umber)?|\bret(?:urn)?\b)"
    r"[\s=:\[(]{1,3}(?P<hccl>\d{1,2})\b|\berrNo\[0x0*50\d00(?P<hccl_hex>[0-9a-f]{2})\]|\b(?P<hccl_name>HCCL_E_[A-Z_]+)\b|"
    r"(?:\b(?P<title>[A-Z]\w+)\()?\b(?P<cann>E[0-9A-Z]\d{4})\b|\bERR\d\d(?P<torch_npu>\d{3})\b|"
    r"(?:code|[rR]et|result|err|errno|status|[eE]rror|return)\b[\s=:\[(]{1,3}(?:is )?(?P<acl>[1-5]\d{5})\b|"
    r"(?:signal:? |Signals\.)(?P<exits>SIG[A-Z0-9]+)\b|"
    r"(?:\[Errno |\berrno[:= ]{1,3}|\bos error )(?P<errno>\d{1,3})\b|\b(?P<errno_name>E[A-Z]{3,14})\b"
)
_VOCABULARY = {"hccl_name": "hccl", "hccl_hex": "hccl", "errno_name": "errnos", "errno": "errnos"}
_WORDS_OF_ERRNO = {
    os.strerror(number): name for number, name in errno.errorcode.items() if len(os.strerror(number)) > 8
}


_FIXED_WORDS = (
    "nccl", "cuda", "statuses", "recovery", "resolver", "compilers", "plog", "frameworks", "downloads", "containers",
)  # fmt: skip


@cache
def _phrases() -> tuple[Pattern[str], Mapping[str, Value]]:
    """Return one pattern of all values that are words, and the values by their words."""
    values = {key: value for name in _FIXED_WORDS for key, value in vocabulary(name).items()}
    known = ((words, value_of("errnos", name)) for words, name in _WORDS_OF_ERRNO.items())
    values.update({words: value for words, value in known if value is not None})
    longest = sorted(values, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest))), values


def values_in(text: str) -> Iterator[Value]:
    """Yield the codes and fixed words of a text, in their order by vocabulary."""
    for found in _CODES.finditer(text):
        name, key = str(found.lastgroup), str(found[found.lastgroup or 0])
        if name == "errno":
            key = errno.errorcode.get(int(key), key)
        if name == "hccl_hex":
            key = str(int(key, 16))
        value = value_of(_VOCABULARY.get(name, name), key)
        if name == "cann" and key not in vocabulary("cann"):
            value = value_of_title(found["title"] or "", key) or value
        if value is not None:
            yield value
    pattern, values = _phrases()
    for found in pattern.finditer(text):
        yield values[found.group()]
    if "NCCL WARN" in text:
        files = (value_of("nccl", name) for name in wording("nccl-file").findall(text))
        yield from (value for value in files if value is not None)


def value_of_title(title: str, key: str) -> Value | None:
    """Return the value of a code that no table has, by the vendor's name for it."""
    known = (value for words, value in vocabulary("titles").items() if f"_{words}_" in f"_{title.lower()}_")
    return next((replace(value, key=key) for value in known), None)


def concepts_in(text: str) -> Iterator[Value]:
    """Yield what the nouns of a text suggest, the first of the table first; their keys are these nouns. A noun that is
    only a part of a name (of an argument, a file, an option) is not what the text is about."""
    named = [one.span() for one in wording("name").finditer(text)]
    for key, value in vocabulary("concepts").items():
        for found in _compiled(key).finditer(text):
            start, end = found.span()
            if not (found.group().isalpha() and any(first <= start and end <= last for first, last in named)):
                yield replace(value, key=found.group())
                break


def lacking_in(text: str) -> Iterator[Value]:
    """Yield the owner of each module, library, header, symbol or variable that a text reports as missing: it gives the
    fix. A mangled symbol is of its outer namespace; a header is <NAME>, a library to link -lNAME."""
    for found in wording("lacks").finditer(text):
        kind = str(found.lastgroup)
        mangled = wording("mangled").match(found[kind])
        name = found[kind] if mangled is None else f"{mangled[2][: int(mangled[1])]}::"
        name = {"header": f"<{name}>", "link": f"-l{name}"}.get(kind, name)
        value = value_of("owners", name) or value_of("owners", f"any {kind.rstrip('0123456789')}")
        if value is not None:
            yield value


def services_in(text: str) -> Iterator[Value]:
    """Yield the known services that a text names by their hosts, without pages to read there."""
    for found in _hosts_of_services().finditer(text):
        yield vocabulary("services")[found[1]]


@cache
def _hosts_of_services() -> Pattern[str]:
    hosts = "|".join(map(re.escape, vocabulary("services")))
    return re.compile(rf"(?<![\w-])({hosts})(?![\w-]|\.\w)(?!/(?:docs|models|papers|blog)\b)")


HELD_FROM = 0.3
"""Others hold memory of a device if it is more than this fraction of it: the runtime itself holds a few GiB."""
FRAGMENTED_FROM = 0.1
"""Memory is fragmented if this fraction of it, and what was requested, is reserved by the process and not in use."""
_UNITS = {"K": 2.0**10, "M": 2.0**20, "G": 2.0**30}


def measured_in(text: str) -> Iterator[Value]:
    """Yield that other processes hold memory of the device, or that the process's own is fragmented: by what an
    allocator reports of the total, of what is free, and of its own."""
    sizes: dict[str, float] = {}
    for found in wording("memory-size").finditer(text):
        sizes.setdefault(str(found["before"] or found["after"]), float(found["size"]) * _UNITS[found["unit"]])
    total, free, own, used, idle, tried = (
        next((sizes[one] for one in names if one in sizes), None) for names in _REPORTED_AS
    )
    own = used + idle if own is None and used is not None and idle is not None else own
    idle = own - used if idle is None and own is not None and used is not None else idle
    if total and free is not None and own is not None and total - free - own > HELD_FROM * total:
        yield Value("measured", "held by others", "device-memory", fix="memory-held")
    elif total and idle is not None and idle > max(FRAGMENTED_FROM * total, tried or 0.0):
        yield Value("measured", "fragmented", "device-memory", fix="fragmented")


_REPORTED_AS = (
    ("total capacity", "total capacity of"),
    ("free", "of which"),
    ("reserved in total", "this process has"),
    ("already allocated", "is allocated by"),
    ("is reserved by",),
    ("Tried to allocate",),
)


def variants_in(text: str) -> Iterator[Value]:
    """Yield which of several limits of a resource was reached."""
    hits = ((value, _compiled(key).search(text)) for key, value in vocabulary("variants").items())
    return (replace(value, key=found.group()) for value, found in hits if found is not None)


GIVE_THE_FIX = (lacking_in, measured_in, variants_in, services_in)
"""Of the whole output of a failure: who provides what is missing, who holds what is full, and who did not respond."""


@cache
def _compiled(key: str) -> Pattern[str]:
    return re.compile(key)


def cann_detail(lines: Iterable[str]) -> str:
    """Return the kernel that CANN names as the failed one, else what its reports and their trace have behind the error
    id: the first that is more than that a call failed, without the place in CANN's sources; "" if there is neither."""
    reports: list[str] = []
    in_trace = False
    for text in lines:
        kernel = wording("failed-kernel").search(text)
        if kernel is not None:
            return str(kernel["text"])
        found = wording("cann-report").search(text)
        if found is None and in_trace:
            found = wording("cann-trace").match(text)
        reports += [] if found is None else [next(filter(None, found.groups()))]
        in_trace = "TraceBack (most recent call last)" in text or (in_trace and text[:1].isspace())
    return next(iter(sorted(reports, key=lambda one: "ailed" in one)), "")


@cache
def wording(name: str) -> Pattern[str]:
    """Return the pattern of a kind of line (wordings.toml)."""
    row = read_table("wordings")[name]
    return re.compile("|".join(row["any"]), re.IGNORECASE if row.get("is_any_case") else 0)


def says(text: str, *names: str) -> bool:
    """Return whether a text has one of these wordings."""
    for name in names:  # for each line of each rank
        if wording(name).search(text) is not None:
            return True
    return False


def is_warning(text: str) -> bool:
    """Return whether its level is a warning. NCCL's WARN, and a warning that reports an error, are errors."""
    return says(text, "warning") and not says(text, "report")


def is_try(text: str) -> bool:
    """Return whether c10d could not reach the store yet: it warns for each attempt, and finally raises."""
    return says(text, "store-not-there") and is_warning(text)


def is_error_line(text: str) -> bool:
    """Return whether a plog line is not of a level below ERROR."""
    return not text.startswith(("[INFO]", "[DEBUG]", "[WARNING]", "[EVENT]"))


def hides_cause(code: str, texts: Iterable[str]) -> bool:
    """Return whether a message with this code, which may stand for a failure in a lower layer, has another one."""
    layer, _, outer = code.partition("-")
    value = value_of("acl", outer) if layer == "ACL" else None
    hits = (found["code"] for text in texts for found in wording("return-code").finditer(text))
    return value is not None and value.proof == "outer" and any(inner not in (outer, "0", "0x0") for inner in hits)


def tells_of_memory(text: str) -> bool:
    """Return whether a scheduler reports that it, or the kernel, ended a process of the job for its memory."""
    hard = (value for value in values_in(text) if value.is_hard and value.vocabulary == "frameworks")
    return any(value.domain == "host-memory" for value in hard) and not says(text, "went-on")


def kernel_values(text: str) -> Iterator[Value]:
    """Yield the events that a line of the kernel log reports."""
    return (value for key, value in vocabulary("kernel").items() if key in text)


def class_of(name: str) -> Value:
    """Return the value of an exception's class, such as "torch.OutOfMemoryError": that of its nearest known base
    class; a class that nobody knows is the program's own."""
    short = name.rpartition(".")[2]
    builtin = getattr(builtins, short, None)
    bases = builtin.__mro__ if isinstance(builtin, type) else ()
    names: Iterable[str] = (name, short, *(base.__name__ for base in bases))
    known = (vocabulary("exceptions").get(one) for one in names)
    parts = (Value("exceptions", short, domain, depth=1) for domain in _domains_of_parts(short))
    return next((one for one in (*known, *parts) if one is not None), Value("exceptions", short, "program"))


def _domains_of_parts(short: str) -> Iterator[str]:
    """Yield the domains of the parts of a class's name, such as "Timeout" of "NotifyTimeoutError"."""
    parts: Mapping[str, str] = read_table("exceptions")["parts"]
    return (domain for domain, words in parts.items() if any(word in short for word in words.split()))


def value_of_package(module: str) -> Value | None:
    """Return the value of a library by a module's dotted name; None: it may raise anything."""
    parts = module.split(".")
    names = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((one for one in map(vocabulary("packages").get, names) if one is not None), None)


def at_phase(value: Value, phase: str) -> Value:
    """Return a value as it is in a phase of the program: a path that is not there while files are saved is of the
    storage, and of no wrong path."""
    rows = (row for row in read_table("conclusions")["at"] if row["phase"] == phase and value.key in row["keys"])
    row = next(rows, None)
    depth = value.depth if row is None else max(value.depth, row.get("depth", value.depth))
    if row is None:
        return value
    found = value.as_hint if value.domain != row["domain"] else value
    given = {name: row[name] for name in ("domain", "fix", "retry", "vocabulary") if name in row}
    return replace(found, depth=depth, **given)


def deepest(values: Iterable[Value]) -> Value | None:
    """Return the value that says most: the deepest, where an outer code is hardly deeper than a message; the first of
    equals. None: there is none."""
    return max(values, key=lambda one: min(one.depth, 0.5) if one.proof == "outer" else one.depth, default=None)
