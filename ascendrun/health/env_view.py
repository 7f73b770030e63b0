"""The environment of a rank on each node: variables, limits, interpreter, packages; secrets are masked."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, Callable

from ascendrun.core.dataclass import dataclass
from ascendrun.core.logs.redaction import SECRET_NAME
from ascendrun.core.node_messages import Failure
from ascendrun.health.survey.check_context import CheckContext, Group, group_hosts
from ascendrun.health.survey.facts import NodeFacts
from ascendrun.text import Text

_URL_LOGIN = re.compile(r"(?<=://)[^/\s@]+(?=@)")
PER_NODE = re.compile(
    r"SSH_\w+|HOSTNAME|HOST|PWD|OLDPWD|SHLVL|_|XDG_\w+|TERM|(?:LOCAL_|GROUP_|ROLE_|NODE_)?RANK|"
    r"TORCHELASTIC_ERROR_FILE|ASCENDRUN_(?:METRICS_FILE|NODE_ROOT)"
)
"""Variables that differ between nodes by nature, or do not matter to a job: not part of a diff."""
PER_RANK = re.compile(r"(?:LOCAL_|ROLE_)?RANK|TORCHELASTIC_ERROR_FILE|ASCENDRUN_(?:METRICS_FILE|RUN_ID|JOB_ID|ATTEMPT)")
"""Not for an interactive shell: variables of one rank, or marks of an attempt's processes."""

AGENT_DIRECTORY = "<ascendrun>"
"""Replaces the path of ascendrun's directory in values, since it differs between hosts."""
NOT_SET = Text("env.not-set", "(not set)")


@dataclass(frozen=True)
class EnvRow:
    """One row. `kind`: variable, limit, python or package. The largest group is first."""

    kind: str
    name: str
    groups: tuple[Group, ...]

    @property
    def differs(self) -> bool:
        return len(self.groups) > 1


@dataclass(frozen=True)
class EnvReport:
    hosts: tuple[str, ...]
    unreached: Mapping[str, Failure]
    rows: tuple[EnvRow, ...]


def make_env_report(context: CheckContext, *, salt: str, only_differing: bool = False) -> EnvReport:
    """Make the report. `salt`: new for each report; equal secrets get equal, irreversible marks."""
    rows = tuple(
        row
        for row in _rows(context, salt)
        if not only_differing or (row.differs and not (row.kind == "variable" and PER_NODE.fullmatch(row.name)))
    )
    return EnvReport(hosts=(*context.facts, *context.unreached), unreached=context.unreached, rows=rows)


def mask(name: str, value: str, *, salt: str) -> str:
    """Return the value, or for a secret a mark that shows only whether two are equal."""
    if SECRET_NAME.search(name) and value:
        return f"(secret #{_mark(value, salt)})"
    return _URL_LOGIN.sub(lambda found: f"(secret #{_mark(found.group(), salt)})", value)


def is_secret(name: str) -> bool:
    """Return whether a variable of this name is treated as a secret."""
    return SECRET_NAME.search(name) is not None


def _mark(value: str, salt: str) -> str:
    return hashlib.sha256(f"{salt}\0{value}".encode("utf-8", "replace")).hexdigest()[:6]


def write_env_file(context: CheckContext, host: str) -> str:
    """Return shell text that sets the variables of the job's ranks on `host` and runs its setup.

    Raises LookupError when there is no plan for the host. MASTER_PORT and variables of single ranks are omitted.
    """
    nodes = context.plan.nodes if context.plan is not None else ()
    node = next((node for node in nodes if node.host == host), None)
    if node is None:
        raise LookupError(host)
    lines = [
        "# " + str(Text("env.file-head", "environment of the ranks on {host}; source it in bash", host=host)),
        "# " + str(Text("env.file-omitted", "omitted: MASTER_PORT, RANK, LOCAL_RANK and secrets of env_file")),
        "",
    ]
    lines += [
        f"export {name}={shlex.quote(value)}"
        for name, value in sorted(node.ranks[0].env.items())
        if not PER_RANK.fullmatch(name) and name != "MASTER_PORT"
    ]
    if node.setup:
        lines += ["", "# " + str(Text("env.file-setup", "setup of the job file")), node.setup]
    return "\n".join(lines) + "\n"


def _rows(context: CheckContext, salt: str) -> Iterator[EnvRow]:
    yield from _table(context, "python", _python)
    yield from _table(context, "package", lambda facts: facts.python.modules if facts.python else None)
    yield from _table(context, "limit", _limits)
    roots = {facts.root for facts in context.facts.values() if facts.root}

    def masked(facts: NodeFacts, name: str, value: str) -> str:
        value = mask(name, value, salt=salt)
        return value.replace(facts.root, AGENT_DIRECTORY) if len(roots) > 1 and facts.root else value

    def variables(facts: NodeFacts) -> Mapping[str, str] | None:
        environ = facts.environ
        return None if environ is None else {name: masked(facts, name, value) for name, value in environ.items()}

    yield from _table(context, "variable", variables)


def _table(
    context: CheckContext, kind: str, values_of: Callable[[NodeFacts], Mapping[str, Any] | None]
) -> Iterator[EnvRow]:
    """Yield the rows of one kind, without hosts whose complete table is unknown."""
    found = {host: values_of(facts) for host, facts in context.facts.items()}
    tables = {host: values for host, values in found.items() if values is not None}
    for name in sorted({name for values in tables.values() for name in values}):
        groups = group_hosts({host: values.get(name) for host, values in tables.items()})
        if groups:
            yield EnvRow(kind, name, groups)


def _python(facts: NodeFacts) -> Mapping[str, str | Text | None] | None:
    if facts.python is None:
        return None
    return {"executable": facts.python.executable, "version": facts.python.version, "error": facts.python.error}


def _limits(facts: NodeFacts) -> Mapping[str, str | None] | None:
    if facts.limits is None:
        return None
    return {
        name.lower(): " / ".join("unlimited" if value is None else str(value) for value in pair)
        for name, pair in facts.limits.items()
    }
