"""The messages between the controller and an agent: each request with its reply.

The agent (node/agent/serve.py) reads and writes the same fields as plain JSON: it runs on Python 3.7 and starts on
hundreds of nodes. Raise node/wire.PROTOCOL when a message changes so that the other side must know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from ascendrun.core.dataclass import dataclass, load_dataclass
from ascendrun.core.node_messages import node_text
from ascendrun.head.protocol.messages import Done, Message, Request, converted
from ascendrun.text import Text

Sizes = Mapping[str, Mapping[str, int]]
"""By file and generation: bytes, or an offset."""


class AgentInfo(Message, op="hello"):
    """The first event of an agent. Its `protocol` is checked before the rest is read.

    `machine_key`, `incarnation`: of the machine, and of its directory in `root` (node/agent/serve.py).
    `net_ns`: its network namespace. `neighbours`: keys of other machines that use `root`. `live`: tags of attempts that
    were prepared and have not ended.
    """

    root: str
    hostname: str
    boot_id: str
    user: str
    python: str
    python_version: str
    kernel: str
    arch: str
    cpus: int
    machine_id: str | None = None
    memory_bytes: int | None = None
    uid: int | None = None
    machine_key: str | None = None
    incarnation: str | None = None
    net_ns: int | None = None
    neighbours: tuple[str, ...] | None = converted(tuple, default=None)
    live: tuple[str, ...] | None = converted(tuple, default=None)


class Pong(Message):
    """`at_ns`: the node's clock; of Renew that since boot."""

    at_ns: int


class Ping(Request[Pong], op="ping"):
    """Query the clock of the node."""


class WatchHead(Request[Done], op="watch_head"):
    """To an agent on the head node: when this connection ends and the file `lock` is not empty, become `argv` with
    the variables `env`, which starts a controller that was killed together with its guard."""

    lock: str
    argv: Sequence[str]
    env: Mapping[str, str]


class ProbeReply(Message):
    """Reply to Probe. `routes`: by peer {interface, source}, both None if unknown."""

    at_ns: int
    free_bytes: int | None = None
    routes: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)


class Probe(Request[ProbeReply], op="probe"):
    """Query the node's report. `peers`: by host, its addresses and names; the first that has a route counts."""

    peers: Mapping[str, Sequence[str]]


class CheckpointsReply(Message):
    """Reply to Checkpoints: newest first, each as core/jobs/checkpoints.Listed."""

    checkpoints: Sequence[Mapping[str, Any]] = ()


class Checkpoints(Request[CheckpointsReply], op="checkpoints"):
    """List the checkpoints in a directory, `limit` complete ones; 0: the default of the agent."""

    folder: str
    limit: int = 0


class PrepareReply(Message):
    """Reply to Prepare. `kept`: names in the working directory that belong to the user and hide staged names. `hccl`:
    the leased port blocks, by their first port. `pointer`: {path, before, step} of a file that was set back.
    `not_local`: why growing files stay on a network file system, None: they do not."""

    master_port: int | None = None
    hccl: tuple[int, ...] = converted(tuple, default=())
    kept: tuple[str, ...] = converted(tuple, default=())
    pointer: Mapping[str, Any] | None = None
    not_local: Text | str | None = converted(node_text, default=None)


class Prepare(Request[PrepareReply], op="prepare"):
    """Check and reserve everything for an attempt, start nothing: core/jobs/plan_text.prepare_request makes the fields.
    `job`: copy of the job (core/jobs/job_copy.py) for the node, None: none. `devices`: {type, ids} to lease, None:
    none. `hccl`: candidates for HCCL's port block; those that are free are leased. `fence_s`: seconds
    after which the ranks end if the head does not renew their lease, None: never. `pointer`: as in NodePlan.
    `launcher`: {argv, command, env} of the process that starts the ranks, None: the agent starts them. `library`: the
    tree that is last on the ranks' PYTHONPATH, None: none. `work_of`: key of the machine whose working directory of
    `home` this one takes over, None: none; it fails if that directory is not visible, unless `may_lack_work`.
    `peers`: {addresses, key, after_s} of node/supervisor/peers.py, None: no host notifies the others.
    `container`: of core/jobs/plan.container_request, None: the ranks run on the node itself."""

    tag: str
    node_rank: int
    ranks: Sequence[Mapping[str, Any]]
    cwd: str
    setup: str | None
    trees: Sequence[str]
    link_tree: str | None
    ports: Sequence[int]
    stop: Mapping[str, Any]
    start_s: float
    max_s: float | None
    sampling: Mapping[str, Any] | None = None
    home: str | None = None
    job: Mapping[str, Any] | None = None
    devices: Mapping[str, Any] | None = None
    hccl: Sequence[int] = ()
    fence_s: float | None = None
    peers: Mapping[str, Any] | None = None
    pointer: Mapping[str, Any] | None = None
    launcher: Mapping[str, Any] | None = None
    library: str | None = None
    work_of: str | None = None
    may_lack_work: bool = False
    container: Mapping[str, Any] | None = None


