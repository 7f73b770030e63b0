"""Class of a failure: its domain by the values of closed vocabularies, its scope by counting, its phase by the frames;
and what follows from it: the facts of hosts that are shown, and whether another attempt helps.

A row of the catalogue is more exact than a vocabulary, but is not needed: codes, errno, the classes of exceptions and
kernel events of the first ranks give the domain of a failure whose message nobody has entered.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace

from ascendrun.ascend import vocabularies
from ascendrun.ascend.compatibility import misfits_in
from ascendrun.ascend.signatures import signature_of
from ascendrun.ascend.vocabularies import Value, alike, deepest, is_error_line, says, value_of, value_of_row, wording
from ascendrun.core.records import flattened
from ascendrun.health.cut_frames import calls_in, module_of
from ascendrun.health.diagnosis import result
from ascendrun.health.diagnosis.candidates import is_timely
from ascendrun.health.diagnosis.evidence import Evidence, surely_before
from ascendrun.health.diagnosis.lines.launchers import LAUNCHERS
from ascendrun.health.diagnosis.lines.rank_lines import services_in
from ascendrun.health.diagnosis.rank_timelines import RankTimeline
from ascendrun.health.diagnosis.render import caveat
from ascendrun.health.diagnosis.result import Confidence, Diagnosis, Proof, Suspect
from ascendrun.health.package_pairs import is_of_versions
from ascendrun.health.what_differs import unlike_hosts
from ascendrun.text import listed

READ_RANKS = 4
"""Ranks of the first failure whose words are read: the others say the same."""
HOST_SHARE = 0.75
PASSED_S, REMOVED_S = 1.0, 60.0
LAST_LINES = 8
MOST_VALUES, MOST_DIFFERENCES = 12, 6  # of a diagnosis
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[^\x00-\x7f]+")


def classified(found: Diagnosis, winner: Suspect, evidence: Evidence, timelines: Sequence[RankTimeline]) -> Diagnosis:
    """Return a diagnosis with the class of its first failure, how certain that is, and what follows from it."""
    first = [one for one in timelines if one.rank.rank in winner.ranks][:READ_RANKS]
    scope, group, is_whole = place_of(winner, evidence, groups_of(evidence, timelines))
    phase = vocabularies.phase_of("\n".join(one.frames for one in first))
    row = signature_of(winner.code)
    told = [one for one in (code_value(winner.code),) if one is not None]
    is_vague = not told or (row is not None and row.role != "cause" and told[0].domain != "silent")
    if is_vague or vocabularies.is_open(winner.code):
        told += _said_by(winner, first)
        told += [value for one in first if one.chain is None for value in calls_in(one.frames)]
    printed = [text for one in first for text in (*one.said, *(line.text for line in one.details))]
    whole = "\n".join((*(proof.line for proof in winner.proofs), *printed, str(found.values.get("message", ""))))
    told += (value for read in vocabularies.GIVE_THE_FIX for value in read(whole))
    told += _removed_early(winner, whole, timelines)
    is_wide = scope == "all" or is_whole  # software differs between hosts, not between the ranks of one
    raised = ((text, one.frames, one.chain.final if one.chain else None) for one in first for text in one.said)
    if any(is_of_versions(*one, is_wide=is_wide) for one in raised):
        told.append(Value("exceptions", "versions", "environment", depth=2, fix="versions"))
    values = _ordered(told, phase)
    passed = is_whole and bool(values) and _is_of_the_host(values[0]) and _others_passed(winner, timelines)
    is_pair = winner.code in vocabularies.alike("of-two") and bool(found.given.get("BOTH"))
    if passed:
        values = [Value("scope", "host", "environment"), *values]
    is_open = vocabularies.is_open(winner.code) and winner.code != "exception"
    if is_open or (values and values[0].domain == "silent"):
        values = _ordered([*values, *_seen_on(winner, evidence, first)], phase)
    domain = values[0].domain if values else "program"
    gives_retry = bool(values) and values[0].vocabulary in alike("give-retry")
    own = vocabularies.retry_without_row(winner.code, values)
    others = [*_other_codes(winner, first)]
    if row is not None and any(one.is_exact and one.domain != domain for one in others):
        found = replace(found, confidence=Confidence.LIKELY, caveats=(*found.caveats, caveat("two-codes")))
    if winner.code == "exception" and not (values and values[0].is_exact) and not _has_content(winner):
        found = replace(found, confidence=Confidence.LIKELY, caveats=(*found.caveats, caveat("no-message")))
    pairs = [Value("package_pairs", "versions", "environment", depth=2, proof="hard")] if is_pair else []
    proofs = [vocabularies.at_phase(one, phase) for one in (*others, *pairs, *_proofs(winner, first))]
    is_of_some = found.caveats == (caveat("inner-unknown"),) and all(_is_alone(one, domain) for one in first)
    is_known = passed is False and (is_of_some or found.confidence is Confidence.CERTAIN)
    differences = differences_of(evidence, winner.hosts, domain) if is_whole else ()
    unfit = misfits_in(evidence.host(winner.hosts[0]).facts) if winner.hosts and domain == "environment" else ()
    misfits = (Proof(one.message, host=winner.hosts[0]) for one in unfit if one.message is not None)
    grade = _grade_of(values, proofs, winner.code, is_known=is_known)
    was_seen = winner.rules or not any(one.rank.code for one in first)  # a signal is known of all
    if scope == "rank" and not was_seen and not _others_known(winner, evidence, timelines):
        is_its_own = grade is Confidence.UNKNOWN or (first[0].rank.last_step or 0) > 1 or says(whole, "of-one-device")
        unseen = vocabularies.following(domain).get("unseen", scope)
        scope = "shown" if unseen == "alike" and is_its_own else unseen
    return replace(
        found,
        values={**found.values, **({"misfit": unfit[0].hint or ""} if unfit else {})},
        domain=domain,
        scope=scope,
        group=group,
        phase=phase,
        why=tuple(dict.fromkeys(values))[:MOST_VALUES],
        reason_grade=grade,
        retry=(gives_retry and values[0].retry) or retry_of(winner.code, is_whole=is_whole, domain=domain, own=own),
        evidence=(*found.evidence, *misfits, *differences),
    )


def _other_codes(winner: Suspect, first: Sequence[RankTimeline]) -> Iterator[Value]:
    """Yield the exact codes of the first ranks, of their exceptions and of known lines. The winner's row is more exact
    than an errno on its line."""
    proven = {proof.line for proof in winner.proofs}
    for one in first:
        said = [(text, value) for text in one.said for value in vocabularies.values_in(text)]
        yield from (value for text, value in said if value.vocabulary != "errnos" or text.strip() not in proven)
        known = (code_value(suspect.code) for suspect in one.indicators if suspect.role == result.CAUSE)
        yield from (value for value in known if value is not None)


def _proofs(winner: Suspect, first: Sequence[RankTimeline]) -> Iterator[Value]:
    """Yield the values of the lines of a failure: also a row of the catalogue is certain only by one of them."""
    for proof in winner.proofs:
        yield from vocabularies.values_in(proof.line)
        yield from () if proof.rank is not None else vocabularies.kernel_values(proof.line)
    for chain in (one.chain.leading for one in first if one.chain is not None):
        yield from (vocabularies.class_of(raised.type) for raised in chain)


def _removed_early(winner: Suspect, text: str, timelines: Sequence[RankTimeline]) -> Iterator[Value]:
    """Yield that a temporary file is gone after a rank of the same host, shortly before, ended well."""
    if says(text, "temporary-missing"):
        ends = [one.end for one in timelines if one.rank.code == 0 and one.rank.host in winner.hosts]
        if any(surely_before(end, winner.at) and not surely_before(end, winner.at, by_s=REMOVED_S) for end in ends):
            yield vocabularies.vocabulary("calls")["removed-early"]


def _is_of_the_host(first: Value) -> bool:
    """Return whether an error of the program that all ranks of a host have, and no other rank, is one of its software:
    the program is the same everywhere. What names its data (KeyError) may be of the part of a model that is there."""
    return first.domain == "program" and (first.vocabulary in alike("same-everywhere") or first.depth < 0)


def _has_content(winner: Suspect) -> bool:
    """Return whether a message has a word that is not in the name of its class; of a general one a name."""
    name, _, message = str(winner.values.get("message", "")).partition(": ")
    words, known = ({word.lower() for word in _WORD.findall(text)} for text in (message, name))
    is_plain = says(message, "names-nothing") and vocabularies.class_of(name).depth < 0
    return not (words <= known or is_plain or says(message, "unprintable"))


def code_value(code: str) -> Value | None:
    """Return the value of a diagnosis's code: of a conclusion, a row, or the vocabulary that has the row's code."""
    row = signature_of(code)
    return value_of("conclusions", code) or value_of_row(code, "" if row is None else row.family)


def _said_by(winner: Suspect, first: Sequence[RankTimeline]) -> Iterator[Value]:
    """Yield what the first ranks say, and how they ended."""
    said = [text for one in first for text in one.said] or [proof.line for proof in winner.proofs]
    raised = [str(winner.values[key]) for key in ("message", "root") if key in winner.values]
    names = [name for text in raised for name in (text.partition(":")[0], *wording("inner-class").findall(text))]
    kinds = [vocabularies.class_of(name) for name in names if winner.code == "exception"]
    states = any(one.domain == "program" and one.depth in (0, 1) for one in kinds)
    libraries = [value for one in first for value in _libraries_of(one)]
    if any(map(_is_of_a_service, said)) and not states:
        reached = [value.domain for text in said for value in (*kinds, *vocabularies.values_in(text))]
        yield Value("services", "url", "access", depth=3 if "network" in reached else 1)
    is_inside = any(one.chain is not None and one.chain.root.below for one in first)
    yield from (one.as_hint if is_inside and one.domain == "program" else one for one in kinds)
    if not kinds or all(one.depth < 0 for one in kinds):
        said += [line.text for one in first for line in (*one.details, *(() if kinds or one.details else one.plog))]
    if states:
        said = [result.without_quotes(text) for text in said]  # a program's own data may have any words
    values = [value for text in said for value in vocabularies.values_in(text)]
    yield from values
    if alike("asynchronous").isdisjoint(value.vocabulary for value in values):
        yield from libraries
    if all(one.depth >= -1 for one in kinds):
        yield from vocabularies.concepts_in("\n".join(said))
    errors = (line.text for one in first for line in one.plog if is_error_line(line.text))
    yield from (value for text in errors for value in vocabularies.values_in(text))
    ends = (value_of("exits", str(winner.values.get(key))) for key in ("signal", "code"))
    yield from (one for one in ends if one is not None and winner.code != "exception")


def _libraries_of(one: RankTimeline) -> Iterator[Value]:
    """Yield the libraries that raised the exceptions of a rank: those of their classes, else of the frames below the
    program's own, the deepest first."""
    leading = () if one.chain is None else one.chain.leading
    for raised in (raised for raised in leading if vocabularies.class_of(raised.type).depth > -2):
        modules = (raised.type.rpartition(".")[0], *map(module_of, raised.below))
        found = [one for one in map(vocabularies.value_of_package, modules) if one is not None]
        if raised.below and raised.raised_in[1] == "<module>":
            found.append(Value("packages", "import", "environment", depth=2))
        yield from found[:1]


