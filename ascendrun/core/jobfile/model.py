"""The job file as types: every field of every release, strict and frozen; what may be said, not yet what fits."""

from __future__ import annotations

from typing import Annotated, Any, Dict, Literal, Mapping, Optional, Tuple, Union

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, WithJsonSchema

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
PROGRAM_PATTERN = r"^[a-z][a-z0-9_]{0,62}$"


def _whole(value: Any) -> Any:
    """1e3 is a whole number to whoever writes it."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _nodes_tag(value: Any) -> str:
    return "range" if isinstance(value, (dict, NodeRange)) else "count"


Whole = Annotated[int, BeforeValidator(_whole)]
NodeCount = Annotated[int, Field(ge=1, le=4096), BeforeValidator(_whole)]
Seconds = Annotated[float, Field(gt=0, le=31_536_000, allow_inf_nan=False)]
Signal = Literal["TERM", "INT", "HUP", "QUIT", "USR1", "USR2"]
Family = Literal["npu", "cuda", "cpu", "auto"]
Launcher = Literal["spawn", "torchrun", "deepspeed", "python"]
Cause = Literal["infra", "hccl", "hang"]
Scalar = Union[None, bool, int, float, str]
Argument = Union[Scalar, Tuple[Scalar, ...]]
EnvText = Annotated[str, WithJsonSchema({"type": ["string", "number", "boolean"]})]
Word = Annotated[str, WithJsonSchema({"type": ["string", "number", "boolean"]})]
Name = Annotated[str, Field(pattern=NAME_PATTERN)]


class Strict(BaseModel):
    """No unknown keys, no conversions, no changes after reading."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", use_attribute_docstrings=True)


class NodeRange(Strict):
    """An elastic number of nodes."""

    min: Whole = Field(ge=1, le=4096)
    """The fewest nodes to run on."""
    max: Whole = Field(ge=1, le=4096)
    """The most nodes to run on."""


Nodes = Annotated[
    Union[Annotated[NodeCount, Tag("count")], Annotated[NodeRange, Tag("range")]], Discriminator(_nodes_tag)
]


class Devices(Strict):
    """Which devices each node gives to the job."""

    family: Family = "cpu"
    """npu (torch_npu, HCCL), cuda (NCCL), cpu (gloo), or auto."""
    per_node: Optional[Whole] = Field(None, ge=1, le=1024)
    """Ranks on each node. Without it: the number of `ids`, else the host's slots, else 1."""
    ids: Optional[Tuple[Annotated[Whole, Field(ge=0, le=9999)], ...]] = Field(None, min_length=1)
    """The device ids to use on each node, ascending; instead of `per_node`."""


class EnvFile(Strict):
    """Secrets stay in a file of the head: read at the start, sent to the ranks, stored nowhere."""

    file: str = Field(min_length=1)
    """NAME=value lines; relative to the job file."""


class Stage(Strict):
    """The user's code, frozen: the same bytes on every node, or no start."""

    dir: str = Field(min_length=1)
    """The folder to send; relative to the job file."""
    exclude: Tuple[str, ...] = ()
    """What to leave out: names or patterns; a trailing / means folders only."""


class Container(Strict):
    """Run the command inside a container."""

    image: str = Field(min_length=1)
    """The image's name."""
    runtime: Literal["docker", "podman"] = "docker"
    """The container runtime of the nodes."""


class Checkpoint(Strict):
    """How the job saves its state."""

    dir: Optional[str] = Field(None, min_length=1)
    """An absolute path on the nodes; without it a folder of the run's own."""
    grace_s: Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)] = 30.0
    """Seconds between the signal and the kill, for saving."""
    signal: Signal = "TERM"
    """What tells the ranks to save and exit."""


class Restart(Strict):
    """When a failed job is started again."""

    max: Whole = Field(0, ge=0, le=1000)
    """How many restarts, at most."""
    window_s: Optional[Seconds] = None
    """Count only the restarts of the last seconds."""
    backoff_s: Optional[Tuple[Seconds, Seconds]] = None
    """The first and the longest pause between attempts."""
    on: Optional[Tuple[Cause, ...]] = None
    """The causes that are worth a restart."""
    stop_after_no_progress: Optional[Whole] = Field(None, ge=1, le=1000)
    """Give up after this many attempts that made no progress."""
    exclude_node_on: Optional[Tuple[str, ...]] = None
    """The findings after which a node is left out."""


