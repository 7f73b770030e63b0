"""Ranks under a separate launcher (torchrun, deepspeed): the output of its process, split by rank."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ascendrun.ascend.vocabularies import is_warning, says, wording
from ascendrun.health.diagnosis.evidence import Evidence, Line, RankEvidence
from ascendrun.health.diagnosis.lines.tracebacks import read_chains, same_exception, split_prefix
from ascendrun.text.format import numbers_in

LAUNCHERS = frozenset({"torchrun", "deepspeed", "none"})
"""Launchers of which the evidence has the process of each node, not its ranks."""
OBSERVED_BEFORE_S = 1.0
"""Minimum time from the first end of a rank to the end of its launcher."""
_NODE_RANK = re.compile(r"node_rank=(\d+)")


class InnerEnd(NamedTuple):
    """The end of one rank as its launcher reports it. `is_root`: torchrun lists it as the first failure observed."""

    rank: int
    pid: int | None = None
    code: int | None = None
    is_root: bool = False


def expand(evidence: Evidence) -> Evidence:
    """Return evidence by the real ranks if their launchers report them; otherwise unchanged."""
    if evidence.launcher not in LAUNCHERS:
        return evidence
    parts = [_expand_process(one, evidence) for one in evidence.ranks]
    if not any(parts):
        return evidence
    unique: dict[int, RankEvidence] = {}
    for rank in [one for inner in parts for one in inner]:
        unique.setdefault(rank.rank, rank)
    for process in [process for process, inner in zip(evidence.ranks, parts) if not inner]:
        free = process.rank if process.rank not in unique else max(unique) + 1  # its number is that of a node
        unique[free] = replace(process, rank=free)
    return replace(
        evidence,
        ranks=tuple(unique[number] for number in sorted(unique)),
        world_size=max(evidence.world_size, len(unique)),
    )


def _expand_process(process: RankEvidence, evidence: Evidence) -> tuple[RankEvidence, ...]:
    """Return the ranks of a launcher's process, () if it reports none."""
    is_alone = len(evidence.ranks) == 1
    found_ends = find_torchrun_ends(process.lines) or find_reported_ends(process.lines, is_alone=is_alone)
    ends = {end.rank: end for end in found_ends}
    by_rank: dict[int | None, list[Line]] = {}
    for line in process.lines:
        by_rank.setdefault(split_prefix(line.text)[1], []).append(line)
    loose = by_rank.pop(None, [])
    are_warnings = all(is_warning(split_prefix(line.text)[2]) for lines in by_rank.values() for line in lines)
    if not ends and are_warnings:  # one process of one rank: torch and torch_npu name it in their reports
        found = wording("own-rank").findall("\n".join(line.text for line in process.lines))
        named = {int(rank) for numbers in found for rank in numbers if rank} or _labelled(process, evidence)
        return tuple(replace(process, rank=rank) for rank in named) if len(named) == 1 else ()
    numbers = sorted({*ends, *(rank for rank in by_rank if rank is not None)})
    owners = _owners(ends, loose) if are_warnings and any(end.is_root for end in ends.values()) else ()
    lone = process.code if len(numbers) == 1 and not ends and not process.stopped else None  # it ended as its only rank
    inner = (ends.get(number) or InnerEnd(number, code=lone) for number in numbers)
    return tuple(_inner(process, end, by_rank.get(end.rank, []), loose if end.rank in owners else ()) for end in inner)


def _labelled(process: RankEvidence, evidence: Evidence) -> set[int]:
    """Return the ranks that the labels of error lines name. A local rank, or the number of a device, is of this node,
    of which each has as many ranks."""
    texts = [line.text for line in process.lines if says(line.text, "logged-error", "traceback", "bare-exception")]
    found = [label for label in map(wording("rank-label").search, texts) if label is not None]
    each, rest = divmod(evidence.world_size, len(evidence.ranks))
    first = 0 if len(evidence.ranks) == 1 else None if rest or each < 2 else process.rank * each
    local = {int(label["local"] or label["device"]) for label in found if not label["rank"]}
    ranks = {int(label["rank"]) for label in found if label["rank"]}
    return ranks or (set() if first is None else {first + number for number in local})