def _is_of_a_service(text: str) -> bool:
    named = (name for name in services_in(text) if not vocabularies.is_documentation(name))
    return any((*services_in(text, by_address=True), *named))


def _others_passed(winner: Suspect, timelines: Sequence[RankTimeline]) -> bool | None:
    """Return whether the ranks of other hosts lived clearly longer: they had passed the same place. None: the clocks do
    not tell."""
    ends = [one.end for one in timelines if one.rank.host not in winner.hosts]
    if not ends or any(surely_before(end, winner.at, by_s=-PASSED_S) for end in ends):
        return False
    return all(surely_before(winner.at, end, by_s=PASSED_S) for end in ends) or None


def _seen_on(winner: Suspect, evidence: Evidence, first: Sequence[RankTimeline]) -> Iterator[Value]:
    """Yield what the kernels and devices of their hosts report. Without the kernel's log, or during work that fills the
    memory of a host, SIGKILL is most often that of its out-of-memory killer."""
    for host in (evidence.host(name) for name in winner.hosts):
        here = evidence.ranks_of(host.host)
        last = [line.text for one in first for line in one.rank.lines[-LAST_LINES:]]
        is_likely = winner.code == "killed" and (host.dmesg is None or any(says(text, "memory-work") for text in last))
        unread = value_of("conclusions", "killed-unseen") if is_likely else None
        yield from () if unread is None else (unread,)
        lines = (line.text for line in host.dmesg or () if line.at_s is None or is_timely(line.at_s, here))
        logged = ((text, value) for text in lines for value in vocabularies.kernel_values(text))
        own = [str(one.rank.pid) for one in first]
        yield from (value for text, value in logged if value.domain != "host-memory" or any(pid in text for pid in own))
        devices = {one.rank.device for one in first}
        if any(fact.device in devices for fact in host.devices):
            yield Value("devices", "alarm", "device", depth=5, proof="usual")


