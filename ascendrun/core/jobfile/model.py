"""The job file as types, strict and frozen: every key with its type, default, meaning and an example."""

from __future__ import annotations

from typing import Annotated, Any, Dict, Literal, Mapping, Optional, Tuple, Union

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from ascendrun.text import Text, write

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
PROGRAM_PATTERN = r"^[a-z][a-z0-9_]{0,62}$"


def _integer(value: Any) -> Any:
    """Accept 1e3 as an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Integer = Annotated[int, BeforeValidator(_integer)]
Seconds = Annotated[float, Field(gt=0, le=31_536_000, allow_inf_nan=False)]
Signal = Literal["TERM", "INT", "HUP", "QUIT", "USR1", "USR2"]
DeviceType = Literal["npu", "cuda", "cpu"]
Launcher = Literal["spawn", "torchrun", "deepspeed", "none"]
Scalar = Union[None, bool, int, float, str]
Argument = Union[Scalar, Tuple[Scalar, ...]]
Word = Annotated[str, WithJsonSchema({"type": ["string", "number", "boolean"]})]
FileName = Annotated[str, Field(min_length=1)]
Name = Annotated[str, Field(pattern=NAME_PATTERN)]


class Strict(BaseModel):
    """No unknown keys, no conversions, no changes after reading."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", use_attribute_docstrings=True)


class Devices(Strict):
    """The devices that each node gives to the job."""

    type: DeviceType = Field("cpu", examples=["npu"])
    """Device type: npu (torch_npu, HCCL), cuda (NCCL) or cpu (gloo)."""
    per_node: Optional[Integer] = Field(None, ge=1, le=1024, examples=[8])
    """Ranks on each node. Default: the number of `ids`, else the `slots` of the host, else 1."""
    ids: Optional[Tuple[Annotated[Integer, Field(ge=0, le=9999)], ...]] = Field(
        None, min_length=1, examples=[[0, 1, 2, 3]]
    )
    """Device ids to use on each node, in ascending order. Replaces `per_node`."""


class Workdir(Strict):
    """The code directory. Every node gets the same files, or the job does not start."""

    path: FileName = Field(examples=["."])
    """Directory to send to every node, relative to the job file. Ranks run in a copy of it."""
    exclude: Tuple[str, ...] = Field((), examples=[["data/", ".git/", "*.ckpt"]])
    """Names or patterns to omit. A trailing `/` matches directories only."""


class Checkpoint(Strict):
    """How the job saves its state."""

    dir: Optional[str] = Field(None, min_length=1, examples=["/data/ckpt/my-job"])
    """Absolute path on the nodes for checkpoints. Default: a directory of the run."""
    grace_period_s: Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)] = Field(30.0, examples=[300])
    """Seconds between the stop signal and SIGKILL, for saving a checkpoint."""
    signal: Signal = Field("TERM", examples=["USR1"])
    """Signal that requests the ranks to save a checkpoint and exit."""


class Timeouts(Strict):
    """Limits in seconds."""

    start_s: Seconds = Field(600.0, examples=[600])
    """Seconds from the start command until every rank runs."""
    run_s: Optional[Seconds] = Field(None, examples=[86400])
    """Seconds that the job may run. Default: no limit."""


class Checks(Strict):
    """The preflight checks of the job. `ascendrun doctor` lists their names."""

    skip: Tuple[Name, ...] = Field((), examples=[["clock"]])
    """Checks to omit."""
    require: Tuple[Name, ...] = Field((), examples=[["torch"]])
    """Checks to run in addition to the default ones."""


class Sampling(Strict):
    """Monitoring of devices, hosts and ranks while the job runs."""

    interval_s: Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)] = Field(5.0, examples=[10])
    """Seconds between two samples. Longer on more than 200 hosts. 0 turns sampling off."""


class JobBody(Strict):
    """The keys that a job and a stage of a pipeline have in common."""

    program: Optional[Annotated[str, Field(pattern=PROGRAM_PATTERN)]] = Field(None, examples=["trajectory"])
    """Bundled training program to run. Cannot be combined with `command`."""
    command: Optional[Tuple[Word, ...]] = Field(None, min_length=1, examples=[["python", "train.py", "--lr", "2e-5"]])
    """Command to run on each rank, as a list of arguments. It is not passed to a shell."""
    launcher: Launcher = Field("spawn", examples=["torchrun"])
    """spawn: the agent starts each rank with the environment that torchrun sets. torchrun, deepspeed: the agent starts
    this launcher once on each node. none: one process on each node."""
    nodes: Optional[Integer] = Field(None, ge=1, le=4096, examples=[2])
    """Number of hosts to use, from the top of the hostfile. Default: all of them."""
    devices: Devices = Field(Devices(), examples=[{"type": "npu", "per_node": 8}])
    """The devices that each node gives to the job."""
    hostfile: Optional[FileName] = Field(None, examples=["cluster.hosts"])
    """File that lists the hosts, relative to the job file."""
    args: Mapping[str, Argument] = Field(default_factory=dict, examples=[{"learning_rate": 2e-5}])
    """Options of the program. `ascendrun schema PROGRAM` lists them."""
    env: Mapping[str, Word] = Field(default_factory=dict, examples=[{"OMP_NUM_THREADS": 8}])
    """Environment variables of every rank. Put secrets into `env_file`."""
    env_file: Tuple[FileName, ...] = Field((), examples=[["secrets.env"]])
    """Files with NAME=value lines for secrets, relative to the job file. Read at each start and never stored."""
    setup: Optional[str] = Field(None, min_length=1, examples=["source /usr/local/Ascend/ascend-toolkit/set_env.sh"])
    """Bash script that runs on every node before the command, in the same shell."""
    python: Optional[str] = Field(None, min_length=1, examples=["/opt/conda/bin/python"])
    """Python interpreter on the nodes: an absolute path or a name on PATH."""
    workdir: Optional[Workdir] = Field(None, examples=[{"path": ".", "exclude": ["data/", ".git/"]}])
    """The code directory. Every node gets the same files, or the job does not start."""
    checkpoint: Checkpoint = Field(Checkpoint(), examples=[{"dir": "/data/ckpt/my-job", "grace_period_s": 300}])
    """How the job saves its state."""
    timeouts: Timeouts = Field(Timeouts(), examples=[{"start_s": 600, "run_s": 86400}])
    """Limits in seconds."""
    checks: Checks = Field(Checks(), examples=[{"skip": ["clock"]}])
    """The preflight checks of the job. `ascendrun doctor` lists their names."""
    sampling: Sampling = Field(Sampling(), examples=[{"interval_s": 10}])
    """Monitoring of devices, hosts and ranks while the job runs."""


