"""The `notify`, `hook` and `deadman` blocks of a settings file: YAML to targets, every problem at its place."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional
from urllib.parse import urlsplit

from ascendrun.core.notices import DEFAULT_JOBS, ON, SERVICES, Target, with_name
from ascendrun.text import LANGUAGES, Text, renamed, suggestion, write

if TYPE_CHECKING:
    from ascendrun.core.errors import Problem

BLOCKS = ("notify", "hook", "deadman")
MOST_TARGETS = 16
SECRET_BYTES = 8192
STYLES = ("rich", "text")
SUFFIX_KINDS = {"started": ("started",), "ok": ("succeeded", "stopped"), "failed": ("failed",)}
_TARGET_FIELDS = ("name", "type", "url", "url_file", "secret", "secret_file", "events", "jobs", "format", "lang")
_HOOK_FIELDS = ("command", "events", "jobs", "timeout_s", "lang")
_DEADMAN_FIELDS = ("url", "url_file", "interval_s", "jobs", *SUFFIX_KINDS)
RENAMED: Mapping[str, str] = {
    "notify.kind": "notify.type",
    "notify.on": "notify.events",
    "notify.style": "notify.format",
    "hook.on": "hook.events",
    "deadman.every_s": "deadman.interval_s",
}
_LOOPBACK = re.compile(r"localhost|127\.\d+\.\d+\.\d+|::1")


@dataclass(frozen=True)
class NoticeSettings:
    """Who is told of what. `targets`: the services and the hook, each with a name of its own; `deadman`: None, no such
    switch. `origins`: for each block the file that it came from."""

    targets: tuple[Target, ...] = ()
    deadman: Target | None = None
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def everyone(self) -> tuple[Target, ...]:
        return self.targets if self.deadman is None else (*self.targets, self.deadman)


class UnreadableCredentialsError(ValueError):
    """A file that should hold a URL or a secret cannot be used; the message names the file, never its content."""

    def __init__(self, message: Text) -> None:
        super().__init__(message)
        self.message = message


def read_credentials(target: Target) -> tuple[str, str | None]:
    """(URL, secret) of the target as its files have them now. Raises UnreadableCredentialsError."""
    url = target.url if target.url_file is None else _read_line(target.url_file)
    secret = target.secret if target.secret_file is None else _read_line(target.secret_file)
    problem = _url_problem(url or "", target.kind)
    if problem:
        raise UnreadableCredentialsError(
            Text("notify.target-url", "{target}: {problem}", target=target.url_file or target.name, problem=problem)
        )
    assert url is not None
    return url, secret


def where_of(target: Target) -> str:
    """The host of the URL, or the command; never a path or parameter of a URL."""
    if target.kind == "hook":
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
    """What is wrong with a URL, without the URL; None: nothing."""
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


# ---------------------------------------------------------------- from YAML

Refuse = Callable[[Text, Any, Optional[Text]], None]
"""(message, node, hint)"""


def parse_blocks(nodes: Mapping[str, Any], file: Path, problems: list[Problem]) -> NoticeSettings:
    """Targets from the YAML nodes of the blocks; what is wrong goes to `problems`. Paths start at the file's folder."""
    from ascendrun.core.errors import Problem

    def refuse(message: Text, node: Any, hint: Text | None = None) -> None:
        problems.append(Problem(str(file), node.start_mark.line + 1, node.start_mark.column + 1, message, hint))

    before = len(problems)
    targets: list[Target] = []
    for node in _list_of(nodes["notify"], refuse) if "notify" in nodes else ():
        target = _parse_target(node, file.parent, refuse)
        if target is not None:
            if target.name and target.name in {other.name for other in targets}:
                refuse(Text("notify.same-name", "notify: duplicate target name {name}", name=target.name), node, None)
            targets.append(target)
    if len(targets) > MOST_TARGETS:
        refuse(
            Text("notify.too-many", "notify: at most {limit} targets", limit=MOST_TARGETS),
            nodes["notify"],
            Text("notify.too-many-hint", "use one generic webhook that forwards to the others"),
        )
    hook = _parse_hook(nodes["hook"], file.parent, refuse) if "hook" in nodes else None
    deadman = _parse_deadman(nodes["deadman"], file.parent, refuse) if "deadman" in nodes else None
    if len(problems) > before:
        return NoticeSettings()
    return NoticeSettings(
        with_name(targets) + ((hook,) if hook else ()),
        deadman,
        {block: str(file) for block in BLOCKS if block in nodes},
    )