def _ordered(values: Iterable[Value], phase: str) -> list[Value]:
    """Return the values, the deciding one first: the deepest; of nothing deep the nouns of the message."""
    known = [vocabularies.at_phase(one, phase) for one in values]
    best = deepest(known)
    if best is not None and best.depth <= 0:
        best = next((one for one in known if one.vocabulary == "concepts" and one.depth >= best.depth), best)
    if best is None:
        return []
    return [best, *(one for one in known if one is not best)]


def groups_of(evidence: Evidence, timelines: Sequence[RankTimeline]) -> Mapping[str, frozenset[int]]:
    """Return the ranks of each group that is known in full: hosts of one group of the hostfile, a role, a process group
    by a flight recorder, or a group of HCCL of which as many ranks as it has name it."""
    named = [(name, one.rank, 0) for one in evidence.ranks for name in evidence.host(one.host).groups]
    named += [(label.rpartition("/")[0], rank, 0) for rank, label in evidence.labels.items()]
    calls = (call for host in evidence.hosts for dump in host.recorded.values() for call in dump)
    named += [(call.group, rank, 0) for call in calls for rank in call.members]
    lines = ((one.rank.rank, line.values) for one in timelines for line in one.messages if line.kind == "members")
    named += [(values["group"], rank, int(values["size"])) for rank, values in lines]
    found: dict[str, set[int]] = {}
    for name, rank, _ in named:
        found.setdefault(name, set()).add(rank)
    sizes = {name: size for name, _, size in named}
    return {name: frozenset(ranks) for name, ranks in found.items() if len(ranks) >= sizes[name]}


