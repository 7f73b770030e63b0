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
from collections.abc import Mapping, Sequence
from pathlib import Path

from ascendrun.core.errors import DeadlineExceededError, UnreachableError
from ascendrun.core.hosts import Host
from ascendrun.head.ssh.child_process import ChildStream
from ascendrun.head.ssh.config import SshTarget
from ascendrun.head.ssh.host_keys import HostKey, parse_known_hosts
from ascendrun.head.ssh.openssh_errors import classify, no_binary, no_login
from ascendrun.head.ssh.transport import CLOSED_HERE, COMMAND_ENDED, Deadlines, Receiver, StreamClosedError
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


def build_argv(
    host: Host,
    *,
    deadlines: Deadlines,
    known_hosts: Sequence[str],
    log: str,
    config: Path | None = None,
    host_key_alias: str | None = None,
    algorithms: Mapping[str, str] | None = None,
) -> list[str]:
    """Return the `ssh` command line for `host`, up to its name. The user's config applies to everything else."""
    options = _options(
        host, deadlines=deadlines, known_hosts=known_hosts, host_key_alias=host_key_alias, algorithms=algorithms
    )
    return _argv(["ssh", "-T", "-E", log], host, options, config)


def build_terminal_argv(
    host: Host,
    *,
    deadlines: Deadlines,
    known_hosts: Sequence[str],
    config: Path | None = None,
    host_key_alias: str | None = None,
    algorithms: Mapping[str, str] | None = None,
    has_terminal: bool,
) -> list[str]:
    """As `build_argv`, for a user at a terminal: ssh may ask for a passphrase, and its messages are shown."""
    options = _options(
        host, deadlines=deadlines, known_hosts=known_hosts, host_key_alias=host_key_alias, algorithms=algorithms
    )
    options.update(BatchMode="no" if has_terminal else "yes", LogLevel="ERROR")
    if has_terminal:
        del options["EscapeChar"]
    return _argv(["ssh", "-t" if has_terminal else "-T"], host, options, config)


def _argv(start: list[str], host: Host, options: Mapping[str, str], config: Path | None) -> list[str]:
    settings = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    return [*start, *(() if config is None else ("-F", str(config))), *settings, "--", host.name]


def _options(
    host: Host,
    *,
    deadlines: Deadlines,
    known_hosts: Sequence[str],
    host_key_alias: str | None,
    algorithms: Mapping[str, str] | None,
) -> dict[str, str]:
    options = {
        "BatchMode": "yes",
        "StrictHostKeyChecking": "yes",
        "UpdateHostKeys": "no",
        "UserKnownHostsFile": " ".join(_quote(name) for name in known_hosts) or "none",
        "GlobalKnownHostsFile": "none",
        "ConnectTimeout": str(max(1, math.ceil(deadlines.tcp_s))),
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
    }
    if host_key_alias:
        options["HostKeyAlias"] = host_key_alias
    if "kexalgorithms" not in (algorithms or {}):
        options["KexAlgorithms"] = _FAST_KEX  # the default, sntrup761, costs 64 ms of CPU for each host
    if host.addr:
        options["HostName"] = host.addr
    if host.port:
        options["Port"] = str(host.port)
    if host.user:
        options["User"] = host.user
    return options


def _quote(path: str) -> str:
    return f'"{path}"' if " " in path else path


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
            except (StreamClosedError, DeadlineExceededError):
                login.end()
                raise
        login.start(receiver)
        with self._lock:
            self._streams.append(login.stream)
            if self._is_closed:
                login.stream.close()
        return login.stream

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            waiting, self._waiting = self._waiting, None
            streams, self._streams = self._streams, []
        if waiting is not None:
            waiting.end()
        for stream in streams:
            stream.close()


