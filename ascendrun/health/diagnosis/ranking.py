"""Choice of the first failure, its certainty, and the role of every rank's end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ascendrun.ascend.peer_messages import LOST
from ascendrun.ascend.signatures import signature_of
from ascendrun.ascend.vocabularies import alike, cann_detail, class_of, is_open, phase_of, says, wording
from ascendrun.health.cut_frames import cut_in
from ascendrun.health.diagnosis import result
from ascendrun.health.diagnosis.candidates import candidates_of, joined, merged, strongest_symptom
from ascendrun.health.diagnosis.classes import classified, code_value
from ascendrun.health.diagnosis.evidence import Evidence, Moment, earliest, surely_before
from ascendrun.health.diagnosis.lines.launchers import LAUNCHERS
from ascendrun.health.diagnosis.rank_timelines import RankTimeline
from ascendrun.health.diagnosis.render import caveat
from ascendrun.health.diagnosis.result import ChainLink, Confidence, Diagnosis, Proof, Role, Suspect
from ascendrun.health.diagnosis.wait_rules import FEW_SHARE, blame_waiting
from ascendrun.health.hints import named_in
from ascendrun.health.output_facts import facts_in
from ascendrun.health.package_pairs import pair_in
from ascendrun.health.tool_errors import advised_in, innermost
from ascendrun.health.wait_limits import call_in, limit_in, peers_in, report_of
from ascendrun.health.what_differs import crowd_in, unlike_in
from ascendrun.health.whose_code import packages_in
from ascendrun.text import Text
from ascendrun.text.format import fold_hosts, fold_numbers, format_bytes

CERTAIN_FROM = 60
"""A weaker reason is never reported as certain."""
CLEARLY_S, AT_ONCE_S, LONG_MS = 1.0, 10.0, 60_000
MOST_DETAILS, MOST_WAITING = 3, 4
ROOM_BYTES = 2**30
MUTE_S = 0.3
"""Output is read in pieces: a line may have been written this long before it was received."""


def decide(evidence: Evidence, timelines: Sequence[RankTimeline]) -> Diagnosis:
    """Diagnose an attempt that failed."""
    candidates = [one for one in candidates_of(evidence, timelines) if not _came_with_limit(one, timelines)]
    winner = choose(candidates, timelines)
    is_open = winner is None or not winner.is_credible
    if winner is None or is_open or ("only-kernel" in winner.caveats and not winner.ranks):
        waiting = blame_waiting(evidence, timelines)
        if waiting is not None and is_open and (winner is None or waiting.strength > winner.strength):
            candidates.append(waiting)
            winner = waiting
        elif waiting is not None and winner is not None and waiting.ranks and waiting.is_credible and not is_open:
            located = _located(winner, waiting, timelines)
            candidates = [located, *(one for one in candidates if one is not winner or located is waiting)]
            winner = located
    winner = _with_equal_ends(winner or strongest_symptom(timelines) or _unknown(evidence, timelines), timelines)
    value, caveats = code_value(winner.code), caveats_of(winner, candidates, evidence, timelines)
    chain = make_chain(winner, timelines)
    lags_s = [link.lag_s for link in chain if link.role is Role.CONSEQUENCE and link.lag_s is not None]
    details, told = _told_of(winner, evidence, timelines)
    given = _given_of(winner, evidence, timelines)
    waited_in = [Proof(text) for text in report_of(given) if not winner.strength]
    places = ((one.host, what) for one in evidence.hosts for what in one.missing)
    missing = (Text("cli.at", "{place}: {message}", place=host, message=what) for host, what in places)
    found = Diagnosis(
        code=winner.code,
        confidence=Confidence.UNKNOWN if not winner.strength else Confidence.LIKELY if caveats else Confidence.CERTAIN,
        ranks=winner.ranks,
        hosts=winner.hosts,
        values={**winner.values, **told},
        at_s=winner.at.at_s if winner.at else None,
        time_error_s=winner.at.error_s if winner.at else None,
        lag_s=min(lags_s, default=None),
        evidence=(*waited_in, *winner.proofs, *details),
        chain=chain,
        caveats=tuple(map(caveat, caveats)),
        alternatives=tuple(
            ChainLink(Role.UNKNOWN, one.code, one.ranks, one.hosts, one.values, at_s=one.at.at_s if one.at else None)
            for one in _alternatives(winner, candidates)
        ),
        missing=(*evidence.missing, *missing),
        domain="network" if told.get("waited") == LOST else "" if value is None else value.domain,
        rules=winner.rules,
        given=given,
    )
    return classified(found, winner, evidence, timelines) if winner.strength else found


def _with_equal_ends(winner: Suspect, timelines: Sequence[RankTimeline]) -> Suspect:
    """Add the ranks that failed in the same way, although the stop of their host came first: each printed the line of
    the winner, and no signal and no success ended it. Not if a rule chose among ranks that print the same."""

    def line_of(one: Suspect | None) -> str | None:
        return result.normalised(one.proofs[0].line) if one is not None and one.proofs else None

    said = line_of(winner)
    if winner.rules or said is None:
        return winner
    ends = [one for one in timelines if one.rank.code != 0 and one.rank.signal is None and one.waited is None]
    same = [one.rank for one in ends if line_of(one.own) == said]
    ranks, hosts = {*winner.ranks, *(rank.rank for rank in same)}, {*winner.hosts, *(rank.host for rank in same)}
    return replace(winner, ranks=tuple(sorted(ranks)), hosts=tuple(sorted(hosts)))


def _told_of(
    winner: Suspect, evidence: Evidence, timelines: Sequence[RankTimeline]
) -> tuple[Sequence[Proof], Mapping[str, str]]:
    """Return what the first rank logged before a general exception, or before an end without one; and as values what
    its message advises, what CANN reports, else the first of these, how most ranks waited, and in which
    phase."""
    first = [one for one in timelines if one.rank.rank in winner.ranks[:1]]
    said = [text for one in first for text in one.said]
    known = [proof.line for proof in winner.proofs]
    is_general = winner.code == "exception" and class_of(str(winner.values.get("type", ""))).depth < 0
    logged = [(one, line) for one in first for line in one.details[:MOST_DETAILS] if line.text.strip() not in known]
    is_plain = is_general or winner.code in alike("by-exit-code")
    proofs = [result.proof_of(evidence, line, one.rank) for one, line in logged if is_plain]
    coded = [*known, *said, *(line.text for one in first for line in one.plog)]
    lines = [*(proof.line for proof in proofs), *coded]
    raised = first if winner.code == "exception" else [one for one in timelines if one.waited and not winner.strength]
    inner = wording("last-error").search("\n".join(text for one in raised for text in one.said))
    detail = cann_detail(lines) or (inner["text"] if inner is not None else lines[0] if proofs else "")
    waits = Counter(one.waited for one in timelines if one.waited and (winner.rules or not winner.strength))
    waited = next((kind for kind, _ in waits.most_common(1) if kind != LOST or not winner.strength), "")
    doing = phase_of("\n".join(one.frames for one in timelines if one.waited)) if waited else ""
    row, printed = signature_of(winner.code), [line for one in first for line in (*one.rank.lines, *one.plog)]
    is_stock = is_open(winner.code) or (row is not None and (row.family, row.role) == ("cann", result.SYMPTOM))
    steps = (wording("vendor-solution").search(line.text) for line in printed if is_stock and not winner.rules)
    solution = next((match["text"] for match in steps if match is not None), "")
    inner_line = innermost((*known, *said), [line.text for line in printed])
    shown = {"last" if "last" in winner.values else "message": inner_line, "waited": waited, "doing": doing}
    found = {"advice": advised_in(said or known * is_plain), "solution": solution, "detail": detail, **shown}
    return proofs, {key: text for key, text in found.items() if text}


def _given_of(winner: Suspect, evidence: Evidence, timelines: Sequence[RankTimeline]) -> Mapping[str, str]:
    """Return what a hint may name: of the job, the first rank, its message, and the short variables of its host."""
    first = next((one for one in timelines if one.rank.rank in winner.ranks and one.rank.rank >= 0), None)
    own = () if first is None else first.said or tuple(line.text for line in first.details)
    told = own or tuple(proof.text for proof in winner.proofs if isinstance(proof.text, str))
    last = None if first is None or first.chain is None else first.chain.final
    host, frames = evidence.host(winner.hosts[0]) if winner.hosts else None, first.frames if first else ""
    facts, free = ({}, 0) if host is None else (host.facts, host.disk_free_bytes or 0)
    where, versions, environ = str(winner.values.get("where", "?")), facts.get("packages", {}), facts.get("environ")
    waiting = [one for one in timelines if one.waited][:MOST_WAITING]
    messages = [(one.rank.rank, message) for one in timelines for message in one.messages]
    reports = [*(proof.line for proof in winner.proofs), *(text for one in waiting for text in one.said)]
    reports += [one.line.text for _, one in messages if "ms" in one.values and not winner.strength][:1]
    peers, here = peers_in(messages), [one for one in evidence.ranks if one.host in winner.hosts]
    return {
        **call_in(messages, [one.rank.rank for one in timelines]),
        **unlike_in(messages, len(timelines))[0],
        **(cut_in(winner.ranks, timelines) if winner.code in alike("by-exit-code") else {}),
        **named_in(told, {"accelerator": evidence.device_type, "launcher": evidence.launcher}, environ),
        **packages_in(told, last, frames, versions, where),
        **crowd_in("\n".join(told), first.rank if first else None, here),
        **facts_in(told, [line.text for line in first.rank.lines] if first else (), len(here)),
        **pair_in(told, frames, versions, where, last),
        **limit_in([*told, *reports], "\n".join(one.frames for one in waiting), environ),
        "JOB": evidence.job,
        "R": "" if first is None else str(first.rank.rank),
        "N": "" if first is None or first.rank.device is None else str(first.rank.device),
        "HOST": fold_hosts(winner.hosts),
        "FREE": format_bytes(free) if free > ROOM_BYTES and says("\n".join(told), "no-space") else "",
        "PEERS": "" if winner.ranks else peers,
        "LATE": f"rank{'s' * (len(winner.ranks) > 1)} {fold_numbers(winner.ranks)}"
        if winner.rules and winner.ranks
        else peers,
    }


def choose(candidates: Sequence[Suspect], timelines: Sequence[RankTimeline]) -> Suspect | None:
    """Return the strongest candidate that no credible other one certainly preceded; of equals, the earliest. A rank
    that ended without output before all others had a reason is not a consequence of them, nor are the few that did so
    with another code."""
    credible = [one for one in candidates if one.is_credible] or list(candidates)
    ends = [one for one in candidates if one.code in alike("by-exit-code") and one not in credible]
    before = [one for one in ends if all(surely_before(one.at, other.at, by_s=MUTE_S) for other in credible)]
    mute = [one for one in ends if one in before or _is_outlier(one, credible, timelines)]
    if mute:
        return min(mute, key=lambda one: one.at_s)
    certain = [one for one in credible if one.sure or one.is_vague]  # others may have been caught, or be ambiguous
    first = [
        one for one in credible if not any(surely_before(other.at, one.at) for other in certain if other is not one)
    ]
    return max(first or credible, key=lambda one: (one.strength, -one.at_s), default=None)


def _came_with_limit(one: Suspect, timelines: Sequence[RankTimeline]) -> bool:
    """Return whether an end without a reason came when the wait of others reached its limit: they waited before it."""
    late = [each for each in timelines if any(int(line.values.get("ms", 0)) > LONG_MS for line in each.messages)]
    return (
        one.is_vague and bool(late) and not any(surely_before(one.at, each.waited_at, by_s=AT_ONCE_S) for each in late)
    )


def _is_outlier(mute: Suspect, credible: Sequence[Suspect], timelines: Sequence[RankTimeline]) -> bool:
    """Return whether the few ranks ended with a different exit code, and all others raised the same exception: the few
    were first, unless the clocks contradict."""
    if len(credible) != 1 or credible[0].code != "exception" or surely_before(credible[0].at, mute.at):
        return False
    codes = {str(timeline.rank.code) for timeline in timelines if timeline.rank.rank in credible[0].ranks}
    few, many = len(mute.ranks), len(credible[0].ranks)
    return 4 * few <= many and few + many == len(timelines) and mute.values.get("code") not in codes


def _located(kernel: Suspect, waiting: Suspect, timelines: Sequence[RankTimeline]) -> Suspect:
    """Join a kernel message and the rank that others waited for, if on one host; of several hosts, choose the one
    with the kernel message; otherwise return `waiting`."""
    own, theirs = set(kernel.hosts), set(waiting.hosts)
    if not (theirs <= own or (waiting.code in alike("several-hosts") and own < theirs)):
        return waiting
    there = {timeline.rank.rank for timeline in timelines if timeline.rank.host in own}
    return joined(kernel, waiting, there & {*waiting.ranks})


def caveats_of(
    winner: Suspect, candidates: Sequence[Suspect], evidence: Evidence, timelines: Sequence[RankTimeline]
) -> tuple[str, ...]:
    """Return the names of the reasons why it is not certain; () for none, also for one of no weight."""
    if not winner.strength:
        return ()
    inside = {timeline.rank.rank for timeline in timelines if timeline.rank.inner}
    caveats = {
        **dict.fromkeys(winner.caveats, True),
        "unsure": not winner.sure,
        "killer-unknown": winner.code in ("killed", "terminated", "interrupted"),
        "no-error-output": winner.code in ("exit-code", "crash") and winner.values.get("last") == "-",
    }
    caveats["weak"] = winner.strength < CERTAIN_FROM and not any(caveats.values())
    caveats["inner-unknown"] = evidence.launcher in LAUNCHERS and not inside.issuperset(winner.ranks)
    caveats["alternatives"] = bool(_alternatives(winner, candidates))
    caveats["not-all-seen"] = _unseen(winner, evidence, timelines)
    caveats["unexplained"] = _unexplained(winner, timelines)
    caveats["torn"] = any(one.is_torn for one in timelines if one.rank.rank in winner.ranks)
    caveats["no-exception"] = winner.code == "exit-code" and not (caveats["torn"] or caveats["no-error-output"])
    return tuple(name for name, holds in caveats.items() if holds)


def _alternatives(winner: Suspect, candidates: Sequence[Suspect]) -> tuple[Suspect, ...]:
    """Return other possible first reasons: all credible ones, and weak ones that were not clearly later."""
    return tuple(
        one
        for one in candidates
        if one is not winner
        and not (one.ranks and set(one.ranks) <= set(winner.ranks))
        and (one.is_credible or not surely_before(winner.at, one.at, by_s=CLEARLY_S))
    )


def _unseen(winner: Suspect, evidence: Evidence, timelines: Sequence[RankTimeline]) -> bool:
    """Return whether ranks other than the winner's have neither an end nor output."""
    ranks = [timeline.rank for timeline in timelines]
    lost = evidence.silent_hosts
    over = {host.host for host in evidence.hosts if host.has_ended}
    known = {rank.rank for rank in ranks if rank.has_ended or rank.start_failed is not None}
    known |= {rank.rank for rank in ranks if rank.lines and rank.host not in {*lost, *over}}
    expected = {rank.rank for rank in ranks if rank.host in lost and not rank.has_ended}
    if not any(rank.inner for rank in ranks):
        expected |= set(range(evidence.world_size))
    return bool(expected - known - set(winner.ranks))


