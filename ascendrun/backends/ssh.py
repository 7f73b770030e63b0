"""Hosts behind SSH: chooses the transport for each host; shares keys, host keys and jump hosts.

Also what a user does with them: look at and record host keys, open a terminal.
"""

from __future__ import annotations

import shlex
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from typing import TYPE_CHECKING, Any, Callable

from ascendrun.backends import Backends, SshOptions
from ascendrun.core.dataclass import dataclass
from ascendrun.core.errors import AscendrunError, AuthenticationError, UnreachableError
from ascendrun.core.hosts import Host
from ascendrun.core.settings import Settings
from ascendrun.head.ssh.config import SshConfig, SshTarget, needs_openssh, parse_jump
from ascendrun.head.ssh.host_keys import (
    OWN_FILE,
    HostKey,
    KnownHostsFile,
    Recorded,
    find_recorded,
    known_name,
    record_host_keys,
    verify_key,
)
from ascendrun.head.ssh.transport import CLOSED_HERE, Connection, Deadlines, NoKeyError
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.head.ssh.keys import KeyRing
    from ascendrun.head.ssh.openssh import OpensshRoute
    from ascendrun.head.ssh.paramiko_transport import ParamikoConnection

AUTH_PAUSE_S = 60.0
"""A rejected login is not repeated for this many seconds: sshd counts failures and may block the address."""

HANDSHAKES_PER_JUMP = 8
"""Concurrent handshakes through one jump host; above this, its MaxStartups starts to drop connections."""

SCANS_AT_ONCE = 32


