"""The messages between commands and the controller: the request and the reply of each operation, used by both ends.

A message is the JSON header of a frame, its fields by name. Raise control_socket.PROTOCOL when one changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from functools import partial
from typing import TYPE_CHECKING, Any

from ascendrun.core.dataclass import load_dataclass
from ascendrun.core.hosts import Host, load_hosts
from ascendrun.core.node_messages import Failure
from ascendrun.core.pulse import Pulse
from ascendrun.core.reports import NodeReport, load_report, report_values
from ascendrun.core.retention import Removal
from ascendrun.head.protocol.messages import Done, Message, Request, converted
from ascendrun.text import Text, from_json

if TYPE_CHECKING:
    from ascendrun.core.samples import DeviceSample, HostSample


def _load_samples(kind: str, rows: Any) -> tuple[Any, ...]:
    from ascendrun.core import samples  # defines many types

    return tuple(load_dataclass(getattr(samples, kind), row) for row in rows)


def _load_removals(rows: Any) -> tuple[Removal, ...]:
    return tuple(load_dataclass(Removal, row) for row in rows)


class Submitted(Message):
    """Reply to Submit. `job`: its id, or that of the pipeline."""

    job: str


class Submit(Request[Submitted], op="submit"):
    """Store and start a job, or the stages of a pipeline. `submissions`: each as Submission.to_json.

    `pipeline`: the id of the pipeline to continue with these stages; None: a new pipeline.
    """

    submissions: tuple[Mapping[str, Any], ...] = converted(tuple)
    pipeline: str | None = None


class JobRead(Message):
    """Reply to ReadJob. `submissions`: each as Submission.to_json, without trees. `needs_stack`: a bundled program runs
    on this machine, in the Python of ascendrun."""

    submissions: tuple[Mapping[str, Any], ...] = converted(tuple)
    needs_stack: bool = False


class ReadJob(Request[JobRead], op="read-job"):
    """Read a job file as `submit` does, so that its process needs no models; paths are absolute. `place`: see
    command_place.reading_place; the controller has the same, or refuses. `user`: who submits.

    The controller refuses what depends on settings (engines), is long (sweeps) or has a path of one process (/dev,
    /proc), and files with problems: the command reads these itself, and names what is wrong as the user wrote it.
    """

    file: str
    key: str
    place: tuple[str, ...] = converted(tuple, default=())
    user: str | None = None
    overrides: tuple[str, ...] = converted(tuple, default=())
    hostfile: str | None = None
    only: str | None = None
    exclude: str | None = None
    priority: int = 0


class Stop(Request[Done], op="stop"):
    """Stop a job. `now`: without its grace period. `by`: the user and the machine of the command."""

    job: str
    now: bool = False
    by: str = "-"


class Retry(Request[Done], op="retry"):
    """Start the next attempt of an ended job, with a new budget of restarts. `attempt`: the one that ended, which makes
    a repeated request harmless. `by`: the user and the machine of the command."""

    job: str
    attempt: int
    by: str = "-"


class Release(Request[Done], op="release"):
    """State that no process of a job is left on a host. `by`: the user who states it."""

    host: str
    by: str


class ChangeMachines(Request[Done], op="change-machines"):
    """Close machines to new placements, open them, or state that they are gone. `change`: drain, undrain, lost, or
    deep (they passed a deep examination, which ends a quarantine); `by`: the user; `until_s`: end of a drain in UTC,
    None: until undrain; `at_s`: its beginning, None: now; `now`: also move the jobs that may restart; `force`: they are
    gone although they respond."""

    hosts: tuple[Host, ...] = converted(load_hosts)
    change: str = "drain"
    by: str = ""
    reason: str = ""
    until_s: float | None = None
    now: bool = False
    force: bool = False
    at_s: float | None = None


class HoldJob(Request[Done], op="hold"):
    """Hold a job in the queue; `by` None: the user `ended_by` ends that."""

    job: str
    by: str | None = None
    ended_by: str = "-"


class PruneReply(Message):
    """What was removed on one host, with `dry_run`: would be. `host` None: the head node itself.

    `jobs`: logs of jobs by id; `trees`: staged directories by hash, and encoded texts as data/KEY, which nothing has
    used. `refused`: why not.
    """

    host: str | None
    jobs: tuple[Removal, ...] = converted(_load_removals, default=())
    trees: tuple[Removal, ...] = converted(_load_removals, default=())
    refused: Failure | None = converted(Failure.from_json, default=None)


class Prune(Request[PruneReply], op="prune"):
    """Remove old data of ended jobs; one reply for the head node and one for each host of these jobs.

    `older_s`: age instead of the settings; `keep`: ids and names of jobs that stay."""

    older_s: float | None = None
    keep: tuple[str, ...] = converted(tuple, default=())
    dry_run: bool = False


class Remove(Request[PruneReply], op="remove"):
    """Remove ended jobs, all stages of a pipeline together, with their files on nodes and on the head node.

    One reply from each host, the last one of the head node. `force`: also where outputs were not fetched, or a host is
    unreachable."""

    jobs: tuple[str, ...] = converted(tuple)
    force: bool = False


class Planned(Message):
    """Reply to Plan. `plan`: as render_plan makes it."""

    plan: Mapping[str, Any]


class Plan(Request[Planned], op="plan"):
    """Query the plan that a submission would get. `submission`: as Submission.to_json."""

    submission: Mapping[str, Any]


class ExecReply(Message):
    """End of a command on one host; the body is its standard output, `out_bytes` long, then its standard error.

    `failed`: why it was not run; the other fields then have no meaning.
    """

    host: str
    wall_s: float
    failed: Failure | None = converted(Failure.from_json, default=None)
    code: int | None = None
    signal: int | None = None
    timed_out: bool = False
    out_bytes: int = 0


class Exec(Request[ExecReply], op="exec"):
    """Run a command on every host; one reply from each."""

    hosts: tuple[Host, ...] = converted(load_hosts)
    argv: tuple[str, ...] = converted(tuple)
    timeout_s: float


class NodeReply(Message):
    """The report of one host, or the reason of its absence. `used_bytes`: disk use of ascendrun there, None: not
    requested, or not known in time."""

    host: str
    report: NodeReport | None = converted(
        load_report, write=lambda report: None if report is None else report_values(report), default=None
    )
    refused: Failure | None = converted(Failure.from_json, default=None)
    used_bytes: int | None = None


class Nodes(Request[NodeReply], op="nodes"):
    """Query the state of every host; one reply from each. `with_usage`: also the disk use of ascendrun."""

    hosts: tuple[Host, ...] = converted(load_hosts)
    with_usage: bool = False


class SurveyReply(Message):
    """The raw results of one host, or the reason of their absence.

    `report`: as report_values makes it with all hosts of the survey. `results`: by probe.
    """

    host: str
    refused: Failure | None = converted(Failure.from_json, default=None)
    report: Mapping[str, Any] = field(default_factory=dict)
    results: Mapping[str, Any] = field(default_factory=dict)


class Survey(Request[SurveyReply], op="survey"):
    """Examine hosts, in the shell of a job if there is a submission; one reply from each.

    `names`: only these probes. `training`: paths of files that a training reads. `every_pair`: test all pairs of NPU
    ports, not a sample.
    """

    hosts: tuple[Host, ...] = converted(load_hosts)
    submission: Mapping[str, Any] | None = None
    device_type: str | None = None
    paths: tuple[str, ...] = converted(tuple, default=())
    training: tuple[str, ...] = converted(tuple, default=())
    names: tuple[str, ...] | None = converted(tuple, default=None)
    is_full: bool = True
    every_pair: bool = False


class SampleReply(Message):
    """The new samples of one host, or the reason of their absence."""

    host: str
    devices: tuple[DeviceSample, ...] = converted(partial(_load_samples, "DeviceSample"), default=())
    hosts: tuple[HostSample, ...] = converted(partial(_load_samples, "HostSample"), default=())
    refused: Failure | None = converted(Failure.from_json, default=None)


class Sample(Request[SampleReply], op="sample"):
    """Take a sample on every host; one reply from each within `timeout_s`.

    `device_type` None: any type that the host has. `unless_pending`: not on hosts with another pending request.
    """

    hosts: tuple[Host, ...] = converted(load_hosts)
    timeout_s: float
    device_type: str | None = None
    unless_pending: bool = False


class GrepReply(Message):
    """Reply to Grep; the body is the hits of one host. `complete`: the search ended in time."""

    host: str
    problem: Text | str | None = converted(from_json, default=None)
    complete: bool = False


class Grep(Request[GrepReply], op="grep"):
    """Search the output of a job's ranks on its hosts. `hosts`: the agent's request for each."""

    job: str
    attempt: int
    hosts: Mapping[str, Mapping[str, Any]]


class GatherReply(Message):
    """Reply to Gather. `problem`: why the artifacts of a host are missing; None: they are stored."""

    host: str
    problem: Text | str | None = converted(from_json, default=None)


class Gather(Request[GatherReply], op="gather"):
    """Fetch the artifacts of an attempt, None: of the newest; one reply from each host."""

    job: str
    attempt: int | None = None


class FetchReply(Message):
    """Progress of the outputs of one host: `files` of `total_files` and `done_bytes` of `total_bytes` are in `folder`.

    `ended`: this is the last reply about the host. `missing`: patterns that matched no file. `refused`: links that are
    not copied. `problem`: why files are missing, None: no problem."""

    host: str
    folder: str
    files: int = 0
    total_files: int = 0
    done_bytes: int = 0
    total_bytes: int = 0
    missing: tuple[str, ...] = converted(tuple, default=())
    refused: tuple[str, ...] = converted(tuple, default=())
    ended: bool = False
    problem: Failure | None = converted(Failure.from_json, default=None)


class Fetch(Request[FetchReply], op="fetch"):
    """Fetch files; several replies from each host. `patterns` (): those that the job declares; `into`: an absolute
    directory on this machine, None: that of the job's outputs. `hosts` (): those that the job declares. `job` None:
    files of the hosts, relative to the home directory. `strip`: start of the paths that is omitted below `into`."""

    job: str | None
    patterns: tuple[str, ...] = converted(tuple, default=())
    into: str | None = None
    hosts: tuple[Host, ...] = converted(load_hosts, default=())
    strip: str = ""


class Put(Request[FetchReply], op="put"):
    """Send files and directories of this machine to a directory of each host; several replies from each host.

    `files`: absolute paths. `folder`: absolute, or relative to the working directory of the job's ranks; `job` None: to
    the home directory."""

    hosts: tuple[Host, ...] = converted(load_hosts)
    files: tuple[str, ...] = converted(tuple)
    folder: str = ""
    job: str | None = None


class StacksReply(Message):
    """The stacks of one host's ranks as node/stacks.py has them, or why there are none."""

    host: str
    ranks: tuple[Mapping[str, Any], ...] = converted(tuple, default=())
    refused: Failure | None = converted(Failure.from_json, default=None)