class Timeouts(Strict):
    """Limits in seconds."""

    start_s: Seconds = 600.0
    """From the order to start until every rank lives."""
    hang_s: Optional[Seconds] = None
    """Silence after which the job counts as hung; null: never."""
    max_s: Optional[Seconds] = None
    """The longest the job may run; null: no limit."""


class Checks(Strict):
    """Which checks gate the start."""

    skip: Tuple[Name, ...] = ()
    """Checks to leave out."""
    require: Tuple[Name, ...] = ()
    """Checks to run on top of the usual ones."""


class Sampling(Strict):
    """How often devices, hosts and ranks are looked at while the job runs."""

    every_s: Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)] = 5.0
    """Seconds between two looks; on more than 200 hosts it is rarer. 0: never."""


class JobBody(Strict):
    """What a job and a stage of a pipeline have in common."""

    program: Optional[Annotated[str, Field(pattern=PROGRAM_PATTERN)]] = None
    """A bundled training program; or use `command`."""
    command: Optional[Tuple[Word, ...]] = Field(None, min_length=1)
    """The command as a list of words, run as it stands, never through a shell: [python, train.py, --lr, 2e-5]."""
    launcher: Launcher = "spawn"
    """spawn: each rank is started by the agent, with torchrun's environment. torchrun, deepspeed: one launcher a node.
    python: one process a node."""
    nodes: Optional[Nodes] = None
    """How many hosts of the hostfile, from its top; without it all of them."""
    spares: Whole = Field(0, ge=0, le=4096)
    """Hosts kept ready to replace a failed one."""
    devices: Devices = Devices()
    """Which devices each node gives to the job."""
    hostfile: Optional[str] = Field(None, min_length=1)
    """The file that lists the hosts; relative to the job file."""
    args: Mapping[str, Argument] = Field(default_factory=dict)
    """The program's own options."""
    env: Mapping[str, EnvText] = Field(default_factory=dict)
    """Environment variables of every rank; never for secrets."""
    env_from: Tuple[EnvFile, ...] = ()
    """Files with secret variables; read at the start, never stored."""
    setup: Optional[str] = Field(None, min_length=1)
    """Text that bash runs before the command on every node, such as: source set_env.sh"""
    python: Optional[str] = Field(None, min_length=1)
    """The interpreter on the nodes: an absolute path, or a name found on PATH."""
    stage: Optional[Stage] = None
    """The folder of code to send to every node."""
    container: Optional[Container] = None
    """Run inside a container."""
    checkpoint: Checkpoint = Checkpoint()
    """How the job saves its state."""
    restart: Restart = Restart()
    """When a failed job is started again."""
    timeouts: Timeouts = Timeouts()
    """Limits in seconds."""
    checks: Checks = Checks()
    """Which checks gate the start."""
    sampling: Sampling = Sampling()
    """How often devices, hosts and ranks are looked at while the job runs."""


class PipelineStage(JobBody):
    """One stage of a pipeline: a job with its own overrides."""

    name: Name
    """The stage's name."""
    needs: Optional[Name] = None
    """The stage that has to succeed before this one starts."""


class JobSpec(JobBody):
    """One job: what to run, where, and within which limits."""

    name: Name
    """The job's name: letters, digits, '.', '_', '-'."""
    stages: Tuple[PipelineStage, ...] = ()
    """A pipeline: stages that run one after the other."""


def job_json_schema() -> Dict[str, Any]:
    """The job file's JSON Schema, for editors (`# yaml-language-server: $schema=FILE`)."""
    schema = JobSpec.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "ascendrun job file"
    # pydantic leaves the description of a section out where it refers to the section's own definition.
    for properties in (schema["properties"], schema["$defs"]["PipelineStage"]["properties"]):
        for name, described in properties.items():
            described.setdefault(
                "description",
                PipelineStage.model_fields[name].description
                if name in PipelineStage.model_fields
                else JobSpec.model_fields[name].description,
            )
    return schema
