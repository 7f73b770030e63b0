"""Which checkpoint an attempt resumes from: the newest one that is complete on every host that needs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace

from ascendrun.core.dataclass import dataclass

BUNDLED = "ascendrun"
"""Format of the bundled programs: ranks send each other the parts that are on one host only."""
DIVIDED = frozenset({BUNDLED, "deepspeed"})
"""Formats of which each host may have some parts."""


@dataclass(frozen=True)
class Listed:
    """A checkpoint on one host. `epoch`: docs/epochs.md; `save`: tells saves of one step apart, "" without a mark.
    `parts`: those here; `of`: all of them, empty: nothing else is needed. `why`, `file`: a code, if it is not `whole`,
    and the file."""

    format: str
    path: str
    step: int
    epoch: int = 0
    save: str = ""
    parts: tuple[str, ...] = ()
    of: tuple[str, ...] = ()
    bytes: int = 0
    whole: bool = True
    why: str = ""
    file: str = ""


Listings = Mapping[str, Sequence[Listed]]
"""By host. A host that could not list its checkpoints is absent."""


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that an attempt resumes from. `step` 0: there is none. `paths`: by host. `skip`: steps that were
    set aside after repeated failures. `older`: step of the next older complete checkpoint, 0: none, None: unknown."""

    step: int = 0
    format: str = ""
    paths: Mapping[str, str] = field(default_factory=dict)
    skip: tuple[int, ...] = ()
    older: int | None = None

    def environment(self, host: str) -> dict[str, str]:
        """Return the variables that tell a program where to resume."""
        skip = {"ASCENDRUN_RESUME_SKIP": ",".join(map(str, self.skip))} if self.skip else {}
        if not self.step:
            return skip
        chosen = {"STEP": str(self.step), "PATH": self.paths[host], "FORMAT": self.format}
        return {**{f"ASCENDRUN_RESUME_{name}": value for name, value in chosen.items()}, **skip}


@dataclass(frozen=True)
class OnlyCopy:
    """The newest checkpoint needs hosts that the attempt does not have; their disks have the only copy."""

    step: int
    hosts: tuple[str, ...]


def choose(
    listings: Listings,
    hosts: Sequence[str],
    *,
    skip: Sequence[int] = (),
    absent: Sequence[str] = (),
    known_step: int = 0,
) -> ResumePoint | OnlyCopy:
    """Return what an attempt on `hosts`, in the order of their node ranks, resumes from.

    `skip`: steps set aside; used only while an older checkpoint exists. `absent`: hosts of the attempt before that this
    one does not have. `known_step`: that an earlier attempt resumed from: it existed.
    """
    there: dict[tuple[int, int, str, str], dict[str, Listed]] = {}
    for host in hosts:
        for one in listings.get(host, ()):
            there.setdefault((one.step, one.epoch, one.format, one.save), {})[host] = one
    newest_elsewhere = known_step
    chosen = ResumePoint()
    for key in sorted(there, reverse=True):
        whole = {host: one for host, one in there[key].items() if one.whole}
        if key[0] in skip:
            continue
        if is_usable(whole, listings, hosts):
            if chosen.step:
                if key[0] == chosen.step:
                    continue
                chosen = replace(chosen, older=key[0])
                break
            paths = {host: (whole.get(host) or next(iter(whole.values()))).path for host in hosts}
            chosen = ResumePoint(key[0], key[2], paths, tuple(skip), older=0)
            continue
        if not chosen.step and key[2] in DIVIDED and whole and len(whole) == len(there[key]):
            newest_elsewhere = max(newest_elsewhere, key[0])
    if absent and newest_elsewhere > chosen.step and newest_elsewhere not in skip:
        return OnlyCopy(newest_elsewhere, tuple(absent))
    if not chosen.step and skip:
        return choose(listings, hosts, absent=absent, known_step=known_step)
    return chosen


def is_usable(whole: Mapping[str, Listed], listings: Listings, hosts: Sequence[str]) -> bool:
    """Return whether these complete copies of one checkpoint suffice for an attempt on `hosts`."""
    if not whole:
        return False
    one = next(iter(whole.values()))
    needed = {part for copy in whole.values() for part in copy.of}
    if not needed <= {part for copy in whole.values() for part in copy.parts}:
        return False
    if one.format == BUNDLED:
        return True
    if one.format == "transformers":  # only rank 0's host needs it where the others have never written any
        writers = {host for host in hosts if any(each.format == one.format for each in listings.get(host, ()))}
        return {hosts[0], *writers} <= set(whole)
    return set(hosts) <= set(whole)


def incomplete(listings: Listings, step: int) -> list[tuple[str, Listed]]:
    """Return the checkpoints above a step that are not complete, with their hosts, newest first."""
    torn = [(host, one) for host, copies in listings.items() for one in copies if not one.whole and one.step > step]
    return sorted(torn, key=lambda each: -each[1].step)