class Renew(Request[Pong], op="renew"):
    """Renew the lease of an attempt with `fence_s` (node/reap.py). `at_ns`: of the last reply, None: ask for it
    only."""

    tag: str
    at_ns: int | None = None


class GoReply(Message):
    supervisor_pid: int


class Go(Request[GoReply], op="go"):
    """Start the prepared attempt; repeatable. `hccl_base`: first of HCCL's ports, None: not chosen here."""

    tag: str
    master_port: int | None
    secret_env: Mapping[str, str] = field(repr=False)
    hccl_base: int | None = None


class Abort(Request[Done], op="abort"):
    """Forget an attempt that was not started."""

    tag: str


class Stop(Request[Done], op="stop"):
    """End an attempt; the event `ended` of its records is the proof. `why`: a code, which the node records: the cause
    of the job's stop, or what the comparison with the node found. `now`: without the grace period. `hung`: its ranks
    print their stacks and end by SIGABRT. `by`: user@machine, or "controller"; the node records it too.

    `events`: by generation, the bytes of the attempt's events that are here, so that a node whose folder was made again
    continues after them."""

    tag: str
    now: bool
    grace_s: float
    why: str
    events: Mapping[str, int] = field(default_factory=dict)
    hung: bool = False
    by: str = "controller"


class Follow(Request[Done], op="follow"):
    """Send new bytes of an attempt's files, from these offsets on, as FileData.

    `limits`: bytes of one file that are sent, by its kind (core/retention.py); 0: nothing more.
    `windows`: of a file, (bytes, generation, offset): so many beyond that place, which Acknowledge moves."""

    tag: str
    offsets: Sizes
    limits: Mapping[str, int] = field(default_factory=dict)
    windows: Mapping[str, Sequence[int]] = field(default_factory=dict)


class Acknowledge(Request[Done], op="acknowledge"):
    """Move the window of a followed file: what is before this place does not wait on the head any more."""

    tag: str
    file: str
    generation: int
    offset: int


class Unfollow(Request[Done], op="unfollow"):
    tag: str


class UsageReply(Message):
    """Disk use on a node. `runs`: bytes of each run's attempts; `trees`: of each staged directory that no attempt uses,
    and of encoded texts (data/KEY), (bytes, seconds since the last use). `total_bytes`: of everything, None: of one
    head only."""

    runs: Mapping[str, int]
    trees: Mapping[str, Sequence[float]]
    total_bytes: int | None = None


class Usage(Request[UsageReply], op="usage"):
    """Query the disk use of the runs of the head node `head_id`; None: only the total of all."""

    head_id: str | None = None


class PruneReply(Message):
    """`removed`: bytes of each run or staged directory that is gone."""

    removed: Mapping[str, int]


class Prune(Request[PruneReply], op="prune"):
    """Remove the attempts of ended runs, and staged directories that no attempt uses.

    `trees`: by hash, the seconds without use that UsageReply had; one that was used since then stays. `everything`: of
    the runs, also the files that ranks wrote; the error reply names an attempt that has not ended."""

    runs: tuple[str, ...] = converted(tuple)
    trees: Mapping[str, float] = converted(dict)
    everything: bool = False


@dataclass(frozen=True)
class Process:
    """A living process of an attempt. `start`: clock ticks since boot; `state`: a letter of /proc; `wait_channel`: the
    kernel function in which it waits, "" if it runs or the kernel does not show it; `killed`: SIGKILL was
    sent."""

    pid: int
    start: int
    comm: str
    state: str
    wait_channel: str
    killed: bool = False


