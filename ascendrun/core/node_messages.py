"""Messages that nodes send as key and values: English templates, and conversion of the data to a text.

Nodes run their own standard-library code without templates: node/op_errors.py makes the data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ascendrun.core.dataclass import dataclass
from ascendrun.core.errors import AscendrunError
from ascendrun.text import Text, from_json, to_json

_OS = "{doing}: {error}"
MESSAGES: Mapping[str, str] = {
    "archive-damaged": "the archive is damaged: {error}",
    "archive-too-large": "the archive exceeds the limits ({entries} entries, {bytes:bytes})",
    "archive-truncated": "the archive ends within {path}",
    "arguments-too-long": "the arguments and environment of {path} are too long for the kernel",
    "attempt-older": "attempt {attempt} is older than attempt {newest}, which this node has already seen",
    "attempt-running": "attempt {attempt} is running",
    "attempt-started": "attempt {attempt} was already started on this node",
    "attempt-stopped": "attempt {attempt} was already stopped on this node",
    "attempt-stopped-early": "attempt {attempt} was stopped before it was started",
    "bad-request": "invalid request {op}: {error}",
    "busy": "the agent has too many open requests",
    "cannot-start": "cannot start {path}: {error}",
    "command-failed": "{command}: exit code {status}: {output}",
    "command-missing": "{path} not found on this node",
    "command-not-executable": "{path} is not executable",
    "command-not-in-path": "command {command} not found in PATH",
    "command-timed-out": "{command}: timed out, killed",
    "command-wrong-format": "{path} is not a program for this machine",
    "connection-refused": "connection refused",
    "deadline": "{op} did not finish in time on this node",
    "directory-unusable": _OS,
    "device-in-use": "{type} {device} is leased by an unknown program",
    "device-leased": "{type} {device} is in use by run {tag} of user {user} since {since_s:clock}",
    "disk-full": _OS,
    "disk-nearly-full": "only {free_bytes:bytes} free in {path}",
    "entry-below-link": "{path} is below the symbolic link {link}",
    "entry-changed": "{path} was changed",
    "entry-changed-while-staged": "{path} changed while it was being staged",
    "entry-missing": "{path} is missing",
    "entry-special-bits": "{path} has setuid, setgid or sticky bits",
    "entry-twice": "{path} occurs twice",
    "entry-unexpected": "{path} is not part of it",
    "entry-unsupported": "{path} is not a file, directory or symbolic link",
    "entry-without-parent": "{path}: its parent is not a directory",
    "error": "{error}",
    "file-error": "{path}: {error}",
    "file-system-hangs": "timed out; a file system does not respond",
    "files-skipped": "{count:plural file files} skipped",
    "grep-failed": "grep exited with {status}: {error}",
    "hccl-ports-in-use": "HCCL port blocks {ports:ranks} are in use on this node",
    "internal": "internal error in {op}: {error}",
    "keep-records": "cannot write the records in {path}",
    "head-unreachable": "no contact with the controller (limit: restart.fence_after_s, {limit_s:duration})",
    "link-loop": "the symbolic link {path} is part of a loop",
    "link-outside": "the symbolic link {path} leads outside the directory",
    "list-processes": "cannot list the processes of attempt {attempt} in {path}",
    "listing-changed": "its listing was changed",
    "listing-damaged": "its listing is damaged",
    "name-too-long": "the name is too long: {path}",
    "no-bash": "setup requires bash, which is not installed on this node",
    "no-command-after-setup": "command {path} not found in PATH after setup",
    "no-inodes": "no free inodes in {path}",
    "no-memory": "not enough memory to start {path}",
    "no-reply": "no reply in time",
    "no-such-command": "command {path} not found",
    "no-time-for-test": "not tested: time limit reached",
    "no-time-left": "time limit reached at {path}; the rest is missing",
    "no-time-left-for-check": "not checked: time limit reached",
    "not-a-directory": "{path} is not a directory",
    "not-prepared": "attempt {attempt} was not prepared on this node",
    "not-rank-output": "not the output of a rank: {files}",
    "older-attempt-running": "attempt {attempt} of this job still has processes on this node",
    "os-error": _OS,
    "other-content": "its contents have the hash {tree}",
    "other-host-answered": "{peer} replied",
    "other-owner": "{path} belongs to user id {owner}, expected {user}",
    "other-program-answered": "another program replied",
    "path-outside": "invalid path in a directory tree: {path}",
    "pattern-unreadable": "the Python of this node cannot read the pattern: {error}",
    "ports-in-use": "all ports of the job are in use on this node: {ports:ranks}",
    "prepare-attempt": "cannot prepare attempt {attempt} in {path}",
    "process-limit": "process limit reached; {path} was not started",
    "processes-remain": "{count:plural process processes} outlived the ranks",
    "launcher-exited": "the launcher of the ranks exited with code {code}",
    "launcher-killed": "the launcher of the ranks was killed by signal {signal}",
    "launcher-not-started": "the launcher of the ranks could not be started",
    "rank-exited": "rank {rank} exited with code {code}",
    "rank-killed": "rank {rank} was killed by signal {signal}",
    "rank-not-running": "rank {rank} has no running process on this node",
    "rank-not-started": "rank {rank} could not be started",
    "read-output": "cannot read {path}",
    "read-tree": "cannot read the staged directory {tree}",
    "record-end": "cannot record the end of attempt {attempt}",
    "run-limit": "ran for {limit_s:duration} (limit: timeouts.run_s)",
    "setup-failed": "setup exited with code {status}: {output}",
    "several": "{problems}",
    "size-limit": "size limit reached at {path}; the rest is missing",
    "stage-files-missing": "the files of earlier stages in {path} are not on this node",
    "stop-attempt": "cannot stop attempt {attempt} in {path}",
    "stop-hung": "stopped because the job hangs",
    "stop-requested": "stop requested",
    "store-tree": "cannot store the directory in {path}",
    "supervisor-failed": "the supervisor did not start: {error}",
    "supervisor-terminated": "the supervisor received SIGTERM",
    "timed-out": "timed out",
    "too-many-bytes": "{bytes:bytes} exceed the limit of {limit:bytes}",
    "too-many-entries": "{entries} entries exceed the limit of {limit}",
    "too-many-outputs": "{pattern} has more than {limit} files",
    "tree-changed": "the staged directory {path} was changed: {difference}",
    "tree-missing": "the staged directory {tree} is not on this node",
    "tree-received-differs": "the received directory is not {tree}: {difference}",
    "unknown-op": "the agent (protocol {version}) does not support {op}",
    "workdir-missing": "the working directory {path} does not exist on this node",
    "workdir-not-accessible": "the working directory {path} cannot be entered",
    "write-in": "cannot write in {path}",
}
HINTS: Mapping[str, str] = {
    "arguments-too-long": "pass large values in a file",
    "attempt-older": "submit the job again",
    "attempt-started": "submit the job again",
    "attempt-stopped": "submit the job again",
    "attempt-stopped-early": "submit the job again",
    "busy": "repeat the command",
    "command-missing": "install it on the node, or set `python` in the job file",
    "command-not-executable": "chmod +x {path}",
    "command-not-in-path": "set `python` to a full path in the job file, or extend PATH in its `env` or `setup`",
    "command-wrong-format": "check its first line (#!) and the architecture that it was built for",
    "deadline": "check the node for a slow disk or name service",
    "device-in-use": "list the processes on the node: ascendrun leases",
    "directory-unusable": "check the owner, mode and mount of the directory",
    "disk-full": "free disk space on the node",
    "disk-nearly-full": "free disk space on the node",
    "entry-unsupported": "exclude it: workdir.exclude in the job file",
    "hccl-ports-in-use": "list their owners: ascendrun leases",
    "internal": "report this; the traceback is in the standard error of the agent",
    "no-bash": "install bash on the node",
    "no-command-after-setup": "set PATH in `setup` of the job file",
    "no-inodes": "remove files from this file system",
    "no-such-command": "set its full path, or set PATH in `env` or `setup` of the job file",
    "not-a-directory": "remove {path} on the node",
    "older-attempt-running": "stop that job first: ascendrun ps -a",
    "other-owner": "remove {path}, or set ASCENDRUN_NODE_ROOT to a directory of this user",
    "ports-in-use": "list the processes on the node: ss -ltnp",
    "process-limit": "raise the limit of processes on the node: ulimit -u",
    "setup-failed": "run the text of `setup` in bash on the node",
    "supervisor-failed": "inspect {log} on the node",
    "too-many-bytes": "exclude data directories: workdir.exclude in the job file",
    "too-many-entries": "exclude data directories: workdir.exclude in the job file",
    "too-many-outputs": "pack them into one file in the script, or write narrower patterns in `outputs`",
    "tree-changed": "run `chmod -R u+w {path} && rm -rf {path}` on the node, then submit the job again",
    "tree-missing": "submit the job again",
    "tree-received-differs": "submit the job again; its files changed while they were staged",
    "unknown-op": "ascendrun controller stop",
    "workdir-missing": "create it on the node",
    "workdir-not-accessible": "check its mode and owner on the node",
}


@dataclass(frozen=True)
class Failure:
    """Reason why a node, or the connection to it, gave no result. `code`: of a node's error or an AscendrunError.
    `owner`: the run that holds what was requested, None: unknown, or nothing is held."""

    code: str
    message: Text | str
    hint: Text | str | None = None
    owner: str | None = None

    @classmethod
    def of(cls, error: AscendrunError) -> Failure:
        return cls(error.code, error.message, error.hint)

    @classmethod
    def of_node(cls, row: Mapping[str, Any]) -> Failure:
        """Create it from an agent's error: {"code", "message": {"key", "values"}}."""
        code, data = str(row.get("code", "internal")), row.get("message")
        owner = _values(data).get("tag") if code == "held" and isinstance(data, Mapping) else None
        return cls(code, node_text(data), node_hint(data), None if owner is None else str(owner))

    def to_json(self) -> dict[str, Any]:
        return {"code": self.code, "message": to_json(self.message), "hint": to_json(self.hint)}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Failure:
        return cls(str(row.get("code")), from_json(row.get("message") or ""), from_json(row.get("hint")))

    def line(self) -> Text:
        """Return message and hint in one line, for a table cell or an event."""
        if self.hint is None:
            return Text("node.failure", "{message}", message=self.message)
        return Text("node.failure-and-hint", "{message} ({hint})", message=self.message, hint=self.hint)


def node_text(data: Any) -> Text | str:
    """Return the text of a node's message. Other data (an older agent's sentence) stays unchanged."""
    if not isinstance(data, Mapping):
        return str(data)
    key = str(data.get("key"))
    return Text(f"node.{key}", MESSAGES.get(key, key), **_values(data))


def node_hint(data: Any) -> Text | None:
    if not isinstance(data, Mapping) or data.get("key") not in HINTS:
        return None
    return Text(f"node.{data['key']}.hint", HINTS[str(data["key"])], **_values(data))


def with_texts(value: Any) -> Any:
    """Return a raw reply of a node with its messages as texts."""
    if isinstance(value, Mapping):
        if set(value) == {"key", "values"} and value["key"] in MESSAGES:
            return node_text(value)
        return {name: with_texts(item) for name, item in value.items()}
    return [with_texts(item) for item in value] if isinstance(value, list) else value


def _values(data: Mapping[str, Any]) -> dict[str, Any]:
    values = with_texts(data.get("values") or {})
    return dict(values) if isinstance(values, Mapping) else {}