def place_of(winner: Suspect, evidence: Evidence, groups: Mapping[str, frozenset[int]]) -> tuple[str, str, bool]:
    """Return where it failed, by counting ranks; the name of the group, "": of none; and whether it is of all ranks of
    its hosts, and of no others."""
    every = {rank.rank for rank in evidence.ranks}
    ranks = set(winner.ranks) & every
    hosts = {rank.host for rank in evidence.ranks}
    is_of_node = evidence.launcher in LAUNCHERS  # its process of a node stands for the ranks there
    if len(ranks) >= HOST_SHARE * max(1 if is_of_node else 2, len(every)):
        return "all", "", False
    there = [{one.rank for one in evidence.ranks_of(host)} for host in winner.hosts]
    has_several = not ranks or len(ranks) > len(winner.hosts) or (len(ranks) == 1 and is_of_node)
    is_part = 0 < len(winner.hosts) < max(2, len(hosts)) and has_several
    is_whole = is_part and (not ranks or all(_is_most(ranks & one, one) for one in there))
    fitting = [name for name, members in groups.items() if len(members) > 1 and _is_most(ranks, members)]
    if fitting and not (is_whole and len(winner.hosts) == 1):
        return "group", min(fitting, key=lambda name: len(groups[name])), is_whole
    own = len(winner.ranks)  # also ranks that were not recorded
    return "host" if is_whole else "rank" if own == 1 else "ranks" if own else "", "", is_whole


