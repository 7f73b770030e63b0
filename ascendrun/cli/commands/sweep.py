"""sweep: the jobs of a sweep with their values and results."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import click

from ascendrun.cli import output as out
from ascendrun.cli.context import CliContext
from ascendrun.cli.options import cli_command, list_output_option
from ascendrun.core.errors import NotFoundError
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.cluster.samples import SweepJob


@cli_command("sweep")
@click.argument("sweep")
@list_output_option
def command(ctx: CliContext, sweep: str, output: str | None) -> None:
    """Show each job of a sweep: its values, state, last step, last and least loss, and the metrics that it reported.

    SWEEP is the id that `submit` printed, or the id or name of one of its jobs. `stop`, `retry` and `rm` accept the id
    for all of its jobs.

    Examples:
    ascendrun sweep s-3f9a2c41            # one row for each job
    ascendrun sweep s-3f9a2c41 -o json | jq '.jobs | min_by(.best_loss).values'
    """
    rows = ctx.cluster.samples.sweep(sweep)
    if not rows:
        raise NotFoundError(Text("sweep.not-found", "{sweep}: sweep not found", sweep=sweep))
    print_sweep(rows, output)


def print_sweep(rows: Sequence[SweepJob], output: str | None) -> None:
    from ascendrun.cluster.samples import SweepJob  # reads the store: not for --help

    columns = [_column(name, name) for name in ("id", "state")]
    columns += [_column(key, "values", key) for key in dict.fromkeys(key for row in rows for key in row.values)]
    columns += [_column(name, name) for name in ("step", "loss", "best_loss")]
    columns += [_column(name, "metrics", name) for name in dict.fromkeys(name for row in rows for name in row.metrics)]
    out.print_rows(rows, columns, output, name="jobs", kind=SweepJob)


def _column(title: str, field: str, key: str | None = None) -> out.Column:
    def cell(row: SweepJob) -> str:
        value = getattr(row, field) if key is None else getattr(row, field).get(key)
        return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)

    return out.Column(title.upper() if key is None else title, cell, dropped=int(field == "metrics"))


def jobs_of(ctx: CliContext, refs: Sequence[str], states: Collection[str] | None = None) -> tuple[str, ...]:
    """Return jobs, in place of the id of a sweep all of its jobs that are in one of these states, None: in any."""
    found: list[str] = []
    for ref in refs:
        rows = [row for row in ctx.cluster.samples.sweep(ref) if row.sweep == ref] if ref.startswith("s-") else []
        chosen = [row for row in rows if states is None or row.state in states]
        found += [row.id for row in chosen or rows] or [ref]
    return tuple(found)
