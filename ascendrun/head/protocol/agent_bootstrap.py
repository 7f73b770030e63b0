"""From a login to a running agent: the head's end of the protocol in node/loader; the errors of a connection to it."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

from ascendrun.core import errors
from ascendrun.core.dataclass import dataclass
from ascendrun.core.hosts import Host
from ascendrun.core.node_messages import Failure
from ascendrun.head.protocol.messages import OTHER_VERSION_HINT
from ascendrun.head.ssh.transport import Backend, Connection
from ascendrun.node import loader, wire
from ascendrun.node.loader import pack_agent
from ascendrun.text import Text

NOISE_BYTES = 2048
FENCE_ID = 0
"""Number of the request `fence`; those of a connection begin with 1."""
LOGIN_BYTES = 16 << 20
"""Bytes of output before the agent starts, after which the login counts as a flood."""


class AgentImage:
    """The agent's archive and the line that starts it, packed when they are first used. Any thread."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        """`files`: by name in the archive. Read them early: a command without agents waits for no packing."""
        self._files = files
        self._packing = threading.Lock()
        self._packed: tuple[bytes, str] | None = None

    def pack(self) -> tuple[bytes, str]:
        """Return (the archive, its SHA-256 in hex)."""
        with self._packing:
            if self._packed is None:
                self._packed = pack_agent(self._files)
            return self._packed

    @property
    def login_command(self) -> str:
        return loader.login_command(self.pack()[1][:16])


@dataclass(frozen=True)
class Login:
    """A login. `wait_s`: seconds until its shell ran the start line. `noise`: output of its startup files.

    Startup files that write into the connection do so at every login, also into those of scp and git.
    """

    wait_s: float | None = None
    noise: str | None = None


class AgentBootstrap:
    """One bootstrap. `feed` is called by the connection's thread, the other methods by other threads. `fence`: head id
    and term that the agent admits before its first event counts, None: it admits every head."""

    def __init__(self, host: str, image: AgentImage, fence: tuple[str, int] | None = None) -> None:
        self._host, self._image, self._fence = host, image, fence
        self._hello: dict[str, Any] | None = None
        self._boot = loader.Boot()
        self._frames = wire.FrameReader()
        self._lock = threading.Lock()
        self._needs_input = False
        self._login_bytes = 0
        self._failure: errors.AscendrunError | None = None
        self._errors = b""
        self._started_mono = time.monotonic()
        self._first_reply_mono: float | None = None

    def login(self) -> Login:
        with self._lock:
            noise = (self._boot.noise.strip() + b"\n" + self._errors.strip()).strip()
            replied = self._first_reply_mono
        wait_s = None if replied is None else round(replied - self._started_mono, 3)
        return Login(wait_s, noise[:NOISE_BYTES].decode("utf-8", "replace"))

    def feed(self, data: bytes) -> list[tuple[dict[str, Any], bytes]]:
        """Return the frames completed by new output; none before the agent sends. Raises wire.FrameError,
        SupersededError, UnreachableError."""
        if not self._boot.is_over:
            self._login_bytes += len(data)
            if self._login_bytes > LOGIN_BYTES:
                raise wire.FrameError(f"the login prints more than {LOGIN_BYTES >> 20} MiB before the agent starts")
            for step in self._boot.feed(data):
                self._take(step)
            data, self._boot.leftover = self._boot.leftover, b""
        elif self._failure is not None:
            return []
        frames = self._frames.feed(data) if self._failure is None and data else []
        return frames if self._fence is None else [one for frame in frames for one in self._fenced(*frame)]

    def _fenced(self, header: dict[str, Any], body: bytes) -> list[tuple[dict[str, Any], bytes]]:
        """Hold the agent's first event back until heads of lower terms change nothing more there; it gets the state of
        that moment."""
        if header.get("event") == "hello":
            with self._lock:
                self._hello, self._needs_input = header, True
            return []
        if header.get("re") != FENCE_ID or self._hello is None:
            return [(header, body)]
        if header.get("ok"):
            return [({**self._hello, **header, "re": None}, b"")]
        failure = Failure.of_node(header.get("error") or {})
        message = Text("agent.on-host", "{host}: {reason}", host=self._host, reason=failure.message)
        kind = errors.SupersededError if failure.code == "superseded" else errors.UnreachableError
        raise kind(message, hint=failure.hint, host=self._host)

    def _take(self, step: loader.Step) -> None:
        with self._lock:
            self._first_reply_mono = self._first_reply_mono or time.monotonic()
            if step.kind == loader.NEED_AGENT:
                self._needs_input = True
            elif step.kind == loader.NO_PYTHON:
                self._failure = errors.PreflightError.of(
                    "agent.no-python",
                    "{host}: no Python 3.7 or newer found ({tried})",
                    "install python3 on the host, or add it to PATH of non-interactive logins",
                    host=self._host,
                    tried=list(loader.PYTHONS),
                    why_lost="not-started",
                )
            elif step.kind == loader.FAILED:
                self._failure = errors.UnreachableError.of(
                    "agent.not-installed",
                    "{host}: cannot install the agent: {error}",
                    "check space and permissions of ~/.ascendrun on {host}",
                    host=self._host,
                    error=step.detail,
                    why_lost="not-started",
                )

    def feed_error(self, data: bytes) -> None:
        """Keep standard error output for the message if no agent starts."""
        with self._lock:
            self._errors = (self._errors + data)[-4096:]

    def needs_input(self) -> bool:
        """Return True once each time that the other side waits: for the archive, or for the term of this head."""
        with self._lock:
            needs, self._needs_input = self._needs_input, False
        return needs

    def make_input(self) -> bytes:
        """Return what the other side waits for."""
        if self._hello is None or self._fence is None:
            return loader.upload(*self._image.pack())
        return wire.pack({"id": FENCE_ID, "op": "fence", "head_id": self._fence[0], "term": self._fence[1]})

    def why_closed(self, reason: Text, status: int | None) -> errors.AscendrunError:
        """Return the error of an ended stream: the reason in the protocol, or the last output of the login."""
        with self._lock:
            if self._failure is not None:
                return self._failure
            output = (self._errors or self._boot.all_noise()[-4096:]).decode("utf-8", "replace").strip().splitlines()
        values = {"host": self._host, "output": output[-1] if output else "-"}
        if self._boot.is_over:
            return errors.UnreachableError.of(
                "agent.connection-closed",
                "{host}: connection closed: {reason} (last output: {output})",
                reason=reason,
                why_lost="connection-ended",
                **values,
            )
        return errors.UnreachableError.of(
            "agent.login-ended",
            "{host}: the login ended before the agent started (exit code {status}; last output: {output})",
            "check that the account has a login shell: ssh {host} true",
            status=status,
            why_lost="not-started",
            **values,
        )


