"""Which value of a job on an engine came from where: the job file, the engine, the settings or the command. Pure."""

from __future__ import annotations

from typing import Any

from ascendrun.core.dataclass import dataclass
from ascendrun.core.jobfile.model import JobSpec


@dataclass(frozen=True)
class Origin:
    """`origin`: job, engine, settings or command."""

    key: str
    value: Any
    origin: str


def origins_of(spec: JobSpec) -> tuple[Origin, ...]:
    """Return the values of a job on an engine that a site may set; () without an engine."""
    engine = spec.engine
    if not isinstance(engine, dict):
        return ()
    from ascendrun.core.engine_types import SiteOfNodes  # with a job on an engine they are imported

    of_site = {*SiteOfNodes.model_fields, "type", "file", "container", "applied", "chosen_by"}
    values = {"setup": spec.setup, "python": spec.python, **{f"env.{name}": value for name, value in spec.env.items()}}
    box = engine.get("container") or spec.model_dump(include={"container"}, exclude_unset=True).get("container") or {}
    values.update((f"container.{key}", box[key]) for key in ("image", "runtime") if key in box)
    own = {key: value for key, value in engine.items() if key not in of_site and value}
    mounts = box.get("mounts", ())
    return (
        Origin("engine", engine.get("name") or engine["type"], engine["chosen_by"]),
        *(Origin(key, value, "engine") for key, value in own.items()),
        *(Origin(key, one, "engine" if key in engine["applied"] else "job") for key, one in values.items() if one),
        *(Origin("container.mounts", one, "engine" if one in engine.get("mounts", ()) else "job") for one in mounts),
    )
