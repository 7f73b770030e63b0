"""A diagnosis, and the stacks of ranks, as lines."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ascendrun.cli import output as out
from ascendrun.core.events import name_ranks
from ascendrun.core.jobs.reasons import CONFIDENCE
from ascendrun.core.jobs.restart import PastAttempt
from ascendrun.health.diagnosis.render import class_text, who
from ascendrun.health.diagnosis.result import ChainLink, Diagnosis, Proof, Role
from ascendrun.text import Text, language
from ascendrun.text.format import fold_hosts, fold_numbers, label_ranks

if TYPE_CHECKING:
    from ascendrun.cluster import Explanation, JobStacks, StackGroup

COLORS = {"certain": "\x1b[31m", "likely": "\x1b[33m", "unknown": "\x1b[36m"}
CALM = frozenset({"succeeded", "running", "in-progress", "stopped-by-user", "stage-skipped"})
MOST_EVIDENCE, MOST_LINKS, MOST_OUTCOME, MOST_ALTERNATIVES = 5, 6, 3, 3
NAMES_CELLS = 30
EVIDENCE_CELLS = 200
SPOOLED = re.compile(r"/rank-(\d+)\.")
SHARED = re.compile(r"([^/]+)/node-\d+\.")
"""Output of a process that starts the ranks of its node."""
CLEAR_ERROR_S = 0.05
"""Seconds: a smaller error of a time is not shown."""
LABELS = {
    "when": Text("explain.when", "when"),
    "cause": Text("explain.cause", "cause"),
    "class": Text("explain.class", "class"),
    "why": Text("explain.why", "class follows from"),
    "rule": Text("explain.rule-applied", "rule that applied"),
    "caveats": Text("explain.caveats", "caveats"),
    "alternatives": Text("explain.alternatives", "alternatives"),
    "evidence": Text("explain.evidence", "evidence"),
    "followed": Text("explain.followed", "what followed"),
    "anomalies": Text("explain.anomalies", "anomalies"),
    "hint": Text("explain.hint", "hint"),
    "outcome": Text("explain.outcome", "outcome"),
    "attempts": Text("explain.attempts", "attempts"),
    "stacks": Text("explain.stacks", "stacks"),
    "missing": Text("explain.missing", "missing evidence"),
    "consequence": Text("explain.consequence", "consequence"),
    "teardown": Text("explain.teardown", "teardown"),
    "unclear": Text("explain.unclear", "unclear"),
    "initiating": Text("explain.initiating", "first"),
}


def print_explanation(explanation: Explanation, *, color: bool, everything: bool, why: bool = False) -> None:
    """Print it in the language of the process. Text is wrapped; only log lines are truncated, unless `everything`."""
    width = out.terminal_width(None)
    lines, count = explanation_lines(explanation, None if everything else width, everything=everything, why=why)
    found = explanation.diagnosis
    for index, text in enumerate(lines):
        is_summary = color and found.code not in CALM and 2 <= index < 2 + count
        sys.stdout.write(f"{COLORS[found.confidence.value]}{text}\x1b[0m\n" if is_summary else f"{text}\n")


def explanation_lines(
    explanation: Explanation, cells: int | None, *, everything: bool = False, why: bool = False
) -> tuple[list[str], int]:
    """Return the lines, and how many of them from the third on are the summary."""
    found = explanation.diagnosis
    summary = _wrapped(_summary(found), cells, indent=2)
    lines = [_title(explanation), "", *summary, *_fields(found, cells)]
    values = [f"{one.vocabulary} {one.key}: {one.domain} ({one.depth:+d})" for one in found.why if why]
    lines += _section("why", [_cut(value, cells) for value in values], True, 0)
    if why and found.rules:
        *others, applied = found.rules
        rule = Text("explain.rule", "{applied}; before it did not apply: {others}", applied=applied, others=others)
        lines += _section("rule", _indented([rule], cells), True, 0)
    lines += _section("evidence", [_evidence(proof, cells) for proof in found.evidence], everything, MOST_EVIDENCE)
    followed = [link for link in found.chain if link.role is not Role.INITIATING]
    lines += _section("followed", _links(followed, found.labels, cells), everything, MOST_LINKS)
    lines += _section("anomalies", _indented(found.anomalies, cells), everything, MOST_LINKS)
    stacks = [_stack_lines(group, cells) for group in explanation.stacks]
    lines += _section("stacks", stacks, everything, MOST_LINKS)
    lines += _section("attempts", [_past(one) for one in explanation.past_attempts[::-1]], everything, MOST_LINKS)
    hint = _with_job(found.hint, explanation)
    lines += _section("hint", _indented([hint, *_retry(found)] if hint else [], cells), True, 0)
    outcome = [out.headline(str(text)) for text in found.outcome]
    lines += _section("outcome", _indented(outcome, cells), everything, MOST_OUTCOME)
    lines += _section("missing", _indented(found.missing, cells), everything, MOST_OUTCOME)
    return ["\n".join(map(out.sanitise_line, line.split("\n"))) for line in lines], len(summary)


def _title(explanation: Explanation) -> str:
    parts = [out.named(explanation.id, explanation.name), explanation.state]
    if explanation.attempts > 1:
        number, count = explanation.attempt, explanation.attempts
        parts.append(str(Text("explain.attempt", "attempt {number} of {count}", number=number, count=count)))
    return "  ".join(parts)


def _summary(found: Diagnosis) -> str:
    message = out.sanitise(found.message)
    return message if found.code in CALM else f"{message}  [{CONFIDENCE[found.confidence.value]}]"


def _fields(found: Diagnosis, cells: int | None) -> list[str]:
    rows: list[tuple[str, str]] = []
    if found.at_s is not None:
        rows.append(("when", _when(found)))
    if found.cause:
        rows.append(("cause", found.cause))
    where = class_text(found, f"  [{CONFIDENCE[found.reason_grade.value]}]")
    if where is not None:
        rows.append(("class", str(where)))
    if found.caveats:
        rows.append(("caveats", _joined(found.caveats)))
    if found.alternatives:
        texts = [
            out.labelled(who(other.ranks, other.hosts, found.labels), other.message) for other in found.alternatives
        ]
        rows.append(("alternatives", _joined(texts[:MOST_ALTERNATIVES])))
    names = {name: str(LABELS[name]) for name, _ in rows}
    widest = max((out.width_of(name) for name in names.values()), default=0)
    lines: list[str] = []
    for name, value in rows:
        lines += _wrapped(f"  {_pad(names[name], widest)}  {value}", cells, indent=widest + 4)
    return lines


def _joined(texts: Sequence[str | Text]) -> str:
    return ("；" if language() == "zh" else "; ").join(map(str, texts))


def _when(found: Diagnosis) -> str:
    error_s = found.time_error_s or 0.0
    at = _clock(found.at_s)
    if error_s > CLEAR_ERROR_S:
        at = str(Text("explain.error", "{at} (±{error:.1f} s)", at=at, error=error_s))
    if found.lag_s is None:
        return at
    return str(Text("explain.at", "{at}; other ranks {lag} later", at=at, lag=_lag(found.lag_s)))


def _clock(at_s: float | None) -> str:
    """Return the time to the millisecond: related failures occur within one second."""
    return out.describe_time(at_s) if at_s is None else f"{out.describe_time(at_s)}.{int(at_s % 1 * 1000):03d}"


def _lag(lag_s: float | None) -> str:
    if lag_s is None:
        return "-"
    return f"{lag_s * 1000:.0f} ms" if lag_s < 1 else f"{lag_s:.1f} s" if lag_s < 60 else out.describe_seconds(lag_s)


def _evidence(proof: Proof, cells: int | None) -> str:
    place = "" if proof.file is None else proof.file if proof.offset is None else f"{proof.file}:{proof.offset}"
    line = out.headline(str(proof.text))
    line = line if cells is None else out.cut(line, EVIDENCE_CELLS)
    return _cut(f"{place}  {line}" if place else line, cells)


def _links(links: Sequence[ChainLink], labels: Mapping[int, str], cells: int | None) -> list[str]:
    rows = []
    for link in links:
        name = "unclear" if link.role is Role.UNKNOWN else link.role.value
        if not link.ranks:
            ranks = fold_hosts(link.hosts)
        elif len(link.ranks) == 1:
            ranks = f"rank {label_ranks(link.ranks, labels)}"
        else:
            ranks = str(Text("explain.ranks", "ranks {ranks}", ranks=label_ranks(link.ranks, labels)))
        lag = "" if link.lag_s is None else f"  {Text('explain.later', '{lag} later', lag=_lag(link.lag_s))}"
        rows.append((str(LABELS[name]), ranks, out.sanitise_line(link.message) + lag))
    widths = [max((out.width_of(row[place]) for row in rows), default=0) for place in (0, 1)]
    widths[1] = min(widths[1], NAMES_CELLS)
    return [_cut("  ".join((_pad(role, widths[0]), _pad(ranks, widths[1]), end)), cells) for role, ranks, end in rows]


def _pad(text: str, cells: int) -> str:
    return text + " " * (cells - out.width_of(text))


def _cut(text: str, cells: int | None) -> str:
    return text if cells is None else out.cut(text, cells - 2)


def _wrapped(text: str, cells: int | None, *, indent: int) -> list[str]:
    return [text] if cells is None else out.wrap(text, cells, indent=indent)


def _indented(texts: Sequence[str | Text], cells: int | None) -> list[str]:
    """Return the texts of a section, one per item, over several lines if necessary."""
    return ["\n  ".join(_wrapped(str(text), None if cells is None else cells - 2, indent=2)) for text in texts]


def _past(one: PastAttempt) -> str:
    """Return an attempt that was followed by another: its nodes, duration, newest step and failure."""
    text = Text(
        "explain.past-attempt",
        "attempt {number} on {hosts:hosts}: {duration}, step {step}, {failure}",
        number=one.number,
        hosts=one.hosts,
        duration="-" if one.started_at_s is None else out.describe_seconds(one.ended_at_s - one.started_at_s),
        step="-" if one.last_step is None else one.last_step,
        failure=out.describe_attempt_failure(one.failure),
    )
    return str(text)


def _retry(found: Diagnosis) -> list[str]:
    if found.code in CALM:
        return []
    if found.retry == "same":
        return [str(Text("explain.retry-same", "a retry without changes may succeed"))]
    if found.retry == "exclude":
        return [str(Text("explain.retry-exclude", "retry without {hosts:hosts}", hosts=list(found.hosts) or "?"))]
    if found.retry == "never":
        return [str(Text("explain.retry-never", "will fail again until this is fixed"))]
    return []


def _section(name: str, rows: Sequence[str], everything: bool, most: int) -> list[str]:
    if not rows:
        return []
    shown = list(rows) if everything else list(rows[:most])
    if len(shown) < len(rows):
        shown.append(str(Text("explain.more", "{count} more (--all shows them)", count=len(rows) - len(shown))))
    return ["", str(LABELS[name]), *(f"  {row}" for row in shown)]


def _with_job(hint: str, explanation: Explanation) -> str:
    """Return the hint with the job and its rank in its commands. Under another launcher a rank's lines are in the file
    of its node's process."""
    files = (SPOOLED.search(proof.file or "") for proof in explanation.diagnosis.evidence[:1])
    ranks = tuple(int(match.group(1)) for match in files if match is not None) or explanation.diagnosis.ranks
    of_node = next((SHARED.match(proof.file or "") for proof in explanation.diagnosis.evidence[:1]), None)
    if of_node is not None:
        hint = hint.replace("--rank R", f"--hosts {of_node[1]}")
    text = hint.replace("JOB.yaml", "\0").replace("JOB", explanation.id).replace("\0", "JOB.yaml")
    return text.replace("--rank R", f"--rank {fold_numbers(ranks)}") if ranks else text.replace(" --rank R", "")


