"""SSH through the OpenSSH binary: slower, but it reads every config and supports what paramiko does not.

A connection is one `ssh` process, logged in when `connect` returns; it waits for the one command that `open` sends as
its first line of input. A second `open` starts a second `ssh`.
"""

from __future__ import annotations

import math
import os
import random
import re
import select
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Callable

from ascendrun.core import errors
from ascendrun.core.dataclass import dataclass
from ascendrun.core.hosts import Host
from ascendrun.head.ssh.child_process import ChildStream
from ascendrun.head.ssh.config import SshTarget
from ascendrun.head.ssh.host_keys import HostKey, parse_known_hosts
from ascendrun.head.ssh.transport import CLOSED_HERE, COMMAND_ENDED, Deadlines, Receiver, StreamClosedError
from ascendrun.node.files import read_some
from ascendrun.text import Text

WAIT_FOR_COMMAND = """exec /bin/sh -c 'IFS= read -r command && eval "$command"'"""
"""Command of the login shell until `open`; valid in sh, csh, fish and zsh. `read` stops at the end of its line."""

_LOGGED_IN = "Authenticated to "
_RETRY_S = (0.1, 0.6)
_FAST_KEX = "^curve25519-sha256,curve25519-sha256@libssh.org,ecdh-sha2-nistp256"
_HUNG_UP = re.compile(r"kex_exchange_identification:.*(closed|reset)", re.IGNORECASE)
_LOST = re.compile(
    r"^Connection to \S+ closed by remote host|^client_loop: |^Timeout, server |^(Read from|Connection "
    r"(closed|reset) by|ssh_dispatch_run|ssh_packet|packet_write|Disconnected from|Received disconnect)"
)


@dataclass(frozen=True)
class OpensshRoute:
    """How `ssh` reaches a host. The user's config applies to everything that is not set here.

    `known_hosts`: files with host keys; `alias`: the host's name there, None: as ssh's own. `config`: a file that
    replaces the user's and the system's config.
    """

    host: Host
    target: SshTarget
    deadlines: Deadlines
    known_hosts: Sequence[str]
    alias: str | None = None
    config: Path | None = None

    def argv(self, *flags: str, **changed: str | None) -> list[str]:
        """Return the command line up to the host's name. `changed`: options with another value, None: without it."""
        host = self.host
        options = {
            "BatchMode": "yes",
            "StrictHostKeyChecking": "yes",
            "UpdateHostKeys": "no",
            "UserKnownHostsFile": " ".join(f'"{path}"' if " " in path else path for path in self.known_hosts) or "none",
            "GlobalKnownHostsFile": "none",
            "ConnectTimeout": str(max(1, math.ceil(self.deadlines.tcp_s))),
            "ServerAliveInterval": "2",
            "ServerAliveCountMax": "3",
            "ControlMaster": "no",
            "ControlPath": "none",
            "ClearAllForwardings": "yes",
            "ForwardAgent": "no",
            "ForwardX11": "no",
            "PermitLocalCommand": "no",
            "RemoteCommand": "none",
            "EscapeChar": "none",
            "LogLevel": "VERBOSE",
            "HostKeyAlias": self.alias,
            # the default, sntrup761, costs 64 ms of CPU for each host
            "KexAlgorithms": None if "kexalgorithms" in self.target.algorithms else _FAST_KEX,
            "HostName": host.addr,
            "Port": str(host.port) if host.port else None,
            "User": host.user,
            **changed,
        }
        settings = [word for name, value in options.items() if value for word in ("-o", f"{name}={value}")]
        return ["ssh", *flags, *(() if self.config is None else ("-F", str(self.config))), *settings, "--", host.name]

    def terminal_argv(self, *, has_terminal: bool) -> list[str]:
        """As `argv`, for a user at a terminal: ssh may ask for a passphrase, and its messages are shown."""
        if has_terminal:
            return self.argv("-t", BatchMode="no", LogLevel="ERROR", EscapeChar=None)
        return self.argv("-T", LogLevel="ERROR")


