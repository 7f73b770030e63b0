"""Events of what a job writes and what is copied of it: logs, outputs, checkpoints, records, notifications."""

from __future__ import annotations

from ascendrun.core.event_types.jobs import REASON, EventType, Severity

DATA_EVENTS = (
    EventType(
        "notification-failed",
        Severity.WARNING,
        "notification to {target} failed: {reply}",
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
        "{hosts:hosts}: {file}.{generation} was truncated to {size:bytes} on the node; the earlier contents are kept"
        " on the head node",
        "A log file became shorter on the node.",
        {"file": "name", "generation": "number of the rotated file", "size": "bytes"},
    ),
    EventType(
        "file-unreadable",
        Severity.WARNING,
        "{hosts:hosts}: cannot read {file}.{generation}: {error}; its contents arrive when it can be read",
        "A log file cannot be read on the node.",
        {"file": "name", "generation": "number of the rotated file", "error": "message of the node"},
    ),
    EventType(
        "file-limited",
        Severity.WARNING,
        "{hosts:hosts}: {file}.{generation} has {size:bytes}; only its first {limit:bytes} are copied to the head node",
        "A file of a rank is larger than the limit of its kind.",
        {"file": "name", "generation": "number of the rotated file", "size": "bytes", "limit": "bytes"},
    ),
    EventType(
        "outputs-fetched",
        Severity.INFO,
        "{hosts:hosts}: {files:plural file files} ({size:bytes}) fetched to {directory}",
        "The declared outputs of a host are on the head node. The job has ended.",
        {"files": "number", "size": "bytes", "directory": "path on the head node"},
    ),
    EventType(
        "outputs-missing",
        Severity.WARNING,
        "{hosts:hosts}: no file matches outputs {patterns}",
        "The job has ended, and declared outputs do not exist on a host.",
        {"patterns": "list of paths and patterns"},
    ),
    EventType(
        "outputs-waiting",
        Severity.WARNING,
        "{hosts:hosts} unreachable; outputs there are fetched when it is reachable again",
        "The job has ended, and a host with declared outputs does not respond.",
    ),
    EventType(
        "outputs-failed",
        Severity.WARNING,
        "{hosts:hosts}: outputs not fetched: {reason}",
        "Declared outputs could not be fetched. `ascendrun fetch` tries again.",
        {"reason": REASON},
    ),
    EventType(
        "pull-paused",
        Severity.WARNING,
        "logs stay on the nodes: {cause}",
        "The head node no longer copies logs, metrics and samples of the job. The ranks are not affected.",
        {
            "cause": "job-limit (the job occupies pull_job_bytes on the head node) or disk-space (less than "
            "min_free_bytes are free there; copying continues when twice that is free)"
        },
    ),
    EventType(
        "resume-chosen",
        Severity.INFO,
        "resuming from step {step}: {path} ({format})",
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
        "{hosts:hosts}: checkpoint {path} is not complete: {why} {file}",
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
        "checkpoints set aside after repeated failures: {steps}",
        "Attempts that resumed from there failed twice in a row without progress. The next older checkpoint is used.",
        {"steps": "their steps, also in `ASCENDRUN_RESUME_SKIP`"},
    ),
    EventType(
        "checkpoint-pointer-repaired",
        Severity.WARNING,
        "{hosts:hosts}: {path} named {before}; it names step {step} again",
        "The job has `checkpoint: {pointer: repair}`, and the file named a checkpoint newer than the one that the job "
        "resumes from. Its old text is next to it, in NAME.old.",
        {"path": "the file", "before": "its old text", "step": "step of the checkpoint that it names now"},
    ),
    EventType("pull-resumed", Severity.INFO, "logs are copied again", "The head node has free space again.", {}),
    EventType(
        "io-error",
        Severity.WARNING,
        "{hosts:hosts}: the supervisor continues after {errno} in {step}",
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
        "{hosts:hosts}: {count:plural record records} of the supervisor were lost",
        "Notes about logs were dropped while they could not be written. Starts and exits are never dropped.",
        {"count": "how many"},
        frozenset({"count"}),
    ),
)
