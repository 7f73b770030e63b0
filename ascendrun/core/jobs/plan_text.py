"""Launch plan as data and as text: the requests to the agents, and the commands to paste on each node."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from ascendrun.core.jobs.plan import CODE_TREE, LIBRARY_TREE, PORT_TOKEN, LaunchPlan, NodePlan
from ascendrun.core.rank_env import PATH_TOKEN
from ascendrun.text import Text, listed, to_json


def prepare_request(node: NodePlan, plan: LaunchPlan) -> dict[str, Any]:
    """Return the fields of the agent's `prepare` operation for this node."""
    code, library = ([tree.sha256 for tree in plan.trees if tree.name == name] for name in (CODE_TREE, LIBRARY_TREE))
    leased = node.devices if plan.leases_devices else None
    first_of_role = next(one for one in plan.nodes if one.role == node.role)
    launcher = to_json(node.launcher)
    if launcher is not None:
        del launcher["plain"]  # for a shell
    return {
        "tag": plan.run_id,
        "node_rank": node.node_rank,
        "ranks": to_json(node.ranks),
        **({} if launcher is None else {"launcher": launcher}),
        "cwd": node.cwd,
        "setup": node.setup,
        "trees": [tree.sha256 for tree in plan.trees],
        "link_tree": code[0] if code else None,
        **({"library": library[0]} if library else {}),
        "ports": list(plan.master_ports) if node is first_of_role else [],
        **({"hccl": list(plan.hccl_bases)} if plan.hccl_bases else {}),
        **({"devices": {"type": plan.device_type, "ids": list(leased)}} if leased else {}),
        "stop": {"signal": plan.stop_signal, "grace_s": plan.grace_s},
        "start_s": plan.start_s,
        "max_s": plan.max_s,
        **({} if plan.fence_s is None else {"fence_s": plan.fence_s}),
        **({} if plan.sampling is None else {"sampling": {**plan.sampling, "devices": node.devices}}),
        **({} if plan.home is None else {"home": plan.home}),
        **({} if node.container is None else {"container": node.container}),
        **({} if node.pointer is None else {"pointer": node.pointer}),
    }


def render_plan(plan: LaunchPlan) -> dict[str, Any]:
    """Return the plan as data. Each node's `prepare` is the exact request to its agent; PORT_TOKEN in an argument is
    the placeholder of the port that is free at the start. `command`: of a launcher, as a shell would run it."""
    return {
        "job": plan.job,
        "attempt": plan.attempt,
        "tag": plan.run_id,
        "world_size": plan.world_size,
        "master_address": plan.master_address,
        "master_ports": list(plan.master_ports),
        "hccl_bases": list(plan.hccl_bases),
        "trees": to_json(plan.trees),
        "nodes": [
            {
                "host": node.host,
                "prepare": prepare_request(node, plan),
                **({} if node.launcher is None else {"command": list(node.launcher.plain)}),
                **({} if node.role is None else {"role": node.role, "ends_job": node.ends_job}),
            }
            for node in plan.nodes
        ],
    }


def render_text(rendered: Mapping[str, Any]) -> str:
    """Return the result of `render_plan` as commands to paste on each node. MASTER_PORT is the first candidate; a plan
    has no secrets."""
    port = str(rendered["master_ports"][0])
    heads = [
        Text(
            "plan.job",
            "{job}, attempt {attempt}: {ranks:plural rank ranks} on {nodes:plural node nodes}, rendezvous at {address}",
            job=rendered["job"],
            attempt=rendered["attempt"],
            ranks=rendered["world_size"],
            nodes=len(rendered["nodes"]),
            address=rendered["master_address"],
        ),
        Text(
            "plan.port",
            "MASTER_PORT: the first free port of {count} from {port}",
            count=len(rendered["master_ports"]),
            port=port,
        ),
    ]
    heads += [origin_line(**one) for one in rendered.get("origins") or ()]
    boxes = [node["prepare"]["container"] for node in rendered["nodes"] if node["prepare"].get("container")]
    if boxes:
        heads.append(Text("plan.container", "container of {image}, by {runtime} on each node", **boxes[0]))
    heads += [
        Text(
            "plan.staged",
            "staged {name}: {files:plural file files}, {size:bytes}, {sha256}",
            **{**tree, "size": tree["size_bytes"], "sha256": tree["sha256"][:16]},
        )
        for tree in rendered["trees"]
    ]
    if rendered["hccl_bases"]:
        heads.append(
            Text(
                "plan.hccl-base",
                "HCCL_IF_BASE_PORT: the first of {bases:ranks} whose 32 ports are free on all nodes",
                bases=rendered["hccl_bases"],
            )
        )
    lines = [f"# {head}" for head in heads]
    for node in rendered["nodes"]:
        lines += ["", *_node_lines(node, port)]
    return "\n".join(lines) + "\n"


def origin_line(key: str, value: object, origin: str) -> Text:
    """Return which value of a job came from where."""
    return Text("plan.origin", "{key}: {value} ({origin})", key=key, value=value, origin=listed(f"origin.{origin}"))


def _node_lines(node: Mapping[str, Any], port: str) -> list[str]:
    host, prepare = node["host"], node["prepare"]
    launcher = prepare.get("launcher")
    ranks = [{"argv": node["command"], "env": launcher["env"]}] if launcher else prepare["ranks"]
    first = ranks[0]["env"]
    shared = {name: value for name, value in first.items() if all(rank["env"].get(name) == value for rank in ranks)}
    head = Text(
        "plan.node",
        "{host}: node {number}, {count:plural process processes}",
        host=host,
        number=prepare["node_rank"],
        count=len(ranks),
    )
    if "role" in node:
        head = Text("plan.node-of-role", "{node}, role {role}", node=head, role=node["role"])
    lines = [f"# {head}", f"cd -- {shlex.quote(prepare['cwd'])}"]
    lines += [f"export {name}={_quoted(value)}" for name, value in shared.items()]
    lines.append(f"export MASTER_PORT={port}")
    if prepare.get("hccl"):
        lines.append(f"export HCCL_IF_BASE_PORT={prepare['hccl'][0]}")
    if prepare["setup"]:
        lines += [f"# {Text('plan.setup', 'setup, run by bash before each process')}", prepare["setup"]]
    for rank in ranks:
        own = [f"{name}={value}" for name, value in rank["env"].items() if name not in shared]
        words = [word.replace(PORT_TOKEN, port) for word in rank["argv"]]
        lines.append(shlex.join(["env", *own, *words] if own else words) + (" &" if len(ranks) > 1 else ""))
    return lines


def _quoted(value: str) -> str:
    """Quote a value for zsh, which expands an unquoted leading "=" to the path of a command."""
    if value.endswith(PATH_TOKEN):
        return shlex.quote(value[: -len(PATH_TOKEN)]) + '"$PATH"'
    return f"'{value}'" if value.startswith("=") and "'" not in value else shlex.quote(value)