def _others_known(winner: Suspect, evidence: Evidence, timelines: Sequence[RankTimeline]) -> bool:
    """Return whether another rank is known not to have failed in the same way, or there is none: by success, a signal,
    or output, except if it ended by itself without a reason."""
    others = [one for one in timelines if one.rank.rank not in winner.ranks]
    ended = [one for one in others if one.rank.code == 0 or (one.rank.signal is not None and not one.rank.stopped)]
    vague = [one for one in others if one.rank.code and one.waited is None and (one.own is None or one.own.is_vague)]
    shown = [one for one in others if (one.rank.lines or one.plog) and one not in vague]
    return bool(ended or shown) or max(evidence.world_size, len(timelines)) < 2


def _is_most(ranks: Set[int], members: Set[int]) -> bool:
    return ranks <= members and len(ranks) >= HOST_SHARE * len(members)


def _is_alone(one: RankTimeline, domain: str) -> bool:
    """Return whether an output, which may be of several ranks of a node, has no other reason or traceback."""
    causes = [code_value(own.code) for own in one.indicators if own.role == result.CAUSE and not own.is_vague]
    heads = sum(says(line.text, "traceback") for line in one.rank.lines)
    is_one = heads <= (0 if one.chain is None else len(one.chain.leading))
    return is_one and all(value is None or value.domain == domain for value in causes)


def _grade_of(values: Sequence[Value], proofs: Iterable[Value], code: str, *, is_known: bool) -> Confidence:
    """Return how certain the domain is: certain only if the failure is known, a value proves its domain, and no exact
    one is of another."""
    is_only_end = code == "exit-code" and all(one.key in (code, "1") for one in values)
    if not values or is_only_end or values[0].key in alike("ask-for-lines"):
        return Confidence.UNKNOWN
    exact = [one for one in (*values, *proofs) if one.is_exact]
    is_proven = any(one.is_hard for one in exact) and all(one.domain == values[0].domain for one in exact)
    return Confidence.CERTAIN if is_proven and is_known else Confidence.LIKELY


def retry_of(code: str, *, is_whole: bool = False, domain: str = "", own: str = "") -> str:
    """Return whether another attempt helps: same, exclude (without its hosts), never, unknown; `own`: by its values.
    What fails on all ranks of its hosts only (`is_whole`) is their fault; what its domain causes again stays."""
    row, value = signature_of(code), value_of("conclusions", code)
    retry = value.retry if value is not None and value.retry else own or ("unknown" if row is None else row.retry)
    follows = vocabularies.following(domain)
    is_state = follows.get("stays") and (row is None or row.role != result.CAUSE)
    comes_again = retry == "same" and (follows.get("comes_again") or is_state)
    if is_whole and (retry == "never" or comes_again) and code not in alike("of-settings") and follows.get("of_nodes"):
        return "exclude"
    return "unknown" if comes_again else retry


def differences_of(evidence: Evidence, hosts: tuple[str, ...], domain: str) -> tuple[Proof, ...]:
    """Return what each of the hosts has and no other host of its role, as observations; () also if nothing was
    recorded."""
    known = {one.host: dict(flattened(one.facts)) for one in evidence.hosts if one.facts}
    roles = {one.host: evidence.labels.get(one.rank, "").rpartition("/")[0] for one in evidence.ranks}
    fits = vocabularies.following(domain).get("facts", "").split()
    found = sorted(unlike_hosts(known, roles, hosts), key=lambda one: [*fits, one.kind].index(one.kind))
    return tuple(Proof(listed("diagnosis.differs", **one._asdict()), host=one.host) for one in found)[:MOST_DIFFERENCES]
