"""Host keys: reads known_hosts files, verifies a presented key, records new keys in ascendrun's file."""

from __future__ import annotations

import base64
import binascii
import fcntl
import hashlib
import hmac
import os
from collections.abc import Collection, Sequence
from pathlib import Path

from ascendrun.core.dataclass import dataclass
from ascendrun.core.errors import HostKeyChangedError, HostKeyUnknownError, UnreachableError
from ascendrun.head.ssh.config import patterns_match
from ascendrun.node.files import replace_file
from ascendrun.text import Text

OWN_FILE = "known_hosts"
DEFAULT_PORT = 22
_MARKERS = {"@revoked": "revoked", "@cert-authority": "authority"}


@dataclass(frozen=True)
class HostKey:
    """A public host key: its SSH type ("ssh-ed25519") and the key itself in base64."""

    type: str
    base64: str

    @property
    def fingerprint(self) -> str:
        """Return "SHA256:…" as `ssh-keygen -lf` prints it."""
        digest = hashlib.sha256(base64.b64decode(self.base64)).digest()
        return "SHA256:" + base64.b64encode(digest).decode("ascii").rstrip("=")

    @property
    def short_type(self) -> str:
        """Return the common name of the type: "ED25519", "RSA", "ECDSA"."""
        return self.type.replace("ssh-", "").split("-")[0].upper()

    def __str__(self) -> str:
        return f"{self.short_type} {self.fingerprint}"


@dataclass(frozen=True)
class KnownKey:
    """One line of a known_hosts file. `marker`: "", "revoked" or "authority". `names` as written, hashed or plain."""

    marker: str
    names: str
    key: HostKey
    file: str
    line: int


@dataclass(frozen=True)
class Recorded:
    """Recorded keys of one host. `keys` come from ascendrun's own file if it names the host, else from the rest.

    `in_own_file`: whether ascendrun's own file decided it.
    """

    keys: tuple[KnownKey, ...] = ()
    revoked: tuple[KnownKey, ...] = ()
    authorities: tuple[KnownKey, ...] = ()
    in_own_file: bool = False


def known_name(host: str, port: int) -> str:
    """Return the host as known_hosts spells it: "name", or "[name]:port" for a port other than 22."""
    return host.lower() if port == DEFAULT_PORT else f"[{host.lower()}]:{port}"


def parse_known_hosts(text: str, file: str) -> tuple[KnownKey, ...]:
    """Return every readable line; skip lines that no current tool could use (comments, SSH-1 keys, bad base64)."""
    parsed = (_parse_line(line, file, number) for number, line in enumerate(text.splitlines(), 1))
    return tuple(entry for entry in parsed if entry is not None)


def _parse_line(line: str, file: str, number: int) -> KnownKey | None:
    fields = line.split()
    marker = ""
    if fields and fields[0].startswith("@"):
        marker = _MARKERS.get(fields.pop(0), "unknown")
    if len(fields) < 3 or fields[0].startswith("#") or marker == "unknown":
        return None
    try:
        blob = base64.b64decode(fields[2], validate=True)
    except (binascii.Error, ValueError):
        return None
    if not blob[4:].startswith(fields[1].encode("utf-8", "replace")):
        return None  # the type written next to the key is not the key's own
    return KnownKey(marker=marker, names=fields[0], key=HostKey(fields[1], fields[2]), file=file, line=number)


