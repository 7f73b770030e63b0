"""Rules of `command` and `env` of a job file."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from typing import Any

from ascendrun.core.errors import Problem
from ascendrun.core.jobfile.launchers import LAUNCHERS, RAY
from ascendrun.core.jobfile.tree import Draft
from ascendrun.core.rank_env import OWN_VARIABLES, VISIBLE_DEVICES, is_own_variable
from ascendrun.core.reader.source_text import REMOVE
from ascendrun.text import Text, write

MAX_ARGUMENT_BYTES = 131_071
"""Linux rejects a single argument or environment variable of 128 KiB or more."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_BARE_WORD = re.compile(r"[A-Za-z0-9_./+-][A-Za-z0-9_./+=:@-]*")
_WRAPPERS = {
    "torchrun": ("torchrun", "torchrun"),
    "torch.distributed.run": ("torchrun", "torchrun"),
    "torch.distributed.launch": ("torchrun", "torchrun"),
    "deepspeed": ("deepspeed", "deepspeed"),
    "accelerate launch": ("accelerate", "accelerate"),
    "accelerate.commands.launch": ("accelerate", "accelerate"),
    "fabric run": ("fabric run", "spawn"),
    "lightning run": ("lightning run", "spawn"),
    "lightning fabric": ("fabric run", "spawn"),
}
"""Commands that start the ranks of a node: (their name, the launcher that starts the same ranks)."""
_SHELLS = frozenset({"sh", "bash", "dash", "zsh"})
_FLAGS = frozenset({"-u", "-B", "-I", "-E", "-s"})
"""Options of Python without a value."""
_ENVIRONMENT_ONLY = frozenset({"source", ".", "export", "unset", "ulimit", "module", "conda", "set", "echo"})
"""Commands of `setup` that leave no files in the working directory."""
_TO_FILE = Text("jobfile.put-into-file", "put the value into a file")


def list_form(command: str) -> str:
    """Return a command line as the equivalent YAML list, with quotes where YAML could read an argument differently."""
    try:
        words = shlex.split(command)
    except ValueError:
        words = command.split()
    return "[" + ", ".join(word if _is_safe_word(word) else _quoted(word) for word in words) + "]"


def command_rule(draft: Draft) -> Iterator[Problem]:
    command = draft.data.get("command")
    if isinstance(command, str) and not draft.is_invalid("command"):
        yield draft.value("command").problem(
            Text("jobfile.command-string", "command: expected a list, got a string"),
            write(f"command: {list_form(command)}"),
        )
    if not isinstance(command, tuple) or not command:
        return
    words = [word if isinstance(word, str) else "" for word in command]
    if not words[0]:
        yield draft.value("command", 0).problem(Text("jobfile.empty-command", "command: the first item is empty"))
    for index, word in enumerate(words):
        if len(word.encode("utf-8", "replace")) > MAX_ARGUMENT_BYTES:
            yield draft.value("command", index).problem(
                Text("jobfile.long-argument", "argument exceeds 128 KiB, the limit of Linux"), _TO_FILE
            )
    wrapper = _wrapper(words)
    if wrapper and draft.data.get("launcher") not in ("none", RAY):
        name, launcher = wrapper
        yield draft.value("command", 0).problem(
            Text("jobfile.nested-launcher", "the command would start {launcher} once for each rank", launcher=name),
            Text(
                "jobfile.nested-launcher-hint",
                "write launcher: {launcher} and command: [python, your_script.py], or launcher: none",
                launcher=launcher,
            ),
        )


def staged_rule(draft: Draft) -> Iterator[Problem]:
    """Yield a problem for a command whose file no node will have: in the working directory is only what is staged."""
    words, files = draft.data.get("command"), draft.files
    if files is None or draft.is_later_stage or not isinstance(words, tuple) or makes_files(draft.data.get("setup")):
        return
    script = script_of([word if isinstance(word, str) else "" for word in words], draft.data.get("launcher", "spawn"))
    if script is None or script.startswith("/"):
        return
    place, below = draft.value("command", 0), draft.section("workdir")
    path = below.get("path")
    is_outside = posixpath.normpath(script).startswith("../")
    values = {"file": script, "directory": path}
    hint = Text("jobfile.stage-or-absolute", "put it into workdir.path, or write its absolute path on the nodes")
    if not draft.has("workdir"):
        is_here = not is_outside and files.is_readable(script)
        message = Text("jobfile.not-staged", "command: {file:quote} is not sent to the nodes without workdir", **values)
        yield place.problem(message, write("workdir: {path: .}") if is_here else hint)
    elif isinstance(path, str) and files.is_directory(path):
        is_excluded = any(fnmatch(script.lstrip("./"), str(each)) for each in below.get("exclude") or ())
        if is_outside or is_excluded or not files.is_readable(posixpath.join(path if path != "." else "", script)):
            message = Text(
                "jobfile.not-in-workdir", "command: {file:quote} is not in {directory}, or excluded", **values
            )
            yield place.problem(message, hint)


