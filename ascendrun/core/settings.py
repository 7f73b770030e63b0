"""Settings: flags, environment variables and settings files, and the origin of each value."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ascendrun.core.dataclass import dataclass
from ascendrun.core.retention import DAY_S, GIB, MIB, Retention
from ascendrun.text import LANGUAGES, Text

if TYPE_CHECKING:
    from ascendrun.core.errors import Problem
    from ascendrun.core.notice_settings import NoticeSettings

STATE_VARIABLE = "ASCENDRUN_STATE_DIR"
SYSTEM_FILE = Path("/etc/ascendrun/config.yaml")
FILE_LIMIT_BYTES = 64 * 1024
LOGIN_FILE = "login.env"
"""Lines NAME=value in `local_root`: variables of a login on that host that are missing in this environment."""
NOTICE_BLOCKS: Mapping[str, Text] = {
    "notify": Text("config.meaning.notify", "services that receive notifications"),
    "hook": Text("config.meaning.hook", "command that receives notifications"),
    "deadman": Text("config.meaning.deadman", "URL requested at intervals while jobs run"),
}
"""Blocks of a settings file, see core/notice_settings.py."""


@dataclass(frozen=True)
class Settings:
    """`state_dir`: all data of the head node (0700, on a local disk). `hostfile`: for commands without a hostfile,
    None: they fail. `color`: auto, always or never. `exec_timeout_s`: time limit of an `exec` command on a host.
    `transport`: connection to hosts behind SSH: auto, paramiko, or openssh (the ssh program). `lang`: the language of
    messages, en or zh, None: that of the locale. `retention`: the settings of LIMITS. `origins`: by name, the origin of
    its value, such as "default" or "$ASCENDRUN_COLOR". `notices`: recipients of notifications, None: none.
    """

    state_dir: Path
    hostfile: Path | None = None
    color: str = "auto"
    exec_timeout_s: float = 60.0
    transport: str = "auto"
    lang: str | None = None
    idle_check_s: float | None = None
    retention: Retention = field(default_factory=Retention)
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)
    notices: NoticeSettings | None = None


@dataclass(frozen=True)
class SettingView:
    """One setting as `config` shows it. `value` None: not set."""

    name: str
    value: str | None
    origin: str
    meaning: Text


class InvalidSettingError(ValueError):
    """A text that is not a valid value of its setting."""

    def __init__(self, message: Text) -> None:
        super().__init__(message)
        self.message = message


@dataclass(frozen=True)
class Setting:
    """A setting: its meaning, and the conversion of its text to a value (raises InvalidSettingError).

    `parse` gets the text and the directory that a relative path starts from.
    """

    name: str
    meaning: Text
    parse: Callable[[str, Path], Any]

    @property
    def variable(self) -> str:
        return f"ASCENDRUN_{self.name.upper()}"


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


def _parse_seconds(text: str, _folder: Path) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
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


LIMITS: Mapping[str, tuple[str, float, Text]] = {
    "pull_error_mib": (
        "pull_error_bytes",
        MIB,
        Text("settings.pull-error", "MiB of a rank's error file that are copied to the head node"),
    ),
    "pull_metrics_mib": (
        "pull_metrics_bytes",
        MIB,
        Text("settings.pull-metrics", "MiB of a rank's metrics that are copied to the head node"),
    ),
    "pull_job_gib": (
        "pull_job_bytes",
        GIB,
        Text("settings.pull-job", "GiB of a job on the head node; its further logs stay on the nodes"),
    ),
    "outputs_job_gib": (
        "outputs_job_bytes",
        GIB,
        Text("settings.outputs-job", "GiB of a job's `outputs` that are fetched to the head node at its end"),
    ),
    "min_free_gib": (
        "min_free_bytes",
        GIB,
        Text("settings.min-free", "GiB to keep free on the head node; with less, logs stay on the nodes"),
    ),
    "keep_jobs_days": (
        "keep_jobs_s",
        DAY_S,
        Text("settings.keep-jobs-days", "days after its end until `prune` removes a job's logs from the head node"),
    ),
    "keep_jobs_gib": (
        "keep_jobs_bytes",
        GIB,
        Text("settings.keep-jobs", "GiB of all jobs on the head node; beyond it `prune` removes the oldest"),
    ),
    "keep_node_days": (
        "keep_node_s",
        DAY_S,
        Text("settings.keep-node-days", "days after its end until `prune` removes a job's logs from a node"),
    ),
    "keep_node_gib": (
        "keep_node_bytes",
        GIB,
        Text("settings.keep-node", "GiB of ended jobs on a node; beyond it `prune` removes the oldest"),
    ),
}
"""Settings of Retention: the field, its units in one unit of the setting, the meaning."""


def _parse_amount(unit: float) -> Callable[[str, Path], int]:
    def parse(text: str, _folder: Path) -> int:
        try:
            amount = float(text)
        except ValueError:
            amount = -1.0
        if not 0 < amount < 1e9:
            raise InvalidSettingError(
                Text("settings.amount", "expected a number above 0, got {value:quote}", value=text)
            )
        return round(amount * unit)

    return parse


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
        "idle_check_s",
        Text("settings.idle-check", "seconds between background checks of an idle host, or off"),
        _parse_interval,
    ),
    *(Setting(name, meaning, _parse_amount(unit)) for name, (_, unit, meaning) in LIMITS.items()),
)


def load_settings(
    environ: Mapping[str, str], *, flags: Mapping[str, str] | None = None, files: Sequence[Path] | None = None
) -> Settings:
    """Load settings: flag > environment > user's file > system's file > default.

    `files`: the configuration files, the weakest first; None: the usual two. A missing file is not an error. Raises
    InvalidInputError with every problem of every source.
    """
    problems: list[Problem] = []
    values: dict[str, Any] = {"state_dir": default_state_dir(environ)}
    origins = {setting.name: "default" for setting in SETTINGS}
    for file in files if files is not None else settings_files(environ):
        of_file: list[Problem] = []
        blocks: dict[str, Any] = {}
        for name, (text, line, column) in _read_file(file, of_file, blocks).items():
            _set(values, origins, name, text, str(file), file.parent, (str(file), line, column), of_file)
        if blocks:
            from ascendrun.core.notice_settings import NoticeSettings, merge, parse_blocks

            values["notices"] = merge(values.get("notices") or NoticeSettings(), parse_blocks(blocks, file, of_file))
        problems.extend(sorted(of_file, key=lambda problem: (problem.line or 0, problem.column or 0)))
    for setting in SETTINGS:
        given = environ.get(setting.variable)
        if given:
            origin = f"${setting.variable}"
            _set(values, origins, setting.name, given, origin, Path.cwd(), (origin, None, None), problems)
    for name, text in (flags or {}).items():
        flag = f"--{name.replace('_', '-')}"
        _set(values, origins, name, text, flag, Path.cwd(), (flag, None, None), problems)
    if values.get("notices") and values.get("lang"):
        from ascendrun.core.notice_settings import with_language

        values["notices"] = with_language(values["notices"], values["lang"])
    if problems:
        from ascendrun.core.errors import InvalidInputError

        raise InvalidInputError(problems)
    limits = {field: values.pop(name) for name, (field, _, _) in LIMITS.items() if name in values}
    return Settings(origins=origins, retention=replace(Retention(), **limits), **values)


def _set(
    values: dict[str, Any],
    origins: dict[str, str],
    name: str,
    text: str,
    origin: str,
    folder: Path,
    place: tuple[str, int | None, int | None],
    problems: list[Problem],
) -> None:
    setting = next((setting for setting in SETTINGS if setting.name == name), None)
    try:
        if setting is None:
            raise InvalidSettingError(Text("settings.unknown", "unknown setting {name:quote}", name=name))
        values[name] = setting.parse(text, folder)
        origins[name] = origin
    except InvalidSettingError as error:
        from ascendrun.core.errors import Problem
        from ascendrun.text import suggestion

        hint = (
            suggestion(name, [setting.name for setting in SETTINGS])
            if setting is None
            else Text("settings.meaning", "{name}: {meaning}", name=name, meaning=setting.meaning)
        )
        problems.append(Problem(*place, message=error.message, hint=hint))


def _read_file(file: Path, problems: list[Problem], blocks: dict[str, Any]) -> dict[str, tuple[str, int, int]]:
    """Return name -> (text, line, column) of a YAML mapping; {} if the file is missing. The YAML nodes of NOTICE_BLOCKS
    go to `blocks`."""
    from ascendrun.core.errors import Problem

    def refuse(message: Text, line: int | None = None, column: int | None = None) -> None:
        hint = Text("settings.form", "write one setting on each line, such as `color: never`")
        problems.append(Problem(str(file), line, column, message, hint))

    try:
        with open(file, "rb") as opened:
            raw = opened.read(FILE_LIMIT_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        refuse(Text("settings.cannot-read", "cannot read the file: {error}", error=error.strerror))
        return {}
    if len(raw) > FILE_LIMIT_BYTES:
        refuse(Text("settings.too-large", "the file exceeds {limit:bytes}", limit=FILE_LIMIT_BYTES))
        return {}
    return _parse_mapping(raw, refuse, blocks)


def _parse_mapping(raw: bytes, refuse: Callable[..., None], blocks: dict[str, Any]) -> dict[str, tuple[str, int, int]]:
    import yaml

    try:
        node = yaml.compose(raw.decode("utf-8"), Loader=yaml.SafeLoader)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        what = (
            Text("settings.too-deep", "nested too deeply")
            if isinstance(error, RecursionError)
            else getattr(error, "problem", None) or str(error)
        )
        message = Text("settings.not-yaml", "invalid YAML: {error}", error=what)
        refuse(message, mark.line + 1 if mark else None, mark.column + 1 if mark else None)
        return {}
    if node is None:
        return {}
    if not isinstance(node, yaml.MappingNode):
        refuse(Text("settings.mapping", "expected a mapping of names to values"), 1, 1)
        return {}
    found: dict[str, tuple[str, int, int]] = {}
    for key, value in node.value:
        line, column = key.start_mark.line + 1, key.start_mark.column + 1
        if key.value in NOTICE_BLOCKS and key.value not in blocks:
            blocks[key.value] = value
        elif not (isinstance(key, yaml.ScalarNode) and isinstance(value, yaml.ScalarNode)):
            refuse(Text("settings.plain", "expected one plain value for each name"), line, column)
        elif key.value in found:
            refuse(Text("settings.duplicate", "duplicate setting {name}", name=key.value), line, column)
        else:
            found[key.value] = (value.value, line, column)
    return found


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


def view_settings(settings: Settings) -> tuple[SettingView, ...]:
    """Return every setting with value and origin. For URLs of notifications only the host: the rest is a credential."""
    views = []
    for setting in SETTINGS:
        of, unit, _ = LIMITS.get(setting.name, ("", 1.0, None))
        value = getattr(settings.retention, of) / unit if of else getattr(settings, setting.name)
        text = None if value is None else f"{value:g}" if isinstance(value, float) else str(value)
        views.append(SettingView(setting.name, text, settings.origins[setting.name], setting.meaning))
    notices = settings.notices
    texts: dict[str, list[str]] = {block: [] for block in NOTICE_BLOCKS}
    if notices is not None:
        from ascendrun.core.notice_settings import where_of

        for target in notices.everyone:
            block = target.type if target.type in texts else "notify"
            shown = f"{target.name} ({target.type})" if target.name != target.type else target.name
            texts[block].append(f"{shown} {where_of(target)}")
    origins = notices.origins if notices is not None else {}
    for block, meaning in NOTICE_BLOCKS.items():
        views.append(SettingView(block, ", ".join(texts[block]) or None, origins.get(block, "default"), meaning))
    return tuple(views)
