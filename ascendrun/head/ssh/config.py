"""The settings of ~/.ssh/config for a host, parsed here, since `ssh -G` costs a process for each host."""

from __future__ import annotations

import base64
import binascii
import fnmatch
import getpass
import glob
import os
import re
import socket
import stat
import threading
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from ascendrun.core.dataclass import dataclass
from ascendrun.core.hosts import Host
from ascendrun.text import Text, TextError

SYSTEM_CONFIG = "/etc/ssh/ssh_config"
MAX_INCLUDE_DEPTH = 16
DEFAULT_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")
_PROXIES = ("proxyjump", "proxycommand")
_TAKES_REST_OF_LINE = {"proxycommand", "localcommand", "remotecommand", "knownhostscommand"}


@dataclass(frozen=True)
class SshTarget:
    """SSH settings of one host. `name`: the hostfile's; `address`: to connect to.

    `identity_files`: configured files, () if none are (then ssh's defaults). `identity_agent`: a socket path, "none",
    or None for $SSH_AUTH_SOCK. `jump`: "[user@]host[:port]" of the one jump host, None: none. `key_alias`:
    HostKeyAlias, None: the address. `algorithms`: the config's own lists by lower-case keyword. `why_openssh`: the
    settings that paramiko does not support, None: it supports all.
    """

    name: str
    address: str
    port: int
    user: str
    identity_files: tuple[str, ...] = ()
    identities_only: bool = False
    identity_agent: str | None = None
    jump: str | None = None
    key_alias: str | None = None
    known_hosts_files: tuple[str, ...] = ()
    family: int = socket.AF_UNSPEC
    algorithms: Mapping[str, str] = field(default_factory=dict)
    why_openssh: Text | None = None

    @property
    def endpoint(self) -> str:
        """Return address and port for messages, such as "10.0.0.3:22"."""
        address = f"[{self.address}]" if ":" in self.address else self.address
        return f"{address}:{self.port}"

    @property
    def label(self) -> str:
        """Return the name for messages about another host, such as "npu01 (10.0.0.3:22)"."""
        return f"{self.name} ({self.endpoint})"

    @property
    def names(self) -> dict[str, Any]:
        """Return the values that messages about the host have."""
        address = {"endpoint": self.endpoint, "address": self.address, "port": self.port}
        return {"host": self.name, "user": self.user, **address}


class ConfigError(TextError):
    """A config file that ssh would reject."""


@dataclass(frozen=True)
class _Line:
    keyword: str
    arguments: tuple[str, ...]
    place: str


@dataclass
class _Settings:
    """Settings found so far for one host; the first value of a keyword takes precedence."""

    original: str
    values: dict[str, _Line]
    identity_files: list[str] = field(default_factory=list)
    is_final: bool = False
    needs_final: bool = False
    obstacle: Text | None = None

    def first(self, keyword: str) -> str | None:
        found = self.values.get(keyword)
        return found.arguments[0] if found else None

    def setting(self, keyword: str) -> Text:
        """Return the text for a setting that paramiko does not support."""
        return _setting(keyword, self.first(keyword) or "", self.values[keyword].place)