class PipelineStage(JobBody):
    """One stage of a pipeline: a job with its own values for some keys."""

    name: Name = Field(examples=["train"])
    """Name of the stage."""
    needs: Optional[Name] = Field(None, examples=["prepare"])
    """Stage that must succeed before this one starts. Default: the stage above."""


class JobSpec(JobBody):
    """One job: what to run, where, and within which limits."""

    name: Name = Field(examples=["my-job"])
    """Name of the job: letters, digits, `.`, `_` and `-`, at most 63 characters."""
    stages: Tuple[PipelineStage, ...] = Field((), examples=[[{"name": "prepare"}, {"name": "train"}]])
    """Stages of a pipeline, which run one after the other. A stage inherits the other keys of the file."""


RENAMED: Mapping[str, str] = {
    "stage": "workdir",
    "stage.dir": "workdir.path",
    "workdir.dir": "workdir.path",
    "env_from": "env_file",
    "devices.family": "devices.type",
    "checkpoint.grace_s": "checkpoint.grace_period_s",
    "timeouts.max_s": "timeouts.run_s",
    "sampling.every_s": "sampling.interval_s",
}
"""Old keys of the job file and their new names. An old key is an error with the hint `write NEW: VALUE`."""

RENAMED_VALUES: Mapping[str, Mapping[str, str]] = {"launcher": {"python": "none"}}
"""Old values by key, and their new names."""

UNSUPPORTED: Mapping[str, Text] = {
    "spare_nodes": Text("jobfile.later.spares", "replace a failed host in the hostfile and submit the job again"),
    "spares": Text("jobfile.later.spares", "replace a failed host in the hostfile and submit the job again"),
    "container": Text("jobfile.later.container", "start the container runtime in command"),
    "restart": Text("jobfile.later.restart", "remove it and submit the job again after a failure"),
    "timeouts.hang_s": Text("jobfile.later.hang", "remove it; timeouts.run_s limits the duration of the job"),
    "timeouts.first_step_s": Text("jobfile.later.hang", "remove it; timeouts.run_s limits the duration of the job"),
    "checkpoint.fenced": Text("jobfile.later.remove", "remove it"),
    "checkpoint.pointer": Text("jobfile.later.remove", "remove it"),
    "nodes.min": write("nodes: 2"),
    "nodes.max": write("nodes: 2"),
}
"""Keys of other tools that are not implemented: rejected with a hint, and absent from the JSON Schema."""


def not_supported(key: str) -> Text:
    return Text("jobfile.later", "{key} is not supported yet", key=key)


def migrate_spec(old: Mapping[str, Any]) -> Dict[str, Any]:
    """Return a job spec stored under earlier key names with the current names; a current spec is unchanged.

    Unknown keys are dropped.
    """
    return _migrated(old, (), JobSpec)


def _migrated(old: Mapping[str, Any], path: Tuple[str, ...], model: type[BaseModel]) -> Dict[str, Any]:
    new: Dict[str, Any] = {}
    for key, value in old.items():
        key = RENAMED.get(".".join((*path, key)), key).rpartition(".")[2]
        if key not in model.model_fields:
            continue
        section = SECTIONS.get(key)
        if section is not None and isinstance(value, Mapping):
            value = _migrated(value, (*path, key), section)
        elif key == "stages" and not path and isinstance(value, (list, tuple)):
            value = [_migrated(stage, (), PipelineStage) for stage in value]
        elif key == "env_file" and isinstance(value, (list, tuple)):
            value = [file.get("file") if isinstance(file, Mapping) else file for file in value]
        elif key == "nodes" and isinstance(value, Mapping):
            value = value.get("max")
        elif isinstance(value, str):
            value = RENAMED_VALUES.get(".".join((*path, key)), {}).get(value, value)
        new[key] = value
    return new


SECTIONS: Mapping[str, type[BaseModel]] = {
    "devices": Devices,
    "workdir": Workdir,
    "checkpoint": Checkpoint,
    "timeouts": Timeouts,
    "checks": Checks,
    "sampling": Sampling,
}
"""The sections of a job file by key."""


def job_json_schema() -> Dict[str, Any]:
    """The JSON Schema of job files, for editors."""
    schema = JobSpec.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "ascendrun job file"
    # pydantic omits the description and examples of a section where it refers to the section's own definition.
    for properties, model in (
        (schema["properties"], JobSpec),
        (schema["$defs"]["PipelineStage"]["properties"], PipelineStage),
    ):
        for name, described in properties.items():
            field = model.model_fields[name]
            described.setdefault("description", field.description)
            described.setdefault("examples", field.examples)
    return schema
