"""What a job file must fulfil beyond the types of its fields: one function a rule, each finds all it can."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable

from ascendrun.core.errors import Problem
from ascendrun.core.jobfile.tree import key_place, place_of
from ascendrun.core.jobfile.yaml_source import MappingNode, Place, ScalarNode, Source, find
from ascendrun.core.jobs.rank_env import OWN_VARIABLES, VISIBLE_DEVICES, is_own_variable
from ascendrun.core.message_format import shown, suggestion
from ascendrun.options import JOB_FILE, OptionProblem, ProgramOptions, check_arguments

MAX_WORD_BYTES = 131_071
"""Linux hands a process no single argument or variable above 128 KiB."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_BARE_WORD = re.compile(r"[A-Za-z0-9_./+-][A-Za-z0-9_./+=:@-]*")
_WRAPPERS = {
    "torchrun": "torchrun",
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "deepspeed": "deepspeed",
}


@dataclass(frozen=True)
class Draft:
    """A job file on its way to a JobSpec. `data` is what the model reads, unchecked; `args` go through `typed_args`.
    `check_names` tells the names that `checks` may hold; None: nobody knows them here."""

    root: MappingNode
    data: dict[str, Any]
    source: Source
    programs: Mapping[str, ProgramOptions]
    check_names: Callable[[], Sequence[str]] | None = None

    def has(self, name: str) -> bool:
        return name in self.data

    def section(self, name: str) -> Mapping[str, Any]:
        value = self.data.get(name)
        return value if isinstance(value, dict) else {}

    def key(self, *path: Any) -> Place:
        return key_place(self.root, path)

    def value(self, *path: Any) -> Place:
        return place_of(self.root, path)

    def is_spoilt(self, *path: Any) -> bool:
        return self.source.is_spoilt(find(self.root, path))

    @property
    def table(self) -> ProgramOptions | None:
        """The options of the job's program; None when there is no such program."""
        name = self.data.get("program")
        return self.programs.get(name) if isinstance(name, str) else None


def broken_rules(draft: Draft) -> Iterator[Problem]:
    for rule in _RULES:
        yield from rule(draft)


def typed_args(draft: Draft) -> dict[str, Any]:
    """`args` by option name, each value of its option's type; wrong ones stay as they are."""
    return dict(draft.section("args")) if draft.table is None else _checked_args(draft, draft.table)[0]


def _checked_args(draft: Draft, table: ProgramOptions) -> tuple[dict[str, Any], list[OptionProblem]]:
    given = draft.section("args")
    texts = {name: text for name in given if (text := _source_text(draft, name)) is not None}
    spoilt = [name for name in given if draft.is_spoilt("args", name)]
    return check_arguments(table, given, JOB_FILE, texts=texts, unchecked=spoilt)


def list_form(command: str) -> str:
    """A command line as the YAML list that means the same; words that YAML could misread stand in quotes."""
    try:
        words = shlex.split(command)
    except ValueError:
        words = command.split()
    return "[" + ", ".join(word if _is_safe_word(word) else _quoted(word) for word in words) + "]"


def _what_to_run(draft: Draft) -> Iterator[Problem]:
    if draft.has("stages"):
        yield draft.key("stages").problem("a stage has no stages of its own")
        return
    given = [name for name in ("program", "command") if draft.has(name)]
    if not given:
        yield draft.root.place.problem(
            "says neither program nor command", "program: trajectory, or command: [python, train.py]"
        )
    for extra in given[1:]:
        yield draft.key(extra).problem(f"{extra} stands beside {given[0]}", "leave one of the two")


def _program(draft: Draft) -> Iterator[Problem]:
    name = draft.data.get("program")
    if isinstance(name, str) and name not in draft.programs and not draft.is_spoilt("program"):
        yield draft.value("program").problem(
            f"no program is called {shown(name)}", suggestion(name, list(draft.programs))
        )


def _args(draft: Draft) -> Iterator[Problem]:
    args = draft.section("args")
    if draft.has("command") and not draft.has("program") and args:
        yield draft.key("args").problem(
            "args belong to a program; a command has its own words", "put them into the command list"
        )
        return
    if draft.table is None:
        return
    for problem in _checked_args(draft, draft.table)[1]:
        if problem.name is None:
            place = draft.key("args") if draft.has("args") else draft.key("program")
        else:
            place = (draft.key if problem.is_name else draft.value)("args", problem.name)
        yield place.problem(str(problem.message), str(problem.hint) if problem.hint else None)
    for name, value in args.items():
        option = draft.table.find(name)
        if option is not None and option.type == "path" and isinstance(value, str) and value.startswith("~"):
            yield _home_problem(draft, "args", name)


