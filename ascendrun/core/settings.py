"""Settings: flags, environment variables and the text of settings files, and the origin of each value."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ascendrun.core.dataclass import dataclass
from ascendrun.core.retention import UNITS, Retention
from ascendrun.text import LANGUAGES, Text, TextError

if TYPE_CHECKING:
    from ascendrun.core.errors import Problem
    from ascendrun.core.reader.yaml_source import MappingNode, Source

STATE_VARIABLE = "ASCENDRUN_STATE_DIR"
FORWARDED_VARIABLE = "ASCENDRUN_FORWARDED"
"""In the environment of a command that another machine sent: by a "head" setting, or to the "store"."""
REQUESTER_VARIABLE = "ASCENDRUN_REQUESTED_BY"
"""In the environment of a command that runs for another user: who typed it."""
SYSTEM_FILE = Path("/etc/ascendrun/config.yaml")
LOGIN_FILE = "login.env"
"""Lines NAME=value in `local_root`: variables of a login on that host that are missing in this environment."""
NOTICE_BLOCKS: Mapping[str, Text] = {
    "notify": Text("config.meaning.notify", "services that receive notifications"),
    "hook": Text("config.meaning.hook", "command that receives notifications"),
    "deadman": Text("config.meaning.deadman", "URL requested at intervals while jobs run"),
}
"""Blocks of a settings file, see core/notices/settings.py."""
POWER_BLOCK = "power"
"""Block of a settings file, see core/power_settings.py."""
SHARE_BLOCK = "fair_share"
"""Block of a settings file, see core/share_settings.py."""
STANDBY_BLOCK = "standby"
"""Block of a settings file, see core/standby_settings.py."""
ENGINE_BLOCK = "engines"
"""Block of a settings file with the engines of a site by name, see core/engines.py."""
BLOCKS = {
    **NOTICE_BLOCKS,
    POWER_BLOCK: Text("config.meaning.power", "command that switches off hosts that do not respond"),
    SHARE_BLOCK: Text("config.meaning.fair_share", "shares and quotas of users and projects"),
    STANDBY_BLOCK: Text("config.meaning.standby", "second machine of this head, and its voters"),
    ENGINE_BLOCK: Text("config.meaning.engines", "engines of this site by name"),
}
FORM = Text("settings.form", "write one setting on each line, such as `color: never`")


@dataclass(frozen=True)
class SettingsBlocks:
    """The blocks of one settings file, not yet checked: recipients of notifications, power, shares, the standby,
    and engines."""

    file: Path
    root: MappingNode
    source: Source


T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """`state_dir`: all data of the head node (0700, on a local disk). `hostfile`: for commands without a hostfile,
    None: they fail. `color`: auto, always or never. `exec_timeout_s`: time limit of an `exec` command on a host.
    `transport`: connection to hosts behind SSH: auto, paramiko, or openssh (the ssh program). `lang`: the language of
    messages, en or zh, None: that of the locale. `default_engine`: of jobs that name neither an engine nor a hostfile,
    None: they fail. `head`: user@host on which commands run, or several with commas, of which one is the head, None:
    this machine. `queue`: directory of the queue that
    the users of this machine share, None: jobs of this user only are considered. `owner`: another machine
    that has the store, None: this one, or none yet. `retention`: the settings with a
    `limit`. `origins`: by name, the origin of its value, such as "default" or "$ASCENDRUN_COLOR". `blocks`: the
    weakest file first; `notices.settings.read_notices`, `power_settings.read_power`, `share_settings.read_share`,
    `standby_settings.read_standby` and `engines.find_engine` check them.
    """

    state_dir: Path
    hostfile: Path | None = None
    color: str = "auto"
    exec_timeout_s: float = 60.0
    transport: str = "auto"
    lang: str | None = None
    default_engine: str | None = None
    idle_check_s: float | None = None
    head: str | None = None
    queue: Path | None = None
    owner: str | None = None
    retention: Retention = field(default_factory=Retention)
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)
    blocks: tuple[SettingsBlocks, ...] = field(default=(), compare=False)

    def strongest(self, parse: Callable[[SettingsBlocks, list[Problem]], T | None]) -> T | None:
        """Return what `parse` reads of the strongest file that has it; None: no file has. Raises InvalidInputError with
        the problems that `parse` adds for each file."""
        problems: list[Problem] = []
        found = [parse(blocks, problems) for blocks in self.blocks]
        if problems:
            from ascendrun.core.errors import InvalidInputError

            raise InvalidInputError(problems)
        return next(filter(None, reversed(found)), None)


class InvalidSettingError(TextError):
    """A text that is not a valid value of its setting."""


@dataclass(frozen=True)
class Setting:
    """A setting: its meaning, and the conversion of its text to a value (raises InvalidSettingError).

    `parse` gets the text and the directory that a relative path starts from. `limit`: the field of Retention that it
    sets, "": none; `unit`: how many units of the field one of the setting is.
    """

    name: str
    meaning: Text
    parse: Callable[[str, Path], Any]
    limit: str = ""
    unit: float = 1.0

    @property
    def variable(self) -> str:
        return f"ASCENDRUN_{self.name.upper()}"

    def value(self, settings: Settings) -> Any:
        """Return the value in the unit of the setting; None: not set."""
        return getattr(settings.retention, self.limit) / self.unit if self.limit else getattr(settings, self.name)


def _parse_path(text: str, folder: Path) -> Path:
    if not text:
        raise InvalidSettingError(Text("settings.empty-path", "expected a path"))
    return Path(os.path.abspath(folder / os.path.expanduser(text)))


def _one_of(*choices: str) -> Callable[[str, Path], str]:
    def parse(text: str, _folder: Path) -> str:
        if text not in choices:
            raise _not_one_of(text, choices)
        return text

    return parse


def _not_one_of(text: str, choices: Sequence[str]) -> InvalidSettingError:
    return InvalidSettingError(
        Text("settings.choice", "expected one of {choices}, got {value:quote}", choices=list(choices), value=text)
    )


def _number(text: str) -> float:
    """Return the number of a text; -1 if it is none."""
    try:
        return float(text)
    except ValueError:
        return -1.0


def _parse_seconds(text: str, _folder: Path) -> float:
    seconds = _number(text)
    if not 0 < seconds <= 86400:
        raise InvalidSettingError(
            Text("settings.seconds", "expected a number of seconds up to 86400, got {value:quote}", value=text)
        )
    return seconds


def _parse_interval(text: str, folder: Path) -> float | None:
    return None if text == "off" else _parse_seconds(text, folder)


def _parse_lang(text: str, _folder: Path) -> str:
    """Also accept the name of a locale, such as zh_CN.UTF-8, and the language of tests."""
    lang = next((lang for lang in ("en", "zh", "pseudo") if text.lower().startswith(lang)), None)
    if lang is None:
        raise _not_one_of(text, LANGUAGES)
    return lang


def _limit(limit: str, *, setting: str, meaning: Text) -> Setting:
    unit = UNITS[setting.rpartition("_")[2]]

    def parse(text: str, _folder: Path) -> int:
        amount = _number(text)
        if not 0 < amount < 1e9:
            raise InvalidSettingError(
                Text("settings.amount", "expected a number above 0, got {value:quote}", value=text)
            )
        return round(amount * unit)

    return Setting(setting, meaning, parse, limit, unit)


SETTINGS: tuple[Setting, ...] = (
    Setting(
        "state_dir", Text("settings.state-dir", "directory of jobs, logs and samples; on a local disk"), _parse_path
    ),
    Setting("hostfile", Text("settings.hostfile", "hosts of nodes, exec and trust if none are given"), _parse_path),
    Setting(
        "color", Text("settings.color", "colored output: auto, always or never"), _one_of("auto", "always", "never")
    ),
    Setting(
        "exec_timeout_s",
        Text("settings.exec-timeout", "time limit of a command of exec on a host, in seconds"),
        _parse_seconds,
    ),
    Setting(
        "transport",
        Text("settings.transport", "SSH implementation: auto, paramiko or openssh"),
        _one_of("auto", "paramiko", "openssh"),
    ),
    Setting("lang", Text("settings.lang", "language of messages: en or zh (default: that of the locale)"), _parse_lang),
    Setting(
        "default_engine",
        Text("settings.default-engine", "engine of jobs that name neither an engine nor a hostfile"),
        lambda text, _folder: text,
    ),
    Setting(
        "idle_check_s",
        Text("settings.idle-check", "seconds between background checks of an idle host, or off"),
        _parse_interval,
    ),
    Setting("head", Text("settings.head", "user@host on which commands run, through ssh"), lambda text, _folder: text),
    Setting(
        "queue", Text("settings.queue", "directory of the queue that the users of this machine share"), _parse_path
    ),
    *(_limit(one.name, **one.metadata) for one in fields(Retention)),
)
_BY_NAME: Mapping[str, Setting] = {setting.name: setting for setting in SETTINGS}


@dataclass(frozen=True)
class _Given:
    """One value of one source: `folder` is where its relative path starts; `place` and `is_private` are those of a
    Problem."""

    name: str
    text: str
    folder: Path
    place: tuple[str, int | None, int | None]
    is_private: bool = False


def parse_settings(
    texts: Mapping[Path, bytes],
    environ: Mapping[str, str],
    *,
    flags: Mapping[str, str],
    folder: Path,
    check_blocks: Callable[[SettingsBlocks, list[Problem]], object],
    problems: Sequence[Problem] = (),
) -> Settings:
    """Return the settings: flag > environment > files > default. `texts`: of the files, the weakest first; `folder`:
    where a relative path of a flag or a variable starts; `check_blocks` adds the problems of blocks, and is called if
    there are other problems; `problems`: those found before.

    Raises InvalidInputError with every problem of every source.
    """
    found = list(problems)
    values: dict[str, Any] = {"state_dir": default_state_dir(environ)}
    origins = dict.fromkeys(_BY_NAME, "default")
    blocks: list[SettingsBlocks] = []
    for file, text in texts.items():
        _set_all(values, origins, _of_file(file, text, blocks, found), found)
    given = [
        _Given(setting.name, environ[setting.variable], folder, (f"${setting.variable}", None, None))
        for setting in SETTINGS
        if environ.get(setting.variable)
    ]
    given += [_Given(name, text, folder, (f"--{name.replace('_', '-')}", None, None)) for name, text in flags.items()]
    _set_all(values, origins, given, found)
    limits = {one.limit: values.pop(one.name) for one in SETTINGS if one.limit and one.name in values}
    settings = Settings(origins=origins, retention=replace(Retention(), **limits), blocks=tuple(blocks), **values)
    if found:
        from ascendrun.core.errors import InvalidInputError

        for block in blocks:
            check_blocks(block, found)
        order = {str(file): number for number, file in enumerate(texts)}
        found.sort(key=lambda one: (order.get(one.file, len(order)), one.line or 0, one.column or 0))
        raise InvalidInputError(found)
    return settings


def _set_all(values: dict[str, Any], origins: dict[str, str], given: Iterable[_Given], problems: list[Problem]) -> None:
    for one in given:
        setting = _BY_NAME.get(one.name)
        try:
            if setting is None:
                raise InvalidSettingError(Text("settings.unknown", "unknown setting {name:quote}", name=one.name))
            values[one.name] = setting.parse(one.text, one.folder)
            origins[one.name] = one.place[0]
        except InvalidSettingError as error:
            from ascendrun.core.errors import Problem
            from ascendrun.text import suggestion

            hint = (
                suggestion(one.name, list(_BY_NAME))
                if setting is None
                else Text("settings.meaning", "{name}: {meaning}", name=one.name, meaning=setting.meaning)
            )
            problems.append(Problem(*one.place, error.message, hint, one.is_private))


def _of_file(file: Path, text: bytes, blocks: list[SettingsBlocks], problems: list[Problem]) -> Iterator[_Given]:
    """Yield the plain settings of a file; BLOCKS go to `blocks`."""
    from ascendrun.core.reader.yaml_source import ListNode, MappingNode, ScalarNode, read_yaml

    source = read_yaml(text, str(file), is_plain=True)
    problems += [replace(problem, is_private=True) for problem in source.problems]
    root = source.root
    if root is None or not source.is_complete:
        return
    if not isinstance(root, MappingNode):
        problem = root.place.problem(Text("settings.mapping", "expected a mapping of names to values"), FORM)
        problems.append(replace(problem, is_private=True))
        return
    if any(name in BLOCKS for name in root.entries):
        blocks.append(SettingsBlocks(file, root, source))
    is_block = root.place == next(iter(root.keys.values()), None)  # each name has its own line
    for name, node in root.entries.items():
        place = root.keys[name]
        if name in BLOCKS or source.is_invalid(node):
            continue
        if isinstance(node, ScalarNode):
            is_private = name not in _BY_NAME or not is_block
            yield _Given(name, node.text, file.parent, (str(file), place.line, place.column), is_private)
        elif name == "head" and isinstance(node, ListNode) and all(isinstance(one, ScalarNode) for one in node.items):
            heads = ",".join(one.text for one in node.items if isinstance(one, ScalarNode))
            yield _Given(name, heads, file.parent, (str(file), place.line, place.column))
        else:
            problem = place.problem(Text("settings.plain", "expected one plain value for each name"), FORM)
            problems.append(replace(problem, is_private=True))


def settings_files(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the usual files, the weakest first."""
    return (SYSTEM_FILE, user_file(environ))


def user_file(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return Path(base) / "ascendrun" / "config.yaml"


def default_state_dir(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return Path(base) / "ascendrun"


def local_root(settings: Settings, name: str) -> Path:
    """Return the directory used as the home of a node where host `name` is this machine (`addr=local`).

    Raises UnreachableError for a name that would lead out of the state directory.
    """
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
        from ascendrun.core.errors import UnreachableError

        raise UnreachableError(
            Text("ssh.local-name", "invalid name of a local host: {name:quote}", name=name),
            hint=Text("ssh.local-name.hint", "use letters, digits, dots, dashes and underscores in the hostfile"),
        )
    return settings.state_dir / "local" / name