class OpensshConnection:
    """Implementation of `transport.Connection`."""

    peer_address: str | None = None

    def __init__(self, argv: Sequence[str], target: SshTarget, login: _Login) -> None:
        self._argv = argv
        self._target = target
        self._lock = threading.Lock()
        self._waiting: _Login | None = login
        self._streams: list[ChildStream] = []
        self._is_closed = False

    def open(self, command: str, receiver: Receiver, *, deadline_s: float) -> ChildStream:
        """Open as `transport.Connection.open`; a second call logs in again, and raises the errors of `connect`."""
        with self._lock:
            login, self._waiting = self._waiting, None
            is_closed = self._is_closed
        if is_closed:
            raise StreamClosedError(CLOSED_HERE)
        is_first = login is not None and "\n" not in command
        if login is not None and not is_first:
            login.end()
        if login is None or not is_first:
            login = _Login(self._argv, command, self._target)
            login.wait(deadline_s)
        if is_first:
            try:
                login.stream.send(command.encode() + b"\n", deadline_s=deadline_s)
            except (StreamClosedError, errors.DeadlineExceededError):
                login.end()
                raise
        login.start(receiver)
        with self._lock:
            self._streams.append(login.stream)
            if self._is_closed:
                login.stream.close()
        return login.stream

    def has_unread(self) -> bool:
        return False

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            waiting, self._waiting = self._waiting, None
            streams, self._streams = self._streams, []
        if waiting is not None:
            waiting.end()
        for stream in streams:
            stream.close()


def connect(route: OpensshRoute) -> OpensshConnection:
    """Return a logged-in connection. Raises UnreachableError or a child, from the output of `ssh`."""
    argv, target, limits = route.argv("-T", "-E", "{log}"), route.target, route.deadlines
    until = time.monotonic() + limits.tcp_s + limits.banner_s + limits.kex_s + limits.auth_s
    while True:
        login = _Login(argv, WAIT_FOR_COMMAND, target)
        try:
            login.wait(until - time.monotonic())
            return OpensshConnection(argv, target, login)
        except _HungUpError as error:
            pause_s = random.uniform(*_RETRY_S)
            if time.monotonic() + pause_s > until - limits.kex_s - limits.auth_s:
                raise errors.UnreachableError(
                    error.message, hint=error.hint, host=target.name, why_lost=error.why_lost
                ) from error
            time.sleep(pause_s)


