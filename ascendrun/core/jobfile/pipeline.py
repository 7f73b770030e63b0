"""Trees of the stages of a pipeline file: the keys of the file, overridden by those of the stage."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING

from ascendrun.core.dataclass import dataclass
from ascendrun.core.errors import Problem
from ascendrun.core.reader.strict import NAME_HINT, NAME_PATTERN
from ascendrun.core.reader.yaml_source import ListNode, MappingNode, Node, Place, ScalarNode, Source
from ascendrun.text import Text, suggestion, write

if TYPE_CHECKING:
    from ascendrun.core.jobfile.model import JobSpec
    from ascendrun.options import ProgramOptions

MERGED = ("args", "env", "labels", "devices", "checkpoint", "timeouts", "checks", "sampling", "progress")
"""Sections that a stage may set in part; the stage inherits other keys or replaces them."""

INSTEAD = {
    "program": ("command", "roles"),
    "command": ("program", "args", "roles"),
    "roles": ("program", "args", "command", "nodes"),
}
"""Keys of the file that a stage with its own program, command or roles does not inherit."""

NAME_BYTES = 63


@dataclass(frozen=True)
class StageJob:
    """One job of a file. `stage`: its name within the pipeline, None: the file is a single job.
    `needs`: the stage that must succeed before, None: none. `root`: its tree, for the locations of problems; None:
    not from a file."""

    stage: str | None
    needs: str | None
    spec: JobSpec
    root: MappingNode | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class StageRoot:
    """Tree of one stage, in the form of a job file."""

    name: str
    needs: str | None
    root: MappingNode


def split_stages(
    root: MappingNode, source: Source, programs: Mapping[str, ProgramOptions] | None = None
) -> list[StageRoot] | None:
    """Return the trees of a pipeline's stages, in order; None when the file is a single job.

    `programs`: for the aliases of options: a stage may override `learning_rate` of the file with `lr`. Problems of the
    list, its names and needs go to the source.
    """
    stages = root.entries.get("stages")
    if stages is None or isinstance(stages, ScalarNode) and stages.plain and stages.text in ("", "~", "null"):
        return None
    place = root.keys.get("stages", stages.place)
    if not isinstance(stages, ListNode) or not stages.items:
        source.problems.append(
            place.problem(
                Text("stages.no-list", "stages: expected a list of stages"),
                write("stages: [{name: prepare, …}, {name: train, …}]"),
            )
        )
        return []
    found: list[StageRoot] = []
    earlier: list[str] = []
    for index, item in enumerate(stages.items):
        if not isinstance(item, MappingNode):
            source.problems.append(
                item.place.problem(
                    Text("stages.no-mapping", "stages[{index}]: expected a mapping", index=index),
                    write("{name: train, program: …}"),
                )
            )
            continue
        name = _name(item, index, earlier, root, source)
        needs = _needs(item, name, earlier, source)
        found.append(StageRoot(name or "", needs, override(root, item, name or f"stage-{index}", programs or {})))
        earlier += [name] if name is not None else []
    return found


def parallel_conflicts(jobs: Sequence[StageJob], roots: Sequence[StageRoot]) -> Iterator[Problem]:
    """Yield a problem for stages that may run at the same time and send different files. Both would be linked into the
    working directory that stages share on a host, and each start would remove the files of the other."""
    needed: dict[str | None, frozenset[str | None]] = {None: frozenset()}
    for at, job in enumerate(jobs):
        needed[job.stage] = needed.get(job.needs, frozenset()) | {job.needs}
        for other in jobs[:at]:
            if other.stage in needed[job.stage] or None in (job.spec.workdir, other.spec.workdir):
                continue
            if job.spec.workdir != other.spec.workdir:
                root = next(root.root for root in roots if root.name == job.stage)
                place = root.keys.get("workdir", root.place)
                yield place.problem(
                    Text(
                        "stages.parallel",
                        "stages {first} and {second} may run in parallel and have different workdir values",
                        first=other.stage,
                        second=job.stage,
                    ),
                    Text(
                        "stages.parallel-hint",
                        "write needs: {first} in {second}, or the same workdir in both",
                        first=other.stage,
                        second=job.stage,
                    ),
                )


def _name(item: MappingNode, index: int, earlier: list[str], root: MappingNode, source: Source) -> str | None:
    key, node = f"stages[{index}].name", item.entries.get("name")
    if node is None:
        text = Text("jobfile.required", "{key} is required", key=key)
        source.problems.append(item.place.problem(text, write("name: train")))
        return None
    name = node.text if isinstance(node, ScalarNode) else ""
    message: Text | None = None
    hint: Text | None = None
    own = root.entries.get("name")
    if not re.match(NAME_PATTERN, name):
        message = Text("jobfile.name", "{key}: invalid name {value:quote}", key=key, value=name)
        hint = NAME_HINT
    elif name in earlier:
        message = Text("stages.duplicate", "duplicate stage name {name}", name=name)
    elif isinstance(own, ScalarNode) and len(own.text) + 1 + len(name) > NAME_BYTES:
        message = Text(
            "stages.long-name",
            "job name {name} is too long (at most {limit} characters)",
            name=f"{own.text}.{name}",
            limit=NAME_BYTES,
        )
    if message is None:
        return name
    source.problems.append(node.place.problem(message, hint))
    return None


def _needs(item: MappingNode, name: str | None, earlier: list[str], source: Source) -> str | None:
    """Return the stage above, unless the file names another: stages run one after the other."""
    node = item.entries.get("needs")
    if node is None:
        return earlier[-1] if earlier else None
    needed = node.text if isinstance(node, ScalarNode) else ""
    if needed in earlier:
        return needed
    message = (
        Text("stages.needs-itself", "stage {name} cannot need itself", name=name)
        if needed == name
        else Text("stages.needs", "needs: no stage {needed:quote} above this one", needed=needed)
    )
    source.problems.append(node.place.problem(message, suggestion(needed, earlier)))
    return None


def override(root: MappingNode, item: MappingNode, name: str, programs: Mapping[str, ProgramOptions]) -> MappingNode:
    """Return the tree of a stage or a role, in the form of a job file."""
    merged = MappingNode(item.place)
    table = programs.get(_text(item.entries.get("program") or root.entries.get("program")) or "")
    aliases = {} if table is None else table.names_by_alias
    dropped = {other for key, others in INSTEAD.items() if key in item.entries for other in others}
    if _text(item.entries.get("program")) not in (None, _text(root.entries.get("program"))):
        dropped.add("args")  # options of another program
    for key, node in root.entries.items():
        if key not in ("stages", *dropped):
            _put(merged, key, node, root.keys[key])
    for key, node in item.entries.items():
        if key in ("name", "needs"):
            continue
        common = merged.entries.get(key)
        if key in MERGED and isinstance(common, MappingNode) and isinstance(node, MappingNode):
            _put(merged, key, _merge(common, node, aliases if key == "args" else {}), item.keys[key])
        elif not (common is not None and _is_override(common.place)):
            _put(merged, key, node, item.keys[key])
    own = root.entries.get("name")
    if isinstance(own, ScalarNode):
        merged.entries["name"] = ScalarNode(own.place, f"{own.text}.{name}", plain=False)
    return merged


def _merge(common: MappingNode, own: MappingNode, aliases: Mapping[str, str]) -> MappingNode:
    """Merge two trees. `aliases`: option names by alias; a key of the stage replaces all names of its option."""
    merged = MappingNode(own.place, dict(common.entries), dict(common.keys))
    for either, other in (("ids", "per_node"), ("per_node", "ids")):
        if either in own.entries and other not in own.entries:
            merged.entries.pop(other, None)
    for key, node in own.entries.items():
        same = [name for name in common.entries if aliases.get(name, name) == aliases.get(key, key)]
        if not any(_is_override(common.entries[name].place) for name in same):
            for name in same:
                if name not in own.entries:
                    merged.entries.pop(name, None)
            _put(merged, key, node, own.keys[key])
    return merged


def _is_override(place: Place) -> bool:
    """A `--set` without a stage applies to every stage and overrides the file."""
    return place.line is None


def _put(target: MappingNode, key: str, node: Node, place: Place) -> None:
    target.entries[key] = node
    target.keys[key] = place


def _text(node: Node | None) -> str | None:
    return node.text if isinstance(node, ScalarNode) else None
