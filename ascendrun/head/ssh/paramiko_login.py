"""Connect through paramiko, in phases: TCP, banner, key exchange, host key, login, each with its own deadline.

TCP: every address is tried, every wait is limited, dead peers are detected.
"""

from __future__ import annotations

import itertools
import random
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Callable, Optional

from ascendrun.core.errors import AuthenticationError, UnreachableError
from ascendrun.head.ssh.config import SshTarget
from ascendrun.head.ssh.host_keys import HostKey
from ascendrun.head.ssh.hub import IDLE_POLL_S
from ascendrun.head.ssh.keys import Identity, Unusable
from ascendrun.head.ssh.paramiko_import import PartialAuthentication, paramiko
from ascendrun.head.ssh.paramiko_packets import QuickAckSocket
from ascendrun.head.ssh.paramiko_transport import ParamikoConnection, SshTransport
from ascendrun.head.ssh.transport import CLOSED_HERE, Deadlines, NoKeyError
from ascendrun.text import Text

RESOLVE_S = 5.0
"""Seconds that the name service may take."""

USER_TIMEOUT_MS = 8_000
"""Milliseconds unacknowledged after which the kernel ends the connection; paramiko never notices a dead peer."""

KEEPALIVE_S = 3
"""The kernel probes an idle peer at this interval; no user time on either side, unlike SSH's own keepalive."""

Address = tuple[socket.AddressFamily, tuple[Any, ...]]

Dial = Callable[[], tuple[Any, Optional[str]]]
"""Makes the byte stream that SSH runs on: a socket, or a channel through a jump host; with the address, if known."""