def _source_text(draft: Draft, name: str) -> str | None:
    node = find(draft.root, ("args", name))
    return node.text if isinstance(node, ScalarNode) else None


def _command(draft: Draft) -> Iterator[Problem]:
    command = draft.data.get("command")
    if isinstance(command, str) and not draft.is_spoilt("command"):
        yield draft.value("command").problem(
            "command is a text; it never goes through a shell, so it is a list", f"command: {list_form(command)}"
        )
    if not isinstance(command, tuple) or not command:
        return
    words = [word if isinstance(word, str) else "" for word in command]
    if not words[0]:
        yield draft.value("command", 0).problem("the first word of command names nothing to run")
    for index, word in enumerate(words):
        if len(word.encode("utf-8", "replace")) > MAX_WORD_BYTES:
            yield draft.value("command", index).problem("Linux takes no argument above 128 KiB", "put it in a file")
    wrapper = _wrapper(words)
    if wrapper and draft.data.get("launcher") != "python":
        yield draft.value("command", 0).problem(
            f"the command starts {wrapper} itself, once for each rank",
            f"launcher: {wrapper} with command: [python, your_script.py], or launcher: python for one process a node",
        )


def _wrapper(words: Sequence[str]) -> str | None:
    """The launcher that the command calls, by name or as a module."""
    first = words[0].rpartition("/")[2]
    if first in _WRAPPERS:
        return _WRAPPERS[first]
    if first.startswith("python") and len(words) > 2 and words[1] == "-m":
        return _WRAPPERS.get(words[2])
    return None


def _env(draft: Draft) -> Iterator[Problem]:
    family = draft.section("devices").get("family", "cpu")
    visible = VISIBLE_DEVICES.get(family) if isinstance(family, str) else None
    for name, value in draft.section("env").items():
        place = draft.key("env", name)
        if not _VARIABLE.fullmatch(name):
            yield place.problem(f"{shown(name)} is no name of a variable", "letters, digits, _; no digit first")
        elif is_own_variable(name):
            yield place.problem(f"{name} is set by ascendrun for each rank", OWN_VARIABLES.get(name, "delete it"))
        elif name == visible:
            yield place.problem(f"{name} is set by ascendrun", "devices: {ids: [0, 1]} chooses devices")
        elif name == "MASTER_PORT" and not _is_port(value):
            yield draft.value("env", name).problem(
                "MASTER_PORT wants a port from 1 to 65535", "delete it, and a free port is found"
            )
        if isinstance(value, str) and len(name) + len(value.encode("utf-8", "replace")) >= MAX_WORD_BYTES:
            yield place.problem("Linux takes no variable above 128 KiB", "put it in a file")


def _is_port(value: Any) -> bool:
    return isinstance(value, str) and bool(re.fullmatch(r"[1-9][0-9]{0,4}", value)) and int(value) <= 65535


def _devices(draft: Draft) -> Iterator[Problem]:
    devices = draft.section("devices")
    ids, per_node, family = devices.get("ids"), devices.get("per_node"), devices.get("family", "cpu")
    if family == "auto":
        yield draft.value("devices", "family").problem(
            "devices.family auto: not supported yet", "write npu, cuda or cpu"
        )
    if not isinstance(ids, tuple) or not all(type(one) is int for one in ids) or not ids:
        return
    if len(set(ids)) != len(ids) or list(ids) != sorted(ids):
        right = ", ".join(str(one) for one in sorted(set(ids)))
        yield draft.value("devices", "ids").problem("devices.ids must ascend, each once", f"ids: [{right}]")
    if type(per_node) is int and per_node != len(ids):
        yield draft.key("devices", "per_node").problem(
            f"devices.per_node is {per_node}, but ids names {len(ids)}", "leave one of the two"
        )
    if family == "cpu":
        yield draft.key("devices", "ids").problem(
            "devices.ids means nothing for family cpu", f"per_node: {len(ids)}, or family: npu"
        )


