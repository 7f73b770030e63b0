"""A pipeline's file as one tree for each of its stages: the common part, with the stage's own laid over it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ascendrun.core.errors import Problem
from ascendrun.core.jobfile.model import NAME_PATTERN
from ascendrun.core.jobfile.yaml_source import ListNode, MappingNode, Node, Place, ScalarNode, Source
from ascendrun.core.message_format import shown, suggestion

if TYPE_CHECKING:
    from ascendrun.core.jobfile.model import JobSpec

MERGED = ("args", "env", "devices", "checkpoint", "restart", "timeouts", "checks")
"""Sections of which a stage may give some keys and inherit the others; of the rest it inherits all or nothing."""

INSTEAD = {"program": ("command",), "command": ("program", "args")}
"""What a stage that says its own is not given of the common part."""

NAME_BYTES = 63


@dataclass(frozen=True)
class StageJob:
    """One job of a file. `stage`: its name within the pipeline, None: the file is a single job.
    `needs`: the stage that has to succeed before, None: none."""

    stage: str | None
    needs: str | None
    spec: JobSpec


@dataclass(frozen=True)
class StageRoot:
    """One stage's tree, as if it were a job file of its own."""

    name: str
    needs: str | None
    root: MappingNode


def split_stages(root: MappingNode, source: Source) -> list[StageRoot] | None:
    """The trees of a pipeline's stages, in order; None when the file is a single job.

    What is wrong with the list itself, its names and needs goes to the source.
    """
    stages = root.entries.get("stages")
    if stages is None or isinstance(stages, ScalarNode) and stages.plain and stages.text in ("", "~", "null"):
        return None
    place = root.keys.get("stages", stages.place)
    if not isinstance(stages, ListNode) or not stages.items:
        source.problems.append(
            place.problem("stages wants a list of stages", "stages: [{name: prepare, …}, {name: train, …}]")
        )
        return []
    found: list[StageRoot] = []
    earlier: list[str] = []
    for index, item in enumerate(stages.items):
        if not isinstance(item, MappingNode):
            source.problems.append(item.place.problem(f"stages[{index}] is no mapping", "{name: train, program: …}"))
            continue
        name = _name(item, index, earlier, root, source)
        needs = _needs(item, name or "this stage", earlier, source)
        found.append(StageRoot(name or "", needs, _laid_over(root, item, name or f"stage-{index}")))
        earlier += [name] if name is not None else []
    return found


def side_by_side(jobs: Sequence[StageJob], roots: Sequence[StageRoot]) -> Iterator[Problem]:
    """Stages that may run at the same time and stage different files: both are linked into the one working folder that
    the stages share on a host, and each start would take the other's files away."""
    needed: dict[str | None, frozenset[str | None]] = {None: frozenset()}
    for at, job in enumerate(jobs):
        needed[job.stage] = needed.get(job.needs, frozenset()) | {job.needs}
        for other in jobs[:at]:
            if other.stage in needed[job.stage] or None in (job.spec.stage, other.spec.stage):
                continue
            if job.spec.stage != other.spec.stage:
                root = next(root.root for root in roots if root.name == job.stage)
                place = root.keys.get("stage", root.place)
                yield place.problem(
                    f"{other.stage} and {job.stage} may run side by side in one working folder and stage other files",
                    f"needs: {other.stage} in {job.stage}, or the same stage.dir and stage.exclude in both",
                )


def _name(item: MappingNode, index: int, earlier: list[str], root: MappingNode, source: Source) -> str | None:
    node = item.entries.get("name")
    if node is None:
        source.problems.append(item.place.problem(f"stages[{index}].name is missing", "name: train"))
        return None
    text = node.text if isinstance(node, ScalarNode) else ""
    if not re.match(NAME_PATTERN, text):
        source.problems.append(
            node.place.problem(
                f"stages[{index}].name {shown(text)} is no name",
                "letters, digits, '.', '_', '-'; a letter or digit first",
            )
        )
        return None
    if text in earlier:
        source.problems.append(node.place.problem(f"two stages are called {text}", "give each its own name"))
        return None
    own = root.entries.get("name")
    if isinstance(own, ScalarNode) and len(own.text) + 1 + len(text) > NAME_BYTES:
        source.problems.append(
            node.place.problem(
                f"{own.text}.{text} is too long for a job's name", f"at most {NAME_BYTES} characters together"
            )
        )
        return None
    return text


def _needs(item: MappingNode, name: str, earlier: list[str], source: Source) -> str | None:
    """The stage above, unless another one is named: stages run one after the other."""
    node = item.entries.get("needs")
    if node is None:
        return earlier[-1] if earlier else None
    text = node.text if isinstance(node, ScalarNode) else ""
    if text in earlier:
        return text
    what = "itself" if text == name else f"{shown(text)}, which is no stage above it"
    source.problems.append(node.place.problem(f"{name} needs {what}", suggestion(text, earlier)))
    return None


def _laid_over(root: MappingNode, item: MappingNode, name: str) -> MappingNode:
    merged = MappingNode(item.place)
    dropped = {other for key, others in INSTEAD.items() if key in item.entries for other in others}
    if _text(item.entries.get("program")) not in (None, _text(root.entries.get("program"))):
        dropped.add("args")  # they were another program's
    for key, node in root.entries.items():
        if key not in ("stages", *dropped):
            _put(merged, key, node, root.keys[key])
    for key, node in item.entries.items():
        if key in ("name", "needs"):
            continue
        common = merged.entries.get(key)
        if key in MERGED and isinstance(common, MappingNode) and isinstance(node, MappingNode):
            _put(merged, key, _merge(common, node), item.keys[key])
        elif not (common is not None and _is_override(common.place)):
            _put(merged, key, node, item.keys[key])
    own = root.entries.get("name")
    if isinstance(own, ScalarNode):
        merged.entries["name"] = ScalarNode(own.place, f"{own.text}.{name}", plain=False)
    return merged


def _merge(common: MappingNode, own: MappingNode) -> MappingNode:
    merged = MappingNode(own.place, dict(common.entries), dict(common.keys))
    for either, other in (("ids", "per_node"), ("per_node", "ids")):
        if either in own.entries and other not in own.entries:
            merged.entries.pop(other, None)
    for key, node in own.entries.items():
        before = merged.entries.get(key)
        if before is None or not _is_override(before.place):
            _put(merged, key, node, own.keys[key])
    return merged


def _is_override(place: Place) -> bool:
    """A `--set` of the common part means every stage, whatever the file says."""
    return place.line is None


def _put(target: MappingNode, key: str, node: Node, place: Place) -> None:
    target.entries[key] = node
    target.keys[key] = place


def _text(node: Node | None) -> str | None:
    return node.text if isinstance(node, ScalarNode) else None