class SshConfig:
    """The user's and the system's config files (or the given file), each read once. Thread-safe."""

    def __init__(self, path: Path | None = None) -> None:
        user = os.path.join(os.path.expanduser("~"), ".ssh", "config")
        self._files: tuple[str, ...] = (str(path),) if path is not None else (user, SYSTEM_CONFIG)
        self._must_exist = path is not None
        self._lock = threading.Lock()
        self._lines: dict[str, tuple[_Line, ...]] = {}
        self._unreadable: dict[str, Text] = {}

    def resolve(self, host: Host) -> SshTarget:
        """Return how to reach `host`; the hostfile's addr, user and port override the config."""
        given = {"hostname": host.addr, "user": host.user, "port": str(host.port) if host.port else None}
        chosen = _Settings(host.name, {key: _Line(key, (value,), "") for key, value in given.items() if value})
        self._walk_all(chosen)
        if chosen.needs_final:
            chosen.is_final = True
            self._walk_all(chosen)
        return self._target(host, chosen)

    def _walk_all(self, chosen: _Settings) -> None:
        for file in self._files:
            self._walk(file, chosen, depth=0, is_active=True, must_exist=self._must_exist)

    def _walk(self, file: str, chosen: _Settings, *, depth: int, is_active: bool, must_exist: bool = False) -> None:
        if depth > MAX_INCLUDE_DEPTH:
            chosen.obstacle = chosen.obstacle or Text(
                "ssh.include-depth", "Include nests deeper than {limit} ({file})", limit=MAX_INCLUDE_DEPTH, file=file
            )
            return
        applies = is_active
        for line in self._read(file, must_exist=must_exist):
            if line.keyword == "host":
                applies = is_active and patterns_match(line.arguments, chosen.original)
            elif line.keyword == "match":
                applies = is_active and _match_applies(line, chosen)
            elif line.keyword == "include" and applies:
                for name in self._included(line):
                    self._walk(name, chosen, depth=depth + 1, is_active=True)
            elif applies:
                _apply(line, chosen)
        if file in self._unreadable:
            chosen.obstacle = chosen.obstacle or self._unreadable[file]

    def _included(self, line: _Line) -> list[str]:
        is_system = line.place.startswith("/etc/ssh/")
        base = "/etc/ssh" if is_system else os.path.join(os.path.expanduser("~"), ".ssh")
        names: list[str] = []
        for pattern in line.arguments:
            pattern = os.path.expanduser(pattern)
            names += sorted(glob.glob(pattern if os.path.isabs(pattern) else os.path.join(base, pattern)))
        return names

    def _read(self, file: str, *, must_exist: bool) -> tuple[_Line, ...]:
        with self._lock:
            if file not in self._lines:
                lines: tuple[_Line, ...] = ()
                try:
                    lines = self._parse(file)
                except FileNotFoundError:
                    if must_exist:
                        self._unreadable[file] = Text("ssh.config-missing", "{file}: file not found", file=file)
                except OSError as error:
                    self._unreadable[file] = Text(
                        "ssh.config-unreadable", "{file}: {error}", file=file, error=error.strerror
                    )
                except ConfigError as error:
                    self._unreadable[file] = error.message
                self._lines[file] = lines
            return self._lines[file]

    def _parse(self, file: str) -> tuple[_Line, ...]:
        status = os.stat(file)
        if not file.startswith("/etc/ssh/") and (
            status.st_uid not in (0, os.getuid()) or stat.S_IMODE(status.st_mode) & 0o022
        ):
            raise ConfigError(
                Text("ssh.config-writable", "{file}: writable by others, rejected by ssh (chmod 600 {file})", file=file)
            )
        text = Path(file).read_text(encoding="utf-8", errors="surrogateescape")
        return parse_config(text, file)

    def _target(self, host: Host, chosen: _Settings) -> SshTarget:
        address = host.addr or _expand(chosen.first("hostname") or host.name, {"h": host.name, "n": host.name})
        port_text = chosen.first("port") or "22"
        user = chosen.first("user") or getpass.getuser()
        port = int(port_text) if port_text.isdigit() and 0 < int(port_text) < 65536 else 0
        if not port:
            chosen.obstacle = chosen.obstacle or Text(
                "ssh.config-port", "invalid port {port} ({place})", port=port_text, place=chosen.values["port"].place
            )
        tokens = _tokens(host.name, address, port, user)
        known = [
            _expand(name, tokens)
            for key in ("userknownhostsfile", "globalknownhostsfile")
            for name in (chosen.values[key].arguments if key in chosen.values else _DEFAULT_KNOWN_HOSTS[key])
        ]
        return SshTarget(
            name=host.name,
            address=address,
            port=port or 22,
            user=user,
            identity_files=tuple(
                dict.fromkeys(_expand(name, tokens) for name in chosen.identity_files if name.lower() != "none")
            ),
            identities_only=chosen.first("identitiesonly") == "yes",
            identity_agent=_agent_path(chosen.first("identityagent"), tokens),
            jump=_jump(chosen, tokens),
            key_alias=chosen.first("hostkeyalias"),
            known_hosts_files=tuple(name for name in known if name.lower() != "none"),
            family=_FAMILIES.get((chosen.first("addressfamily") or "any").lower(), socket.AF_UNSPEC),
            algorithms={key: value for key in _ALGORITHMS if (value := chosen.first(key))},
            why_openssh=_why_openssh(chosen),
        )


_DEFAULT_KNOWN_HOSTS: Mapping[str, tuple[str, ...]] = {
    "userknownhostsfile": ("~/.ssh/known_hosts", "~/.ssh/known_hosts2"),
    "globalknownhostsfile": ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2"),
}
_FAMILIES = {"any": socket.AF_UNSPEC, "inet": socket.AF_INET, "inet6": socket.AF_INET6}
_ALGORITHMS = ("kexalgorithms", "ciphers", "macs", "hostkeyalgorithms", "pubkeyacceptedalgorithms")