class Stacks(Request[StacksReply], op="stacks"):
    """Query the stacks of a running job's ranks; one reply from each host."""

    job: str


class RankProcessReply(Message):
    """`argv`: the command that becomes a shell next to the rank, on its host."""

    host: str
    argv: tuple[str, ...] = converted(tuple)


class RankProcess(Request[RankProcessReply], op="rank-process"):
    """Find the process of a running rank, for a shell next to it."""

    job: str
    rank: int


class ControllerStatus(Message):
    """The running controller. `jobs`: live jobs. `pulse`: what it knows about them now, None: an older release.
    `guard_pid`: the process that starts it again after a crash, None: there is none. `standby`: of a head that has one,
    {term, lease, in_sync, voters, heads}: `voters` has seconds since each granted the lease, None: it has not."""

    pid: int
    jobs: tuple[str, ...] = converted(tuple, default=())
    pulse: Pulse | None = converted(Pulse.from_json, default=None)
    guard_pid: int | None = None
    standby: Mapping[str, Any] | None = None


class Status(Request[ControllerStatus], op="status"):
    """Query the status; every version of the controller replies."""


class CheckStore(Request[Done], op="check-store"):
    """Check the job list; the reply comes when damage is repaired."""


class Shutdown(Request[Done], op="shutdown"):
    """End the controller; supported by every version."""