def merge(weak: NoticeSettings, strong: NoticeSettings) -> NoticeSettings:
    """Block by block the stronger file's, where it has one."""
    services = strong if "notify" in strong.origins else weak
    hooks = strong if "hook" in strong.origins else weak
    targets = [target for target in services.targets if target.kind != "hook"]
    targets += [target for target in hooks.targets if target.kind == "hook"]
    deadman = strong.deadman if "deadman" in strong.origins else weak.deadman
    return NoticeSettings(tuple(targets), deadman, {**weak.origins, **strong.origins})


def with_language(settings: NoticeSettings, lang: str) -> NoticeSettings:
    """The same, with a language for targets that set none."""
    return replace(settings, targets=tuple(replace(target, lang=target.lang or lang) for target in settings.targets))


def _parse_target(node: Any, folder: Path, refuse: Refuse) -> Target | None:
    fields = _fields(node, "notify", _TARGET_FIELDS, refuse)
    if fields is None:
        return None
    kind = _text(fields, "type", refuse)
    if kind is None or kind not in SERVICES:
        refuse(_not_one_of("notify.type", kind, SERVICES), fields.get("type", node), None)
        return None
    name = _text(fields, "name", refuse) or ""
    if name in ("hook", "deadman") or (name and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name)):
        refuse(
            Text("notify.name", "invalid target name {name:quote}", name=name[:40]),
            fields["name"],
            Text("notify.name-hint", "use letters, digits, '.', '_' and '-'; hook and deadman are reserved"),
        )
    return Target(
        name=name,
        kind=kind,
        on=_words(fields, "events", ("ended",), refuse, ON),
        jobs=_jobs(fields, refuse),
        style=_choice(fields, "format", STYLES, refuse),
        lang=_choice(fields, "lang", LANGUAGES, refuse) if "lang" in fields else None,
        **_credentials(fields, node, kind, folder, refuse),
    )


def _parse_hook(node: Any, folder: Path, refuse: Refuse) -> Target | None:
    fields = _fields(node, "hook", _HOOK_FIELDS, refuse)
    if fields is None:
        return None
    command = _list_of_texts(fields["command"], refuse) if "command" in fields else ()
    if not command or "command" in fields and type(fields["command"]).__name__ == "ScalarNode":
        refuse(
            Text("notify.hook-command", "hook.command must be a list of arguments"),
            fields.get("command", node),
            write("command: [/path/to/script, --flag]"),
        )
        return None
    program = os.path.expanduser(command[0])
    command = (str(folder / program) if "/" in program else program, *command[1:])
    return Target(
        name="hook",
        kind="hook",
        on=_words(fields, "events", ("ended",), refuse, ON),
        jobs=_jobs(fields, refuse),
        lang=_choice(fields, "lang", LANGUAGES, refuse) if "lang" in fields else None,
        command=command,
        timeout_s=_seconds(fields, "timeout_s", 30.0, (0.1, 3600.0), refuse),
    )


def _parse_deadman(node: Any, folder: Path, refuse: Refuse) -> Target | None:
    fields = _fields(node, "deadman", _DEADMAN_FIELDS, refuse)
    if fields is None:
        return None
    suffixes: dict[str, str] = {}
    for word, kinds in SUFFIX_KINDS.items():
        if word in fields:
            suffix = _text(fields, word, refuse) or ""
            if suffix and not re.fullmatch(r"/[A-Za-z0-9._~/-]{1,100}", suffix):
                refuse(
                    Text("notify.suffix", "deadman.{key} must be a path to append to the URL", key=word),
                    fields[word],
                    write(f"{word}: /fail"),
                )
            suffixes.update(dict.fromkeys(kinds, suffix))
    target = Target(
        name="deadman",
        kind="deadman",
        jobs=_jobs(fields, refuse),
        every_s=_seconds(fields, "interval_s", 60.0, (1.0, 86400.0), refuse),
        **_credentials(fields, node, "deadman", folder, refuse),
    )
    return replace(target, suffixes=suffixes)


def _credentials(fields: Mapping[str, Any], node: Any, kind: str, folder: Path, refuse: Refuse) -> dict[str, Any]:
    block = "deadman" if kind == "deadman" else "notify"
    found: dict[str, Any] = {}
    for name in ("url", "url_file", "secret", "secret_file"):
        text = _text(fields, name, refuse) if name in fields else None
        if text is not None and name.endswith("_file"):
            text = os.path.abspath(folder / os.path.expanduser(text))
        found[name] = text
    if (found["url"] is None) == (found["url_file"] is None):
        refuse(
            Text("notify.one-url", "{block}: expected either url_file or url", block=block),
            node,
            Text("notify.one-url-hint", "set url_file to a file (chmod 600) that contains the URL"),
        )
    elif found["url"] is not None:
        problem = _url_problem(found["url"], kind)
        if problem:
            refuse(
                Text("notify.block-url", "{block}.url: {problem}", block=block, problem=problem), fields["url"], None
            )
    if found["secret"] is not None and found["secret_file"] is not None:
        refuse(Text("notify.one-secret", "{block}: expected either secret_file or secret", block=block), node, None)
    if kind in ("wecom", "slack") and (found["secret"] or found["secret_file"]):
        refuse(
            Text("notify.no-secret", "{kind} does not support a signing secret", kind=kind),
            node,
            Text("notify.no-secret-hint", "remove secret; the URL is the only credential"),
        )
    return found


