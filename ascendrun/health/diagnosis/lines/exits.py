"""The end of a process: its exit code, its signal, and the kernel's messages."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile

from ascendrun.ascend.vocabularies import alike, says, strength_of, tells_of_memory, wording
from ascendrun.core.jobfile.launchers import RAY
from ascendrun.health.cut_frames import last_of
from ascendrun.health.diagnosis.evidence import Evidence, Line, RankEvidence, moment
from ascendrun.health.diagnosis.result import CAUSE, TEARDOWN, Proof, Suspect, proof_of
from ascendrun.text import Text, listed
from ascendrun.text.format import numbers_in

RAY_ENDS = {91: "ray-gcs-died", 92: "ray-raylet-died", 93: "ray-ended", 94: "ray-late"}
"""Exit codes of a node of a Ray cluster, those of node/ray_node.py; a test compares them."""
LOW_MEMORY_SHARE = 0.03
"""A host with a lower fraction of free memory counts as out of memory."""


def signal_name(number: int) -> str:
    return next((one.name for one in signal.Signals if one == number), f"signal {number}")


def signal_of(rank: RankEvidence) -> int | None:
    """Return the signal that killed it; a shell reports 128 + number, a launcher its negative: 256 - number."""
    if rank.signal is not None:
        return rank.signal
    code = rank.code or 0
    if code < 0:
        return -code
    number = 256 - code if 240 < code < 253 else code - 128
    return number if number <= 31 and number in set(signal.Signals) else None


def is_signal(rank: RankEvidence, name: str) -> bool:
    """Return whether a signal of this group ended it."""
    return signal_name(signal_of(rank) or 0) in alike(name)


def signal_to_launcher(lines: Sequence[Line]) -> int | None:
    """Return the signal that torchrun (exit code 1) reports in its last lines; None: not reported."""
    hits = (wording("signal-to-launcher").search(line.text) for line in reversed(lines[-LAST_LINES:]))
    found = next(filter(None, hits), None)
    number = None if found is None else found["number"] or found["code"]
    return int(number) if number else None if found is None else getattr(signal, found["name"], None)


def named_pids(lines: Sequence[Line] | None, *wordings: str) -> Mapping[int, Line]:
    """Return the pids that lines of these wordings name, with the first line that does."""
    found: dict[int, Line] = {}
    for pattern in map(wording, wordings):
        for line in lines or ():
            match = pattern.search(line.text)
            for pid in numbers_in(next(filter(None, match.groups()))) if match is not None else ():
                found.setdefault(pid, line)
    return found


def exit_indicator(evidence: Evidence, rank: RankEvidence, *, missed_a_child: bool) -> Suspect | None:
    """Return the end of the process as a reason; None: it exited 0, or is running. `missed_a_child`: its exception
    reports that."""
    when = moment(evidence, rank.host, rank.exited_at_s)
    why = rank.start_failed or describe_end(rank)
    proof = Proof(why, rank.rank, rank.host, at_s=when.at_s if when else None)
    made = Suspect("start-failed", strength_of("start-failed"), (rank.rank,), (rank.host,), when, (proof,), key="start")
    if rank.start_failed is not None:
        return replace(made, values={"message": why if isinstance(why, Text) else why.strip()[:300]})
    killed = _killed_for_memory(evidence, rank, missed_a_child=missed_a_child)
    if killed is not None:
        return killed
    ended = RAY_ENDS.get(rank.code or 0) if evidence.launcher == RAY and rank.rank < 0 else None
    if ended is not None:
        notes = tuple(proof_of(evidence, line, rank) for line in rank.lines if line.text.startswith("(ray) "))
        last = notes[-2:] or _last_output(evidence, rank)
        shown = {"last": _sentence(last) if last else "-"}
        return replace(made, code=ended, strength=strength_of("ray"), proofs=(proof, *last), values=shown, key=ended)
    if not rank.has_failed and not (rank.stopped and is_signal(rank, "crashes")):
        return None
    number = signal_of(rank) or (None if rank.stopped or not rank.code else signal_to_launcher(rank.lines))
    name = "" if number is None else signal_name(number)
    values = {"signal": name} if name else {"code": str(rank.code)}
    others = {"": "exit-code", "SIGKILL": "killed", "SIGINT": "interrupted"}
    code = "crash" if name in alike("crashes") else others.get(name, "terminated")
    last = _last_output(evidence, rank) if code in ("exit-code", "crash") else ()
    is_error = code == "exit-code" and bool(last) and says(last[-1].line, "logged-error")
    code = "error-line" if is_error and not says(last[-1].line, "points-elsewhere", "part-of-traceback") else code
    crashes = named_pids(evidence.host(rank.host).dmesg, "crashed") if code == "crash" else {}
    kernel = tuple(proof_of(evidence, line, rank) for pid, line in crashes.items() if pid == rank.pid)
    return replace(
        made,
        code=code,
        strength=strength_of("abort" if number == signal.SIGABRT else code),  # watchdogs and C++ abort after an error
        proofs=(proof, *kernel, *last),
        values={**values, "last": _sentence(last or kernel) if last or kernel else "-"},
        role=TEARDOWN if rank.stopped else CAUSE,
        key=name or str(rank.code),
        sure=code == "killed",
        is_vague=code in alike("vague-ends"),
    )


LAST_LINES, LAST_OUTPUT_S = 25, 30.0


def _last_output(evidence: Evidence, rank: RankEvidence) -> tuple[Proof, ...]:
    """Return, of its last lines, the last error with the line before it, or with the logged errors just before it;
    otherwise the last lines of standard error. Warnings do not count."""
    errors, prints = (last_of(rank.lines, stream, most) for stream, most in (("err", LAST_LINES), ("out", 5)))
    last_s = max((line.at_s for line in (*prints, *errors) if line.at_s is not None), default=0.0)
    recent = [line for line in (*prints, *errors) if line.at_s is None or last_s - line.at_s <= LAST_OUTPUT_S]
    stems = [line for line in recent if says(line.text, "error-stem") and not says(line.text, "part-of-traceback")]
    decisive = [line for line in stems if not says(line.text, "points-elsewhere")] or stems
    in_a_row = [*takewhile(lambda line: says(line.text, "logged-error"), reversed(decisive))][2::-1]
    chosen = in_a_row if len(in_a_row) > 1 else [*errors[-2:-1], decisive[-1]] if decisive else errors[-2:]
    return tuple(proof_of(evidence, line, rank) for line in chosen)


def _sentence(last: Sequence[Proof]) -> str:
    """Return the first of consecutive errors, which has the reason; else the last line."""
    line = last[0 if all(says(proof.line, "logged-error") for proof in last) else -1].line
    return wording("log-header").sub("", line)[:200]


def describe_end(rank: RankEvidence) -> Text:
    """Return a text such as "exited with code 1", "was killed by SIGKILL"."""
    number = signal_of(rank)
    named = {} if number is None else {"signal": signal_name(number)}
    key = "ended-by" if rank.signal is not None else "exited-with-signal" if named else "exited"
    end = listed(f"diagnosis.{key}", code=rank.code, **named)
    return listed("diagnosis.after-stop", end=end) if rank.stopped else end


KILLED_BEFORE_S, KILLED_AFTER_S = 120.0, 10.0
"""Around the end of a rank: a process that the kernel killed then may have been one of its own."""


def _killed_for_memory(evidence: Evidence, rank: RankEvidence, *, missed_a_child: bool) -> Suspect | None:
    """Decide by kernel messages with its pid or a child's pid; otherwise by circumstances."""
    host, end_s = evidence.host(rank.host), rank.exited_at_s
    dead, is_killed = named_pids(host.dmesg, "killed-for-memory"), signal_of(rank) == signal.SIGKILL
    may_be = is_killed or not rank.has_ended  # in a container the pid may be of another process
    if rank.pid is not None and rank.pid in dead and may_be:
        return _oom(evidence, rank, [dead[rank.pid]], pid=rank.pid, sure=rank.has_ended)
    for pid, line in named_pids(rank.lines, "worker-lost", *["child-killed"] * may_be).items():
        if pid in dead:
            found = _oom(evidence, rank, [dead[pid], line], pid=pid, sure=True)
            return replace(found, at=moment(evidence, rank.host, line.at_s) or found.at)
    told = [line for line in rank.lines[-LAST_LINES:] if is_killed and not rank.stopped and tells_of_memory(line.text)]
    if told:
        found = _oom(evidence, rank, told[:1], pid=rank.pid, sure=True)
        return replace(found, values={**found.values, "last": told[0].text.strip()[:200]})
    ours = {one.pid for one in evidence.ranks_of(rank.host)}
    strangers = {pid: line.at_s for pid, line in dead.items() if pid not in ours}
    since_s = {pid: 0.0 if at_s is None or end_s is None else at_s - end_s for pid, at_s in strangers.items()}
    others = [pid for pid, time_s in since_s.items() if -KILLED_BEFORE_S < time_s < KILLED_AFTER_S][-1:]
    found = _oom(evidence, rank, [dead[pid] for pid in others], pid=others[0] if others else rank.pid, sure=False)
    free, total = host.memory_free_bytes, host.memory_total_bytes
    if missed_a_child and others and rank.has_failed:
        return replace(found, strength=strength_of("child-oom"))
    if is_killed and not rank.stopped and free is not None and total is not None and free < total * LOW_MEMORY_SHARE:
        low = Proof(listed("diagnosis.low-memory", free=free, total=total), host=host.host)
        return replace(found, proofs=(*found.proofs, low))
    return found if is_killed and not rank.stopped and others else None


def _oom(evidence: Evidence, rank: RankEvidence, lines: Sequence[Line], *, pid: int | None, sure: bool) -> Suspect:
    when, values = moment(evidence, rank.host, rank.exited_at_s), {"pid": "?" if pid is None else str(pid)}
    strength = strength_of("host-oom" if sure else "host-oom-likely")
    proofs = tuple(proof_of(evidence, line, rank) for line in lines)
    return Suspect("host-oom", strength, (rank.rank,), (rank.host,), when, proofs, values, sure, key=rank.host)