def _paths(draft: Draft) -> Iterator[Problem]:
    places: tuple[tuple[Any, ...], ...] = (("hostfile",), ("stage", "dir"), ("checkpoint", "dir"), ("python",))
    files = draft.data.get("env_from")
    if isinstance(files, tuple):
        places += tuple(("env_from", index, "file") for index in range(len(files)))
    for path in places:
        value: Any = draft.data
        for step in path:
            inside = isinstance(value, dict) and step in value or isinstance(value, tuple) and isinstance(step, int)
            value = value[step] if inside else None
        if isinstance(value, str) and value.startswith("~"):
            yield _home_problem(draft, *path)
        elif path == ("checkpoint", "dir") and isinstance(value, str) and not value.startswith("/"):
            yield draft.value(*path).problem(
                "checkpoint.dir lies on the nodes, so it must be absolute",
                "checkpoint: {dir: /data/ckpt}, or leave it out",
            )
        elif path == ("python",) and isinstance(value, str) and "/" in value and not value.startswith("/"):
            yield draft.value(*path).problem(
                "python is run on the nodes: an absolute path, or a name found on PATH", "python: /opt/conda/bin/python"
            )


def _home_problem(draft: Draft, *path: Any) -> Problem:
    name = ".".join(str(step) for step in path)
    return draft.value(*path).problem(
        f"{name}: ~ is not understood; whose home on which machine?", "write the whole path"
    )


def _stage(draft: Draft) -> Iterator[Problem]:
    exclude = draft.section("stage").get("exclude")
    for index, item in enumerate(exclude if isinstance(exclude, tuple) else ()):
        if isinstance(item, str) and (not item.strip("/") or item.startswith("/") or ".." in item.split("/")):
            yield draft.value("stage", "exclude", index).problem(
                f"stage.exclude {shown(item)} names nothing inside stage.dir", "exclude: [data/, .git/, '*.ckpt']"
            )


def _checks(draft: Draft) -> Iterator[Problem]:
    """Names of checks, written with - or _; whoever reads the file without knowing them lets them pass."""
    known = draft.check_names() if draft.check_names is not None and draft.section("checks") else None
    for key in ("skip", "require"):
        names = draft.section("checks").get(key)
        for index, name in enumerate(names if isinstance(names, tuple) else ()):
            if known is not None and isinstance(name, str) and name.replace("_", "-").lower() not in known:
                yield draft.value("checks", key, index).problem(
                    f"no check is called {shown(name)}", suggestion(name, list(known))
                )


def _order_of_pairs(draft: Draft) -> Iterator[Problem]:
    nodes = draft.section("nodes")
    low, high = nodes.get("min"), nodes.get("max")
    if type(low) is int and type(high) is int and low > high:
        yield draft.value("nodes", "min").problem(f"nodes.min {low} is above nodes.max {high}")
    backoff = draft.section("restart").get("backoff_s")
    if isinstance(backoff, tuple) and len(backoff) == 2 and all(type(one) in (int, float) for one in backoff):
        if backoff[0] > backoff[1]:
            yield draft.value("restart", "backoff_s").problem(
                "restart.backoff_s: the first pause is above the longest",
                f"backoff_s: [{backoff[1]:g}, {backoff[0]:g}]",
            )


def _not_yet(draft: Draft) -> Iterator[Problem]:
    """Fields of a later release: refused, so that nobody waits for an effect that does not come."""
    later = [
        (("spares",), bool(draft.data.get("spares")), "delete it; name a healthy host in the hostfile when one fails"),
        (("nodes",), isinstance(draft.data.get("nodes"), dict), "write one number: nodes: 2"),
        (("container",), draft.has("container"), "start the container's runtime in `command`"),
        (("timeouts", "hang_s"), draft.section("timeouts").get("hang_s") is not None, "delete it; max_s is a limit"),
        (("restart", "max"), draft.section("restart").get("max", 0) != 0, "delete it and submit again after a failure"),
    ]
    later.extend(
        (("restart", key), True, "delete it; without restarts it has no effect")
        for key in draft.section("restart")
        if key in ("window_s", "backoff_s", "on", "stop_after_no_progress", "exclude_node_on")
    )
    for path, is_used, way_out in later:
        if is_used:
            yield draft.key(*path).problem(f"{'.'.join(path)}: not supported yet", way_out)


def _is_safe_word(word: str) -> bool:
    return (
        bool(_BARE_WORD.fullmatch(word))
        and not re.match(r"[-+.]?[0-9]", word)
        and word.lower() not in ("yes", "no", "on", "off", "true", "false", "null")
        and word not in ("-",)
    )


def _quoted(word: str) -> str:
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


_RULES: Sequence[Callable[[Draft], Iterator[Problem]]] = (
    _what_to_run,
    _program,
    _args,
    _command,
    _env,
    _devices,
    _paths,
    _stage,
    _checks,
    _order_of_pairs,
    _not_yet,
)