def _owners(ends: Mapping[int, InnerEnd], loose: Sequence[Line]) -> tuple[int, ...]:
    """Return owners of lines without prefix: the first rank, if any; all ranks that ended with its code if there are as
    many equal tracebacks."""
    root = next(end for end in ends.values() if end.is_root)
    alike = tuple(end.rank for end in ends.values() if end.code == root.code)
    chains, _ = read_chains([line for line in loose if not says(line.text, "of-launcher")])
    counted = Counter(map(same_exception, chains))
    return alike if counted and max(counted.values()) >= len(alike) else (root.rank,)


def _inner(process: RankEvidence, end: InnerEnd, lines: Sequence[Line], loose: Sequence[Line]) -> RankEvidence:
    """Make a rank; SIGTERM or SIGKILL to a rank that is not the root counts as a stop."""
    signal = -end.code if end.code is not None and end.code < 0 else None
    exited_s = None if process.exited_at_s is None else process.exited_at_s - OBSERVED_BEFORE_S * end.is_root
    return replace(
        process,
        rank=end.rank,
        pid=end.pid,
        device=None,
        inner=True,
        code=None if signal else end.code,
        signal=signal,
        stopped=process.stopped or (not end.is_root and end.code in (-15, -9)),
        exited_at_s=exited_s,
        lines=(*lines, *(line for line in loose if not says(line.text, "of-launcher"))),
        last_output_s=None,
        plog=None,
        error=(),
    )


def find_torchrun_ends(lines: Sequence[Line]) -> tuple[InnerEnd, ...]:
    """Return ends from torchrun's summary of failed ranks; () if missing."""
    whole = "\n".join(split_prefix(line.text)[2] for line in lines)
    heads = [(found.start(), found["root"] is not None) for found in wording("torchrun-head").finditer(whole)]
    entries = [*wording("torchrun-entry").finditer(whole)]
    roots = ([is_root for at, is_root in heads if at < one.start()][-1:] == [True] for one in entries)
    ends = ((int(one["rank"]), int(one["pid"]), int(one["code"])) for one in entries)
    return tuple(InnerEnd(*end, is_root) for end, is_root in zip(ends, roots))


def find_reported_ends(lines: Sequence[Line], *, is_alone: bool = True) -> tuple[InnerEnd, ...]:
    """Find ends in a launcher's messages about its processes. `is_alone`: on the only node, so that a
    local rank is the rank where deepspeed's table is missing."""
    whole = "\n".join(line.text for line in lines)
    tables = {
        found["name"]: [numbers_in(part.partition("]")[0]) for part in found[0].split("': [")[1:]]
        for found in wording("deepspeed-table").finditer(whole)
    }
    number = itertools.count()
    sizes = tables.get("WORLD INFO DICT", [])
    nodes = tables.get("global_rank_mapping") or [[next(number) for _ in ranks] for ranks in sizes]
    node_rank = int((_NODE_RANK.findall(whole) or ["0"])[-1])
    here = nodes[node_rank] if node_rank < len(nodes) else []
    pids = {found["local"]: int(found["pid"]) for found in wording("deepspeed-spawned").finditer(whole)}
    ends: list[InnerEnd] = []
    for found in wording("process-returned").finditer(whole):
        local, code = int(found["local"] or found["local2"]), int(found["code"] or found["code2"])
        if local < len(here) or (not nodes and node_rank == 0 and is_alone):
            rank = here[local] if here else local
            pid = pids.get(str(local)) or (int(found["pid"]) if found["pid"] else None)
            ends.append(InnerEnd(rank, pid, code, is_root=not ends))
    return tuple(ends)
