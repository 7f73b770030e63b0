"""Roles of a job: the groups of nodes that run different commands, and the names of their ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ascendrun.core.dataclass import dataclass
from ascendrun.core.errors import NotFoundError
from ascendrun.core.hosts import Host
from ascendrun.text import Text, suggestion

if TYPE_CHECKING:
    from ascendrun.core.jobfile.model import JobSpec


@dataclass(frozen=True)
class Part:
    """A group of nodes with the same command. `role` None: all nodes of a job without roles. `spec`: the job that it
    would be by itself."""

    role: str | None
    spec: JobSpec
    ends_job: bool = True


def parts_of(spec: JobSpec) -> tuple[Part, ...]:
    """Return the roles of a job, in the order of their nodes; of a job without roles its one part."""
    if not spec.roles:
        return (Part(None, spec),)
    found = []
    for role in spec.roles:
        devices, env = role.devices or spec.devices, {**spec.env, **role.env}
        own = {"roles": (), "nodes": role.nodes, "command": role.command, "env": env, "devices": devices}
        found.append(Part(role.name, spec.model_copy(update=own), role.ends_job))
    return tuple(found)


def place_parts(spec: JobSpec, hosts: Sequence[Host]) -> Iterator[tuple[Part, tuple[Host, ...]]]:
    """Yield each part of a job with its hosts, of those of the job in their order."""
    start = 0
    for part in parts_of(spec):
        end = start + part.spec.nodes if part.role is not None and part.spec.nodes else len(hosts)
        yield part, tuple(hosts[start:end])
        start = end


def roles_by_node(spec: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """Return (role, whether it ends the job) of each node of a stored job file, in their order; []: it has no roles."""
    return [(role["name"], role["ends_job"]) for role in spec.get("roles") or () for _ in range(role["nodes"])]


def devices_of(spec: Mapping[str, Any], role: str | None) -> Mapping[str, Any]:
    """Return `devices` of a stored job file for the nodes of a role, None: the job has no roles."""
    own = next((one.get("devices") for one in spec.get("roles") or () if one["name"] == role), None)
    return own or spec.get("devices") or {}


class _Node(Protocol):
    @property
    def role(self) -> str | None: ...

    @property
    def ranks(self) -> tuple[int, ...]: ...


def rank_labels(nodes: Iterable[_Node]) -> dict[int, str]:
    """Return the names of ranks by their numbers in the job: prefill/0 is the first of its role; {}: no roles.

    `nodes`: in their order."""
    counts: dict[str, int] = {}
    labels = {}
    for node in nodes:
        if node.role is not None:
            for rank in node.ranks:
                number = counts[node.role] = counts.get(node.role, -1) + 1
                labels[rank] = f"{node.role}/{number}"
    return labels


def named_rank(ranks: Sequence[int], labels: Mapping[int, str]) -> dict[str, str]:
    """Return the value by which a reason names its one rank as that of a role; {}: by its number."""
    return {"rank": labels[ranks[0]]} if len(ranks) == 1 and ranks[0] in labels else {}


def ranks_of_roles(labels: Mapping[int, str], wanted: Iterable[str]) -> frozenset[int]:
    """Return the ranks of roles (`decode`) and of single names (`decode/0`). Raises NotFoundError."""
    found: set[int] = set()
    for name in wanted:
        ranks = [rank for rank, label in labels.items() if name in (label, label.rpartition("/")[0])]
        if not ranks:
            known = list(dict.fromkeys(label.rpartition("/")[0] for label in labels.values()))
            text = Text("roles.unknown", "no role {name:quote} in this attempt", name=name)
            raise NotFoundError(text, hint=suggestion(name, known) if known else None)
        found.update(ranks)
    return frozenset(found)