def _unexplained(winner: Suspect, timelines: Sequence[RankTimeline]) -> bool:
    """Return whether a rank that waited ended clearly before the first failure, or one failed by itself, not clearly
    later, without output that shows a consequence."""
    others = [one for one in timelines if one.rank.rank not in winner.ranks]
    waited = [one.end for one in others if one.waited is not None and winner.sure]
    # its own reason makes a rank an alternative, messages about others a consequence
    bare = [one.end for one in others if one.waited is None and one.own is None and one.rank.has_failed]
    is_before = any(surely_before(end, winner.at, by_s=CLEARLY_S) for end in waited)
    return is_before or not all(surely_before(winner.at, end, by_s=CLEARLY_S) for end in bare)


def make_chain(winner: Suspect, timelines: Sequence[RankTimeline]) -> tuple[ChainLink, ...]:
    """Return every rank with the role of its end, grouped: first failure, consequences, then teardown."""
    groups: dict[tuple[Role, str], list[RankTimeline]] = {}
    for timeline in timelines:
        groups.setdefault(_role_of(winner, timeline), []).append(timeline)
    links = [_link(winner, role, code, group) for (role, code), group in groups.items()]
    if not winner.ranks and winner.hosts:
        links.append(ChainLink(Role.INITIATING, winner.code, (), winner.hosts, winner.values))
    order = list(Role)
    return tuple(
        sorted(links, key=lambda link: (order.index(link.role), link.at_s is None, link.at_s or 0.0, link.ranks))
    )


