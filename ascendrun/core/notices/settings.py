"""The `notify`, `hook` and `deadman` blocks of settings files as targets, every problem at its place."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional, Tuple
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field

from ascendrun.core.errors import InvalidInputError, Problem
from ascendrun.core.notices import DEFAULT_JOBS, ON, SERVICES, NoticeSettings, Target, with_name
from ascendrun.core.reader.model_reader import read_model
from ascendrun.core.reader.strict import Name, Texts
from ascendrun.core.reader.yaml_source import MappingNode, place_of, texts
from ascendrun.core.settings import NOTICE_BLOCKS, Settings, SettingsBlocks
from ascendrun.text import LANGUAGES, Text, write

if TYPE_CHECKING:
    Event = str
    Service = str
    Language = str
else:
    Event, Service, Language = Literal[tuple(ON)], Literal[SERVICES], Literal[tuple(LANGUAGES)]

SUFFIX_KINDS = {"started": ("started",), "ok": ("succeeded", "stopped"), "failed": ("failed",)}
_LOOPBACK = re.compile(r"localhost|127\.\d+\.\d+\.\d+|::1")
_LISTED = BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)


class Notify(Texts):
    """A service that receives notifications."""

    name: Optional[Name] = None
    type: Service = Field(examples=["slack"])
    url: Optional[str] = Field(None, repr=False)
    url_file: Optional[str] = None
    secret: Optional[str] = Field(None, repr=False)
    secret_file: Optional[str] = None
    events: Annotated[Tuple[Event, ...], _LISTED] = ("ended",)
    jobs: Annotated[Tuple[str, ...], _LISTED] = DEFAULT_JOBS
    format: Literal["rich", "text"] = "rich"
    lang: Optional[Language] = None


class Hook(Texts):
    """A command that receives notifications."""

    command: Tuple[str, ...] = Field(min_length=1, repr=False, examples=[["/path/to/script", "--flag"]])
    events: Annotated[Tuple[Event, ...], _LISTED] = ("ended",)
    jobs: Annotated[Tuple[str, ...], _LISTED] = DEFAULT_JOBS
    timeout_s: Annotated[float, Field(ge=0.1, le=3600)] = 30.0
    lang: Optional[Language] = None


class Deadman(Texts):
    """A URL that is requested at intervals while jobs run."""

    url: Optional[str] = Field(None, repr=False)
    url_file: Optional[str] = None
    interval_s: Annotated[float, Field(ge=1, le=86400)] = 60.0
    jobs: Annotated[Tuple[str, ...], _LISTED] = DEFAULT_JOBS
    started: Optional[str] = Field(None, repr=False)
    ok: Optional[str] = Field(None, repr=False)
    failed: Optional[str] = Field(None, repr=False)


class Blocks(Texts):
    """The blocks of one file."""

    notify: Tuple[Notify, ...] = Field(
        (), max_length=16, repr=False, examples=[[{"type": "slack", "url_file": "slack.url"}]]
    )
    hook: Optional[Hook] = Field(None, repr=False, examples=[{"command": ["/path/to/script"]}])
    deadman: Optional[Deadman] = Field(None, repr=False, examples=[{"url_file": "deadman.url"}])


def read_notices(settings: Settings) -> NoticeSettings:
    """Return the targets of notifications: of each block the strongest file that has it.

    Raises InvalidInputError with every problem of every file.
    """
    problems: list[Problem] = []
    merged = NoticeSettings()
    for blocks in settings.blocks:
        own = parse_blocks(blocks, problems)
        weak = [target for target in merged.targets if target.block not in own.origins]
        targets = sorted((*weak, *own.targets), key=lambda target: list(NOTICE_BLOCKS).index(target.block))
        merged = NoticeSettings(tuple(targets), {**merged.origins, **own.origins})
    if problems:
        raise InvalidInputError(problems)
    return replace(merged, targets=tuple(replace(one, lang=one.lang or settings.lang) for one in merged.targets))


def parse_blocks(blocks: SettingsBlocks, problems: list[Problem]) -> NoticeSettings:
    """Return the settings of one file; no targets when it has problems, which are added to `problems`. Paths are
    relative to the file."""
    root = blocks.root
    found: list[Problem] = []
    data = {name: texts(root.entries[name]) for name in NOTICE_BLOCKS if name in root.entries}
    model = read_model(Blocks, data, root, blocks.source, found)
    found += _credential_problems(root, data)
    found += _name_problems(root, data)
    found += _suffix_problems(root, data)
    found.sort(key=lambda one: (one.line or 0, one.column or 0))
    problems += [replace(one, is_private=True) for one in found]
    targets = () if model is None or found else _targets(model, blocks.file.parent)
    return NoticeSettings(targets, dict.fromkeys(data, str(blocks.file)))


def _targets(blocks: Blocks, folder: Path) -> tuple[Target, ...]:
    given = [{**each.model_dump(), **_paths(each, folder), "name": each.name or ""} for each in blocks.notify]
    targets = with_name([Target(**fields) for fields in given])
    if blocks.hook is not None:
        program, *rest = blocks.hook.command
        program = os.path.expanduser(program)
        command = (str(folder / program) if "/" in program else program, *rest)
        targets += (Target(**{**blocks.hook.model_dump(), "command": command}, name="hook", type="hook"),)
    if blocks.deadman is None:
        return targets
    suffixes = {
        kind: getattr(blocks.deadman, key)
        for key, kinds in SUFFIX_KINDS.items()
        for kind in kinds
        if getattr(blocks.deadman, key) is not None
    }
    fields = {**blocks.deadman.model_dump(exclude=set(SUFFIX_KINDS)), **_paths(blocks.deadman, folder)}
    return (*targets, Target(**fields, suffixes=suffixes, name="deadman", type="deadman"))


def _paths(block: Any, folder: Path) -> dict[str, str]:
    files = {name: getattr(block, name, None) for name in ("url_file", "secret_file")}
    return {name: os.path.abspath(folder / os.path.expanduser(file)) for name, file in files.items() if file}


def _mappings(data: Mapping[str, Any]) -> Iterator[tuple[tuple[Any, ...], str, Mapping[str, Any]]]:
    """Yield (path, service, keys) of each block with a URL."""
    services = data.get("notify")
    for index, each in enumerate(services if isinstance(services, tuple) else ()):
        if isinstance(each, dict) and each.get("type") in SERVICES:
            yield ("notify", index), each["type"], each
    if isinstance(data.get("deadman"), dict):
        yield ("deadman",), "deadman", data["deadman"]


def _credential_problems(root: MappingNode, data: Mapping[str, Any]) -> Iterator[Problem]:
    for path, service, keys in _mappings(data):
        place, block, url = place_of(root, path), path[0], keys.get("url")
        if (url is None) == (keys.get("url_file") is None):
            hint = Text("notify.one-url-hint", "set url_file to a file (chmod 600) that contains the URL")
            yield place.problem(Text("notify.one-url", "{block}: expected either url_file or url", block=block), hint)
        elif isinstance(url, str):
            problem = url_problem(url, service)
            if problem:
                message = Text("notify.block-url", "{block}.url: {problem}", block=block, problem=problem)
                yield place_of(root, (*path, "url")).problem(message)
        if keys.get("secret") is not None and keys.get("secret_file") is not None:
            yield place.problem(
                Text("notify.one-secret", "{block}: expected either secret_file or secret", block=block)
            )
        if service in ("wecom", "slack", "apprise") and (keys.get("secret") or keys.get("secret_file")):
            yield place.problem(
                Text("notify.no-secret", "{kind} does not support a signing secret", kind=service),
                Text("notify.no-secret-hint", "remove secret; the URL is the only credential"),
            )


def _name_problems(root: MappingNode, data: Mapping[str, Any]) -> Iterator[Problem]:
    taken = {"hook", "deadman"}
    for path, _, keys in _mappings(data):
        name = keys.get("name")
        if isinstance(name, str) and name in taken:
            message = Text("notify.same-name", "notify: duplicate target name {name}", name=name)
            yield place_of(root, (*path, "name")).problem(message)
        taken |= {name} if isinstance(name, str) else set()


def _suffix_problems(root: MappingNode, data: Mapping[str, Any]) -> Iterator[Problem]:
    deadman = data.get("deadman")
    for key in SUFFIX_KINDS:
        suffix = deadman.get(key) if isinstance(deadman, dict) else None
        if isinstance(suffix, str) and suffix and not re.fullmatch(r"/[A-Za-z0-9._~/-]{1,100}", suffix):
            message = Text("notify.suffix", "deadman.{key} must be a path to append to the URL", key=key)
            yield place_of(root, ("deadman", key)).problem(message, write(f"{key}: /fail"))


def url_problem(url: str, service: str) -> Text | None:
    """Return the problem of a URL, without the URL; None: valid."""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  # raises when it is no number
    except ValueError:
        return Text("notify.url", "invalid URL")
    if service == "apprise":
        return None if parts.scheme and parts.netloc else Text("notify.url-apprise", "expected a URL of Apprise")
    if parts.scheme not in ("http", "https") or not parts.hostname or not url.isascii() or not url.isprintable():
        return Text("notify.url-scheme", "expected an http or https URL")
    is_safe = service in ("generic", "deadman") or _LOOPBACK.fullmatch(parts.hostname)
    if parts.scheme == "http" and not is_safe:
        return Text("notify.url-plain", "http sends the credential in the URL unencrypted; https is required")
    return None