class ProcessesReply(Message):
    """Reply to Processes. `processes`: without the supervisor and its sampler; `supervisor`: whether it lives.

    `phase`: prepared, running, ended or lost (without supervisor); None: the node has no records of the attempt.
    `events`: the size of its records by generation, read after the processes.
    """

    processes: tuple[Process, ...] = converted(
        lambda rows: tuple(load_dataclass(Process, row) for row in rows), default=()
    )
    supervisor: bool = False
    phase: str | None = None
    events: Mapping[str, int] = field(default_factory=dict)


class Processes(Request[ProcessesReply], op="processes"):
    """Query the living processes of an attempt. An error reply means that they are unknown."""

    tag: str


class LiveReply(Message):
    """Reply to Live: these fields of AgentInfo as they are now."""

    boot_id: str
    incarnation: str | None = None
    live: tuple[str, ...] | None = converted(tuple, default=None)


class Live(Request[LiveReply], op="live"):
    """Query which attempts have no recorded end."""


class CopyReply(Message):
    """Reply to Copy. `job`: as core/jobs/job_copy.py has it; None: the node has none."""

    job: Mapping[str, Any] | None = None


class Copy(Request[CopyReply], op="copy"):
    """Query the copy of the job that came with the preparation of an attempt."""

    tag: str


class StacksReply(Message):
    """Reply to Stacks. `ranks`: see node/stacks.py."""

    ranks: Sequence[Mapping[str, Any]]
    at_ns: int


class Stacks(Request[StacksReply], op="stacks"):
    """Query the stacks of an attempt's ranks."""

    tag: str


class RankProcessReply(Message):
    """Reply to RankProcess. `argv`: the command of the node that becomes the shell."""

    argv: tuple[str, ...] = converted(tuple)


class RankProcess(Request[RankProcessReply], op="rank_process"):
    """Find the process of a running rank, for a shell next to it; see node/stacks.py."""

    tag: str
    rank: int


class ReleaseReply(Message):
    freed_bytes: int
    kept_bytes: int


class Release(Request[ReleaseReply], op="release"):
    """Remove closed logs that the head node has completely (`have`), until at most `keep_bytes` are left."""

    tag: str
    have: Sizes
    keep_bytes: int


class ExecReply(Message):
    """Reply to Exec. The body is standard output, `out_bytes` long, then standard error.

    `code` and `signal` both None: not even SIGKILL ended it.
    """

    code: int | None
    signal: int | None
    timed_out: bool
    out_bytes: int
    err_bytes: int
    truncated: bool


class Exec(Request[ExecReply], op="exec"):
    """Run a command without a shell. `max_bytes`: of output that is kept."""

    argv: Sequence[str]
    timeout_s: float
    max_bytes: int


class SurveyReply(Message):
    """Raw results by item name: see node/agent/survey.py."""

    results: Mapping[str, Any] = converted(dict)


class Survey(Request[SurveyReply], op="survey"):
    """Examine the node. `shell`: {setup, env, secret_env, cwd} of a job, for items that run in it."""

    items: Sequence[Mapping[str, Any]]
    timeout_s: float
    shell: Mapping[str, Any] | None = field(default=None, repr=False)


class SampleReply(Message):
    """Reply to Sample. `lines`: as in an attempt's `samples` file, see node/sampler/sample.py."""

    lines: Sequence[Mapping[str, Any]]
    at_ns: int


class Sample(Request[SampleReply], op="sample"):
    items: Sequence[Mapping[str, Any]]
    timeout_s: float


class GrepReply(Message):
    """Reply to Grep. The body: frames of node/agent/grep.py."""

    complete: bool


class Grep(Request[GrepReply], op="grep"):
    """Search the output of ranks. `files`: by stream, (generation, offset) to start at. Times in the node's clock."""

    tag: str
    files: Mapping[str, Sequence[int]]
    patterns: Sequence[str]
    ignore_case: bool
    invert: bool
    timeout_s: float
    since_ns: int | None = None
    until_ns: int | None = None


class GatherReply(Message):
    """Reply to Gather. Everything was sent as ArtifactData. `files`, `problems`: see node/agent/artifacts.py."""

    files: Sequence[Mapping[str, Any]]
    problems: Sequence[Mapping[str, Any]]
    start_ns: int
    boot_ns: int
    at_ns: int


class Gather(Request[GatherReply], op="gather"):
    """Send the files that may explain an attempt's end."""

    tag: str
    items: Sequence[Mapping[str, Any]]
    timeout_s: float