def scan_host_key(route: OpensshRoute) -> HostKey:
    """Return the key that the host presents; offers no user key. Raises UnreachableError."""
    folder = tempfile.mkdtemp(prefix="ascendrun-ssh-")
    try:
        file, log = os.path.join(folder, "known_hosts"), os.path.join(folder, "log")
        scan = {"StrictHostKeyChecking": "accept-new", "PreferredAuthentications": "none", "HashKnownHosts": "no"}
        argv = replace(route, known_hosts=[file], alias="scanned").argv("-T", "-E", log, **scan)
        limit_s = route.deadlines.tcp_s + route.deadlines.banner_s + route.deadlines.kex_s
        try:
            subprocess.run(
                [*argv, "true"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=limit_s,
                start_new_session=True,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise _no_login(route.target, limit_s) from None
        except OSError as error:
            raise _no_binary(error) from error
        found = parse_known_hosts(_read_text(file), file)
        if not found:
            raise classify(_read_text(log), route.target)
        return found[0].key
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _HungUpError(errors.UnreachableError):
    """sshd disconnected before it sent its banner; another try may succeed."""


class _Login:
    """One `ssh` process from its start until it is logged in; its log goes to a separate pipe."""

    def __init__(self, argv: Sequence[str], command: str, target: SshTarget) -> None:
        self._target = target
        self._log = b""
        self.error_backlog = b""
        self._error_tail = b""
        self._folder = tempfile.mkdtemp(prefix="ascendrun-ssh-")
        path = os.path.join(self._folder, "log")
        os.mkfifo(path, 0o600)
        self._log_fd: int | None = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            self.stream = ChildStream(
                [part.replace("{log}", path) for part in argv] + [command], describe_end=self._describe_end
            )
        except OSError as error:
            self._close_log()
            shutil.rmtree(self._folder, ignore_errors=True)
            raise _no_binary(error) from error

    def wait(self, limit_s: float) -> None:
        """Return when logged in; raise UnreachableError or one of its children, and leave no process then."""
        until = time.monotonic() + limit_s
        try:
            while _LOGGED_IN.encode() not in self._log:
                if self.stream.exit_code is not None:
                    self._read_log(0)
                    output = (self.error_backlog + b"\n" + self._log).decode("utf-8", "replace")
                    error = classify(output, self._target)
                    has_hung_up = _HUNG_UP.search(output)
                    raise (
                        _HungUpError(error.message, hint=error.hint, why_lost=error.why_lost) if has_hung_up else error
                    )
                if time.monotonic() > until:
                    raise _no_login(self._target, limit_s)
                self._read_log(min(0.2, max(until - time.monotonic(), 0.001)))
        except BaseException:
            self.end()
            raise
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)  # ssh has the pipe open by now, or has ended

    def start(self, receiver: Receiver) -> None:
        """Feed `receiver`, keeping the end of the error output: there ssh reports a lost connection."""

        def take_error(data: bytes) -> None:
            self._error_tail = (self._error_tail + data)[-200:]
            receiver.on_error_data(data)

        self.stream.start(Receiver(receiver.on_data, take_error, receiver.on_closed), error_backlog=self.error_backlog)

    def end(self) -> None:
        """End the process of a login that no receiver will get."""
        self.stream.start(Receiver(lambda _: None, lambda _: None, lambda *_: None))
        self.stream.close()

    def _read_log(self, timeout_s: float) -> None:
        assert self._log_fd is not None
        poller = select.poll()
        poller.register(self._log_fd, select.POLLIN)
        poller.register(self.stream.error_fd, select.POLLIN)
        poller.poll(timeout_s * 1000)
        self._log += read_some(self._log_fd) or b""
        self.error_backlog = (self.error_backlog + (read_some(self.stream.error_fd) or b""))[-65536:]

    def _describe_end(self, code: int) -> tuple[Text, int | None]:
        if self._log_fd is not None:
            self._log += read_some(self._log_fd) or b""
        self._close_log()
        output = (self._log + b"\n" + self._error_tail).decode("utf-8", "replace")
        lost = [line for line in output.splitlines() if _LOST.search(line)]
        if code == 255 and lost:
            return Text("ssh.connection-lost", "the connection ended ({error})", error=lost[-1].strip()), None
        if code < 0:
            return Text("ssh.openssh-killed", "ssh was killed by signal {signal}", signal=-code), None
        return COMMAND_ENDED, code

    def _close_log(self) -> None:
        if self._log_fd is not None:
            os.close(self._log_fd)
            self._log_fd = None


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


OUTPUTS: Sequence[tuple[str, Callable[..., errors.UnreachableError], str, str, str, str]] = (
    # output of ssh, the error, the keys and the English of its message and its hint; the first match counts
    (
        r"REVOKED HOST KEY|marked as revoked",
        errors.HostKeyChangedError,
        "ssh.openssh-revoked",
        "{host} ({endpoint}): the host key is revoked; not connected",
        "ssh.host-key-revoked.hint",
        "generate new host keys on the host: ssh-keygen -A",
    ),
    (
        r"IDENTIFICATION HAS CHANGED",
        errors.HostKeyChangedError,
        "ssh.openssh-changed",
        "{host} ({endpoint}): host key {key} differs from the recorded key ({file}); not connected",
        "ssh.openssh-changed.hint",
        "if the host was reinstalled, compare with ssh-keygen -lf on its console, then run: ascendrun "
        "trust --replace {host}",
    ),
    (
        r"host key is known for|Host key verification failed",
        errors.HostKeyUnknownError,
        "ssh.openssh-unknown",
        "{host} ({endpoint}): unknown host key; not connected ({line})",
        "ssh.trust",
        "ascendrun trust {host}",
    ),
    (
        r"Permission denied|Too many authentication failures|No more authentication methods",
        errors.AuthenticationError,
        "ssh.openssh-rejected",
        "{host} ({endpoint}): sshd rejected user {user} ({line})",
        "ssh.openssh-rejected.hint",
        "check the user name; add keys with a passphrase to the agent: ssh-add; details: ssh -v {host}",
    ),
    (
        r"Could not resolve hostname",
        errors.UnreachableError,
        "ssh.openssh-line",
        "{host} ({endpoint}): {line}",
        "ssh.openssh-resolve.hint",
        "check /etc/hosts and DNS, or set addr= in the hostfile",
    ),
    (
        r"during banner exchange",
        errors.UnreachableError,
        "ssh.openssh-banner",
        "{host} ({endpoint}): connected, but no SSH banner ({line})",
        "ssh.openssh-banner.hint",
        "check the load of the host and which service uses the port: ssh -v {host}",
    ),
    (
        r"Unable to negotiate|no matching",
        errors.UnreachableError,
        "ssh.openssh-line",
        "{host} ({endpoint}): {line}",
        "ssh.openssh-algorithms.hint",
        "allow one of the algorithms of this host in ~/.ssh/config",
    ),
    (
        r"Bad configuration|Bad owner|terminating, \d+ bad|keyword .* extra|[Mm]issing argument|line \d+:",
        errors.UnreachableError,
        "ssh.openssh-config",
        "{host} ({endpoint}): ssh rejected its configuration ({line})",
        "ssh.openssh-config.hint",
        "fix the file and check it: ssh -G {host}",
    ),
    (
        r"Connection refused",
        partial(errors.UnreachableError, why_lost="refused"),
        "ssh.openssh-line",
        "{host} ({endpoint}): {line}",
        "ssh.openssh-connect.hint",
        "check the host, sshd and firewalls: ssh -v {host}",
    ),
    (
        r"timed out|No route|Network is unreachable",
        errors.UnreachableError,
        "ssh.openssh-line",
        "{host} ({endpoint}): {line}",
        "ssh.openssh-connect.hint",
        "check the host, sshd and firewalls: ssh -v {host}",
    ),
)


def classify(output: str, target: SshTarget) -> errors.UnreachableError:
    """Return the error that the output of ssh means."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for pattern, error, key, english, hint_key, hint in OUTPUTS:
        line = next((line for line in lines if re.search(pattern, line)), None)
        if line is not None:
            shown = re.search(r"fingerprint for the (\S+) key sent by the remote host is\s+(SHA256:\S+?)\.?\s", output)
            place = re.search(r"Offending (\S+) key in (\S+)", output)
            values = {
                **target.names,
                "line": line[:200],
                "key": " ".join(shown.groups()) if shown else None,
                "file": place.group(2) if place else None,
            }
            return error(Text(key, english, **values), hint=Text(hint_key, hint, **values), host=target.name)
    last = lines[-1][:200] if lines else None
    return errors.UnreachableError(
        Text("ssh.not-connected", "{host} ({endpoint}): not connected ({error})", **target.names, error=last),
        hint=Text("ssh.verbose", "ssh -v {host}", host=target.name),
        host=target.name,
    )


def _no_login(target: SshTarget, limit_s: float) -> errors.UnreachableError:
    return errors.UnreachableError.of(
        "ssh.openssh-timeout",
        "{host} ({endpoint}): ssh did not log in within {limit_s:.3g} s",
        "check the load of the host and prompts for input: ssh -v {host}",
        **target.names,
        limit_s=limit_s,
    )


def _no_binary(error: OSError) -> errors.UnreachableError:
    return errors.UnreachableError.of(
        "ssh.no-binary",
        "cannot start ssh ({error})",
        "install the OpenSSH client and add it to PATH",
        error=error.strerror or str(error),
    )
