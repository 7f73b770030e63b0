"""A plan as text: for each node the commands that a person could paste there to the same effect."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from ascendrun.core.jobs.plan import PORT_TOKEN


def render_text(rendered: Mapping[str, Any]) -> str:
    """What `render_plan` gave, readable. The first candidate stands for MASTER_PORT; secrets are not in a plan."""
    port = str(rendered["master_ports"][0])
    lines = [
        f"# {rendered['job']}, attempt {rendered['attempt']}: {rendered['world_size']} ranks on "
        f"{len(rendered['nodes'])} nodes, meeting at {rendered['master_address']}",
        f"# MASTER_PORT: the first free one of {len(rendered['master_ports'])} from {port} on",
    ]
    lines += [
        f"# staged {tree['name']}: {tree['files']} files, {tree['size_bytes']} bytes, {tree['sha256'][:16]}"
        for tree in rendered["trees"]
    ]
    for node in rendered["nodes"]:
        lines += ["", *_node_lines(node["host"], node["prepare"], port)]
    return "\n".join(lines) + "\n"


def _node_lines(host: str, prepare: Mapping[str, Any], port: str) -> list[str]:
    ranks = prepare["ranks"]
    shared = _shared_env(ranks)
    lines = [
        f"# {host}: node {prepare['node_rank']}, {len(ranks)} process{'es' if len(ranks) != 1 else ''}",
        f"cd -- {shlex.quote(prepare['cwd'])}",
    ]
    lines += [f"export {name}={_quoted(value)}" for name, value in shared.items()]
    lines.append(f"export MASTER_PORT={port}")
    if prepare["setup"]:
        lines += ["# setup, run by bash before each process", prepare["setup"]]
    for rank in ranks:
        own = [f"{name}={value}" for name, value in rank["env"].items() if name not in shared]
        words = [word.replace(PORT_TOKEN, port) for word in rank["argv"]]
        lines.append(shlex.join(["env", *own, *words] if own else words) + (" &" if len(ranks) > 1 else ""))
    return lines


def _quoted(value: str) -> str:
    """zsh takes an unquoted value that starts with "=" for the path of a command."""
    return f"'{value}'" if value.startswith("=") and "'" not in value else shlex.quote(value)


def _shared_env(ranks: list[Mapping[str, Any]]) -> Mapping[str, str]:
    """The variables that have one value in all ranks of the node."""
    first = ranks[0]["env"]
    return {name: value for name, value in first.items() if all(rank["env"].get(name) == value for rank in ranks)}