def _role_of(winner: Suspect, timeline: RankTimeline) -> tuple[Role, str]:
    rank, own = timeline.rank, timeline.own
    if rank.rank in winner.ranks:
        return Role.INITIATING, winner.code
    if timeline.waited is not None:
        return Role.CONSEQUENCE, f"waited-{timeline.waited}"
    if rank.stopped:
        return Role.TEARDOWN, "stopped-with-it"
    if own is not None and (own.role != result.CONSEQUENCE or rank.code != 0):
        is_other = own.role == result.CAUSE and own.strength >= result.CREDIBLE and not surely_before(winner.at, own.at)
        return (Role.UNKNOWN if is_other else Role.CONSEQUENCE), own.code
    if rank.code == 0:
        return Role.TEARDOWN, "ended-well"
    return (Role.CONSEQUENCE, "failed-after") if rank.has_ended else (Role.UNKNOWN, "no-record")


def _link(winner: Suspect, role: Role, code: str, timelines: Sequence[RankTimeline]) -> ChainLink:
    when = winner.at if role is Role.INITIATING and winner.at else earliest(one.seen_at for one in timelines)
    ranks, hosts = sorted(one.rank.rank for one in timelines), sorted({one.rank.host for one in timelines})
    values = next((one.own.values for one in timelines if one.own is not None and one.own.code == code), {})
    at_s, lag_s = when.at_s if when else None, _lag_between(winner.at, when, role)
    return ChainLink(role, code, tuple(ranks), tuple(hosts), values, at_s, lag_s)