def _fields(node: Any, block: str, known: Sequence[str], refuse: Refuse) -> dict[str, Any] | None:
    """name -> value node of a mapping; None when it is none."""
    if type(node).__name__ != "MappingNode":
        refuse(Text("notify.mapping", "{block}: expected a mapping", block=block), node, None)
        return None
    fields: dict[str, Any] = {}
    for key, value in node.value:
        new = RENAMED.get(f"{block}.{key.value}")
        if new is not None:
            written = value.value if isinstance(value.value, str) else "…"
            refuse(renamed(f"{block}.{key.value}", new), key, write(f"{new.partition('.')[2]}: {written}"))
        elif key.value not in known:
            unknown = Text(
                "notify.unknown-key", "{block}: unknown key {key:quote}", block=block, key=str(key.value)[:40]
            )
            refuse(unknown, key, suggestion(str(key.value), known))
        elif key.value in fields:
            refuse(Text("notify.duplicate-key", "{block}: duplicate key {key}", block=block, key=key.value), key, None)
        else:
            fields[key.value] = value
    return fields


def _not_one_of(key: str, value: str | None, choices: Iterable[str]) -> Text:
    return Text(
        "notify.choice",
        "{key}: expected one of {choices}, got {value:quote}",
        key=key,
        choices=list(choices),
        value=str(value)[:40],
    )


def _list_of(node: Any, refuse: Refuse) -> list[Any]:
    if type(node).__name__ != "SequenceNode":
        refuse(
            Text("notify.list", "notify: expected a list of targets"),
            node,
            write("notify: [{type: slack, url_file: slack.url}]"),
        )
        return []
    return list(node.value)


def _list_of_texts(node: Any, refuse: Refuse) -> tuple[str, ...]:
    """A list of plain values, or one plain value as a list of one."""
    items = node.value if type(node).__name__ == "SequenceNode" else [node]
    for item in items:
        if type(item).__name__ != "ScalarNode":
            refuse(Text("notify.plain-items", "expected plain values"), item, None)
            return ()
    return tuple(str(item.value) for item in items)


def _text(fields: Mapping[str, Any], name: str, refuse: Refuse) -> str | None:
    node = fields.get(name)
    if node is None:
        return None
    if type(node).__name__ != "ScalarNode":
        refuse(Text("notify.plain", "{key}: expected a plain value", key=name), node, None)
        return None
    return str(node.value)


def _words(
    fields: Mapping[str, Any], name: str, default: tuple[str, ...], refuse: Refuse, known: Mapping[str, Any]
) -> tuple[str, ...]:
    if name not in fields:
        return default
    words = _list_of_texts(fields[name], refuse)
    for word in words:
        if word not in known:
            refuse(_not_one_of(name, word, known), fields[name], None)
    return words


def _jobs(fields: Mapping[str, Any], refuse: Refuse) -> tuple[str, ...]:
    """Globs over names and ids of jobs."""
    return _list_of_texts(fields["jobs"], refuse) if "jobs" in fields else DEFAULT_JOBS


def _choice(fields: Mapping[str, Any], name: str, choices: Sequence[str], refuse: Refuse) -> str:
    text = _text(fields, name, refuse)
    if text is not None and text not in choices:
        refuse(_not_one_of(name, text, choices), fields[name], None)
    return text if text is not None and text in choices else choices[0]


def _seconds(
    fields: Mapping[str, Any], name: str, default: float, bounds: tuple[float, float], refuse: Refuse
) -> float:
    text = _text(fields, name, refuse)
    try:
        seconds = default if text is None else float(text)
    except ValueError:
        seconds = -1.0
    if not bounds[0] <= seconds <= bounds[1]:
        refuse(
            Text(
                "notify.seconds",
                "{key}: expected a number of seconds from {low:g} to {high:g}",
                key=name,
                low=bounds[0],
                high=bounds[1],
            ),
            fields[name],
            None,
        )
        return default
    return seconds