def parse_config(text: str, file: str) -> tuple[_Line, ...]:
    """Return the lines of a config file. Raises ConfigError with file and line if ssh would also reject it."""
    lines = []
    for number, raw in enumerate(text.splitlines(), 1):
        body = raw.strip()
        if not body or body.startswith("#"):
            continue
        found = re.match(r"(\w+)(?:\s*=\s*|\s+)(.*)", body)
        place = f"{file}:{number}"
        if not found or not found.group(2):
            raise ConfigError(Text("ssh.config-line", "{place}: invalid line {line:quote}", place=place, line=body))
        keyword = found.group(1).lower()
        rest = found.group(2)
        arguments = (rest,) if keyword in _TAKES_REST_OF_LINE else split_arguments(rest, place)
        lines.append(_Line(keyword, arguments, place))
    return tuple(lines)


_ARGUMENT = re.compile(r"""\s*(?:(#.*)|((?:"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|\\["'\\ ]|[^\s"'])+))""")


def split_arguments(text: str, place: str) -> tuple[str, ...]:
    """Split a config line into arguments; quotes keep an argument together. Raises ConfigError on an unclosed quote."""
    criteria: list[str] = []
    position = 0
    while text[position:].strip():
        found = _ARGUMENT.match(text, position)
        if not found:
            raise ConfigError(Text("ssh.config-quote", "{place}: a quote is not closed", place=place))
        if found.group(1):
            break
        criteria.append(_unquote(found.group(2)))
        position = found.end()
    if not criteria:
        raise ConfigError(Text("ssh.config-no-value", "{place}: a keyword without a value", place=place))
    return tuple(criteria)


def _unquote(criterion: str) -> str:
    parts = re.findall(r""""((?:\\.|[^"\\])*)"|'((?:\\.|[^'\\])*)'|(\\["'\\ ]|[^"'])""", criterion)
    return "".join(re.sub(r"""\\(["'\\ ])""", r"\1", "".join(part)) for part in parts)


def patterns_match(patterns: Sequence[str], name: str) -> bool:
    """Return whether ssh's pattern list matches: any match counts, any match of a negated (!pattern) excludes it."""
    matched = False
    for pattern in patterns:
        is_negated = pattern.startswith("!")
        literal = pattern.lstrip("!").lower().replace("[", "[[]")
        if fnmatch.fnmatchcase(name.lower(), literal):
            if is_negated:
                return False
            matched = True
    return matched


def _match_applies(line: _Line, chosen: _Settings) -> bool:
    """Return whether a Match line applies; a criterion that requires ssh sets the obstacle and does not apply."""
    criteria = list(line.arguments)
    while criteria:
        criterion = criteria.pop(0)
        name, _, value = criterion.lstrip("!").partition("=")
        name = name.lower()
        if name in ("all", "canonical", "final"):
            chosen.needs_final = chosen.needs_final or name == "final"
            holds = name == "all" or (name == "final" and chosen.is_final)
        else:
            if not value and not criteria:
                chosen.obstacle = chosen.obstacle or _setting(f"Match {name}", "", line.place)
                return False
            value = value or criteria.pop(0)
            subject = _match_subject(name, chosen)
            if subject is None:
                chosen.obstacle = chosen.obstacle or _setting("Match", name, line.place)
                return False
            holds = patterns_match(value.split(","), subject)
        if holds == criterion.startswith("!"):
            return False
    return True


def _match_subject(name: str, chosen: _Settings) -> str | None:
    if name == "host":
        return _expand(chosen.first("hostname") or chosen.original, {"h": chosen.original, "n": chosen.original})
    if name == "user":
        return chosen.first("user") or getpass.getuser()
    return {"originalhost": chosen.original, "localuser": getpass.getuser()}.get(name)


def _apply(line: _Line, chosen: _Settings) -> None:
    if line.keyword == "identityfile":
        chosen.identity_files.append(line.arguments[0])
    # the first of the two proxies excludes the other
    if not any(keyword in chosen.values for keyword in (_PROXIES if line.keyword in _PROXIES else (line.keyword,))):
        chosen.values[line.keyword] = line


