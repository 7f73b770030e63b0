"""Engines: what a site already has to run jobs on, by the name that its settings give it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from ascendrun.core.errors import InvalidInputError, NotFoundError, Problem
from ascendrun.core.reader.yaml_source import MappingNode, Node, Source, place_of, texts
from ascendrun.core.settings import ENGINE_BLOCK, Settings, SettingsBlocks
from ascendrun.text import Text, closest, did_you_mean, write

FILES = ("hostfile", "template")
"""Options that are paths of files, relative to the file that has the engine."""


def engine_types() -> Mapping[str, Any]:
    """Return the models of engines by type."""
    from ascendrun.core.engine_types import ENGINE_TYPES  # models take long to make; most jobs name no engine

    return ENGINE_TYPES


def read_engine(node: Node, source: Source, problems: list[Problem]) -> dict[str, Any] | None:
    """Return the options of an engine of a settings or job file, without unset ones; None when it has problems, which
    are added to `problems`."""
    if not isinstance(node, MappingNode):
        text = Text("engine.mapping", "engine: expected a mapping with a type")
        problems.append(node.place.problem(text, write("{type: ssh, hostfile: cluster.hosts}")))
        return None
    data = {name: texts(value) for name, value in node.entries.items()}
    model = engine_types().get(str(data.get("type")))
    if model is None:
        text = Text("engine.type", "unknown type of an engine: {type}", type=str(data.get("type")))
        known = Text("engine.types", "the types are {types}", types=list(engine_types()))
        problems.append(place_of(node, ("type",)).problem(text, known))
        return None
    from ascendrun.core.reader.model_reader import read_model

    made = read_model(model, data, node, source, problems)
    return None if made is None else made.model_dump(mode="json", exclude_none=True)


def parse_engines(blocks: SettingsBlocks, problems: list[Problem]) -> dict[str, dict[str, Any]]:
    """Return the engines of one settings file by name; paths are relative to the file."""
    block = blocks.root.entries.get(ENGINE_BLOCK)
    if block is not None and not isinstance(block, MappingNode):
        text = Text("engine.block", "engines: expected a mapping of names to engines")
        problems.append(block.place.problem(text, write("engines: {lab: {type: ssh, hostfile: lab.hosts}}")))
    found = {}
    for name, node in block.entries.items() if isinstance(block, MappingNode) else ():
        engine = read_engine(node, blocks.source, problems)
        if engine is not None:
            found[name] = in_folder({**engine, "name": name}, str(blocks.file.parent))
    return found


def in_folder(engine: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return an engine with its files of that directory."""
    paths = {name: os.path.join(folder, os.path.expanduser(engine[name])) for name in FILES if name in engine}
    return {**engine, **{name: os.path.abspath(path) for name, path in paths.items()}}


def read_engines(settings: Settings) -> dict[str, dict[str, Any]]:
    """Return the engines of the settings by name, each of the strongest file that has it; `file`: that one. Raises
    InvalidInputError with every problem."""
    problems: list[Problem] = []
    engines: dict[str, dict[str, Any]] = {}
    for blocks in settings.blocks:
        found = parse_engines(blocks, problems)
        engines.update((name, {**engine, "file": str(blocks.file)}) for name, engine in found.items())
    if problems:
        raise InvalidInputError(problems)
    return engines


def find_engine(settings: Settings, name: str) -> dict[str, Any]:
    """Return an engine of the settings. Raises NotFoundError; InvalidInputError for an invalid block."""
    engines = read_engines(settings)
    if name not in engines:
        near = closest(name, engines)
        hint = did_you_mean(near) if near else Text("engine.define", "name it in the settings: docs/engines.md")
        raise NotFoundError(Text("engine.unknown", "engine {name} not found in the settings", name=name), hint=hint)
    return engines[name]


def time_limit_s(engine: object) -> float | None:
    """Return the `time` of an engine in seconds, as sbatch reads it: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S; None: it has
    none, or no limit."""
    text = str(engine.get("time", "")) if isinstance(engine, Mapping) else ""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+(?::\d+){0,2})", text)
    if found is None:
        return None
    parts = [float(part) for part in found[2].split(":")]
    units = (3600, 60, 1) if found[1] or len(parts) == 3 else (60, 1)
    return 86400.0 * int(found[1] or 0) + sum(part * unit for part, unit in zip(parts, units))