def makes_files(setup: object) -> bool:
    """Return whether a setup may make the file that the command runs."""
    return any(words and words[0] not in _ENVIRONMENT_ONLY for words in _simple_commands(str(setup or "")))


def script_of(words: Sequence[str], launcher: Any) -> str | None:
    """Return the file that the command runs, by its path; None: a name on PATH, a module, or not known here."""
    rest = _without_environment(words)
    if not rest:
        return None
    first, name = rest[0], rest[0].rpartition("/")[2]
    if name in _SHELLS or name.startswith("python"):
        while len(rest) > 2 and rest[1] in _FLAGS:
            rest.pop(1)
        commands = _simple_commands(rest[2]) if name in _SHELLS and rest[1:2] == ["-c"] and len(rest) > 2 else []
        if len(commands) == 1:
            return script_of(commands[0], launcher)
        found = rest[1] if len(rest) > 1 and not rest[1].startswith("-") else None
    else:
        found = first if "/" in first or launcher in LAUNCHERS and first.endswith(".py") else None
    return None if found is None or set("$`*~") & set(found) else found


def _without_environment(words: Sequence[str]) -> list[str]:
    rest = list(words)
    while rest and (rest[0] in ("env", "exec") or _ASSIGNMENT.match(rest[0])):
        rest.pop(0)
    return rest


def _wrapper(words: Sequence[str]) -> tuple[str, str] | None:
    """Return the item of _WRAPPERS that the command calls, by name, as a module or in the text of a shell."""
    rest = _without_environment(words)
    if not rest:
        return None
    first = rest.pop(0).rpartition("/")[2]
    if first in _SHELLS and len(rest) > 1 and re.fullmatch(r"-[a-z]*c", rest[0]):
        return next(filter(None, map(_wrapper, _simple_commands(rest[1]))), None)
    if first.startswith("python"):
        while rest and rest[0] in _FLAGS:
            rest.pop(0)
        return _WRAPPERS.get(rest[1]) if rest[:1] == ["-m"] and len(rest) > 1 else None
    return _WRAPPERS.get(first) or _WRAPPERS.get(" ".join((first, *rest[:1])))


def _simple_commands(script: str) -> list[list[str]]:
    """Return the words of each simple command of a shell text; [] if it is not plain."""
    lexer = shlex.shlex(script.replace("\n", ";"), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    commands: list[list[str]] = [[]]
    try:
        for word in lexer:
            if set(word) <= set(";&|()"):
                commands.append([])
            else:
                commands[-1].append(word)
    except ValueError:
        return []
    return commands


def env_rule(draft: Draft) -> Iterator[Problem]:
    device_type = draft.section("devices").get("type", "cpu")
    visible = VISIBLE_DEVICES.get(device_type) if isinstance(device_type, str) else None
    of_launcher = ("RAY_ADDRESS",) if draft.data.get("launcher") == RAY else ()
    for name, value in draft.section("env").items():
        place = draft.key("env", name)
        if not _VARIABLE.fullmatch(name):
            yield place.problem(
                Text("jobfile.variable", "env: invalid variable name {name:quote}", name=name),
                Text("jobfile.variable-hint", "use letters, digits and _; do not start with a digit"),
            )
        elif is_own_variable(name) or name == visible or name in of_launcher:
            hint = Text("jobfile.devices-hint", "select devices with devices: {{ids: [0, 1]}}")
            yield place.problem(
                Text("jobfile.own-variable", "env.{name} is set by ascendrun for each rank", name=name),
                hint if name == visible else OWN_VARIABLES.get(name, REMOVE),
            )
        elif name == "MASTER_PORT" and not _is_port(value):
            yield draft.value("env", name).problem(
                Text("jobfile.master-port", "env.MASTER_PORT: expected a port from 1 to 65535"),
                Text("jobfile.master-port-hint", "remove it to use a free port"),
            )
        if isinstance(value, str) and len(name) + len(value.encode("utf-8", "replace")) >= MAX_ARGUMENT_BYTES:
            yield place.problem(
                Text("jobfile.long-variable", "env.{name} exceeds 128 KiB, the limit of Linux", name=name), _TO_FILE
            )


def _is_port(value: Any) -> bool:
    return isinstance(value, str) and bool(re.fullmatch(r"[1-9][0-9]{0,4}", value)) and int(value) <= 65535


def _is_safe_word(word: str) -> bool:
    return (
        bool(_BARE_WORD.fullmatch(word))
        and not re.match(r"[-+.]?[0-9]", word)
        and word.lower() not in ("yes", "no", "on", "off", "true", "false", "null")
        and word not in ("-",)
    )


def _quoted(word: str) -> str:
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