class SshBackend:
    """SSH `transport.Backend`. Files are read once (known_hosts again after a change), keys are loaded once."""

    def __init__(self, settings: Settings, options: SshOptions) -> None:
        assert options.transport in ("auto", "paramiko", "openssh")
        self._options = options
        self._config = SshConfig(options.config)
        self._own = KnownHostsFile(str(settings.state_dir / OWN_FILE))
        self._known_files: dict[str, KnownHostsFile] = {}
        self._lock = threading.Lock()
        self._keys: KeyRing | None = None
        self._refused: dict[tuple[str, int, str], tuple[float, AuthenticationError]] = {}
        self._jumps: dict[str, _Jump] = {}
        self._reasons: dict[str, Text] = {}
        self._targets: dict[Host, SshTarget] = {}

    def connect(self, host: Host) -> Connection:
        target = self.resolve(host)
        login = target.address, target.port, target.user
        with self._lock:
            until, refusal = self._refused.get(login, (0.0, None))
        left_s = until - time.monotonic()
        if refusal is not None and left_s > 0:
            what = refusal.message
            raise AuthenticationError(
                Text("ssh.not-retried", "{error}; next attempt in {wait_s:.0f} s", error=what, wait_s=left_s),
                hint=refusal.hint,
            )
        try:
            if self.why_openssh(host) is not None:
                return self._connect_openssh(host)
            return self._connect_paramiko(host, target)
        except UnreachableError as error:
            with self._lock:  # the config may be fixed meanwhile
                self._config = SshConfig(self._options.config)
                self._targets.pop(host, None)
                self._reasons.pop(host.name, None)
                self._jumps = {text: jump for text, jump in self._jumps.items() if jump.is_up}
            if isinstance(error, AuthenticationError):
                self._key_ring().forget_failures()
                if not isinstance(error, NoKeyError):
                    with self._lock:
                        self._refused[login] = (time.monotonic() + AUTH_PAUSE_S, error)
            raise

    def why_openssh(self, host: Host) -> Text | None:
        """Return why this host is reached through the OpenSSH binary; None: it is reached through paramiko."""
        if self._options.transport == "openssh":
            return Text("ssh.openssh-set", "transport: openssh is set")
        if self._options.transport == "paramiko":
            return None
        with self._lock:
            if host.name in self._reasons:
                return self._reasons[host.name]
        target = self.resolve(host)
        reason = target.why_openssh or needs_openssh(target) or self._jump_reason(target)
        recorded = self.recorded(target)
        if reason is None and recorded.authorities and not recorded.keys:
            place = f"{recorded.authorities[0].file}:{recorded.authorities[0].line}"
            reason = Text("ssh.host-certificates", "host certificates ({place})", place=place)
        return reason

    def recorded(self, target: SshTarget) -> Recorded:
        """Return the recorded host keys of `target`."""
        with self._lock:
            others = [self._known_files.setdefault(path, KnownHostsFile(path)) for path in target.known_hosts_files]
            return find_recorded(known_names(target), own=self._own, others=others)

    def scan_host_key(self, host: Host) -> HostKey:
        """Return the host key that `host` presents, without a login attempt. Raises UnreachableError."""
        target = self.resolve(host)
        if self.why_openssh(host) is not None:
            from ascendrun.head.ssh.openssh import scan_host_key

            return scan_host_key(self._openssh_route(host))
        from ascendrun.head.ssh.paramiko_login import shown_key, start_transport

        transport, _ = start_transport(target, self._dial(target), deadlines=self._options.deadlines)
        try:
            return shown_key(transport)
        finally:
            transport.drop(CLOSED_HERE)

    def resolve(self, host: Host) -> SshTarget:
        """Return how `host` is reached, from the hostfile and the ssh config."""
        with self._lock:
            if host not in self._targets:
                self._targets[host] = self._config.resolve(host)
            return self._targets[host]

    def close(self) -> None:
        with self._lock:
            jumps, self._jumps = list(self._jumps.values()), {}
            keys, self._keys = self._keys, None
        for jump in jumps:
            jump.close()
        if keys is not None:
            keys.close()

    def _connect_paramiko(self, host: Host, target: SshTarget) -> Connection:
        from ascendrun.head.ssh.paramiko_login import NoCommonAlgorithmError

        obstacle = target.why_openssh or self._jump_reason(target)
        if obstacle is not None:  # only if paramiko is configured: it would connect elsewhere than the config specifies
            raise UnreachableError.of(
                "ssh.paramiko-unsupported",
                "{host} ({endpoint}): paramiko does not support a setting of the ssh configuration ({setting})",
                "set transport: auto or openssh",
                **target.names,
                setting=obstacle,
            )
        try:
            return self._make_connection(target)
        except NoCommonAlgorithmError as error:
            if self._options.transport != "auto":
                raise
            with self._lock:
                self._reasons[target.name] = Text(
                    "ssh.no-algorithm", "no algorithm in common ({error})", error=error.message
                )
            return self._connect_openssh(host)

    def _make_connection(self, target: SshTarget) -> ParamikoConnection:
        from ascendrun.head.ssh.paramiko_login import connect

        recorded = self.recorded(target)
        return connect(
            target,
            self._dial(target),
            deadlines=self._options.deadlines,
            key_types=algorithms_of(recorded),
            verify_key=lambda key, address: verify_key(key, recorded, host=target.name, endpoint=target.endpoint),
            identities=lambda: self._key_ring().identities(target),
        )

    def _connect_openssh(self, host: Host) -> Connection:
        from ascendrun.head.ssh.openssh import connect

        return connect(self._openssh_route(host))

    def terminal_argv(self, host: Host, argv: Sequence[str], *, has_terminal: bool) -> list[str]:
        """Return the command line of the user's own OpenSSH that runs `argv` on the host. Host keys are verified as for
        every other connection. Raises UnreachableError without an ssh command."""
        if shutil.which("ssh") is None:
            raise UnreachableError.of(
                "shell.no-ssh", "{host}: ssh not found on this machine", "install the OpenSSH client", host=host.name
            )
        words = " ".join(map(shlex.quote, argv))
        return [*self._openssh_route(host).terminal_argv(has_terminal=has_terminal), words]

    def _openssh_route(self, host: Host) -> OpensshRoute:
        """Only ascendrun's file is read if it has the host: a replaced key must not be accepted from another file."""
        from ascendrun.head.ssh.openssh import OpensshRoute

        target = self.resolve(host)
        recorded = self.recorded(target)
        settles = recorded.in_own_file and not recorded.revoked
        files = (self._own.path,) if settles else (self._own.path, *target.known_hosts_files)
        return OpensshRoute(host, target, self._options.deadlines, files, self._alias(target), self._options.config)

    def _alias(self, target: SshTarget) -> str | None:
        """Return the name of the host's record if it differs from the one that ssh would use, else None."""
        names = known_names(target)
        usual = known_name(target.key_alias or target.address, 22 if target.key_alias else target.port)
        for name in names:
            one = find_recorded(
                [name], own=self._own, others=[self._known_files[path] for path in target.known_hosts_files]
            )
            if one.keys or one.authorities:
                return None if name == usual else name
        return None

    def _dial(self, target: SshTarget) -> Callable[[], tuple[Any, str | None]]:
        if target.jump is None:
            from ascendrun.head.ssh.paramiko_login import dial

            return lambda: dial(target, self._options.deadlines.tcp_s)
        jump = self._jump(target.jump)
        return lambda: (jump.dial(target), None)

    def _jump(self, text: str) -> _Jump:
        target = self.resolve(parse_jump(text))
        with self._lock:
            return self._jumps.setdefault(text, _Jump(target, self._make_connection, self._options.deadlines))

    def _jump_reason(self, target: SshTarget) -> Text | None:
        if target.jump is None:
            return None
        jump = self.resolve(parse_jump(target.jump))
        if jump.jump is not None:
            where = f"{target.jump} -> {jump.jump}"
            return Text("ssh.several-jumps", "several jumps in a row ({where})", where=where)
        return jump.why_openssh or needs_openssh(jump)

    def _key_ring(self) -> KeyRing:
        with self._lock:
            if self._keys is None:
                from ascendrun.head.ssh.keys import KeyRing

                self._keys = KeyRing(self._options.prompt)
            return self._keys


