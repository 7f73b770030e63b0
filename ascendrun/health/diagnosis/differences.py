"""What the hosts of a failure have that all others have not, by the facts that were recorded at the start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ascendrun.ascend.vocabularies import following
from ascendrun.health.diagnosis.evidence import Evidence
from ascendrun.health.diagnosis.result import Proof
from ascendrun.text import listed

MOST = 6
_OF_EACH = frozenset(
    "clock_offset_s processes temperature_c clocks_mhz memory_bytes HOSTNAME SSH_CLIENT SSH_CONNECTION".split()
    + ["ASCENDRUN_METRICS_FILE", "TORCHELASTIC_ERROR_FILE"]  # of a launcher that has ranks on some nodes only
)
"""They differ between healthy hosts."""


def differences_of(evidence: Evidence, hosts: tuple[str, ...], domain: str) -> tuple[Proof, ...]:
    """Return what each of the hosts has and no other host of its role, as observations; () also if nothing was
    recorded."""
    known = {one.host: dict(_flat(one.facts)) for one in evidence.hosts if one.facts}
    roles = {one.host: evidence.labels.get(one.rank, "").rpartition("/")[0] for one in evidence.ranks}
    found: list[tuple[int, Proof]] = []
    fits = following(domain).get("facts", "").split()
    for host in (host for host in hosts if host in known):
        like_it = [one for one in known if one not in hosts and roles.get(one, "") == roles.get(host, "")]
        for key, own in known[host].items():
            theirs = {known[other].get(key, "-") for other in like_it}
            if len(theirs) == 1 and own not in theirs:
                values = {"host": host, "key": key, "own": own, "others": theirs.pop()}
                text = listed("diagnosis.differs", **values)
                place = fits.index(key.partition(".")[0]) if key.partition(".")[0] in fits else len(fits)
                found.append((place, Proof(text, host=host)))
    return tuple(proof for _, proof in sorted(found, key=lambda one: one[0]))[:MOST]


def _flat(facts: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for key, value in facts.items():
        if key in _OF_EACH:
            continue
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", str(value)
