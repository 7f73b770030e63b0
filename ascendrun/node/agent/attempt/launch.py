"""The start of a supervisor: it waits for GO with its modules imported, or a holder starts it; both get descriptors."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess

from ascendrun.node import hold, layout

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

START_S = 20.0
"""Seconds that a supervisor may take to report its start."""


class ReadySupervisor:
    """A supervisor that is started in advance, so that GO does not wait for an interpreter and its imports.

    It has no lease and no claim, and ends with this agent, or when it is closed. Raises OSError.
    """

    def __init__(self, agent: list[str], folder: str, env: dict[bytes, bytes]) -> None:
        self.folder = folder
        self._is_taken = False
        self._socket, theirs = socket.socketpair()
        with theirs, open(os.path.join(folder, "supervisor.log"), "ab") as log:
            self._process = subprocess.Popen(
                [*agent, "warm", "supervise", folder],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=log,
                env=env,
                cwd="/",
                start_new_session=True,
            )

    def is_waiting(self, folder: str) -> bool:
        return self.folder == folder and self._process.poll() is None

    def take(self, env: dict[bytes, bytes], fds: list[int]) -> dict[str, Any]:
        """Let it take over with these descriptors, as `hold.spawn`. Raises OSError."""
        texts = {os.fsdecode(name): os.fsdecode(value) for name, value in env.items()}
        hold.send(self._socket, {"env": texts}, fds)
        self._is_taken = True
        return {"pid": self._process.pid, "fds": list(range(3, len(fds)))}

    def close(self) -> None:
        """End it, unless it was taken; its first process ends in any case."""
        self._socket.close()
        if not self._is_taken:
            self._process.kill()
        self._process.wait()


class ReadySupervisors:
    """Those of this agent, one for each run. Safe to use from several threads."""

    def __init__(self, agent: list[str]) -> None:
        self._agent = agent
        self._by_run: dict[str, ReadySupervisor] = {}

    def start(self, folder: str, env: dict[bytes, bytes]) -> None:
        """Start the supervisor of an attempt, and end that of an earlier attempt of its run. Repeatable."""
        run = _run_of(folder)
        ready = self._by_run.get(run)
        if ready is None or not ready.is_waiting(folder):
            self.release(run)
            self._by_run[run] = ReadySupervisor(self._agent, folder, env)

    def release(self, run: str) -> None:
        ready = self._by_run.pop(run, None)
        if ready is not None:
            ready.close()

    def hand_over(self, folder: str, env: dict[bytes, bytes], log: int, spec: dict[str, Any]) -> dict[str, Any]:
        """Let the supervisor take over the attempt, as `hand_over`; one is started if none is ready: another agent has
        prepared the attempt."""
        ready = self._by_run.pop(_run_of(folder), None)
        if ready is None or not ready.is_waiting(folder):
            ready = ReadySupervisor(self._agent, folder, env)
        try:
            return hand_over(lambda fds: ready.take(env, fds), log, spec)
        finally:
            ready.close()


def _run_of(folder: str) -> str:
    return layout.split_tag(layout.tag_of(folder))[0]


def hand_over(take: Callable[[list[int]], dict[str, Any]], log: int, spec: dict[str, Any]) -> dict[str, Any]:
    """Give a supervisor what GO brought, and return its first message. Secrets use the pipe: never argv, environment or
    disk.

    `take`: starts it with the given descriptors, or finds it started: standard input, output and error output, leases.
    Raises OSError, ValueError and TimeoutExpired; then it is killed.
    """
    leases: dict[str, list[int]] = spec["leases"]
    stdin, to_child = os.pipe()
    from_child, stdout = os.pipe()
    with open(to_child, "wb") as writer, open(from_child, "rb") as reader:
        try:
            made = take([stdin, stdout, log, *(fd for fds in leases.values() for fd in fds)])
        finally:
            os.close(stdin)
            os.close(stdout)
        numbers = iter(made["fds"])
        renumbered = {name: [next(numbers) for _ in fds] for name, fds in leases.items()}
        try:
            writer.write(json.dumps({**spec, "leases": renumbered}).encode("utf-8"))
            writer.close()
            if not select.select([reader], [], [], START_S)[0]:
                raise subprocess.TimeoutExpired("supervise", START_S)
            reply: dict[str, Any] = json.loads(reader.read().decode("utf-8"))
            return reply
        except (subprocess.TimeoutExpired, ValueError, OSError):
            os.kill(made["pid"], signal.SIGKILL)
            raise