_SOCKET_OPTIONS = (
    (socket.IPPROTO_TCP, "TCP_NODELAY", 1),
    (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
    (socket.IPPROTO_TCP, "TCP_KEEPIDLE", KEEPALIVE_S),
    (socket.IPPROTO_TCP, "TCP_KEEPINTVL", KEEPALIVE_S),
    (socket.IPPROTO_TCP, "TCP_KEEPCNT", 3),
    (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", USER_TIMEOUT_MS),
)
_RTO_MAX_MS = (44, 1000)
"""TCP_RTO_MAX_MS of linux/tcp.h, since Linux 6.15, and its least value. The kernel sends again what has no
acknowledgement after a time that doubles: after a cut of 4 s, up to 3 s after the cable is back."""
_RETRY_S = (0.1, 0.6)
_KEX = (
    "ecdh-sha2-nistp256",
    "curve25519-sha256@libssh.org",
    "mlkem768x25519-sha256",
    "ecdh-sha2-nistp384",
    "ecdh-sha2-nistp521",
    "diffie-hellman-group14-sha256",
    "diffie-hellman-group16-sha512",
    "diffie-hellman-group-exchange-sha256",
)
_CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes128-ctr", "aes192-ctr", "aes256-ctr")
_MACS = (
    "hmac-sha2-256-etm@openssh.com",
    "hmac-sha2-512-etm@openssh.com",
    "hmac-sha2-256",
    "hmac-sha2-512",
    "hmac-sha1",
)
_KEY_TYPES = (
    "ssh-ed25519",
    "ecdsa-sha2-nistp256",
    "ecdsa-sha2-nistp384",
    "ecdsa-sha2-nistp521",
    "rsa-sha2-512",
    "rsa-sha2-256",
)


class NoCommonAlgorithmError(UnreachableError):
    """The host and paramiko share no algorithm of some kind; the OpenSSH binary may support older ones."""


class _DroppedError(Exception):
    """sshd disconnected before its banner: usually too many logins at the same time (MaxStartups); try again."""


def connect(
    target: SshTarget, dial: Dial, *, deadlines: Deadlines, key_types: Sequence[str], verify_key: Any, identities: Any
) -> ParamikoConnection:
    """Return an authenticated connection. `judge(HostKey, address)` raises to reject the host before any login attempt;
    `identities()` returns (keys, unusable key files) and is called only after that.

    Raises UnreachableError or one of its children, naming the phase and the host, with a hint.
    """
    transport, address = start_transport(target, dial, deadlines=deadlines, key_types=key_types)
    try:
        verify_key(shown_key(transport), address)
        keys, unusable = identities()
        _log_in(transport, target, keys, unusable, deadlines.auth_s)
        transport.sock.settimeout(IDLE_POLL_S)
        return ParamikoConnection(transport, target, address)
    except BaseException:
        transport.drop(CLOSED_HERE)
        raise


def shown_key(transport: SshTransport) -> HostKey:
    key = transport.host_key
    assert key is not None
    return HostKey(key.get_name(), key.get_base64())


def start_transport(
    target: SshTarget, dial: Dial, *, deadlines: Deadlines, key_types: Sequence[str] = ()
) -> tuple[SshTransport, str | None]:
    """Do TCP, banner and key exchange without login. Retry with jitter if sshd disconnects before its banner."""
    until = time.monotonic() + deadlines.tcp_s + deadlines.banner_s
    for tries in itertools.count(1):
        try:
            return _start_once(target, dial, deadlines, key_types, until)
        except _DroppedError as dropped:
            pause_s = random.uniform(*_RETRY_S)
            if time.monotonic() + pause_s > until:
                raise UnreachableError.of(
                    "ssh.closed-before-banner",
                    "{host} ({endpoint}): connection closed before the SSH banner "
                    "({tries:plural attempt attempts}: {error})",
                    "check MaxStartups in sshd_config and the log on {host}: journalctl -u sshd",
                    **target.names,
                    tries=tries,
                    error=str(dropped),
                ) from dropped
            time.sleep(pause_s)
    raise AssertionError("unreachable")


def _start_once(
    target: SshTarget, dial: Dial, deadlines: Deadlines, key_types: Sequence[str], until: float
) -> tuple[SshTransport, str | None]:
    sock, address = dial()
    transport = SshTransport(sock)
    try:
        _choose_algorithms(transport, target, key_types)
        transport.start_client(event=transport.ready_event)
        _await_banner(transport, target, max(0.1, min(deadlines.banner_s, until - time.monotonic())))
        _await_kex(transport, target, deadlines.kex_s)
        return transport, address
    except BaseException:
        transport.drop(CLOSED_HERE)
        raise


def _choose_algorithms(transport: SshTransport, target: SshTarget, key_types: Sequence[str]) -> None:
    known = [name for name in key_types if name in _KEY_TYPES]
    options = transport.get_security_options()
    config = target.algorithms
    available = set(options.kex)
    options.kex = narrowed([name for name in _KEX if name in available], config.get("kexalgorithms"))
    options.ciphers = narrowed(_CIPHERS, config.get("ciphers"))
    options.digests = narrowed(_MACS, config.get("macs"))
    # recorded types first; then the others, so that a host with new keys differs from a broken host
    options.key_types = tuple(dict.fromkeys([*known, *_KEY_TYPES]))


def narrowed(ours: Sequence[str], requested: str | None) -> tuple[str, ...]:
    """Return the algorithms of `ours` that the config does not exclude; "+more" and "^first" exclude nothing. If none
    would remain, return all: then the host decides."""
    if not requested or requested[0] in "+^":
        return tuple(ours)
    names = {name.strip() for name in requested.lstrip("-").split(",")}
    names |= {name + "@libssh.org" for name in names if name == "curve25519-sha256"}
    keep = tuple(name for name in ours if (name in names) != requested.startswith("-"))
    return keep or tuple(ours)


def _await_banner(transport: SshTransport, target: SshTarget, banner_s: float) -> None:
    if not transport.banner_event.wait(banner_s):
        raise UnreachableError.of(
            "ssh.no-banner",
            "{host} ({endpoint}): connected, but no SSH banner within {limit_s:.3g} s",
            "check the load of the host and which service uses the port: ssh -v {host}",
            **target.names,
            limit_s=banner_s,
        )
    if transport.has_banner:
        return
    received = " ".join(line.strip() for line in transport.packetizer.preamble if line.strip())
    if "Not allowed at this time" in received:
        raise UnreachableError.of(
            "ssh.penalty",
            "{host} ({endpoint}): sshd is rejecting this address after failed logins (PerSourcePenalties)",
            "wait for the penalty to expire, or set PerSourcePenaltyExemptList in sshd_config on {host}",
            **target.names,
        )
    error = transport.saved_exception
    is_other = isinstance(error, paramiko.SSHException) and "Error reading" not in str(error)
    if is_other or (received and "MaxStartups" not in received):
        raise UnreachableError.of(
            "ssh.not-ssh",
            '{host}: the service on this port is not an SSH server (received "{received}")',
            "set port= in the hostfile or Port in ~/.ssh/config",
            **target.names,
            received=received[:80],
        )
    raise _DroppedError(received[:80] or "EOF")


def _await_kex(transport: SshTransport, target: SshTarget, kex_s: float) -> None:
    if not transport.ready_event.wait(kex_s):
        raise UnreachableError.of(
            "ssh.no-key-exchange",
            "{host} ({endpoint}): no key exchange within {limit_s:g} s of the banner",
            "check the load of the host, and the MTU of the network: large packets may be lost",
            **target.names,
            limit_s=kex_s,
        )
    if transport.active and transport.initial_kex_done:
        return
    error = transport.saved_exception
    if isinstance(error, paramiko.ssh_exception.IncompatiblePeer):
        raise NoCommonAlgorithmError.of(
            "ssh.no-common-algorithm",
            "{host} ({endpoint}): {error}",
            "use the OpenSSH transport for this host: transport: openssh",
            **target.names,
            error=str(error),
        )
    if error is None or isinstance(error, (EOFError, OSError)):
        raise _DroppedError("EOF during the key exchange")
    english = "{host} ({endpoint}): key exchange failed ({error})"
    raise UnreachableError(
        Text("ssh.key-exchange-failed", english, **target.names, error=str(error)),
        hint=Text("ssh.sshd-log", "check the log of sshd on the host: journalctl -u sshd"),
        host=target.name,
    )


def _log_in(
    transport: SshTransport, target: SshTarget, keys: Sequence[Identity], unusable: Sequence[Unusable], auth_s: float
) -> None:
    until = time.monotonic() + auth_s
    for identity in keys:
        replied = threading.Event()
        try:
            transport.auth_publickey(target.user, identity.key, event=replied)
        except (paramiko.SSHException, EOFError, OSError):
            replied.set()
        while not replied.wait(min(0.5, max(until - time.monotonic(), 0.001))):
            if time.monotonic() >= until:
                raise UnreachableError.of(
                    "ssh.login-timeout",
                    "{host} ({endpoint}): no reply to the login within {limit_s:g} s",
                    "name lookups or PAM on the host may hang; run: ssh -v {host}",
                    **target.names,
                    limit_s=auth_s,
                )
            if not transport.active:
                break
        if transport.is_authenticated():
            return
        _stop_when_hopeless(transport, target)
    raise _auth_failed(target, keys, unusable)


def _stop_when_hopeless(transport: SshTransport, target: SshTarget) -> None:
    error = transport.saved_exception
    if isinstance(error, PartialAuthentication):
        raise AuthenticationError.of(
            "ssh.second-method",
            "{host} ({endpoint}): user {user} requires a second authentication method ({methods})",
            "allow key-only login for {user}; ascendrun cannot enter passwords or codes",
            **target.names,
            methods=list(error.allowed_types),
        )
    if isinstance(error, paramiko.BadAuthenticationType):
        raise AuthenticationError.of(
            "ssh.keys-not-accepted",
            "{host} ({endpoint}): sshd does not accept keys for user {user} (only {methods})",
            "check PubkeyAuthentication and AllowUsers in sshd_config on the host",
            **target.names,
            methods=list(error.allowed_types),
        )
    if not transport.active:
        raise AuthenticationError.of(
            "ssh.closed-at-login",
            "{host} ({endpoint}): connection closed during the login of user {user} ({error})",
            "set IdentityFile and IdentitiesOnly if many keys are offered; see the log: journalctl -u sshd",
            **target.names,
            error="EOF" if error is None or isinstance(error, EOFError) else str(error),
        )


def _auth_failed(target: SshTarget, keys: Sequence[Identity], unusable: Sequence[Unusable]) -> AuthenticationError:
    facts = [bad.fact for bad in unusable]
    if keys:
        return AuthenticationError.of(
            "ssh.login-rejected",
            "{host} ({endpoint}): sshd rejected user {user} with {keys}",
            "check the user name; allow a key: ssh-copy-id -p {port} {user}@{address}",
            **target.names,
            keys=[*(identity.label for identity in keys), *facts],
        )
    if unusable:
        what = Text("ssh.no-usable-key", "{host} ({endpoint}): no usable key: {keys}", **target.names, keys=facts)
        return NoKeyError(what, hint=unusable[0].hint, host=target.name)
    return NoKeyError.of(
        "ssh.no-key",
        "{host} ({endpoint}): no key for the login (no ssh-agent, no key file)",
        "run ssh-keygen, then ssh-copy-id; or set IdentityFile in ~/.ssh/config",
        **target.names,
    )


def dial(target: SshTarget, tcp_s: float) -> tuple[QuickAckSocket, str]:
    """Return a connected socket and the numeric address it reached, after trying every address within `tcp_s` in total.

    Raises UnreachableError: no such name, or the error of each address.
    """
    addresses = resolve(target)
    until = time.monotonic() + tcp_s
    failures: list[tuple[str, OSError, float]] = []
    for position, address in enumerate(addresses):
        left_s = until - time.monotonic()
        share_s = left_s / (len(addresses) - position)
        if share_s <= 0:
            break
        try:
            return QuickAckSocket(_connect_to(address, share_s)), str(address[1][0])
        except OSError as error:
            failures.append((str(address[1][0]), error, share_s))
    raise UnreachableError.of(
        "ssh.no-connection",
        "{host} ({endpoint}): no TCP connection to port {port} ({errors})",
        "check the host, sshd and firewalls: ssh -p {port} {address}",
        **target.names,
        errors=[_failure(*failure) for failure in failures],
        why_lost="refused" if any(isinstance(error, ConnectionRefusedError) for _, error, _ in failures) else None,
    )


def resolve(target: SshTarget) -> list[Address]:
    """Return every TCP address of a host, in the resolver's order. Raises UnreachableError after at most RESOLVE_S."""

    def look_up(flags: int) -> list[Address]:
        found = socket.getaddrinfo(target.address, target.port, target.family, socket.SOCK_STREAM, 0, flags)
        return [(entry[0], entry[4]) for entry in found]

    try:
        return look_up(socket.AI_NUMERICHOST)
    except socket.gaierror:
        pass  # a name, not a number: it may take long, so a helper thread resolves it
    result: list[Any] = []

    def look_up_name() -> None:
        try:
            result.append(look_up(0))
        except (OSError, UnicodeError) as error:
            result.append(error)

    helper = threading.Thread(target=look_up_name, daemon=True)
    helper.start()
    helper.join(RESOLVE_S)
    found = result[0] if result else None
    names: dict[str, Any] = target.names
    if isinstance(found, list):
        return found
    if found is None:
        error = Text(
            "ssh.resolve-timeout",
            "{host} ({endpoint}): name {address} was not resolved within {limit_s:.0f} s",
            **names,
            limit_s=RESOLVE_S,
        )
    elif isinstance(found, OSError):
        error = Text(
            "ssh.no-address",
            "{host} ({endpoint}): name {address} has no address ({error})",
            **names,
            error=found.strerror,
        )
    else:
        error = Text("ssh.invalid-name", "{host} ({endpoint}): invalid host name {address:quote}", **names)
    hint = Text(
        "ssh.no-address.hint", "check /etc/hosts and DNS: getent hosts {address}; or set addr= in the hostfile", **names
    )
    raise UnreachableError(error, hint=hint, host=target.name) from found


def _connect_to(address: Address, timeout_s: float) -> socket.socket:
    sock = socket.socket(address[0], socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        for level, name, value in _SOCKET_OPTIONS:
            option: int | None = getattr(socket, name, None)
            if option is not None:
                sock.setsockopt(level, option, value)
        if sys.platform == "linux":
            with suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, *_RTO_MAX_MS)
        sock.connect(address[1])
    except BaseException:
        sock.close()
        raise
    return sock


def _failure(address: str, error: OSError, waited_s: float) -> Text:
    if isinstance(error, socket.timeout):
        return Text("ssh.no-reply", "{address}: no reply within {limit_s:.1f} s", address=address, limit_s=waited_s)
    why = (error.strerror or str(error)).lower()
    return Text("ssh.connect-failed", "{address}: {error}", address=address, error=why)
