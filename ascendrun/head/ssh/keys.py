"""Private keys for logins: found once, decrypted once, shared by all hosts; prompts only through the given function."""

from __future__ import annotations

import os
import socket
import threading
from typing import Any, Callable, Optional

from ascendrun.core.dataclass import dataclass
from ascendrun.head.ssh.config import SshTarget, default_key_files, public_blob
from ascendrun.head.ssh.paramiko_import import paramiko
from ascendrun.text import Text

PassphrasePrompt = Callable[[str], Optional[str]]
"""Prompts for a passphrase; returns None if there is none. Must not block if no prompt is possible."""

AGENT_S = 15.0
"""Seconds that the key agent may take for one reply (it may require its owner to touch a key)."""

MAX_TRIES = 5
"""Keys offered to one host; sshd disconnects after its sixth rejection (MaxAuthTries)."""


@dataclass(frozen=True)
class Identity:
    """A key that can sign, and its name in messages."""

    key: Any
    label: str


@dataclass(frozen=True)
class Unusable:
    """A key file that cannot be used, and a hint."""

    fact: Text
    hint: Text | str


class _LockedAgent(paramiko.Agent):
    """The key agent on one socket; 32 handshakes sign through it in turn, none longer than AGENT_S. Raises OSError."""

    def __init__(self, path: str | None) -> None:
        self._turn = threading.Lock()
        paramiko.agent.AgentSSH.__init__(self)
        where = path or os.environ.get("SSH_AUTH_SOCK")
        if where:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.settimeout(AGENT_S)
            try:
                connection.connect(where)
            except OSError:
                connection.close()
                raise
            self._connect(connection)  # type: ignore[attr-defined]  # paramiko's own, not in its stubs

    def _send_message(self, msg: Any) -> Any:
        with self._turn:
            return super()._send_message(msg)  # type: ignore[misc]  # likewise


class KeyRing:
    """All keys of one head node. Thread-safe; a file is read once, a passphrase is requested once."""

    def __init__(self, prompt: PassphrasePrompt | None = None) -> None:
        self._prompt = prompt
        self._lock = threading.Lock()
        self._files: dict[str, Identity | Unusable] = {}
        self._agents: dict[str | None, tuple[_LockedAgent | None, tuple[Identity, ...]]] = {}

    def identities(self, target: SshTarget) -> tuple[tuple[Identity, ...], tuple[Unusable, ...]]:
        """Return keys to offer in this order, at most MAX_TRIES, and the key files that could not be used.

        The agent's copy of a configured key comes first, so that its passphrase is not requested; then files, then the
        agent's other keys, unless the config sets IdentitiesOnly.
        """
        with self._lock:
            agent = self._agent_keys(target.identity_agent)
            by_blob = {identity.key.asbytes(): identity for identity in agent}
            chosen: list[Identity] = []
            unusable: list[Unusable] = []
            for path in target.identity_files or default_key_files():
                public = public_blob(path)
                held = by_blob.pop(public, None) if public else None
                found = held or self._load(path, is_expected=bool(target.identity_files))
                if isinstance(found, Identity):
                    chosen.append(found)
                elif found is not None:
                    unusable.append(found)
        if not (target.identities_only and target.identity_files):
            chosen += by_blob.values()
        return tuple(chosen[:MAX_TRIES]), tuple(unusable)

    def forget_failures(self) -> None:
        """Read the agent and unusable files again at the next login, after a failed login; they may be fixed."""
        with self._lock:
            self._agents.clear()  # not closed: another host's login may be using one
            self._files = {path: found for path, found in self._files.items() if isinstance(found, Identity)}

    def close(self) -> None:
        """Close the agent's sockets."""
        with self._lock:
            for agent, _ in self._agents.values():
                if agent is not None:
                    agent.close()
            self._agents.clear()

    def _agent_keys(self, path: str | None) -> tuple[Identity, ...]:
        if path == "none":
            return ()
        if path not in self._agents:
            agent: _LockedAgent | None = None
            keys: tuple[Identity, ...] = ()
            try:
                agent = _LockedAgent(path)
                keys = tuple(
                    Identity(key, f"{key.comment or key.get_name()} (agent)")
                    for key in agent.get_keys()
                    if not key.get_name().startswith("sk-")
                )
            except (paramiko.SSHException, OSError):
                pass  # an agent that does not reply counts as missing; this is reported when the login fails
            self._agents[path] = (agent, keys)
        return self._agents[path][1]

    def _load(self, path: str, *, is_expected: bool) -> Identity | Unusable | None:
        if path not in self._files:
            self._files[path] = load_key(path, self._prompt)
        found = self._files[path]
        is_missing = isinstance(found, Unusable) and not os.path.exists(path)
        return None if is_missing and not is_expected else found


def load_key(path: str, prompt: PassphrasePrompt | None) -> Identity | Unusable:
    """Return an Identity, or an Unusable with the reason. Prompts for a passphrase once, never without `prompt`."""
    try:
        status = os.stat(path)
        if status.st_uid == os.getuid() and status.st_mode & 0o077:
            return Unusable(
                Text("ssh.key-readable", "{path}: readable by other users, not used", path=str(path)),
                f"chmod 600 {path}",
            )
        try:
            return Identity(paramiko.PKey.from_path(path), path)
        except (paramiko.PasswordRequiredException, TypeError):
            pass  # encrypted: cryptography raises TypeError, paramiko its own exception
        phrase = prompt(f"Passphrase for {path}: ") if prompt else None
        if not phrase:
            return Unusable(
                Text("ssh.key-encrypted", "{path}: encrypted, passphrase unknown", path=str(path)), f"ssh-add {path}"
            )
        password: Any = phrase.encode()  # as paramiko needs it, unlike its stubs
        return Identity(paramiko.PKey.from_path(path, password), path)
    except OSError as error:
        return Unusable(
            Text("ssh.config-unreadable", "{file}: {error}", file=path, error=(error.strerror or str(error)).lower()),
            Text("ssh.key-missing.hint", "check IdentityFile in ~/.ssh/config"),
        )
    except Exception as error:  # paramiko and cryptography raise a dozen kinds: other formats, wrong passphrases
        why = str(error) or type(error).__name__
        return Unusable(
            Text("ssh.key-invalid", "{path}: not usable ({error})", path=path, error=why), f"ssh-keygen -yf {path}"
        )
