"""Rules of a job file beyond the types of its keys: one function per rule, which reports all problems it finds."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Callable

from ascendrun.core.errors import Problem
from ascendrun.core.jobfile import model
from ascendrun.core.jobfile.command_rules import command_rule, env_rule, staged_rule
from ascendrun.core.jobfile.container_rules import container_rule
from ascendrun.core.jobfile.launchers import RAY
from ascendrun.core.jobfile.roles import role_drafts, roles_rule
from ascendrun.core.jobfile.tree import Draft, home_problem
from ascendrun.core.metrics import PROGRESS_NAMES
from ascendrun.core.reader.source_text import REMOVE
from ascendrun.core.reader.yaml_source import ScalarNode, find
from ascendrun.options import JOB_FILE, OptionProblem, ProgramOptions, check_arguments
from ascendrun.text import Text, suggestion, write


def broken_rules(draft: Draft) -> Iterator[Problem]:
    for rule in _RULES:
        yield from rule(draft)
    for role in role_drafts(draft):
        for rule in _RULES_OF_ROLE:
            yield from rule(role)


def typed_args(draft: Draft) -> dict[str, Any]:
    """Return `args` by option name, converted to the type of the option; invalid values are unchanged."""
    return dict(draft.section("args")) if draft.table is None else _checked_args(draft, draft.table)[0]


def _checked_args(draft: Draft, table: ProgramOptions) -> tuple[dict[str, Any], list[OptionProblem]]:
    given = draft.section("args")
    nodes = {name: find(draft.root, ("args", name)) for name in given}
    texts = {name: node.text for name, node in nodes.items() if isinstance(node, ScalarNode)}
    invalid = [name for name in given if draft.is_invalid("args", name)]
    return check_arguments(table, given, JOB_FILE, texts=texts, unchecked=invalid)


def _what_to_run(draft: Draft) -> Iterator[Problem]:
    if draft.has("stages"):
        yield draft.key("stages").problem(Text("stages.nested", "a stage cannot have stages"), REMOVE)
        return
    given = [name for name in ("program", "command", "roles") if draft.has(name)]
    if not given:
        yield draft.root.place.problem(
            Text("jobfile.nothing-to-run", "program or command is required"),
            Text("jobfile.nothing-to-run-hint", "write program: trajectory, or command: [python, train.py]"),
        )
    for extra in given[1:]:
        yield draft.key(extra).problem(
            Text("jobfile.program-and-command", "{key} cannot be combined with {other}", key=extra, other=given[0])
        )


def _program(draft: Draft) -> Iterator[Problem]:
    if draft.has("program") and draft.data.get("launcher") == RAY:
        text = Text("jobfile.ray-program", "launcher ray requires command, not program")
        yield draft.key("launcher").problem(
            text, Text("jobfile.ray-program-hint", "write command, or another launcher")
        )
    name = draft.data.get("program")
    if not isinstance(name, str) or draft.is_invalid("program"):
        return
    if name.endswith(".py") and not draft.has("workdir"):
        yield draft.value("program").problem(
            Text("jobfile.own-program-workdir", "program: {name:quote} requires workdir", name=name),
            write("workdir: {path: .}"),
        )
    elif name.endswith(".py") and name not in draft.programs:
        yield draft.value("program").problem(
            Text("jobfile.own-program-options", "program: {name:quote} or its table of options not found", name=name),
            Text(
                "jobfile.own-program-options-hint",
                "write the options of the program into {file}, next to it",
                file=f"{name[2:-3]}.json",
            ),
        )
    elif name not in draft.programs:
        yield draft.value("program").problem(
            Text("jobfile.unknown-program", "program: unknown program {name:quote}", name=name),
            suggestion(name, list(draft.programs)),
        )


def _args(draft: Draft) -> Iterator[Problem]:
    args = draft.section("args")
    if (draft.has("command") or draft.has("roles")) and not draft.has("program") and args:
        yield draft.key("args").problem(
            Text("jobfile.args-of-command", "args requires program"),
            Text("jobfile.args-of-command-hint", "with command, append the arguments to the command list"),
        )
        return
    if draft.table is None:
        return
    for problem in _checked_args(draft, draft.table)[1]:
        if problem.name is None:
            place = draft.key("args") if draft.has("args") else draft.key("program")
        else:
            place = (draft.key if problem.is_name else draft.value)("args", problem.name)
        yield place.problem(problem.message, problem.hint)
    for name, value in args.items():
        option = draft.table.find(name)
        if option is not None and option.type == "path" and isinstance(value, str) and value.startswith("~"):
            yield home_problem(draft, "args", name)


def _devices(draft: Draft) -> Iterator[Problem]:
    devices = draft.section("devices")
    ids, per_node, device_type = devices.get("ids"), devices.get("per_node"), devices.get("type", "cpu")
    if not isinstance(ids, tuple) or not all(type(each) is int for each in ids) or not ids:
        return
    if len(set(ids)) != len(ids) or list(ids) != sorted(ids):
        right = ", ".join(str(each) for each in sorted(set(ids)))
        yield draft.value("devices", "ids").problem(
            Text("jobfile.ids-order", "devices.ids must be ascending and unique"), write(f"ids: [{right}]")
        )
    if type(per_node) is int and per_node != len(ids):
        yield draft.key("devices", "per_node").problem(
            Text(
                "jobfile.ids-count",
                "devices.per_node is {per_node}, but devices.ids has {count:plural item items}",
                per_node=per_node,
                count=len(ids),
            ),
            Text("jobfile.ids-count-hint", "remove per_node or ids"),
        )
    if device_type == "cpu":
        yield draft.key("devices", "ids").problem(
            Text("jobfile.ids-of-cpu", "devices.ids is not supported with device type cpu"),
            Text("jobfile.ids-of-cpu-hint", "write per_node: {count}, or type: npu", count=len(ids)),
        )


def _progress(draft: Draft) -> Iterator[Problem]:
    pattern = draft.section("progress").get("pattern")
    if not isinstance(pattern, str) or draft.is_invalid("progress", "pattern"):
        return
    place = draft.value("progress", "pattern")
    hint = write(f"progress: {{pattern: '{model.PATTERN_EXAMPLE}'}}")
    try:
        names = re.compile(pattern).groupindex
    except re.error as error:
        message = Text("jobfile.progress-regex", "progress.pattern: invalid regular expression: {why}", why=str(error))
        yield place.problem(message, hint)
        return
    unknown = sorted(set(names) - set(PROGRESS_NAMES))
    if unknown:
        yield place.problem(
            Text(
                "jobfile.progress-group",
                "progress.pattern: unknown group {names}; expected {expected}",
                names=unknown,
                expected=list(PROGRESS_NAMES),
            ),
            hint,
        )
    elif "step" not in names:
        yield place.problem(Text("jobfile.progress-step", "progress.pattern requires the group step"), hint)


def _paths(draft: Draft) -> Iterator[Problem]:
    places: tuple[tuple[Any, ...], ...] = (("hostfile",), ("workdir", "path"), ("checkpoint", "dir"), ("python",))
    files = draft.data.get("env_file")
    if isinstance(files, tuple):
        places += tuple(("env_file", index) for index in range(len(files)))
    for path in places:
        value = draft.at(path)
        if not isinstance(value, str) or not value or draft.is_invalid(*path):
            continue
        if value.startswith("~"):
            yield home_problem(draft, *path)
        elif path == ("checkpoint", "dir") and not value.startswith("/"):
            yield draft.value(*path).problem(
                Text("jobfile.checkpoint-dir", "checkpoint.dir must be an absolute path on the nodes"),
                Text("jobfile.checkpoint-dir-hint", "write checkpoint: {{dir: /data/ckpt}}, or remove it"),
            )
        elif path == ("python",) and "/" in value and not value.startswith("/"):
            yield draft.value(*path).problem(
                Text("jobfile.python", "python must be an absolute path on the nodes, or a name on PATH"),
                write("python: /opt/conda/bin/python"),
            )
        elif draft.files is not None and path == ("workdir", "path") and not draft.files.is_directory(value):
            yield draft.value(*path).problem(
                Text("jobfile.no-directory", "{key}: directory {path:quote} not found", key="workdir.path", path=value),
                Text("jobfile.relative-hint", "the path is relative to the job file"),
            )
        elif draft.files is not None and path[0] == "env_file" and not draft.files.is_readable(value):
            yield draft.value(*path).problem(
                Text("jobfile.no-file", "{key}: cannot read file {path:quote}", key="env_file", path=value),
                Text("jobfile.relative-hint", "the path is relative to the job file"),
            )


def _workdir(draft: Draft) -> Iterator[Problem]:
    exclude = draft.section("workdir").get("exclude")
    for index, item in enumerate(exclude if isinstance(exclude, tuple) else ()):
        if isinstance(item, str) and (not item.strip("/") or item.startswith("/") or ".." in item.split("/")):
            yield draft.value("workdir", "exclude", index).problem(
                Text("jobfile.exclude", "workdir.exclude: {pattern:quote} is outside workdir.path", pattern=item),
                write("exclude: [data/, .git/, '*.ckpt']"),
            )


def _outputs(draft: Draft) -> Iterator[Problem]:
    patterns = draft.data.get("outputs")
    for index, item in enumerate(patterns if isinstance(patterns, tuple) else ()):
        if not isinstance(item, str) or draft.is_invalid("outputs", index):
            continue
        if item.startswith("~"):
            yield home_problem(draft, "outputs", index)
        elif ".." in item.split("/"):
            yield draft.value("outputs", index).problem(
                Text("jobfile.outputs-parent", "outputs: {pattern:quote} contains `..`", pattern=item),
                Text("jobfile.outputs-parent-hint", "write an absolute path, or set output_dir below the directory"),
            )
        elif item.startswith("/") and not item.strip("/*?"):
            yield draft.value("outputs", index).problem(
                Text("jobfile.outputs-root", "outputs: {pattern:quote} names the whole disk", pattern=item),
                write("outputs: [out/]"),
            )


def _checks(draft: Draft) -> Iterator[Problem]:
    """Check names of checks, written with - or _; not checked where the names are not known."""
    known = draft.check_names() if draft.check_names is not None and draft.section("checks") else None
    for key in ("skip", "require"):
        names = draft.section("checks").get(key)
        for index, name in enumerate(names if isinstance(names, tuple) else ()):
            if known is not None and isinstance(name, str) and name.replace("_", "-").lower() not in known:
                yield draft.value("checks", key, index).problem(
                    Text("jobfile.unknown-check", "checks.{key}: unknown check {name:quote}", key=key, name=name),
                    suggestion(name, sorted(known)),
                )


def _restart(draft: Draft) -> Iterator[Problem]:
    pauses = draft.section("restart").get("backoff_s")
    if isinstance(pauses, tuple) and len(pauses) == 2 and all(type(each) in (int, float) for each in pauses):
        if pauses[0] > pauses[1]:
            yield draft.value("restart", "backoff_s").problem(
                Text("jobfile.backoff-order", "restart.backoff_s: the shortest pause exceeds the longest"),
                write(f"backoff_s: [{pauses[1]:g}, {pauses[0]:g}]"),
            )
    if draft.section("restart").get("on_unreachable_node") == "fence":
        yield from _fence(draft)


def _never_restarts(draft: Draft) -> bool:
    restarts = draft.section("restart").get("max_restarts")
    return restarts == 0 or (restarts is None and not draft.has("program"))


def _fewest_nodes(draft: Draft) -> Iterator[Problem]:
    if not draft.has("min_nodes"):
        return
    nodes, fewest = draft.data.get("nodes"), draft.data["min_nodes"]
    if draft.has("roles"):
        text = Text("jobfile.min-nodes-of-roles", "min_nodes cannot be combined with roles: each has its nodes")
        yield draft.key("min_nodes").problem(text, REMOVE)
    elif type(nodes) is int and type(fewest) is int and fewest > nodes:
        text = Text("jobfile.min-nodes-above", "min_nodes: expected at most nodes ({nodes})", nodes=nodes)
        yield draft.value("min_nodes").problem(text, write(f"min_nodes: {nodes}"))
    elif _never_restarts(draft):
        text = Text("jobfile.min-nodes-restarts", "min_nodes requires restart.max_restarts above 0")
        yield draft.key("min_nodes").problem(text, write("restart: {max_restarts: 3}"))


def _preemptible(draft: Draft) -> Iterator[Problem]:
    if draft.data.get("preemptible_after_s") is not None and not (draft.has("program") or draft.has("checkpoint")):
        text = Text("jobfile.preemptible-checkpoint", "preemptible_after_s requires checkpoint, to resume from")
        yield draft.key("preemptible_after_s").problem(text, write("checkpoint: {dir: /data/ckpt}"))


def _fence(draft: Draft) -> Iterator[Problem]:
    """Yield why a lease cannot hold: without restarts it only ends ranks, and a short one ends them too often."""
    if _never_restarts(draft):
        yield draft.value("restart", "on_unreachable_node").problem(
            Text("jobfile.fence-restarts", "restart.on_unreachable_node: fence requires restart.max_restarts above 0"),
            write("max_restarts: 3"),
        )
    limit_s = draft.section("restart").get("fence_after_s", model.Restart().fence_after_s)
    grace_s = draft.section("checkpoint").get("grace_period_s", model.Checkpoint().grace_period_s)
    if not all(type(each) in (int, float) for each in (limit_s, grace_s)):
        return
    if limit_s < grace_s + model.SHORTEST_LEASE_S:
        key = "fence_after_s" if "fence_after_s" in draft.section("restart") else "on_unreachable_node"
        yield draft.value("restart", key).problem(
            Text(
                "jobfile.fence-after",
                "restart.fence_after_s: expected at least {limit_s:g} (checkpoint.grace_period_s and {margin_s:g})",
                limit_s=grace_s + model.SHORTEST_LEASE_S,
                margin_s=model.SHORTEST_LEASE_S,
            ),
            write(f"fence_after_s: {grace_s + model.SHORTEST_LEASE_S:g}"),
        )


def _unsupported(draft: Draft) -> Iterator[Problem]:
    """Yield a problem for each key and value that is not implemented."""
    for key, hint in model.UNSUPPORTED.items():
        path = key.split(".")
        if find(draft.root, tuple(path)) is not None:
            yield draft.key(*path).problem(model.not_supported(key), hint)
    if draft.section("devices").get("type") == "auto":
        hint = Text("jobfile.later.auto", "write npu, cuda or cpu")
        yield draft.value("devices", "type").problem(model.not_supported("devices.type: auto"), hint)


_RULES: Sequence[Callable[[Draft], Iterator[Problem]]] = (
    _what_to_run,
    roles_rule,
    _program,
    _args,
    command_rule,
    staged_rule,
    env_rule,
    _devices,
    _fewest_nodes,
    _preemptible,
    container_rule,
    _paths,
    _progress,
    _workdir,
    _outputs,
    _checks,
    _restart,
    _unsupported,
)
_RULES_OF_ROLE = (command_rule, staged_rule, env_rule, _devices, container_rule)
"""Rules of keys that a role may have."""
