"""Engines: what a site already has to run jobs on, by the name that its settings give it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Optional, Tuple

from pydantic import ConfigDict, Field

from ascendrun.core.errors import InvalidInputError, NotFoundError, Problem
from ascendrun.core.reader.model_reader import read_model
from ascendrun.core.reader.strict import Name, Strict
from ascendrun.core.reader.yaml_source import MappingNode, Node, Source, place_of, texts
from ascendrun.core.settings import ENGINE_BLOCK, Settings, SettingsBlocks
from ascendrun.text import Text, closest, did_you_mean, write

MOUNT_PATTERN = r"^/[^:]*:/[^:]*(:ro|:rw)?$"
"""A mount of a container: SOURCE:TARGET[:ro]."""


class Site(Strict):
    """An engine, and what its site adds to a job; values of the job win. Its values are texts, as those of settings."""

    model_config = ConfigDict(strict=False)
    runs_images: ClassVar[bool] = False
    """Its hosts are containers: those of a job run its image, and start none."""

    name: Optional[Name] = None
    """Its name in the settings."""
    env: Mapping[str, str] = Field(default_factory=dict, examples=[{"HCCL_CONNECT_TIMEOUT": "1200"}])
    setup: Optional[str] = Field(None, examples=["source /usr/local/Ascend/ascend-toolkit/set_env.sh"])
    python: Optional[str] = Field(None, examples=["/opt/conda/bin/python"])


class SiteOfNodes(Site):
    """An engine on whose nodes a job may start containers."""

    image: Optional[str] = Field(None, examples=["quay.io/ascend/cann:8.3"])
    runtime: Optional[Literal["docker", "podman", "apptainer"]] = Field(None, examples=["podman"])
    mounts: Tuple[Annotated[str, Field(pattern=MOUNT_PATTERN)], ...] = Field((), examples=[["/data:/data:ro"]])


class SshEngine(SiteOfNodes):
    """Hosts of a hostfile."""

    type: Literal["ssh"] = Field(examples=["ssh"])
    hostfile: str = Field(examples=["cluster.hosts"])


class SlurmEngine(SiteOfNodes):
    """A Slurm cluster, on whose login node the head runs."""

    type: Literal["slurm"] = Field(examples=["slurm"])
    partition: Optional[str] = Field(None, examples=["npu"])
    account: Optional[str] = Field(None, examples=["llm"])
    qos: Optional[str] = Field(None, examples=["normal"])
    time: Optional[str] = Field(None, examples=["1-00:00:00"])
    constraint: Optional[str] = Field(None, examples=["910b"])
    reservation: Optional[str] = Field(None, examples=["maintenance"])
    exclude: Optional[str] = Field(None, examples=["npu[03-04]"])
    gres: str = Field("npu", examples=["npu:910b"])
    options: Tuple[str, ...] = Field((), examples=[["--exclusive", "--mem=0"]])


class KubernetesEngine(Site):
    """A Kubernetes cluster that kubectl reaches from the head."""

    runs_images = True

    type: Literal["kubernetes"] = Field(examples=["kubernetes"])
    context: str = Field(examples=["prod"])
    namespace: str = Field("default", examples=["train"])
    kind: Literal["pods", "vcjob", "ascendjob"] = Field("pods", examples=["vcjob"])
    image: Optional[str] = Field(None, examples=["quay.io/ascend/cann:8.3"])
    mounts: Tuple[Annotated[str, Field(pattern=r"^(pvc:[a-z0-9.-]+|emptydir|/[^:]*):/[^:]*(:ro|:rw)?$")], ...] = Field(
        (), examples=[["pvc:data:/data"]]
    )
    resource: Optional[str] = Field(None, examples=["example.com/npu"])
    queue: Optional[str] = Field(None, examples=["default"])
    priority_class: Optional[str] = Field(None, examples=["training"])
    template: Optional[str] = Field(None, examples=["pod.yaml"])


ENGINE_TYPES: Mapping[str, type[Site]] = {"kubernetes": KubernetesEngine, "ssh": SshEngine, "slurm": SlurmEngine}
FILES = ("hostfile", "template")
"""Options that are paths of files, relative to the file that has the engine."""


def read_engine(node: Node, source: Source, problems: list[Problem]) -> dict[str, Any] | None:
    """Return the options of an engine of a settings or job file, without unset ones; None when it has problems, which
    are added to `problems`."""
    if not isinstance(node, MappingNode):
        text = Text("engine.mapping", "engine: expected a mapping with a type")
        problems.append(node.place.problem(text, write("{type: ssh, hostfile: cluster.hosts}")))
        return None
    data = {name: texts(value) for name, value in node.entries.items()}
    model = ENGINE_TYPES.get(str(data.get("type")))
    if model is None:
        text = Text("engine.type", "unknown type of an engine: {type}", type=str(data.get("type")))
        known = Text("engine.types", "the types are {types}", types=list(ENGINE_TYPES))
        problems.append(place_of(node, ("type",)).problem(text, known))
        return None
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
