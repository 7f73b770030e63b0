"""Roles of a job: the groups of nodes that run different commands, and the names of their ranks."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ascendrun.core.dataclass import dataclass
from ascendrun.core.errors import NotFoundError
from ascendrun.core.hosts import Host
from ascendrun.text import Text, suggestion

if TYPE_CHECKING:
    from ascendrun.core.jobfile.model import JobSpec


@dataclass(frozen=True)
class Part:
    """A group of nodes with the same command. `role` None: all nodes of a job without roles. `spec`: the job that it
    would be by itself. `groups`: of the hostfile that its hosts are from, (): of any."""

    role: str | None
    spec: JobSpec
    ends_job: bool = True
    groups: tuple[str, ...] = ()


def parts_of(spec: JobSpec) -> tuple[Part, ...]:
    """Return the roles of a job, in the order of their nodes; of a job without roles its one part."""
    if not spec.roles:
        return (Part(None, spec),)
    found = []
    for role in spec.roles:
        own = {"roles": (), "nodes": role.nodes, "command": role.command, "env": {**spec.env, **role.env}}
        own.update(devices=role.devices or spec.devices, container=role.container or spec.container)
        found.append(Part(role.name, spec.model_copy(update=own), role.ends_job, role.groups))
    return tuple(found)


def place_parts(spec: JobSpec, hosts: Sequence[Host]) -> Iterator[tuple[Part, tuple[Host, ...]]]:
    """Yield each part of a job with its hosts: the first of its groups that no part before it has; too few if there are
    no more."""
    free = list(hosts)
    for part in parts_of(spec):
        own = tuple(host for host in free if not part.groups or set(part.groups) & set(host.groups))[: part.spec.nodes]
        taken = set(map(id, own))  # `in` would compare a thousand hosts with a thousand
        free = [host for host in free if id(host) not in taken]
        yield part, own


def devices_of(spec: Mapping[str, Any], role: str | None) -> Mapping[str, Any]:
    """Return `devices` of a stored job file for the nodes of a role, None: the job has no roles."""
    own = {one["name"]: one.get("devices") for one in spec.get("roles") or ()}
    return own.get(role) or spec.get("devices") or {}


def rank_labels(nodes: Iterable[Any]) -> dict[int, str]:
    """Return the names of ranks by their numbers in the job: prefill/0 is the first of its role; {}: no roles.

    `nodes`: with role and ranks (NodeProgress, NodeView), in their order."""
    counts: dict[str, Iterator[int]] = defaultdict(itertools.count)
    named = ((node.role, rank) for node in nodes if node.role is not None for rank in node.ranks)
    return {rank: f"{role}/{next(counts[role])}" for role, rank in named}


def named_rank(ranks: Sequence[int], labels: Mapping[int, str]) -> dict[str, str]:
    """Return the value by which a reason names its one rank as that of a role; {}: by its number."""
    return {"rank": labels[ranks[0]]} if len(ranks) == 1 and ranks[0] in labels else {}


def ranks_of_roles(labels: Mapping[int, str], wanted: Collection[str]) -> frozenset[int]:
    """Return the ranks of roles (`decode`) and of single names (`decode/0`). Raises NotFoundError."""
    roles = {rank: (label, label.rpartition("/")[0]) for rank, label in labels.items()}
    for name in (name for name in wanted if not any(name in names for names in roles.values())):
        text = Text("roles.unknown", "no role {name:quote} in this attempt", name=name)
        raise NotFoundError(text, hint=suggestion(name, [role for _, role in roles.values()]))
    return frozenset(rank for rank, names in roles.items() if set(names) & set(wanted))