def _lag_between(first: Moment | None, then: Moment | None, role: Role) -> float | None:
    """Return seconds after the first failure; None if the clocks are too uncertain."""
    if role is Role.INITIATING or first is None or then is None:
        return None
    error_s = 0.0 if first.host == then.host else first.error_s + then.error_s
    lag_s = then.at_s - first.at_s
    return lag_s if lag_s >= 0 and error_s <= max(1.0, 0.5 * lag_s) else None


def _unknown(evidence: Evidence, timelines: Sequence[RankTimeline]) -> Suspect:
    """Return the end of the few ranks that were not stopped and waited for none; else that ranks lost others, without a
    reason of any, of weight 0."""
    failed = [one for one in timelines if one.rank.has_failed]
    ends = [end for one in failed for end in one.indicators if end.is_vague and one.waited is None]
    if ends and len(failed) <= max(1, FEW_SHARE * len(timelines)):
        return merged(ends)
    suffered = [timeline for timeline in timelines if timeline.waited is not None]
    proofs = (proof for one in suffered[:2] for indicator in one.indicators[:1] for proof in indicator.proofs[:1])
    code, at = "peer-lost" if suffered else "unknown", earliest(one.seen_at for one in suffered)
    return Suspect(code, 0, at=at, proofs=tuple(proofs), values={"reason": evidence.reason or ""})
