"""Type of an event, and those of jobs and hosts: code, severity, English template, meaning, values."""

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
    """One code: its English template, when it is written, and its values.

    Templates may also use `{hosts}`, `{ranks}`, `{attempt}` and `{who}` ("ranks 0-3 on npu[01-02]", or the hosts).
    `folds`: the events of hosts and ranks at the same time are one line; `folded` values may then differ.
    """

    code: str
    severity: Severity
    english: str
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
JOB_EVENTS = (
    EventType(
        "submitted",
        Severity.INFO,
        "{name} submitted for {hosts:hosts}",
        "A job was added to the queue.",
        {"name": "name of the job"},
    ),
    EventType(
        "store-rebuilt",
        Severity.WARNING,
        "job list was damaged or missing; {count:plural job jobs} rebuilt",
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
        "rebuilt from {source} after damage to the job list",
        "The job was missing from the job list, or its entry was damaged or outdated. Earlier events may be missing.",
        {"source": "where its state was found: record.json, job.json, records of the nodes, state.db or memory"},
    ),
    EventType(
        "state-changed",
        Severity.INFO,
        "{state}: {reason}",
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
        "{reason} [{confidence}]",
        "An attempt that failed was diagnosed. This is what failed first, from here on in every output.",
        {
            "reason": REASON,
            "finding": "code of the diagnosis: docs/failures.md",
            "confidence": "certain, likely or unknown",
        },
    ),
    EventType(
        "waiting", Severity.INFO, "{reason}", "What a queued job is waiting for has changed.", {"reason": REASON}
    ),
    EventType(
        "held",
        Severity.WARNING,
        "{reason}",
        "Devices or ports of the job are in use by something else. Nothing was started; the job tries again.",
        {"reason": REASON, "by": "run id of the job that leases them; null: unknown, or no job"},
    ),
    EventType(
        "restarting",
        Severity.WARNING,
        "attempt {attempt} failed ({kind}: {finding}); the next one starts after {pause_s:duration}",
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
        "attempt {attempt} failed ({kind}: {finding}); not restarted by rule {rule}",
        "The restart policy does not start the job again. Hosts and ranks are the first to fail.",
        _JUDGED,
    ),
    EventType(
        "host-fenced",
        Severity.WARNING,
        "{hosts:hosts} unreachable; the job restarts on other hosts, and the old attempt cannot change its checkpoints",
        "The next attempt starts although a host of the last one does not respond.",
        {"by": "epoch (docs/epochs.md), or lease: the host has ended its ranks by itself (restart.fence_after_s)"},
        frozenset(),
    ),
    EventType(
        "host-given-up",
        Severity.WARNING,
        "{hosts:hosts} reported as lost by {by}; checkpoints that only it has are given up",
        "A user ran `ascendrun lost` for a host that an attempt of the job has used.",
        {"by": "name of the user"},
        frozenset(),
    ),
    EventType(
        "restart-waits",
        Severity.WARNING,
        "{reason}",
        "The next attempt waits until no process of the last one can be left on a host. `ascendrun lost HOST` states"
        " that the machine is gone.",
        {"reason": REASON},
    ),
    EventType(
        "stop-requested",
        Severity.INFO,
        "stop requested with a grace period of {grace_s:duration}",
        "A user stopped the job.",
        {"grace_s": "seconds between SIGTERM and SIGKILL; 0 with --now"},
    ),
    EventType(
        "host-passed-over",
        Severity.WARNING,
        "{hosts:hosts} passed over until {until_s:clock}: {why}",
        "A host was not ready for the job, so the job is placed on other hosts of its hostfile.",
        {"why": "what the host lacks, or why it is unreachable", "until_s": "until when the job does not use it"},
    ),
    EventType(
        "hold-started",
        Severity.INFO,
        "held by {by}",
        "A user holds the job in the queue: it is not placed.",
        {"by": "name of the user"},
    ),
    EventType(
        "hold-ended",
        Severity.INFO,
        "hold by {by} ended",
        "The job may be placed again.",
        {"by": "name of the user who held it"},
    ),
    EventType(
        "preflight-warning",
        Severity.WARNING,
        "preflight warning: {warning}",
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
        "{who} did not exit: {why}",
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
        "{who} finished but did not exit and was killed",
        "A rank that hung at its exit was killed after all others had ended.",
        {},
        frozenset(),
    ),
    EventType(
        "adopted",
        Severity.WARNING,
        "attempt {attempt} found on {hosts:hosts} and adopted",
        "An attempt ran that the job list did not have; the job was rebuilt from a copy on a node.",
    ),
    EventType(
        "node-lost",
        Severity.ERROR,
        "{hosts:hosts} lost: {why}",
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
        "{hosts:hosts}: {count:plural process processes} ({pids}) did not exit after SIGKILL (blocked in a driver or"
        " NFS); no job starts on the host until they are gone",
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
        "{hosts:hosts}: the processes that did not exit after SIGKILL are gone",
        "The processes of event processes-remain are gone; the host is free.",
        {},
        frozenset(),
    ),
    EventType(
        "processes-gone",
        Severity.INFO,
        "{hosts:hosts} reachable again; no process of the job remains",
        "A host of which this was unknown confirmed that all processes of the job have exited.",
        {},
        frozenset(),
    ),
    EventType(
        "host-released",
        Severity.WARNING,
        "{hosts:hosts} released by {by}",
        "A user stated with `ascendrun release` that no process of the job is left on the host.",
        {"by": "name of the user", "state": "unconfirmed or leftovers"},
        frozenset(),
    ),
    EventType(
        "spares-missing",
        Severity.WARNING,
        "{found} of {count} spare hosts",
        "Too few hosts were free for the spares of the job when it was placed. Any free host can still replace one.",
        {"found": "spares that the attempt has", "count": "`spare_nodes` of the job file"},
        frozenset(),
    ),
    EventType(
        "spare-ready",
        Severity.INFO,
        "{hosts:hosts} ready as a spare: examined, and the code of the job is there",
        "A spare of a running job passed the light checks. It is examined every 5 minutes.",
        {},
        frozenset(),
    ),
    EventType(
        "spare-not-ready",
        Severity.WARNING,
        "{hosts:hosts} not ready as a spare: {finding}",
        "A spare of a running job could not replace another host now.",
        {"finding": "text: what the checks found, or why the host does not respond"},
    ),
    EventType(
        "host-strike",
        Severity.WARNING,
        "{hosts:hosts}: strike {count}: {reason}",
        "A failure or a check in the background blames one host. Two strikes within 7 days put it into quarantine. The"
        " event belongs to no job.",
        {"reason": REASON, "count": "strikes within 7 days"},
    ),
    EventType(
        "host-closed",
        Severity.WARNING,
        "{hosts:hosts}: {state} by {by}: {reason}",
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
        "{hosts:hosts} open to jobs again, by {by}",
        "A user, or a passed `doctor --deep`, ended what closed the host. The event belongs to no job.",
        {"by": "name of the user", "how": "undrain or deep"},
        frozenset(),
    ),
    EventType(
        "end-unconfirmed",
        Severity.WARNING,
        "cannot confirm that all processes exited on {hosts:hosts}: unreachable; they are stopped when the host is"
        " reachable again",
        "The job ended while hosts were unreachable. The hosts stay reserved until they confirm.",
    ),
    EventType(
        "end-failed",
        Severity.WARNING,
        "{hosts:hosts} reachable, but cannot end the job's processes (full or failed disk?); the request is repeated",
        "The job ended, but the agents on these hosts could not end its processes.",
    ),
    EventType(
        "unreachable",
        Severity.WARNING,
        "{hosts:hosts} unreachable; its ranks may still be running",
        "The connection to hosts of a running job was lost.",
    ),
    EventType("reachable", Severity.INFO, "{hosts:hosts} reachable again", "The connection to hosts is back."),
    EventType(
        "straggler",
        Severity.WARNING,
        "straggler: {who}, {finding} (likely cause: {likely_cause})",
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
        "{who} no longer slow",
        "A straggler is as fast as the others again.",
        {"is_node": "true: the host was reported as a whole"},
        frozenset(),
    ),
    EventType(
        "hang",
        Severity.ERROR,
        "hang: {finding}",
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
        "the job makes progress again after {quiet_s:duration}",
        "A job that was reported as hung completed a step, or its output continues.",
        {"quiet_s": "seconds without progress"},
    ),
    EventType(
        "separate-trainings",
        Severity.ERROR,
        "{hosts:hosts}: the processes train without the other ranks (world size {world_size}); pass NNODES, NODE_RANK,"
        " NPROC_PER_NODE, MASTER_ADDR and MASTER_PORT to the launcher in the command, or form one process group",
        "Ranks of the job train separately. By the environment of their processes all ranks of a training are on this"
        " host, though the job has one process on each of several hosts. Or LLaMA-Factory, an example of transformers,"
        " Accelerate or Lightning prints a smaller world size than that of the job. The job fails, without a restart,"
        " unless `checks.skip` has `separate-trainings`.",
        {"world_size": "ranks of that training, as its processes have it in WORLD_SIZE or print it"},
    ),
)
