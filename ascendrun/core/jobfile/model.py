"""The job file as types, strict and frozen: every key with its type, default, meaning and an example."""

from __future__ import annotations

from typing import Annotated, Any, Dict, Literal, Mapping, Optional, Tuple, Union

from pydantic import BaseModel, BeforeValidator, Field, WithJsonSchema

from ascendrun.core.dataclass import PARSING
from ascendrun.core.reader.strict import Name, Strict, sections_of
from ascendrun.text import Text, write

DEFAULT_CAUSES: Any = ("infra", "device", "hccl", "hang", "storage", "oom", "preempted", "unknown")
PROGRAM_PATTERN = r"^([a-z][a-z0-9_]{0,62}|\./[A-Za-z0-9_][A-Za-z0-9_./-]*\.py)$"
"""A bundled program, or the file of one of your own in workdir.path."""


def _integer(value: Any) -> Any:
    """Accept 1e3 as an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Integer = Annotated[int, BeforeValidator(_integer)]
Seconds = Annotated[float, Field(gt=0, le=31_536_000, allow_inf_nan=False)]
Signal = Literal["TERM", "INT", "HUP", "QUIT", "USR1", "USR2"]
DeviceType = Literal["npu", "cuda", "cpu"]
Launcher = Literal["spawn", "torchrun", "deepspeed", "accelerate", "none", "ray"]
Scalar = Union[None, bool, int, float, str]
Argument = Union[Scalar, Tuple[Union[Scalar, Dict[str, Scalar]], ...]]
Word = Annotated[str, WithJsonSchema({"type": ["string", "number", "boolean"]})]
FileName = Annotated[str, Field(min_length=1)]


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
    fenced: bool = Field(False, examples=[True])
    """The program implements docs/epochs.md, so that a restart does not wait for an unreachable node."""
    pointer: Optional[Literal["repair"]] = Field(None, examples=["repair"])
    """`repair`: if DeepSpeed's `latest` or Megatron's `latest_checkpointed_iteration.txt` names a newer checkpoint than
    the one that the job resumes from, write that one into it. Default: these files are not changed."""


class Timeouts(Strict):
    """Limits in seconds."""

    check_s: Annotated[float, Field(ge=1, le=600, allow_inf_nan=False)] = Field(8.0, examples=[60])
    """Seconds that the setup and the interpreter of the job may take in the checks before a start. If they take longer,
    the start has a warning."""
    start_s: Seconds = Field(600.0, examples=[600])
    """Seconds from the start command until every rank runs."""
    first_step_s: Seconds = Field(1800.0, examples=[3600])
    """Seconds from the start to the first step. Before that, a job without progress does not count as hung."""
    hang_s: Optional[Seconds] = Field(900.0, examples=[900])
    """Seconds without progress until a hung job is stopped for a restart. Without restarts, or with null, a hang is
    only reported."""
    unreachable_s: Optional[Seconds] = Field(3600.0, examples=[3600])
    """Seconds that a host does not respond and no rank on the other hosts makes progress, until a job without restarts
    is stopped. 24 times as long while no host responds. null: no limit."""
    run_s: Optional[Seconds] = Field(None, examples=[86400])
    """Seconds that the job may run. Default: no limit."""


FailureKind = Literal["infra", "device", "hccl", "hang", "storage", "oom", "preempted", "unknown", "user"]
Pause = Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)]


SHORTEST_LEASE_S = 90.0
"""Least difference of restart.fence_after_s and the grace period: a controller that is started again is in time."""


class Restart(Strict):
    """Whether the job starts again after a failure."""

    max_restarts: Optional[Integer] = Field(None, ge=0, le=1000, examples=[3])
    """Restarts within `window_s`. 0: none. Default: 3 for `program`, 0 for `command`."""
    window_s: Seconds = Field(86_400.0, examples=[86400])
    """Seconds after which a restart no longer counts."""
    backoff_s: Tuple[Pause, ...] = Field((10.0, 300.0), min_length=2, max_length=2, examples=[[10, 300]])
    """Shortest and longest pause before a restart. It doubles with each restart without progress."""
    causes: Tuple[FailureKind, ...] = Field(DEFAULT_CAUSES, examples=[["infra", "device", "hccl"]])
    """Kinds of failures after which the job restarts. user: exceptions and other errors of the program."""
    max_restarts_without_progress: Optional[Integer] = Field(None, ge=0, le=1000, examples=[2])
    """Restarts in a row without a new step. Default: 1 to 3, by the kind of failure."""
    exclude_node_findings: Tuple[str, ...] = Field((), examples=[["device", "EI0013"]])
    """Kinds of failures or codes of `ascendrun explain` after which the job never uses the node again."""
    on_unreachable_node: Literal["auto", "wait", "fence"] = Field("auto", examples=["wait"])
    """Restart while a node of the last attempt is unreachable. wait: not before its processes are known to be gone.
    fence: when the node has ended its ranks by itself, after `fence_after_s`."""
    fence_after_s: Seconds = Field(300.0, examples=[300])
    """With on_unreachable_node: fence, seconds without the controller after which a node ends its ranks."""


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


class Container(Strict):
    """The image in which each node runs the job, and how its runtime starts it."""

    image: Annotated[str, Field(pattern=r"^[A-Za-z0-9/.][^\s]*$")] = Field(examples=["quay.io/ascend/cann:8.3"])
    """The image, as its runtime names it. It must be the same on all nodes."""
    runtime: Literal["docker", "podman", "apptainer"] = Field("docker", examples=["podman"])
    """The command on the nodes that starts containers."""
    mounts: Tuple[str, ...] = Field((), examples=[["/data:/data:ro"]])
    """Directories and files of the nodes in the container: SOURCE:TARGET, read-only with `:ro`. The node directory,
    checkpoint.dir and absolute `outputs` are there under the same paths."""
    shm_size: Optional[str] = Field(None, examples=["64GiB"])
    """Size of /dev/shm. Default: the container has that of the node."""
    pull: Literal["never", "missing", "always"] = Field("missing", examples=["never"])
    """Whether the checks before a start fetch the image."""
    options: Tuple[str, ...] = Field((), examples=[["--cap-add=SYS_PTRACE"]])
    """Further options of the command that starts the container."""


PATTERN_EXAMPLE = r"batch (?P<step>\d+) of (?P<total_steps>\d+): loss (?P<loss>\S+)"


class Progress(Strict):
    """How the steps of the training are read from its output."""

    pattern: Optional[str] = Field(
        None, min_length=1, max_length=1000, examples=[r"step (?P<step>\d+) loss (?P<loss>\S+)"]
    )
    """Regular expression of Python for one line, with a group `step` and others named as in docs/metrics.md. Default:
    the output of the usual frameworks is recognised."""


class Role(Strict):
    """One group of nodes of a job with roles."""

    name: Name = Field(examples=["prefill"])
    """Name of the role: its ranks are NAME/0, NAME/1 and so on."""
    nodes: Integer = Field(1, ge=1, le=4096, examples=[2])
    """Number of hosts of the role. The roles take the hosts of the job in their order."""
    command: Tuple[Word, ...] = Field(min_length=1, examples=[["python", "serve.py"]])
    """Command to run on each rank of the role, as a list of arguments."""
    env: Mapping[str, Word] = Field(default_factory=dict, examples=[{"OMP_NUM_THREADS": 8}])
    """Environment variables of the role, in addition to those of the job."""
    devices: Optional[Devices] = Field(None, examples=[{"per_node": 4}])
    """Devices of each node of the role, of the type of the job or cpu. Default: those of the job."""
    container: Optional[Container] = Field(None, examples=[{"image": "quay.io/ascend/cann:8.3"}])
    """The image of the role. Default: that of the job."""
    groups: Tuple[Name, ...] = Field((), examples=[["fast"]])
    """Groups of the hostfile: the role takes hosts of these only. Default: any."""
    ends_job: bool = Field(True, examples=[True])
    """The job ends when all ranks of the role have exited with 0, as the first such role. false: it serves the others
    and is stopped then."""


class JobBody(Strict):
    """The keys that a job and a stage of a pipeline have in common."""

    program: Optional[Annotated[str, Field(pattern=PROGRAM_PATTERN)]] = Field(None, examples=["trajectory"])
    """Bundled training program to run, or ./FILE.py of your own in workdir.path. Cannot be combined with `command`."""
    command: Optional[Tuple[Word, ...]] = Field(None, min_length=1, examples=[["python", "train.py", "--lr", "2e-5"]])
    """Command to run on each rank, as a list of arguments. It is not passed to a shell."""
    roles: Tuple[Role, ...] = Field(
        (), max_length=64, examples=[[{"name": "serve", "command": ["python", "serve.py"]}]]
    )
    """Groups of nodes with different commands, in place of `command`: they start and end together."""
    launcher: Launcher = Field("spawn", examples=["torchrun"])
    """spawn: the agent starts each rank with the environment that torchrun sets. torchrun, deepspeed, accelerate: the
    agent starts this launcher once on each node, which starts the ranks. none: one process on each node, which may
    start the ranks itself: NNODES, NODE_RANK, NPROC_PER_NODE, MASTER_ADDR and MASTER_PORT are set, as LLaMA-Factory and
    ms-swift read them. ray: the nodes form a Ray cluster of the job, and the command runs once, on the first node, when
    all have joined."""
    nodes: Optional[Integer] = Field(None, ge=1, le=4096, examples=[2])
    """Number of hosts to use: free ones of the hostfile, in its order. Default: all of them."""
    min_nodes: Optional[Integer] = Field(None, ge=1, le=4096, examples=[1])
    """Fewest hosts to run with, if the others are not there: the next attempt starts without them, and the job restarts
    with more after its next checkpoint. Default: `nodes`."""
    preemptible_after_s: Optional[Annotated[float, Field(ge=0, le=2_592_000, allow_inf_nan=False)]] = Field(
        None, examples=[600]
    )
    """Seconds that an attempt runs before a job of a higher priority may take its hosts. The job then saves a
    checkpoint and returns to the queue. Default: never."""
    spare_nodes: Integer = Field(0, ge=0, le=64, examples=[1])
    """Hosts to reserve in addition, if they are free, as replacements for a host that fails."""
    devices: Devices = Field(Devices(), examples=[{"type": "npu", "per_node": 8}])
    """The devices that each node gives to the job."""
    hostfile: Optional[FileName] = Field(None, examples=["cluster.hosts"])
    """File that lists the hosts, relative to the job file."""
    engine: Optional[Union[Name, Dict[str, Any]]] = Field(None, examples=["hpc"])
    """Where the job runs: the name of an engine of the settings, or its type and options. Cannot be combined with
    `hostfile`."""
    args: Mapping[str, Argument] = Field(default_factory=dict, examples=[{"learning_rate": 2e-5}])
    """Options of the program. `ascendrun schema PROGRAM` lists them."""
    env: Mapping[str, Word] = Field(default_factory=dict, examples=[{"OMP_NUM_THREADS": 8}])
    """Environment variables of every rank. Put secrets into `env_file`."""
    env_file: Tuple[FileName, ...] = Field((), examples=[["secrets.env"]])
    """Files with NAME=value lines for secrets, relative to the job file. Read at each start and never stored."""
    labels: Mapping[Name, Word] = Field(default_factory=dict, examples=[{"project": "llm-7b"}])
    """Names for the accounting. `history --by project` sums the jobs with the same `project`."""
    visible: Literal["owner", "group"] = Field("owner", examples=["group"])
    """Who may read the job on a head with several users. group: all users of its shared queue, by `ascendrun show`,
    `explain` and `logs`."""
    setup: Optional[str] = Field(None, min_length=1, examples=["source /usr/local/Ascend/ascend-toolkit/set_env.sh"])
    """Bash script that runs on every node before the command, in the same shell."""
    python: Optional[str] = Field(None, min_length=1, examples=["/opt/conda/bin/python"])
    """Python interpreter on the nodes: an absolute path, whose directory comes first on PATH, or a name on PATH."""
    container: Optional[Container] = Field(None, examples=[{"image": "quay.io/ascend/cann:8.3"}])
    """The image in which each node runs the job. Default: none, the job runs on the node itself."""
    workdir: Optional[Workdir] = Field(None, examples=[{"path": ".", "exclude": ["data/", ".git/"]}])
    """The code directory. Every node gets the same files, or the job does not start."""
    checkpoint: Checkpoint = Field(Checkpoint(), examples=[{"dir": "/data/ckpt/my-job", "grace_period_s": 300}])
    """How the job saves its state."""
    timeouts: Timeouts = Field(Timeouts(), examples=[{"start_s": 600, "run_s": 86400}])
    """Limits in seconds."""
    restart: Restart = Field(Restart(), examples=[{"max_restarts": 3}])
    """Whether the job starts again after a failure."""
    checks: Checks = Field(Checks(), examples=[{"skip": ["clock"]}])
    """The preflight checks of the job. `ascendrun doctor` lists their names."""
    sampling: Sampling = Field(Sampling(), examples=[{"interval_s": 10}])
    """Monitoring of devices, hosts and ranks while the job runs."""
    progress: Progress = Field(Progress(), examples=[{"pattern": PATTERN_EXAMPLE}])
    """How the steps of the training are read from its output."""
    outputs: Tuple[FileName, ...] = Field((), examples=[["out/", "logs/*.csv"]])
    """Files and directories to fetch to the head node when the job has ended: paths or patterns (`**`: any depth),
    relative to the working directory of the ranks, or absolute. `ascendrun show` prints where they are."""
    outputs_from: Literal["rank0", "all"] = Field("rank0", examples=["all"])
    """Hosts whose outputs are fetched: the host of rank 0, or all, each into a directory of its name."""


class PipelineStage(JobBody):
    """One stage of a pipeline: a job with its own values for some keys."""

    name: Name = Field(examples=["train"])
    """Name of the stage."""
    needs: Optional[Name] = Field(None, examples=["prepare"])
    """Stage that must succeed before this one starts. Default: the stage above."""


class SweepPlace(Strict):
    """The place of a stored job in its sweep. `index`: from 1; `values`: by the keys of the job file."""

    id: str = ""
    index: int
    count: int
    values: Mapping[str, Scalar]


_SWEEP = {"anyOf": [{"type": "object"}, {"type": "array", "items": {"type": "object"}}]}


class JobSpec(JobBody):
    """One job: what to run, where, and within which limits."""

    name: Name = Field(examples=["my-job"])
    """Name of the job: letters, digits, `.`, `_` and `-`, at most 63 characters."""
    stages: Tuple[PipelineStage, ...] = Field((), examples=[[{"name": "prepare"}, {"name": "train"}]])
    """Stages of a pipeline, which run one after the other. A stage inherits the other keys of the file."""
    sweep: Annotated[Optional[SweepPlace], WithJsonSchema(_SWEEP)] = Field(
        None, examples=[{"args.learning_rate": [1e-4, 3e-4], "args.lora_r": [8, 16]}]
    )
    """Several jobs from one file: each combination of the values of these keys, or of each mapping of a list. They are
    named NAME-1 and so on; `{sweep}` in any value of the file is that number."""


UNSUPPORTED: Mapping[str, Text] = {"nodes.min": write("nodes: 2"), "nodes.max": write("nodes: 2")}
"""Keys of other tools that are not implemented: rejected with a hint, and absent from the JSON Schema."""


def not_supported(key: str) -> Text:
    return Text("jobfile.later", "{key} is not supported yet", key=key)


SECTIONS = sections_of(JobBody)
"""The sections of a job file by key."""


def job_json_schema() -> Dict[str, Any]:
    """The JSON Schema of job files, for editors."""
    schema = JobSpec.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "ascendrun job file"
    definitions = schema["$defs"]
    sections: Tuple[type[BaseModel], ...] = (JobSpec, PipelineStage, Role, *SECTIONS.values())
    for model in sections:
        place = schema if model is JobSpec else definitions[model.__name__]
        meanings = _meanings(model)
        for name, described in place["properties"].items():
            # pydantic omits the examples of a section where it refers to the section's own definition
            described.setdefault("examples", model.model_fields[name].examples)
            described["description"] = meanings[name]
            place["properties"][name] = dict(sorted(described.items()))
    return schema


def _meanings(model: type[BaseModel]) -> Dict[str, str]:
    """Return the docstrings of the fields. Not by pydantic's `use_attribute_docstrings`: it reads the source of every
    class at import, a third of the time of this module, and only a schema has them."""
    import ast
    import inspect
    import textwrap

    found: Dict[str, str] = {}
    for owner in reversed(model.__mro__):
        if owner is Strict or not issubclass(owner, Strict):
            continue
        with PARSING:
            [body] = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        assert isinstance(body, ast.ClassDef)
        for field, below in zip(body.body, body.body[1:]):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
                found[field.target.id] = inspect.cleandoc(ast.literal_eval(below.value))
    return found
