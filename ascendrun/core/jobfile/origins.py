"""Which value of a job on an engine came from where: the job file, the engine, the settings or the command. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ascendrun.core.dataclass import dataclass
from ascendrun.core.jobfile.model import JobSpec

SITE = ("name", "type", "file", "env", "setup", "python", "image", "runtime", "mounts", "applied", "chosen_by")
"""Keys of an engine that are not options of it alone."""


@dataclass(frozen=True)
class Origin:
    """`origin`: job, engine, settings or command."""

    key: str
    value: Any
    origin: str


def origins_of(spec: JobSpec) -> tuple[Origin, ...]:
    """Return the values of a job on an engine that a site may set; () without an engine."""
    return tuple(_origins(spec, spec.engine)) if isinstance(spec.engine, dict) else ()


def _origins(spec: JobSpec, engine: dict[str, Any]) -> Iterator[Origin]:
    def by(key: str) -> str:
        return "engine" if key in engine["applied"] else "job"

    yield Origin("engine", engine.get("name") or engine["type"], engine["chosen_by"])
    for key, value in engine.items():
        if key not in SITE and value:
            yield Origin(key, value, "engine")
    for key in ("setup", "python"):
        if getattr(spec, key) is not None:
            yield Origin(key, getattr(spec, key), by(key))
    for name, value in spec.env.items():
        yield Origin(f"env.{name}", value, by(f"env.{name}"))
    if spec.container is not None:
        for key in ("image", "runtime"):
            if key in spec.container.model_fields_set:
                yield Origin(f"container.{key}", getattr(spec.container, key), by(f"container.{key}"))
        for mount in spec.container.mounts:
            yield Origin("container.mounts", mount, "engine" if mount in engine.get("mounts", ()) else "job")
