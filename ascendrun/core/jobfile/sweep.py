"""Sweeps: several jobs from one file, each with other values of some keys."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ascendrun.core.errors import Problem
from ascendrun.core.jobfile.model import SweepPlace
from ascendrun.core.jobfile.tree import set_value
from ascendrun.core.reader.yaml_source import ListNode, MappingNode, ScalarNode, Source, place_of, scalar_value, walk
from ascendrun.text import Text, write

if TYPE_CHECKING:
    from ascendrun.core.jobfile.pipeline import StageJob
    from ascendrun.options import ProgramOptions

MOST = 1000
"""Jobs of a sweep."""
INDEX = "{sweep}"
"""Stands for the number of the job in every value of the file."""


def points_of(root: MappingNode, source: Source) -> list[dict[str, ScalarNode]]:
    """Return the values of each job by key; []: the file is no sweep. Problems go to the source."""
    node = root.entries.get("sweep")
    if node is None or (isinstance(node, ScalarNode) and scalar_value(node) is None):
        return []
    points: list[dict[str, Any]] = []
    if isinstance(node, MappingNode):
        lists = [one.items for one in node.entries.values() if isinstance(one, ListNode)]
        values = itertools.islice(itertools.product(*lists), MOST + 1) if len(lists) == len(node.entries) else ()
        points = [dict(zip(node.entries, one)) for one in values]
    elif isinstance(node, ListNode):
        points = [getattr(one, "entries", {}) for one in node.items]
    if not points or not all(point and all(isinstance(one, ScalarNode) for one in point.values()) for point in points):
        text = Text("sweep.form", "sweep: expected a mapping of keys to lists of values, or a list of mappings")
    elif len(points) > MOST:
        text = Text("sweep.too-many", "sweep: more than {limit} jobs", limit=MOST)
    elif "stages" in root.entries:
        text = Text("sweep.stages", "sweep cannot be combined with stages")
    else:
        return points
    source.problems.append(node.place.problem(text, write("sweep: {args.learning_rate: [1e-4, 3e-4]}")))
    return []


def enter(root: MappingNode, source: Source, number: int, programs: Mapping[str, ProgramOptions]) -> SweepPlace | None:
    """Give the tree the values of one job of its sweep, from 1, and return its place; None: the file is no sweep."""
    points = points_of(root, source)
    root.entries.pop("sweep", None)
    if not points:
        return None
    for key, node in points[number - 1].items():
        set_value(source, key.split("."), node, node.place, programs)
    name = root.entries.get("name")
    if isinstance(name, ScalarNode):
        root.entries["name"] = ScalarNode(name.place, f"{name.text}-{number}", plain=False)
    for below in walk(root):
        if isinstance(below, ScalarNode):
            below.text = below.text.replace(INDEX, str(number))
    values = {key: scalar_value(node) for key, node in points[number - 1].items()}
    return SweepPlace(index=number, count=len(points), values=values)


def clashes(jobs: Sequence[StageJob]) -> Iterator[Problem]:
    """Yield a problem for each directory that two jobs of a sweep would write."""
    found: set[tuple[str, object]] = set()
    for job in jobs:
        paths = {"checkpoint.dir": job.spec.checkpoint.dir, "args.output_dir": job.spec.args.get("output_dir")}
        for key, path in paths.items():
            if (key, path) in found and str(path).startswith("/") and job.root is not None:
                text = Text("sweep.same-path", "{key}: all jobs of the sweep would write {path}", key=key, path=path)
                hint = write(f'{key.rpartition(".")[2]}: "{path}/{INDEX}"')
                yield place_of(job.root, key.split(".")).problem(text, hint)
            found.add((key, path))
