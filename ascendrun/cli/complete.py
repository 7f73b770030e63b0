"""Shell completion beyond commands and options: jobs, hosts, templates, keys. Fast; an error gives no completions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Callable

import click

if TYPE_CHECKING:
    from ascendrun.cluster import Cluster

Completer = Callable[[click.Context, click.Parameter, str], list[str]]


def add_completers(command: click.Command) -> None:
    """Complete the arguments and options of a command by their names."""
    for param in command.params:
        completer = _COMPLETERS.get(max(param.opts, key=len) if isinstance(param, click.Option) else str(param.name))
        if completer is None and command.name == "init" and param.name == "name":
            completer = _quiet(_templates)
        if completer is not None:
            param._custom_shell_complete = completer  # set by click's own `shell_complete=`


def _quiet(values: Callable[[click.Context], Iterable[str]]) -> Completer:
    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        try:
            return [value for value in values(ctx) if value.startswith(incomplete)]
        except Exception:  # a shell that waits for a completion cannot show an error
            return []

    return complete


def _cluster(ctx: click.Context) -> Cluster:
    from ascendrun.cluster import Cluster

    return Cluster(state_dir=ctx.find_root().params.get("state_dir"))


def _jobs(ctx: click.Context) -> Iterable[str]:
    names = _cluster(ctx).jobs.names()
    return [*reversed(tuple(names)), *dict.fromkeys(names.values())]


def _hosts(ctx: click.Context) -> Iterable[str]:
    return [host.name for host in _cluster(ctx).hosts.select(hostfile=ctx.params.get("hostfile"))]


def _templates(ctx: click.Context) -> Iterable[str]:
    return [template.name for template in _cluster(ctx).job_files.templates()]


def _keys(ctx: click.Context) -> Iterable[str]:
    from ascendrun.core.jobfile.keys import explained_names

    return explained_names()


_COMPLETERS = {
    "key": _quiet(_keys),
    "job": _quiet(_jobs),
    "jobs": _quiet(_jobs),
    "--job": _quiet(_jobs),
    "--resume": _quiet(_jobs),
    "hosts": _quiet(_hosts),
    "--hosts": _quiet(_hosts),
}
