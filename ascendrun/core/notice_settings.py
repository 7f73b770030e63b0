"""The `notify`, `hook` and `deadman` blocks of a settings file: YAML to targets, every problem at its place."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ascendrun.core.dataclass import dataclass
from ascendrun.core.notices import DEFAULT_JOBS, ON, SERVICES, Target, with_name
from ascendrun.text import LANGUAGES, Text, suggestion, write

if TYPE_CHECKING:
    from ascendrun.core.errors import Problem

BLOCKS = ("notify", "hook", "deadman")
MOST_TARGETS = 16
SECRET_BYTES = 8192
FORMATS = ("rich", "text")
SUFFIX_KINDS = {"started": ("started",), "ok": ("succeeded", "stopped"), "failed": ("failed",)}
_TARGET_FIELDS = ("name", "type", "url", "url_file", "secret", "secret_file", "events", "jobs", "format", "lang")
_HOOK_FIELDS = ("command", "events", "jobs", "timeout_s", "lang")
_DEADMAN_FIELDS = ("url", "url_file", "interval_s", "jobs", *SUFFIX_KINDS)
_LOOPBACK = re.compile(r"localhost|127\.\d+\.\d+\.\d+|::1")


@dataclass(frozen=True)
class NoticeSettings:
    """Targets of notifications. `targets`: the services and the hook, each with a unique name; `deadman`: None, no such
    switch. `origins`: for each block the file that defines it."""

    targets: tuple[Target, ...] = ()
    deadman: Target | None = None
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def everyone(self) -> tuple[Target, ...]:
        return self.targets if self.deadman is None else (*self.targets, self.deadman)


class UnreadableCredentialsError(ValueError):
    """A file with a URL or a secret cannot be used; the message names the file, never its content."""

    def __init__(self, message: Text) -> None:
        super().__init__(message)
        self.message = message


def read_credentials(target: Target) -> tuple[str, str | None]:
    """Return (URL, secret) of the target as now in its files. Raises UnreadableCredentialsError."""
    url = target.url if target.url_file is None else _read_line(target.url_file)
    secret = target.secret if target.secret_file is None else _read_line(target.secret_file)
    problem = _url_problem(url or "", target.type)
    if problem:
        where = target.url_file or target.name
        raise UnreadableCredentialsError(
            Text("notify.target-url", "{target}: {problem}", target=where, problem=problem)
        )
    assert url is not None
    return url, secret


def where_of(target: Target) -> str:
    """Return the host of the URL, or the command; never a path or parameter of a URL."""
    if target.type == "hook":
        return target.command[0]
    try:
        url, _ = read_credentials(target)
    except UnreadableCredentialsError:
        return "?"
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}{f':{parts.port}' if parts.port else ''}/…"


def _read_line(path: str) -> str:
    try:
        with open(path, "rb") as opened:
            raw = opened.read(SECRET_BYTES + 1)
    except OSError as error:
        message = Text("notify.cannot-read", "cannot read {path}: {error}", path=path, error=error.strerror)
        raise UnreadableCredentialsError(message) from error
    try:
        lines = raw.decode("utf-8").split()
    except UnicodeDecodeError:
        lines = []
    if len(lines) != 1 or len(raw) > SECRET_BYTES:
        raise UnreadableCredentialsError(
            Text("notify.one-line", "{path}: expected exactly one line without spaces", path=path)
        )
    return lines[0]


def _url_problem(url: str, kind: str) -> Text | None:
    """Return the problem of a URL, without the URL; None: valid."""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  # raises when it is no number
    except ValueError:
        return Text("notify.url", "invalid URL")
    if parts.scheme not in ("http", "https") or not parts.hostname or not url.isascii() or not url.isprintable():
        return Text("notify.url-scheme", "expected an http or https URL")
    if parts.scheme == "http" and kind in SERVICES and kind != "generic" and not _LOOPBACK.fullmatch(parts.hostname):
        return Text("notify.url-plain", "http sends the credential in the URL unencrypted; https is required")
    return None


# ---------------------------------------------------------------- conversion from YAML

Refuse = Callable[..., None]
"""(message, node, hint or nothing)"""


def parse_blocks(nodes: Mapping[str, Any], file: Path, problems: list[Problem]) -> NoticeSettings:
    """Return targets from the YAML nodes of the blocks. Paths are relative to the file. Problems go to `problems`."""
    from ascendrun.core.errors import Problem

    def refuse(message: Text, node: Any, hint: Text | None = None) -> None:
        problems.append(Problem(str(file), node.start_mark.line + 1, node.start_mark.column + 1, message, hint))

    before = len(problems)
    targets: list[Target] = []
    listed = nodes["notify"] if "notify" in nodes else None
    if listed is not None and not _is(listed, "Sequence"):
        hint = write("notify: [{type: slack, url_file: slack.url}]")
        refuse(Text("notify.list", "notify: expected a list of targets"), listed, hint)
        listed = None
    for node in () if listed is None else listed.value:
        target = _parse_target(_Block(node, "notify", _TARGET_FIELDS, file.parent, refuse))
        if target is not None:
            if target.name and target.name in {other.name for other in targets}:
                refuse(Text("notify.same-name", "notify: duplicate target name {name}", name=target.name), node)
            targets.append(target)
    if len(targets) > MOST_TARGETS:
        hint = Text("notify.too-many-hint", "use one generic webhook that forwards to the others")
        refuse(Text("notify.too-many", "notify: at most {limit} targets", limit=MOST_TARGETS), listed, hint)
    hook = _parse_hook(_Block(nodes["hook"], "hook", _HOOK_FIELDS, file.parent, refuse)) if "hook" in nodes else None
    deadman = None
    if "deadman" in nodes:
        deadman = _parse_deadman(_Block(nodes["deadman"], "deadman", _DEADMAN_FIELDS, file.parent, refuse))
    if len(problems) > before:
        return NoticeSettings()
    origins = {block: str(file) for block in BLOCKS if block in nodes}
    return NoticeSettings(with_name(targets) + ((hook,) if hook else ()), deadman, origins)


def merge(weak: NoticeSettings, strong: NoticeSettings) -> NoticeSettings:
    """Return each block of the stronger file if set, else of the weaker."""
    services = strong if "notify" in strong.origins else weak
    hooks = strong if "hook" in strong.origins else weak
    targets = [target for target in services.targets if target.type != "hook"]
    targets += [target for target in hooks.targets if target.type == "hook"]
    deadman = strong.deadman if "deadman" in strong.origins else weak.deadman
    return NoticeSettings(tuple(targets), deadman, {**weak.origins, **strong.origins})


def with_language(settings: NoticeSettings, lang: str) -> NoticeSettings:
    """Return the settings with a language for targets without a language."""
    return replace(settings, targets=tuple(replace(target, lang=target.lang or lang) for target in settings.targets))


class _Block:
    """One mapping: `fields` has the YAML node of each key, `is_valid` is False for another kind of node."""

    def __init__(self, node: Any, name: str, known: Sequence[str], folder: Path, refuse: Refuse) -> None:
        self.node, self.name, self.folder, self.refuse = node, name, folder, refuse
        self.fields: dict[str, Any] = {}
        self.is_valid = _is(node, "Mapping")
        if not self.is_valid:
            refuse(Text("notify.mapping", "{block}: expected a mapping", block=name), node)
        for key, value in node.value if self.is_valid else ():
            if key.value not in known:
                word = str(key.value)
                refuse(
                    Text("notify.unknown-key", "{block}: unknown key {key:quote}", block=name, key=word[:40]),
                    key,
                    suggestion(word, known),
                )
            elif key.value in self.fields:
                refuse(Text("notify.duplicate-key", "{block}: duplicate key {key}", block=name, key=key.value), key)
            else:
                self.fields[key.value] = value

    def text(self, key: str) -> str | None:
        node = self.fields.get(key)
        if node is not None and not _is(node, "Scalar"):
            self.refuse(Text("notify.plain", "{key}: expected a plain value", key=key), node)
            return None
        return None if node is None else str(node.value)

    def texts(self, key: str, default: tuple[str, ...], known: Collection[str] | None = None) -> tuple[str, ...]:
        """Return a list of plain values; a single value gives a list. `known`: allowed values."""
        node = self.fields.get(key)
        if node is None:
            return default
        items = node.value if _is(node, "Sequence") else [node]
        nested = next((item for item in items if not _is(item, "Scalar")), None)
        if nested is not None:
            self.refuse(Text("notify.plain-items", "expected plain values"), nested)
            return ()
        values = tuple(str(item.value) for item in items)
        for value in values if known is not None else ():
            if value not in (known or ()):
                self.refuse(_not_one_of(key, value, known or ()), node)
        return values

    def choice(self, key: str, choices: Sequence[str]) -> str | None:
        """Return the choice. None: not set, or invalid."""
        text = self.text(key)
        if text is not None and text not in choices:
            self.refuse(_not_one_of(key, text, choices), self.fields[key])
        return text if text in choices else None

    def seconds(self, key: str, default: float, low: float, high: float) -> float:
        text = self.text(key)
        try:
            seconds = default if text is None else float(text)
        except ValueError:
            seconds = -1.0
        if low <= seconds <= high:
            return seconds
        self.refuse(
            Text(
                "notify.seconds",
                "{key}: expected a number of seconds from {low:g} to {high:g}",
                key=key,
                low=low,
                high=high,
            ),
            self.fields[key],
        )
        return default


def _parse_target(block: _Block) -> Target | None:
    service = block.text("type")
    if not block.is_valid:
        return None
    if service not in SERVICES:
        block.refuse(_not_one_of("notify.type", service, SERVICES), block.fields.get("type", block.node))
        return None
    name = block.text("name") or ""
    if name in ("hook", "deadman") or (name and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name)):
        hint = Text("notify.name-hint", "use letters, digits, '.', '_' and '-'; hook and deadman are reserved")
        block.refuse(
            Text("notify.name", "invalid target name {name:quote}", name=name[:40]), block.fields["name"], hint
        )
    return Target(
        name=name,
        type=service,
        events=block.texts("events", ("ended",), ON),
        jobs=block.texts("jobs", DEFAULT_JOBS),
        format=block.choice("format", FORMATS) or FORMATS[0],
        lang=block.choice("lang", LANGUAGES),
        **_credentials(block, service),
    )


def _parse_hook(block: _Block) -> Target | None:
    if not block.is_valid:
        return None
    node = block.fields.get("command", block.node)
    command = block.texts("command", ())
    if not command or _is(node, "Scalar"):
        message = Text("notify.hook-command", "hook.command must be a list of arguments")
        block.refuse(message, node, write("command: [/path/to/script, --flag]"))
        return None
    program = os.path.expanduser(command[0])
    return Target(
        name="hook",
        type="hook",
        events=block.texts("events", ("ended",), ON),
        jobs=block.texts("jobs", DEFAULT_JOBS),
        lang=block.choice("lang", LANGUAGES),
        command=(str(block.folder / program) if "/" in program else program, *command[1:]),
        timeout_s=block.seconds("timeout_s", 30.0, 0.1, 3600.0),
    )


def _parse_deadman(block: _Block) -> Target | None:
    if not block.is_valid:
        return None
    suffixes: dict[str, str] = {}
    for key, kinds in SUFFIX_KINDS.items():
        if key in block.fields:
            suffix = block.text(key) or ""
            if suffix and not re.fullmatch(r"/[A-Za-z0-9._~/-]{1,100}", suffix):
                message = Text("notify.suffix", "deadman.{key} must be a path to append to the URL", key=key)
                block.refuse(message, block.fields[key], write(f"{key}: /fail"))
            suffixes.update(dict.fromkeys(kinds, suffix))
    return Target(
        name="deadman",
        type="deadman",
        jobs=block.texts("jobs", DEFAULT_JOBS),
        interval_s=block.seconds("interval_s", 60.0, 1.0, 86400.0),
        suffixes=suffixes,
        **_credentials(block, "deadman"),
    )


def _credentials(block: _Block, service: str) -> dict[str, Any]:
    found: dict[str, str | None] = {}
    for key in ("url", "url_file", "secret", "secret_file"):
        text = block.text(key)
        is_path = text is not None and key.endswith("_file")
        found[key] = os.path.abspath(block.folder / os.path.expanduser(text or "")) if is_path else text
    if (found["url"] is None) == (found["url_file"] is None):
        hint = Text("notify.one-url-hint", "set url_file to a file (chmod 600) that contains the URL")
        message = Text("notify.one-url", "{block}: expected either url_file or url", block=block.name)
        block.refuse(message, block.node, hint)
    elif found["url"] is not None:
        problem = _url_problem(found["url"], service)
        if problem:
            message = Text("notify.block-url", "{block}.url: {problem}", block=block.name, problem=problem)
            block.refuse(message, block.fields["url"])
    if found["secret"] is not None and found["secret_file"] is not None:
        message = Text("notify.one-secret", "{block}: expected either secret_file or secret", block=block.name)
        block.refuse(message, block.node)
    if service in ("wecom", "slack") and (found["secret"] or found["secret_file"]):
        hint = Text("notify.no-secret-hint", "remove secret; the URL is the only credential")
        block.refuse(
            Text("notify.no-secret", "{kind} does not support a signing secret", kind=service), block.node, hint
        )
    return found


def _is(node: Any, kind: str) -> bool:
    """Return whether a YAML node is a Mapping, Sequence or Scalar; yaml is imported only to read a file."""
    return type(node).__name__ == f"{kind}Node"


def _not_one_of(key: str, value: str | None, choices: Iterable[str]) -> Text:
    return Text(
        "notify.choice",
        "{key}: expected one of {choices}, got {value:quote}",
        key=key,
        choices=list(choices),
        value=str(value)[:40],
    )
