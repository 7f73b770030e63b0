"""Types of events: code, severity, meaning, values."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple


class Severity(str, Enum):
    """Importance of an event for an operator."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class EventType(NamedTuple):
    """One code: when it is written, and its values. text/en.json has its template, by `event.CODE`.

    A template may also use `{hosts}`, `{ranks}`, `{attempt}` and `{who}` ("ranks 0-3 on npu[01-02]", or the hosts).
    `folds`: the events of hosts and ranks at the same time are one line; `folded` values may then differ.
    """

    code: str
    severity: Severity
    meaning: str
    values: Mapping[str, str] = MappingProxyType({})
    folded: frozenset[str] | None = None


SEPARATE = "separate-trainings"
"""Code of an event; also a name for `checks.skip`."""
REASON = "text with a code: docs/events.md lists the reasons"
_JUDGED = {
    "kind": "infra, device, hccl, hang, storage, oom, preempted, unknown or user",
    "finding": "code of the diagnosis: docs/explain.md, docs/failures.md",
    "confidence": "certain, likely or unknown",
    "rule": "again or not-counted; why not: cause, never, max-restarts, no-progress or repeated",
    "used": "counted restarts within window_s before this one",
    "limit": "restart.max_restarts",
    "window_s": "restart.window_s",
    "stalled": "restarts since the last progress",
    "last_step": "newest step of the attempt; null: unknown",
}
EVENT_TYPES = (
    EventType("submitted", Severity.INFO, "A job was added to the queue.", {"name": "name of the job"}),
    EventType(
        "store-rebuilt",
        Severity.WARNING,
        "The controller replaced `state.db`. The event belongs to no job.",
        {
            "count": "number of rebuilt jobs",
            "lost": "ids of jobs that could not be rebuilt",
            "file": "where the damaged file is now; null: it was missing",
        },
    ),
    EventType(
        "job-rebuilt",
        Severity.WARNING,
        "The job was missing from the job list, or its entry was damaged or outdated. Earlier events may be missing.",
        {"source": "where its state was found: record.json, job.json, records of the nodes, state.db or memory"},
    ),
    EventType(
        "state-changed",
        Severity.INFO,
        "The job changed its state. With state FAILED the severity is error.",
        {
            "state": "new state",
            "previous": "state before",
            "reason": REASON,
            "cause": "why the job is being stopped: user, refused, failure, node-lost, start-timeout, limit, "
            "head-restarted, need, preempted, held, hung or passed-over; null otherwise",
            "confidence": "of what failed first: certain, likely, unknown, or preliminary (by the exits alone); null: "
            "nothing failed",
        },
    ),
    EventType(
        "diagnosed",
        Severity.INFO,
        "An attempt that failed was diagnosed. This is what failed first, from here on in every output.",
        {
            "reason": REASON,
            "finding": "code of the diagnosis: docs/failures.md",
            "confidence": "certain, likely or unknown",
        },
    ),
    EventType("waiting", Severity.INFO, "What a queued job is waiting for has changed.", {"reason": REASON}),
    EventType(
        "held",
        Severity.WARNING,
        "Devices or ports of the job are in use by something else. Nothing was started; the job tries again.",
        {"reason": REASON, "by": "run id of the job that leases them; null: unknown, or no job"},
    ),
    EventType(
        "restarting",
        Severity.WARNING,
        "The restart policy starts the job again. Hosts and ranks are the first to fail.",
        {
            **_JUDGED,
            "pause_s": "seconds until the next attempt is queued",
            "avoid": "hosts that the next attempt uses only if no others are free",
            "quarantine": "hosts that need an examination before they are used again",
        },
    ),
    EventType(
        "gave-up",
        Severity.ERROR,
        "The restart policy does not start the job again. Hosts and ranks are the first to fail.",
        _JUDGED,
    ),
    EventType(
        "host-fenced",
        Severity.WARNING,
        "The next attempt starts although a host of the last one does not respond.",
        {"by": "epoch (docs/epochs.md), or lease: the host has ended its ranks by itself (restart.fence_after_s)"},
        frozenset(),
    ),
    EventType(
        "host-given-up",
        Severity.WARNING,
        "A user ran `ascendrun lost` for a host that an attempt of the job has used.",
        {"by": "name of the user"},
        frozenset(),
    ),
    EventType(
        "restart-waits",
        Severity.WARNING,
        "The next attempt waits until no process of the last one can be left on a host. `ascendrun lost HOST` states"
        " that the machine is gone.",
        {"reason": REASON},
    ),
    EventType(
        "stop-requested",
        Severity.INFO,
        "A user stopped the job.",
        {"grace_s": "seconds between SIGTERM and SIGKILL; 0 with --now"},
    ),
    EventType(
        "host-passed-over",
        Severity.WARNING,
        "A host was not ready for the job, so the job is placed on other hosts of its hostfile.",
        {"why": "what the host lacks, or why it is unreachable", "until_s": "until when the job does not use it"},
    ),
    EventType(
        "hold-started",
        Severity.INFO,
        "A user holds the job in the queue: it is not placed.",
        {"by": "name of the user"},
    ),
    EventType("hold-ended", Severity.INFO, "The job may be placed again.", {"by": "name of the user who held it"}),
    EventType(
        "preflight-warning",
        Severity.WARNING,
        "A check before the start found something that does not prevent it.",
        {
            "finding": "code of docs/checks.md; null: recorded by an earlier release",
            "values": "of the finding",
            "warning": "text of the finding",
        },
    ),
    EventType(
        "rank-hung-at-exit",
        Severity.WARNING,
        "A rank finished its work, or another rank exited 0, but its process still runs.",
        {
            "cause": 'finished (its metrics have "done": true) or idle; null: unknown',
            "why": "text: what was observed, with after_s",
        },
        frozenset({"why"}),
    ),
    EventType(
        "rank-killed-at-exit",
        Severity.WARNING,
        "A rank that hung at its exit was killed after all others had ended.",
        {},
        frozenset(),
    ),
    EventType(
        "adopted",
        Severity.WARNING,
        "An attempt ran that the job list did not have; the job was rebuilt from a copy on a node.",
    ),
    EventType(
        "node-lost",
        Severity.ERROR,
        "The job's processes on a host are gone, and no end was recorded.",
        {
            "why": "rebooted (another boot id), directory-gone (same boot id, but neither records nor processes) or "
            "by-user (`ascendrun release`)"
        },
        frozenset(),
    ),
    EventType(
        "processes-remain",
        Severity.ERROR,
        "Processes of the job cannot be killed. The host is held until they exit or it is rebooted.",
        {
            "pids": "process ids",
            "count": "how many",
            "processes": "list of objects: pid, start (clock ticks since boot), comm, state, wait_channel (of /proc), "
            "since_ns",
        },
    ),
    EventType(
        "leftovers-gone",
        Severity.INFO,
        "The processes of event processes-remain are gone; the host is free.",
        {},
        frozenset(),
    ),
    EventType(
        "processes-gone",
        Severity.INFO,
        "A host of which this was unknown confirmed that all processes of the job have exited.",
        {},
        frozenset(),
    ),
    EventType(
        "host-released",
        Severity.WARNING,
        "A user stated with `ascendrun release` that no process of the job is left on the host.",
        {"by": "name of the user", "state": "unconfirmed or leftovers"},
        frozenset(),
    ),
    EventType(
        "spares-missing",
        Severity.WARNING,
        "Too few hosts were free for the spares of the job when it was placed. Any free host can still replace one.",
        {"found": "spares that the attempt has", "count": "`spare_nodes` of the job file"},
        frozenset(),
    ),
    EventType(
        "spare-ready",
        Severity.INFO,
        "A spare of a running job passed the light checks. It is examined every 5 minutes.",
        {},
        frozenset(),
    ),
    EventType(
        "spare-not-ready",
        Severity.WARNING,
        "A spare of a running job could not replace another host now.",
        {"finding": "text: what the checks found, or why the host does not respond"},
    ),
    EventType(
        "host-strike",
        Severity.WARNING,
        "A failure or a check in the background blames one host. Two strikes within 7 days put it into quarantine. The"
        " event belongs to no job.",
        {"reason": REASON, "count": "strikes within 7 days"},
    ),
    EventType(
        "host-closed",
        Severity.WARNING,
        "No job is placed on the host. The event belongs to no job.",
        {
            "state": "quarantined or drained",
            "by": "name of the user; controller: after a failure",
            "reason": "text, or what the user gave",
            "until_s": "UTC seconds; null: until undrain",
        },
        frozenset(),
    ),
    EventType(
        "host-opened",
        Severity.INFO,
        "A user, or a passed `doctor --deep`, ended what closed the host. The event belongs to no job.",
        {"by": "name of the user", "how": "undrain or deep"},
        frozenset(),
    ),
    EventType(
        "end-unconfirmed",
        Severity.WARNING,
        "The job ended while hosts were unreachable. The hosts stay reserved until they confirm.",
    ),
    EventType(
        "end-failed", Severity.WARNING, "The job ended, but the agents on these hosts could not end its processes."
    ),
    EventType("unreachable", Severity.WARNING, "The connection to hosts of a running job was lost."),
    EventType("reachable", Severity.INFO, "The connection to hosts is back."),
    EventType(
        "straggler",
        Severity.WARNING,
        "Ranks, or all ranks of a host, are slower than the others.",
        {
            "finding": "text: how much slower",
            "likely_cause": "text: the measurement that explains it best",
            "slower_by": "fraction of additional time, 0.31 = 31%; null: only device metrics show it",
            "step_fraction": "fraction of each step that the job loses; null: unknown",
            "cause": "frequency, temperature, link, data, cpu, shared or health; null: unknown",
            "is_node": "true: most ranks of the host are slow",
        },
        frozenset({"finding", "likely_cause", "slower_by", "step_fraction"}),
    ),
    EventType(
        "straggler-resolved",
        Severity.INFO,
        "A straggler is as fast as the others again.",
        {"is_node": "true: the host was reported as a whole"},
        frozenset(),
    ),
    EventType(
        "hang",
        Severity.ERROR,
        "The job makes no progress, by at least two independent signs: docs/hangs.md. Its hosts and ranks are those"
        " that the others wait for; none: unknown.",
        {
            "finding": "text: what was observed",
            "step": "newest step; null: the program reports none",
            "since_s": "time of the last progress, UTC seconds",
            "signs": "list: no-step, no-output, rank-differs, devices-idle, network-idle, stacks, host-unreachable",
            "where": "innermost function in which the ranks of the event are; null: unknown",
            "others": "innermost function in which the other ranks wait; null: unknown",
            "hang_s": "seconds without progress after which the job is stopped for a restart; null: never",
        },
    ),
    EventType(
        "hang-resolved",
        Severity.INFO,
        "A job that was reported as hung completed a step, or its output continues.",
        {"quiet_s": "seconds without progress"},
    ),
    EventType(
        "separate-trainings",
        Severity.ERROR,
        "Ranks of the job train separately. By the environment of their processes all ranks of a training are on this"
        " host, though the job has one process on each of several hosts. Or LLaMA-Factory, an example of transformers,"
        " Accelerate or Lightning prints a smaller world size than that of the job. The job fails, without a restart,"
        " unless `checks.skip` has `separate-trainings`.",
        {"world_size": "ranks of that training, as its processes have it in WORLD_SIZE or print it"},
    ),
    # What a job writes and what is copied of it: logs, outputs, checkpoints, records, notifications.
    EventType(
        "notification-failed",
        Severity.WARNING,
        "A notification could not be delivered.",
        {
            "target": "name of the target",
            "kind": "kind of the notification; null: several",
            "count": "how many notifications",
            "reply": "text: response of the service, or why no attempt is made any more",
        },
    ),
    EventType(
        "file-truncated",
        Severity.WARNING,
        "A log file became shorter on the node.",
        {"file": "name", "generation": "number of the rotated file", "size": "bytes"},
    ),
    EventType(
        "file-unreadable",
        Severity.WARNING,
        "A log file cannot be read on the node.",
        {"file": "name", "generation": "number of the rotated file", "error": "message of the node"},
    ),
    EventType(
        "file-limited",
        Severity.WARNING,
        "A file of a rank is larger than the limit of its kind.",
        {"file": "name", "generation": "number of the rotated file", "size": "bytes", "limit": "bytes"},
    ),
    EventType(
        "outputs-fetched",
        Severity.INFO,
        "The declared outputs of a host are on the head node. The job has ended.",
        {"files": "number", "size": "bytes", "directory": "path on the head node"},
    ),
    EventType(
        "outputs-missing",
        Severity.WARNING,
        "The job has ended, and declared outputs do not exist on a host.",
        {"patterns": "list of paths and patterns"},
    ),
    EventType(
        "outputs-waiting", Severity.WARNING, "The job has ended, and a host with declared outputs does not respond."
    ),
    EventType(
        "outputs-failed",
        Severity.WARNING,
        "Declared outputs could not be fetched. `ascendrun fetch` tries again.",
        {"reason": REASON},
    ),
    EventType(
        "pull-paused",
        Severity.WARNING,
        "The head node no longer copies logs, metrics and samples of the job. The ranks are not affected.",
        {
            "cause": "job-limit (the job occupies pull_job_bytes on the head node) or disk-space (less than "
            "min_free_bytes are free there; copying continues when twice that is free)"
        },
    ),
    EventType(
        "resume-chosen",
        Severity.INFO,
        "The newest checkpoint that is complete on all hosts. The ranks get it in `ASCENDRUN_RESUME_STEP`, "
        "`ASCENDRUN_RESUME_PATH` and `ASCENDRUN_RESUME_FORMAT`.",
        {
            "step": "its step",
            "format": "ascendrun (bundled programs), transformers, deepspeed, torch-dcp or megatron",
            "path": "its directory on the first host",
        },
    ),
    EventType(
        "checkpoint-incomplete",
        Severity.WARNING,
        "A checkpoint newer than the chosen one cannot be used.",
        {
            "path": "its directory",
            "why": "missing (a file), wrong-size or invalid (of a file), unnamed (a pointer file names an older step), "
            "replaced (saved by an attempt that had been replaced) or unreadable",
            "file": "file in the checkpoint, empty if the cause concerns no file",
        },
    ),
    EventType(
        "checkpoint-set-aside",
        Severity.WARNING,
        "Attempts that resumed from there failed twice in a row without progress. The next older checkpoint is used.",
        {"steps": "their steps, also in `ASCENDRUN_RESUME_SKIP`"},
    ),
    EventType(
        "checkpoint-pointer-repaired",
        Severity.WARNING,
        "The job has `checkpoint: {pointer: repair}`, and the file named a checkpoint newer than the one that the job "
        "resumes from. Its old text is next to it, in NAME.old.",
        {"path": "the file", "before": "its old text", "step": "step of the checkpoint that it names now"},
    ),
    EventType("pull-resumed", Severity.INFO, "The head node has free space again.", {}),
    EventType(
        "io-error",
        Severity.WARNING,
        "A system call of the supervisor failed. The ranks are not affected: docs/node-io.md.",
        {
            "step": "part: records, logs, stop-file, read-output, signals, exits, checks, roll, stop, processes …",
            "errno": "name of the error",
            "count": "how often, 1 when it is first seen; the total follows at the end of the attempt",
        },
        frozenset({"count"}),
    ),
    EventType(
        "records-lost",
        Severity.WARNING,
        "Notes about logs were dropped while they could not be written. Starts and exits are never dropped.",
        {"count": "how many"},
        frozenset({"count"}),
    ),
)
