"""Roles of a job file: what follows from them for its data, and the rules of their keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ascendrun.core.errors import Problem
from ascendrun.core.jobfile.pipeline import override
from ascendrun.core.jobfile.tree import Draft, job_data
from ascendrun.core.reader.source_text import REMOVE
from ascendrun.core.reader.yaml_source import MappingNode, find
from ascendrun.text import Text, write


def with_role_defaults(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the input of the model with what follows from the roles: the number of nodes, their type of devices."""
    roles, devices = _roles(data), data.get("devices")
    if not roles:
        return data
    kind = {"type": devices.get("type", "cpu") if isinstance(devices, dict) else "cpu"}
    made = list(data["roles"])
    for index, own in enumerate(role.get("devices") for role in roles):
        if isinstance(own, dict):
            made[index] = {**roles[index], "devices": {**kind, **own}}
    counts = [role.get("nodes", 1) for role in roles]
    nodes = {"nodes": sum(counts)} if all(type(count) is int and count > 0 for count in counts) else {}
    return {**data, **nodes, "roles": tuple(made)}


def role_drafts(draft: Draft) -> Iterator[Draft]:
    """Yield each role as the job file that it would be by itself, for the rules of the keys that a role has."""
    for index in range(len(_roles(draft.data))):
        item = find(draft.root, ("roles", index))
        if isinstance(item, MappingNode):
            root = override(draft.root, item, "role", draft.programs)
            yield replace(draft, root=root, data=job_data(root, draft.source))


def roles_rule(draft: Draft) -> Iterator[Problem]:
    roles = _roles(draft.data)
    if not roles:
        return
    if draft.has("nodes"):
        text = Text("roles.nodes", "nodes cannot be combined with roles: it is the sum of roles[].nodes")
        yield draft.key("nodes").problem(text, REMOVE)
    if draft.data.get("launcher", "spawn") not in ("spawn", "none"):
        given = str(draft.data["launcher"])
        text = Text("roles.launcher", "launcher {name} cannot be combined with roles", name=given)
        yield draft.value("launcher").problem(text, Text("roles.launcher-hint", "write launcher: spawn or none"))
    kind, names = draft.section("devices").get("type", "cpu"), [role.get("name") for role in roles]
    for index, name in enumerate(names):
        if isinstance(name, str) and name in names[:index]:
            text = Text("roles.duplicate", "duplicate role name {name}", name=name)
            yield draft.value("roles", index, "name").problem(text)
        if draft.at(("roles", index, "env", "MASTER_PORT")) is not None:
            text = Text("roles.master-port", "MASTER_PORT is not supported in the env of a role: the job sets it")
            yield draft.key("roles", index, "env", "MASTER_PORT").problem(text, write("env: {MASTER_PORT: 29500}"))
        if draft.at(("roles", index, "devices", "type")) in [one for one in ("npu", "cuda") if one != kind]:
            text = Text("roles.device-type", "devices.type of a role: expected {kind} or cpu", kind=kind)
            yield draft.value("roles", index, "devices", "type").problem(text, write("devices: {type: cpu}"))


def _roles(data: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the roles by their index; one that is no mapping is empty."""
    roles = data.get("roles")
    return [role if isinstance(role, dict) else {} for role in roles] if isinstance(roles, tuple) else ()