class KnownHostsFile:
    """One known_hosts file, indexed by name, read again only if it has changed on disk."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._stamp: tuple[int, int, int] | None = None
        self._exact: dict[str, list[KnownKey]] = {}
        self._other: list[KnownKey] = []
        self._found: dict[str, tuple[KnownKey, ...]] = {}

    def find(self, name: str) -> tuple[KnownKey, ...]:
        """Return the lines that match `name` (spelt by `known_name`); empty also if there is no such file."""
        self._refresh()
        if name not in self._found:
            others = [entry for entry in self._other if names_match(entry.names, name)]
            self._found[name] = tuple(self._exact.get(name, []) + others)
        return self._found[name]

    def _refresh(self) -> None:
        try:
            stat = os.stat(self.path)
        except OSError:
            self._stamp, self._exact, self._other, self._found = None, {}, [], {}
            return
        stamp = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        if stamp == self._stamp:
            return
        try:
            text = Path(self.path).read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise UnreachableError.of(
                "ssh.known-hosts-unreadable",
                "{path}: not readable ({error}); host keys cannot be verified",
                "fix its permissions: ls -l {path}",
                path=self.path,
                error=error.strerror,
            ) from error
        exact: dict[str, list[KnownKey]] = {}
        other: list[KnownKey] = []
        for entry in parse_known_hosts(text, self.path):
            if entry.names.startswith("|") or any(sign in entry.names for sign in "*?!"):
                other.append(entry)
                continue
            for name in entry.names.lower().split(","):
                exact.setdefault(name, []).append(entry)
        self._exact, self._other, self._found, self._stamp = exact, other, {}, stamp


def names_match(names: str, name: str) -> bool:
    """Return whether the first field of a known_hosts line (hashed, patterns, negations) matches `name`."""
    if not names.startswith("|1|"):
        return patterns_match(names.split(","), name)
    try:
        salt, wanted = (base64.b64decode(part) for part in names[3:].split("|"))
    except ValueError:
        return False
    return hmac.compare_digest(hmac.digest(salt, name.encode("utf-8", "replace"), "sha1"), wanted)


def find_recorded(names: Sequence[str], *, own: KnownHostsFile, others: Sequence[KnownHostsFile]) -> Recorded:
    """Return the records under any of `names`. A revocation in any file counts; else ascendrun's file decides."""
    in_own = tuple(dict.fromkeys(entry for name in names for entry in own.find(name)))
    in_others = tuple(dict.fromkeys(entry for file in others for name in names for entry in file.find(name)))
    own_keys = tuple(entry for entry in in_own if not entry.marker)
    return Recorded(
        keys=own_keys or tuple(entry for entry in in_others if not entry.marker),
        revoked=tuple(entry for entry in in_own + in_others if entry.marker == "revoked"),
        authorities=tuple(entry for entry in in_own + in_others if entry.marker == "authority"),
        in_own_file=bool(own_keys),
    )


def verify_key(shown: HostKey, recorded: Recorded, *, host: str, endpoint: str) -> None:
    """Return if `shown` is the recorded key; else raise HostKeyUnknownError or HostKeyChangedError with a hint.

    `endpoint`: the address and port of the host, for messages.
    """
    for entry in recorded.revoked:
        if entry.key == shown:
            raise HostKeyChangedError.of(
                "ssh.host-key-revoked",
                "{host} ({endpoint}): host key {key} is revoked ({file}:{line}); not connected",
                "generate new host keys on the host: ssh-keygen -A",
                host=host,
                endpoint=endpoint,
                key=str(shown),
                file=entry.file,
                line=entry.line,
            )
    if any(entry.key == shown for entry in recorded.keys):
        return
    if recorded.keys:
        alike = [entry for entry in recorded.keys if entry.key.type == shown.type] or recorded.keys
        raise HostKeyChangedError.of(
            "ssh.host-key-changed",
            "{host} ({endpoint}): host key {key} differs from the recorded key {recorded}; not connected",
            "if the host was reinstalled, compare with ssh-keygen -lf /etc/ssh/ssh_host_{type}_key.pub on "
            "its console, then run: ascendrun trust --replace {host}",
            host=host,
            endpoint=endpoint,
            key=str(shown),
            recorded=[f"{entry.key} ({entry.file}:{entry.line})" for entry in alike],
            type=shown.short_type.lower(),
        )
    names = {"host": host, "endpoint": endpoint}
    english = "{host} ({endpoint}): unknown host key {key}; not connected"
    what = Text("ssh.host-key-unknown", english, **names, key=str(shown))
    for entry in recorded.authorities[:1]:
        what = Text(
            "ssh.host-certificate",
            "{host} ({endpoint}): host keys of this name are signed by a certificate authority ({file}:{line}); not "
            "supported by this transport",
            **names,
            file=entry.file,
            line=entry.line,
        )
    raise HostKeyUnknownError(what, hint=Text("ssh.trust", "ascendrun trust {host}", host=host), host=host)


def record_host_keys(file: Path, entries: Sequence[tuple[str, HostKey]], *, replace: bool = False) -> int:
    """Add (known name, key) pairs to ascendrun's known_hosts file; return how many lines were new.

    With `replace`, other keys of the same names are removed. Writers take turns; readers see the old or the new file.
    """
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(file.with_name(file.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
        kept = _without(text, {name for name, _ in entries}) if replace else text
        present = {(entry.names, entry.key) for entry in parse_known_hosts(kept, str(file))}
        new = [(name, key) for name, key in dict.fromkeys(entries) if (name, key) not in present]
        if new or kept != text:
            start = kept if not kept or kept.endswith("\n") else kept + "\n"
            text = start + "".join(f"{name} {key.type} {key.base64}\n" for name, key in new)
            replace_file(str(file), text.encode())
    finally:
        os.close(lock)
    return len(new)


def _without(text: str, names: Collection[str]) -> str:
    """Return the text without the keys of these names; lines with a marker stay."""
    lines = [(line, _parse_line(line, "", 0)) for line in text.splitlines(keepends=True)]
    return "".join(line for line, entry in lines if entry is None or entry.marker or entry.names not in names)