FRAMES_SHOWN = 8
FRAMES_IN_EXPLAIN = 3


def print_stacks(stacks: JobStacks, *, everything: bool) -> None:
    """Print the groups, innermost function first; at most FRAMES_SHOWN frames unless `everything`."""
    lines: list[str] = []
    if stacks.at_s is not None:
        taken = Text("stacks.taken", "attempt {number}, {at}", number=stacks.attempt, at=out.describe_time(stacks.at_s))
        lines += ["", str(taken)]
    for group in stacks.groups:
        lines += ["", str(_stack_title(group))]
        for name, frames in group.threads or (("", group.frames),):
            lines += [f"  {out.sanitise_line(name)}"] if name else []
            shown = frames if everything or group.threads else frames[:FRAMES_SHOWN]
            lines += [f"    {out.sanitise_line(frame)}" for frame in shown]
            lines += ["    …"] if len(shown) < len(frames) else []
        if not group.frames and not group.threads:
            channel = out.sanitise_line(group.wait_channel) or "-"
            why = Text("stacks.no-frames", "no Python stack (kernel function: {channel})", channel=channel)
            lines.append(f"    {why}")
    lines += [out.labelled(host, problem) for host, problem in stacks.problems]
    print("\n".join(lines[1:] if lines[:1] == [""] else lines))


def _stack_title(group: StackGroup) -> Text:
    who = name_ranks(group.hosts, group.ranks)
    title = Text("stacks.group", "{who}: state {state}", who=who, state=group.state)
    if not group.state:
        title = Text("stacks.at-end", "{who}: printed at SIGABRT", who=who)
    if group.is_awaited:
        title = Text("stacks.awaited", "{group}; the other ranks wait for it", group=title)
    return title


def _stack_lines(group: StackGroup, cells: int | None) -> str:
    """Return a group of ranks with their innermost frames."""
    frames = [f"    {_cut(out.sanitise_line(frame), cells)}" for frame in group.frames[:FRAMES_IN_EXPLAIN]]
    return "\n".join([_cut(str(_stack_title(group)), cells), *frames])
