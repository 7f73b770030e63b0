"""A diagnosis on one screen: the verdict, when, the evidence with its places, what followed, the way out."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

from ascendrun.cli.output import cut, describe_seconds, describe_time, terminal_width, width_of
from ascendrun.cli.sanitise import headline, sanitise, sanitise_line
from ascendrun.core.logs.log_lines import fold_ranks
from ascendrun.core.names import fold_names
from ascendrun.health.diagnosis.render import label, texts, who
from ascendrun.health.diagnosis.result import Role

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ascendrun.health.diagnosis.result import ChainLink, Diagnosis, Proof
    from ascendrun.query.explain import Explanation

COLORS = {"certain": "\x1b[31m", "likely": "\x1b[33m", "not known": "\x1b[36m"}
CALM = frozenset({"succeeded", "running", "on-its-way", "stopped-by-user", "stage-called-off"})
MOST_PROOFS, MOST_LINKS, MOST_DECIDED = 5, 6, 3
NAMES_CELLS = 30
PROOF_CELLS = 200
SPOOLED = re.compile(r"/rank-(\d+)\.")
MOST_RIVALS = 3
CLEAR_ERROR_S = 0.05
"""A smaller error of a time is not worth the reader's eyes."""


def print_explanation(explanation: Explanation, *, lang: str, color: bool, everything: bool) -> None:
    found = explanation.diagnosis
    width = None if everything else terminal_width(None)
    lines = [_title(explanation, lang), "", _verdict(found, lang, color=color)]
    lines += _fields(found, lang)
    proofs = [_proof(proof, cells=None if everything else PROOF_CELLS) for proof in found.proofs]
    lines += _section("evidence", proofs, lang, everything, MOST_PROOFS)
    followed = [link for link in found.chain if link.role is not Role.INITIATING]
    lines += _section("chain", _links(followed, lang), lang, everything, MOST_LINKS)
    lines += _section("odd", list(found.odd), lang, everything, MOST_LINKS)
    advice = _with_job(found.advice, explanation)
    lines += _section("advice", [advice, *_again(found, lang)] if advice else [], lang, True, 0)
    lines += _section("decided", [headline(text) for text in found.decided], lang, everything, MOST_DECIDED)
    lines += _section("missing", list(found.missing), lang, everything, MOST_DECIDED)
    for line in lines:
        for row in line.split("\n"):
            text = row if "\x1b" in line else sanitise_line(row)
            sys.stdout.write((text if width is None or "\x1b" in line else cut(text, width)) + "\n")


def _title(explanation: Explanation, lang: str) -> str:
    parts = [f"{explanation.id} ({explanation.name})", explanation.state]
    if explanation.attempts > 1:
        parts.append(f"{label('attempt', lang)} {explanation.attempt}/{explanation.attempts}")
    return "  ".join(parts)


def _verdict(found: Diagnosis, lang: str, *, color: bool) -> str:
    says = sanitise(found.says)
    if found.code in CALM:
        return says
    sure = label(found.confidence.value, lang)
    text = f"{says}  [{sure}]"
    return f"{COLORS[found.confidence.value]}{text}\x1b[0m" if color else text


def _fields(found: Diagnosis, lang: str) -> list[str]:
    rows: list[tuple[str, str]] = []
    if found.at_s is not None:
        rows.append(("when", _when(found, lang)))
    if found.why:
        rows.append(("why", found.why))
    if found.doubts:
        rows.append(("doubts", "; ".join(found.doubts)))
    if found.rivals:
        told = [f"{who(rival.ranks, rival.hosts, lang)}: {rival.says}" for rival in found.rivals]
        rows.append(("rivals", "; ".join(told[:MOST_RIVALS])))
    names = {name: label(name, lang) for name, _ in rows}
    widest = max((width_of(name) for name in names.values()), default=0)
    return [f"  {names[name]}{' ' * (widest - width_of(names[name]))}  {value}" for name, value in rows]


def _when(found: Diagnosis, lang: str) -> str:
    error_s = found.time_error_s or 0.0
    error = label("error", lang).replace("{error}", f"{error_s:.1f}") if error_s > CLEAR_ERROR_S else ""
    name = "at_alone" if found.lag_s is None else "at"
    return (
        label(name, lang)
        .replace("{when}", _clock(found.at_s))
        .replace("{error}", error)
        .replace("{lag}", _lag(found.lag_s))
    )


def _clock(at_s: float | None) -> str:
    """To the millisecond: what fails together fails within one second."""
    return describe_time(at_s) if at_s is None else f"{describe_time(at_s)}.{int(at_s % 1 * 1000):03d}"


def _lag(lag_s: float | None) -> str:
    if lag_s is None:
        return "-"
    return f"{lag_s * 1000:.0f} ms" if lag_s < 1 else f"{lag_s:.1f} s" if lag_s < 60 else describe_seconds(lag_s)


def _proof(proof: Proof, *, cells: int | None) -> str:
    place = "" if proof.file is None else proof.file if proof.offset is None else f"{proof.file}:{proof.offset}"
    text = headline(proof.text)
    text = text if cells is None else cut(text, cells)
    return f"{place}  {text}" if place else text


def _links(links: Sequence[ChainLink], lang: str) -> list[str]:
    words = texts(lang)["labels"]
    rows = []
    for link in links:
        name = "rank" if len(link.ranks) == 1 else "ranks"
        ranks = str(words[name]).replace("{ranks}", fold_ranks(link.ranks)) if link.ranks else fold_names(link.hosts)
        lag = "" if link.lag_s is None else "  " + words["later"].replace("{lag}", _lag(link.lag_s))
        rows.append((words[link.role.value], ranks, sanitise_line(link.says) + lag))
    widths = [max((width_of(row[place]) for row in rows), default=0) for place in (0, 1)]
    widths[1] = min(widths[1], NAMES_CELLS)
    return ["  ".join((_pad(role, widths[0]), _pad(ranks, widths[1]), says)) for role, ranks, says in rows]


def _pad(text: str, cells: int) -> str:
    return text + " " * (cells - width_of(text))


def _again(found: Diagnosis, lang: str) -> list[str]:
    text = label(f"retry-{found.retry}", lang).replace("{hosts}", fold_names(found.hosts) if found.hosts else "?")
    return [text] if text and found.code not in CALM else []


def _section(name: str, rows: Sequence[str], lang: str, everything: bool, most: int) -> list[str]:
    if not rows:
        return []
    shown = list(rows) if everything else list(rows[:most])
    if len(shown) < len(rows):
        shown.append(label("more", lang).replace("{count}", str(len(rows) - len(shown))))
    return ["", label(name, lang), *(f"  {row}" for row in shown)]


def _with_job(advice: str, explanation: Explanation) -> str:
    """The advice with the job and its rank in the commands that it names. Under a launcher of its own a rank's lines
    are in the file of its node's process."""
    files = (SPOOLED.search(proof.file or "") for proof in explanation.diagnosis.proofs[:1])
    ranks = tuple(int(match.group(1)) for match in files if match is not None) or explanation.diagnosis.ranks
    text = advice.replace("JOB.yaml", "\0").replace("JOB", explanation.id).replace("\0", "JOB.yaml")
    return text.replace("--rank R", f"--rank {fold_ranks(ranks)}") if ranks else text.replace(" --rank R", "")
