"""Child process of a controller that runs a command for another user of the shared queue: it reads a job with
`visible: group`, or any job for an administrator, who may also change it."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Callable

from ascendrun.core.errors import AscendrunError, ConflictError, DeadlineExceededError, NotFoundError
from ascendrun.core.settings import FORWARDED_VARIABLE, REQUESTER_VARIABLE, STATE_VARIABLE
from ascendrun.head.protocol.control_socket import uid_of
from ascendrun.head.queue.messages import Admins, RunForOther
from ascendrun.head.queue.others import query_admins
from ascendrun.head.queue.server import user_of
from ascendrun.head.state.store import Store
from ascendrun.node.files import write_all
from ascendrun.text import LANGUAGES

Flags = Mapping[str, Sequence[str]]
WORDS = "words"
"""In the flags of a command: it may have arguments after the jobs."""
READABLE: Mapping[str, Flags] = {
    "show": {"--output": ("table", "wide")},
    "explain": dict.fromkeys(("--attempt", "--all", "--why", "--output"), ()),
    "logs": dict.fromkeys(
        ("--attempt", "--follow", "--hosts", "--no-prefix", "--output", "--rank", "--since", "--stream", "--tail")
        + ("--timestamps", "--until"),
        (),
    ),
}
"""Commands with the flags that others may use, and the values of each, (): any. The other formats of `show` have the
environment of the job; the other flags of `logs` have paths, or let nodes work."""
FOR_ADMINS: Mapping[str, Flags] = {
    "show": {"--output": ()},
    "explain": READABLE["explain"],
    "logs": {**READABLE["logs"], "--files": (), "--first-per-rank": ()},
    "events": dict.fromkeys(("--follow", "--since", "--kind", "--output"), ()),
    "stacks": dict.fromkeys(("--rank", "--attempt", "--output"), ()),
    "fetch": dict.fromkeys(("--output", WORDS), ()),
    "stop": dict.fromkeys(("--now", "--no-wait", "--output"), ()),
    **dict.fromkeys(("retry", "hold", "unhold"), {"--output": ()}),
}
"""The same for administrators: nothing that runs as the user's login on nodes, writes files of this machine where a
flag names it, or removes what the user has."""
REQUEST_BYTES, REQUEST_S = 8192, 10.0
LIMIT_S = 3600.0
"""Seconds after which a command is ended: a reader who stops reading does not keep it."""


def serve(peer: socket.socket, queue: Path, state_dir: Path) -> None:
    """Serve the one request that a connection brings."""
    peer.settimeout(REQUEST_S)
    ends: list[int] = []
    try:
        data, ends, _, _ = socket.recv_fds(peer, REQUEST_BYTES, 3)
        stdout, stderr, archive = ends
        request, uid = RunForOther.from_header(json.loads(data)), uid_of(peer)
        words = words_of(request, state_dir, partial(query_admins, queue, uid))
        peer.sendall(b"\n")  # accepted: from now on the output may pause
        environ = _environment(request.lang, state_dir, uid)
        run = partial(_run, words, environ, stderr)
        code = _fetch(run, request.into, state_dir, stdout, archive) if request.command == "fetch" else run(stdout)
        reply: dict[str, object] = {"code": code}
    except AscendrunError as error:
        reply = {"error": error.to_json()}
    except (OSError, ValueError, TypeError):
        return  # the reader is gone, or is not a command of ascendrun
    finally:
        for end in ends:
            os.close(end)
    with suppress(OSError):
        peer.sendall(json.dumps(reply).encode())


def words_of(request: RunForOther, state_dir: Path, admins: Callable[[], Admins]) -> list[str]:
    """Return the command line for a request. `admins`: queries the shared queue. Raises ConflictError for what this
    user may not do, NotFoundError for a job that the user may not read."""
    hidden = _not_allowed(READABLE, request)
    jobs = [] if hidden else _visible(request.jobs, state_dir)
    if not jobs:
        found = admins()
        refused = _not_allowed(FOR_ADMINS, request) if found.is_admin or not hidden else hidden
        if not found.is_admin and request.command in FOR_ADMINS and request.command not in READABLE:
            raise ConflictError.of(
                "queue.not-admin",
                "only {owner} and administrators of the shared queue may run `{command}` for jobs of {owner}",
                "ask {owner}, or one of: {admins}",
                owner=user_of(os.getuid()),
                command=request.command,
                admins=list(found.names),
            )
        if refused:
            raise ConflictError.of(
                "queue.other-flag",
                "{flag} is not supported for a job of another user",
                "as root: sudo -iu {owner} ascendrun {command}",
                flag=refused,
                owner=user_of(os.getuid()),
                command=request.command,
            )
        if not found.is_admin:
            raise NotFoundError.of(
                "queue.not-visible",
                "{job} not found, or not visible to others",
                "the job file of a visible job has `visible: group`",
                job=list(request.jobs),
            )
        jobs = [*request.jobs]
    return [request.command, *_flags(request), "--", *jobs, *request.words]


def _flags(request: RunForOther) -> list[str]:
    return [flag if value is True else f"{flag}={value}" for flag, value in request.options.items()]


def _not_allowed(rules: Mapping[str, Flags], request: RunForOther) -> str | None:
    """Return the first part of a request that the rules do not have."""
    flags = rules.get(request.command)
    if flags is None:
        return request.command
    for word, (flag, value) in zip(_flags(request), request.options.items()):
        if flag == WORDS or flag not in flags or (flags[flag] and value not in flags[flag]):
            return word
    return request.words[0] if request.words and WORDS not in flags else None


def _visible(refs: Sequence[str], state_dir: Path) -> list[str]:
    """Return the ids of jobs that others may read; [] if one of them is not such a job."""
    try:
        with Store.open_for_reading(state_dir) as store:
            found = [store.jobs.find(ref) for ref in refs]
    except (NotFoundError, ConflictError):  # its message may name other jobs
        return []
    return [one.job.id for one in found] if all(one.spec.get("visible") == "group" for one in found) else []


def _environment(lang: str, state_dir: Path, uid: int) -> Mapping[str, str]:
    environ = {**os.environ, FORWARDED_VARIABLE: "store", STATE_VARIABLE: str(state_dir)}  # ends with its reader
    environ["ASCENDRUN_LANG"] = lang if lang in LANGUAGES else "en"
    if uid != os.getuid():
        environ[REQUESTER_VARIABLE] = user_of(uid)
    return environ


def _run(words: Sequence[str], environ: Mapping[str, str], stderr: int, stdout: int, *more: str) -> int:
    argv = [sys.executable, "-m", "ascendrun", "--color=never", words[0], *more, *words[1:]]
    try:
        return subprocess.run(
            argv, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=environ, cwd="/", timeout=LIMIT_S
        ).returncode
    except subprocess.TimeoutExpired:
        raise DeadlineExceededError.of(
            "queue.other-limit", "the command ended after {limit_s:duration}", "repeat the command", limit_s=LIMIT_S
        ) from None


def _fetch(run: Callable[..., int], into: str, state_dir: Path, stdout: int, archive: int) -> int:
    """Fetch files into a directory of this user, and send them; what is printed names that of the reader."""
    import tarfile

    with tempfile.TemporaryDirectory(prefix="fetch-", dir=state_dir) as folder, tempfile.TemporaryFile() as printed:
        code = run(printed.fileno(), f"--output-dir={folder}")
        printed.seek(0)
        write_all(stdout, printed.read().replace(folder.encode(), os.fsencode(into)))
        with open(archive, "wb", closefd=False) as pipe, tarfile.open(fileobj=pipe, mode="w|") as tar:
            for base, _, names in os.walk(folder):
                for path in (os.path.join(base, name) for name in names):
                    if stat.S_ISREG(os.lstat(path).st_mode):
                        tar.add(path, os.path.relpath(path, folder))
    return code


if __name__ == "__main__":
    with socket.socket(fileno=0) as _peer:
        serve(_peer, Path(sys.argv[1]), Path(sys.argv[2]))