def is_permanent(error: errors.AscendrunError) -> bool:
    """Return whether only the operator can help: another connect does not."""
    return isinstance(
        error,
        (errors.AuthenticationError, errors.HostKeyUnknownError, errors.HostKeyChangedError, errors.AgentVersionError),
    )


def why_lost(error: errors.AscendrunError | None) -> str:
    """Return the code of why a host is unreachable, by the error of its connection. None: it does not reply."""
    if error is None:
        return "no-reply"
    return error.why_lost or ("not-connected" if error.code == errors.UnreachableError.code else error.code)


def closed(host: str) -> errors.UnreachableError:
    return errors.UnreachableError.of("agent.closed", "{host}: the connection was closed", host=host)


def other_version(host: str, agent: object) -> errors.AgentVersionError:
    what = Text(
        "agent.other-version",
        "{host}: the agent is of another version (protocol {agent}, the controller uses {controller})",
        host=host,
        agent=agent,
        controller=wire.PROTOCOL,
    )
    return errors.AgentVersionError(what, hint=OTHER_VERSION_HINT, host=host)


def invalid_data(host: str, error: ValueError | errors.InvalidInputError) -> errors.UnreachableError:
    """Make the error for a host that sends what no agent sends."""
    return errors.UnreachableError.of(
        "agent.invalid-data",
        "{host}: invalid data from the agent: {error}",
        "check that ~/.bashrc prints nothing: ssh {host} true",
        host=host,
        error=error.problems[0].message if isinstance(error, errors.InvalidInputError) else str(error),
        why_lost="invalid-data",
    )


def internal_failure(host: str, error: Exception) -> errors.UnreachableError:
    """Make the error for an internal error while connecting."""
    what = f"{type(error).__name__}: {error}"
    english = "{host}: internal error: {error}"
    return errors.UnreachableError.of("agent.internal", english, host=host, error=what, why_lost="internal")


def connect(backend: Backend, host: Host) -> Connection:
    """Connect. Raises AscendrunError, also for an internal error, which a worker thread would lose with its future."""
    try:
        return backend.connect(host)
    except errors.AscendrunError:
        raise
    except Exception as error:
        raise internal_failure(host.name, error) from error


def agent_start_timeout(host: str, limit_s: float) -> errors.UnreachableError:
    return errors.UnreachableError.of(
        "agent.start-timeout",
        "{host}: the agent did not start within {limit_s:g} s after login",
        "a shell startup file may be blocking; run: ssh {host} true",
        host=host,
        limit_s=limit_s,
        why_lost="not-started",
    )


def no_reply(host: str, limit_s: float) -> errors.UnreachableError:
    return errors.UnreachableError.of(
        "agent.unreachable", "{host}: no reply for {limit_s:g} s", host=host, limit_s=limit_s, why_lost="no-reply"
    )


def on_host(host: str, reason: Text | str, why_lost: str | None = None) -> errors.UnreachableError:
    return errors.UnreachableError.of("agent.on-host", "{host}: {reason}", host=host, reason=reason, why_lost=why_lost)
