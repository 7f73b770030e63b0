"""A launch plan on paper: for people as the shell lines of every rank, for programs as a record."""

from __future__ import annotations

import shlex
import sys
from typing import Optional

from ascendrun.cli.output import format_one
from ascendrun.cli.sanitise import sanitise
from ascendrun.core.loglines import describe_bytes
from ascendrun.core.plan import PORT_TOKEN, LaunchPlan, NodePlan, RankPlan


def print_plan(plan: LaunchPlan, output: Optional[str]) -> None:
    if output in (None, "table", "wide"):
        sys.stdout.write(describe_plan(plan))
    else:
        assert output is not None
        sys.stdout.write(format_one(plan, output))


def describe_plan(plan: LaunchPlan) -> str:
    """Comment lines say what is common; the rest can be pasted into a shell on the node it stands under."""
    ports = ", ".join(str(port) for port in plan.master_ports[:3]) + (", …" if len(plan.master_ports) > 3 else "")
    lines = [
        f"# {plan.job}, attempt {plan.attempt}: {plan.world_size} ranks on {len(plan.nodes)} nodes",
        f"# MASTER_ADDR {plan.master_address}; MASTER_PORT: the first free one of {ports}",
        f"# stop: SIG{plan.stop_signal}, then {plan.grace_s:g} s to save; start within {plan.start_s:g} s"
        + (f"; at most {plan.max_s:g} s" if plan.max_s is not None else ""),
    ]
    lines += [
        f"# staged: {tree.name}, {tree.files} files, {describe_bytes(tree.size_bytes)}, sha256 {tree.sha256[:16]}"
        for tree in plan.trees
    ]
    for node in plan.nodes:
        lines += ["", f"# node {node.node_rank}: {node.host}", *_node_lines(node)]
    return "".join(f"{sanitise(line)}\n" for line in lines)


def _node_lines(node: NodePlan) -> list[str]:
    common = _common_environment(node.ranks)
    lines = [f"cd {shlex.quote(node.cwd)}"]
    lines += [f"export {name}={_quote(value)}" for name, value in sorted(common.items())]
    if node.setup:
        lines.append(node.setup.rstrip("\n"))
    for rank in node.ranks:
        own = " ".join(f"{name}={_quote(value)}" for name, value in sorted(rank.env.items()) if name not in common)
        argv = " ".join(_quote(argument) for argument in rank.argv)
        lines.append(f"{own} {argv}".strip())
    return lines


def _common_environment(ranks: tuple[RankPlan, ...]) -> dict[str, str]:
    if len(ranks) < 2:
        return {}
    first = dict(ranks[0].env)
    return {name: value for name, value in first.items() if all(rank.env.get(name) == value for rank in ranks[1:])}


def _quote(text: str) -> str:
    """For a shell; the port that is found at the start is a variable there."""
    return '"$MASTER_PORT"'.join(shlex.quote(part) if part else "" for part in text.split(PORT_TOKEN)) or "''"