def connect(
    host: Host,
    target: SshTarget,
    *,
    deadlines: Deadlines,
    known_hosts: Sequence[str],
    config: Path | None = None,
    host_key_alias: str | None = None,
) -> OpensshConnection:
    """Return a logged-in connection. Raises UnreachableError or a child, from the output of `ssh`."""
    argv = build_argv(
        host,
        deadlines=deadlines,
        known_hosts=known_hosts,
        log="{log}",
        config=config,
        host_key_alias=host_key_alias,
        algorithms=target.algorithms,
    )
    until = time.monotonic() + deadlines.tcp_s + deadlines.banner_s + deadlines.kex_s + deadlines.auth_s
    while True:
        login = _Login(argv, WAIT_FOR_COMMAND, target)
        try:
            login.wait(until - time.monotonic())
            return OpensshConnection(argv, target, login)
        except _HungUpError as error:
            pause_s = random.uniform(*_RETRY_S)
            if time.monotonic() + pause_s > until - deadlines.kex_s - deadlines.auth_s:
                raise UnreachableError(error.message, hint=error.hint) from error
            time.sleep(pause_s)


def scan_host_key(host: Host, target: SshTarget, *, deadlines: Deadlines, config: Path | None = None) -> HostKey:
    """Return the key that `host` presents; offers no user key. Raises UnreachableError."""
    folder = tempfile.mkdtemp(prefix="ascendrun-ssh-")
    try:
        file, log = os.path.join(folder, "known_hosts"), os.path.join(folder, "log")
        argv = build_argv(
            host,
            deadlines=deadlines,
            known_hosts=[file],
            log=log,
            config=config,
            host_key_alias="scanned",
            algorithms=target.algorithms,
        )
        # ssh uses the first value of an option.
        first = ("StrictHostKeyChecking=accept-new", "PreferredAuthentications=none", "HashKnownHosts=no")
        limit_s = deadlines.tcp_s + deadlines.banner_s + deadlines.kex_s
        try:
            subprocess.run(
                [argv[0], *(f"-o{option}" for option in first), *argv[1:], "true"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=limit_s,
                start_new_session=True,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise no_login(target, limit_s) from None
        except OSError as error:
            raise no_binary(error) from error
        found = parse_known_hosts(_read_text(file), file)
        if not found:
            raise classify(_read_text(log), target)
        return found[0].key
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _HungUpError(UnreachableError):
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
            self._remove_folder()
            raise no_binary(error) from error

    def wait(self, limit_s: float) -> None:
        """Return when logged in; raise UnreachableError or one of its children, and leave no process then."""
        until = time.monotonic() + limit_s
        try:
            while _LOGGED_IN.encode() not in self._log:
                if self.stream.exit_code is not None:
                    self._read_log(0)
                    output = self._text()
                    kind = _HungUpError if _HUNG_UP.search(output) else None
                    raise classify(output, self._target, kind=kind)
                if time.monotonic() > until:
                    raise no_login(self._target, limit_s)
                self._read_log(min(0.2, max(until - time.monotonic(), 0.001)))
        except BaseException:
            self.end()
            raise
        finally:
            self._remove_folder()  # ssh has the pipe open by now, or has ended

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

    def _remove_folder(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _read_log(self, timeout_s: float) -> None:
        assert self._log_fd is not None
        poller = select.poll()
        poller.register(self._log_fd, select.POLLIN)
        poller.register(self.stream.error_fd, select.POLLIN)
        poller.poll(timeout_s * 1000)
        self._log += _read_some(self._log_fd)
        self.error_backlog = (self.error_backlog + _read_some(self.stream.error_fd))[-65536:]

    def _text(self) -> str:
        return (self.error_backlog + b"\n" + self._log).decode("utf-8", "replace")

    def _describe_end(self, code: int) -> tuple[Text, int | None]:
        if self._log_fd is not None:
            self._log += _read_some(self._log_fd)
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


def _read_some(fd: int) -> bytes:
    try:
        return os.read(fd, 65536)
    except BlockingIOError:
        return b""


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
