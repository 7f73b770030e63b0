"""Child process of a controller that prints a job with `visible: group` for another user of the shared queue."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ascendrun.core.errors import AscendrunError, ConflictError, DeadlineExceededError, NotFoundError
from ascendrun.core.settings import FORWARDED_VARIABLE, STATE_VARIABLE
from ascendrun.head.queue.messages import PrintVisible
from ascendrun.head.state.store import Store
from ascendrun.text import LANGUAGES

READABLE: Mapping[str, Mapping[str, Sequence[str]]] = {
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
REQUEST_BYTES, REQUEST_S = 8192, 10.0
LIMIT_S = 3600.0
"""Seconds after which a command is ended: a reader who stops reading does not keep it."""
NICE = 10


def serve(peer: socket.socket, state_dir: Path) -> None:
    """Serve the one request that a connection brings."""
    peer.settimeout(REQUEST_S)
    try:
        data, ends, _, _ = socket.recv_fds(peer, REQUEST_BYTES, 2)
        stdout, stderr = ends
        request = PrintVisible.from_header(json.loads(data))
        words = words_of(request, state_dir)
        peer.sendall(b"\n")  # accepted: from now on the output may pause
        reply: dict[str, object] = {"code": _run(words, request.lang, state_dir, stdout, stderr)}
    except AscendrunError as error:
        reply = {"error": error.to_json()}
    except (OSError, ValueError, TypeError):
        return  # the reader is gone, or is not a command of ascendrun
    with suppress(OSError):
        peer.sendall(json.dumps(reply).encode())


def words_of(request: PrintVisible, state_dir: Path) -> list[str]:
    """Return the command line for a request. Raises ConflictError for what others may not do, NotFoundError for a job
    that they may not read."""
    flags, words = READABLE.get(request.command), [request.command]
    if flags is None:
        raise _refused(request.command)
    for flag, value in request.options.items():
        words.append(flag if value is True else f"{flag}={value}")
        if flag not in flags or (flags[flag] and value not in flags[flag]):
            raise _refused(words[-1])
    try:
        with Store.open_for_reading(state_dir) as store:
            stored = store.jobs.find(request.job)
    except (NotFoundError, ConflictError):  # its message may name other jobs
        stored = None
    if stored is None or stored.spec.get("visible") != "group":
        raise NotFoundError.of(
            "queue.not-visible",
            "{job} not found, or not visible to others",
            "the job file of a visible job has `visible: group`",
            job=request.job,
        )
    return [*words, "--", stored.job.id]


def _refused(word: str) -> ConflictError:
    return ConflictError.of("queue.visible-flag", "{flag} is not supported for a job of another user", flag=word)


def _run(words: Sequence[str], lang: str, state_dir: Path, stdout: int, stderr: int) -> int:
    environ = {**os.environ, FORWARDED_VARIABLE: "store", STATE_VARIABLE: str(state_dir)}  # ends with its reader
    environ["ASCENDRUN_LANG"] = lang if lang in LANGUAGES else "en"
    argv = [sys.executable, "-m", "ascendrun", "--color=never", *words]
    try:
        return subprocess.run(
            argv, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=environ, cwd="/", timeout=LIMIT_S
        ).returncode
    except subprocess.TimeoutExpired:
        raise DeadlineExceededError.of(
            "queue.visible-limit", "the output ended after {limit_s:duration}", "repeat the command", limit_s=LIMIT_S
        ) from None


if __name__ == "__main__":
    os.nice(NICE)
    with socket.socket(fileno=0) as _peer:
        serve(_peer, Path(sys.argv[1]))