class _Jump:
    """Jump host: a single login serves every host behind it."""

    def __init__(
        self, target: SshTarget, make: Callable[[SshTarget], ParamikoConnection], deadlines: Deadlines
    ) -> None:
        self._target, self._make, self._deadlines = target, make, deadlines
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(HANDSHAKES_PER_JUMP)
        self._connection: ParamikoConnection | None = None
        self._failure: UnreachableError | None = None
        self._failed_at = 0.0

    def dial(self, target: SshTarget) -> Any:
        """Open a channel to `target` through the jump host. Raises UnreachableError or a child, about either host."""
        deadlines = self._deadlines
        patience_s = deadlines.tcp_s + deadlines.banner_s + deadlines.kex_s + deadlines.auth_s
        if not self._slots.acquire(timeout=patience_s):
            raise UnreachableError.of(
                "ssh.jump-busy",
                "{host} ({endpoint}): jump host {jump} was busy for {limit_s:.0f} s",
                "check the load of the jump host",
                **target.names,
                jump=self._target.label,
                limit_s=patience_s,
            )
        try:
            return self._open(target)
        finally:
            self._slots.release()

    def _open(self, target: SshTarget) -> Any:
        from ascendrun.head.ssh.paramiko_import import paramiko

        transport = self._alive().transport
        try:
            return transport.open_channel(
                "direct-tcpip", (target.address, target.port), ("127.0.0.1", 0), timeout=self._deadlines.tcp_s
            )
        except (paramiko.SSHException, EOFError, OSError) as error:
            raise UnreachableError.of(
                "ssh.jump-failed",
                "{host} ({endpoint}): not reachable through jump host {jump} ({error})",
                "ssh -J {via} -p {port} {address}",
                **target.names,
                jump=self._target.label,
                via=f"{self._target.address}:{self._target.port}",
                error=str(error),
            ) from error

    def _alive(self) -> ParamikoConnection:
        requested_at = time.monotonic()
        with self._lock:
            if self._connection is not None and self.is_up:
                return self._connection
            if self._failure is not None and self._failed_at > requested_at:
                failed = self._failure  # it failed while waiting
                raise type(failed)(failed.message, hint=failed.hint, host=failed.host)
            try:
                self._connection = self._make(self._target)
            except UnreachableError as error:
                self._failure, self._failed_at = error, time.monotonic()
                raise
            return self._connection

    @property
    def is_up(self) -> bool:
        connection = self._connection
        return connection is not None and connection.transport.active

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()


def known_names(target: SshTarget) -> list[str]:
    """Return the names that a host may be recorded under; new keys are recorded under the first."""
    if target.key_alias:
        return [target.key_alias.lower()]
    names = [known_name(target.address, target.port), known_name(target.name, target.port)]
    return list(dict.fromkeys(names))


def algorithms_of(recorded: Recorded) -> Sequence[str]:
    """Return the host key algorithms for the recorded keys; RSA keys can sign with two of them."""
    found: list[str] = []
    for entry in recorded.keys:
        found += ["rsa-sha2-512", "rsa-sha2-256"] if entry.key.type == "ssh-rsa" else [entry.key.type]
    return found


@dataclass(frozen=True)
class HostKeyScan:
    """Host key of one host. `key` None: `error` has the reason. `state`: new, known, CHANGED or unreachable.
    `known_name`: the name under which the key is recorded."""

    host: Host
    known_name: str
    key: HostKey | None
    state: str
    error: AscendrunError | None


def scan_host_keys(settings: Settings, hosts: Sequence[Host]) -> Iterator[HostKeyScan]:
    """Yield one scan for each host, in order of arrival."""
    with closing(Backends(settings)) as backends, ThreadPoolExecutor(max_workers=SCANS_AT_ONCE) as pool:
        backend = backends.ssh()
        for done in as_completed([pool.submit(_scan, backend, host) for host in hosts]):
            yield done.result()


def _scan(backend: SshBackend, host: Host) -> HostKeyScan:
    target = backend.resolve(host)
    name = known_names(target)[0]
    try:
        key = backend.scan_host_key(host)
    except AscendrunError as error:
        return HostKeyScan(host, name, None, "unreachable", error)
    recorded = [entry.key for entry in backend.recorded(target).keys]
    return HostKeyScan(host, name, key, "new" if not recorded else "known" if key in recorded else "CHANGED", None)


def record_scans(settings: Settings, scans: Iterable[HostKeyScan], *, replaces: bool) -> None:
    """Record the keys of these scans; with `replaces`, replace other recorded keys."""
    keys = [(scan.known_name, scan.key) for scan in scans if scan.key is not None]
    record_host_keys(settings.state_dir / OWN_FILE, keys, replace=replaces)