_ONLY_OPENSSH: Mapping[str, tuple[str, ...]] = {
    # keyword: values that require nothing
    "proxycommand": ("none",),
    "certificatefile": ("none",),
    "pkcs11provider": ("none",),
    "knownhostscommand": ("none",),
    "revokedhostkeys": ("none",),
    "canonicalizehostname": ("no",),
    "bindaddress": (),
    "bindinterface": (),
}


def _setting(keyword: str, value: str, place: str) -> Text:
    """Return the text for a setting that paramiko does not support."""
    return Text("ssh.setting", "{setting} ({place})", setting=f"{keyword} {value}".strip(), place=place)


def _why_openssh(chosen: _Settings) -> Text | None:
    if chosen.obstacle:
        return chosen.obstacle
    for keyword, neutral in _ONLY_OPENSSH.items():
        value = chosen.first(keyword)
        if value is not None and value.lower() not in neutral:
            return chosen.setting(keyword)
    if "," in (chosen.first("proxyjump") or ""):
        return Text("ssh.several-jumps", "several jumps in a row ({where})", where=chosen.values["proxyjump"].place)
    if chosen.first("gssapiauthentication") == "yes":
        place = chosen.values["gssapiauthentication"].place
        if not place.startswith(("/etc/ssh/", "/etc/crypto-policies/")):
            return _setting("GSSAPIAuthentication", "yes", place)
    if "publickey" not in (chosen.first("preferredauthentications") or "publickey").split(","):
        return chosen.setting("preferredauthentications")
    return None


def _jump(chosen: _Settings, tokens: Mapping[str, str]) -> str | None:
    value = chosen.first("proxyjump")
    if value is None or value.lower() == "none" or "," in value:
        return None
    return _expand(value, tokens)


def parse_jump(text: str) -> Host:
    """Return the host of a ProxyJump value, "[user@]host[:port]" or "ssh://…"; a numeric IPv6 host is in brackets."""
    found = re.fullmatch(r"(?:ssh://)?(?:(.+)@)?(\[[^]]+\]|[^:/]+)(?::(\d+))?/?", text)
    if not found:
        return Host(name=text)
    user, name, port = found.groups()
    return Host(name=name.strip("[]"), user=user, port=int(port) if port else None)


def _agent_path(value: str | None, tokens: Mapping[str, str]) -> str | None:
    if value is None or value == "SSH_AUTH_SOCK":
        return None
    if value.startswith("$") and not value.startswith("${"):
        return os.environ.get(value[1:])
    return value if value == "none" else _expand(value, tokens)


def _tokens(original: str, address: str, port: int, user: str) -> dict[str, str]:
    home = os.path.expanduser("~")
    local = socket.gethostname()
    return {
        "h": address,
        "n": original,
        "p": str(port),
        "r": user,
        "d": home,
        "u": getpass.getuser(),
        "i": str(os.getuid()),
        "l": local,
        "L": local.split(".")[0],
        "k": original,
        "%": "%",
    }


def _expand(text: str, tokens: Mapping[str, str]) -> str:
    """Replace ~, %tokens and ${VARIABLES}; unknown ones remain unchanged."""
    text = re.sub(r"%(.)", lambda found: tokens.get(found.group(1), found.group(0)), text)
    text = re.sub(r"\$\{(\w+)\}", lambda found: os.environ.get(found.group(1), found.group(0)), text)
    return os.path.expanduser(text)


def default_key_files() -> tuple[str, ...]:
    """Return the files that ssh tries if the config names no key."""
    return tuple(os.path.join(os.path.expanduser("~"), ".ssh", name) for name in DEFAULT_KEYS)


def public_blob(path: str) -> bytes | None:
    """Return the public half of a key file, from the .pub next to it; None if it cannot be read."""
    try:
        fields = Path(path + ".pub").read_text(encoding="utf-8", errors="replace").split()
        return base64.b64decode(fields[1])
    except (OSError, IndexError, binascii.Error):
        return None


def needs_openssh(target: SshTarget) -> Text | None:
    """Return why these keys need the OpenSSH binary (certificates, security keys); None if paramiko supports them."""
    for path in target.identity_files or default_key_files():
        if os.path.exists(path + "-cert.pub"):
            return Text("ssh.key-certificate", "a certificate is next to {path}", path=path)
        public = public_blob(path)
        if target.identity_files and public and public[4:7] == b"sk-":
            return Text("ssh.security-key", "a security key ({path})", path=path)
    return None
