"""Says on stderr what is missing in the logs that were printed."""

from __future__ import annotations

from ascendrun.cli.context import CliContext
from ascendrun.cli.log_view import LogView, format_time
from ascendrun.core.logs.log_lines import describe_bytes
from ascendrun.head.state.settings import spool_dir
from ascendrun.query.log_gaps import read_gaps


def tell_gaps(ctx: CliContext, job_id: str, attempt: int, view: LogView) -> None:
    """One line for each gap in a stream that was chosen."""
    for gap in read_gaps(spool_dir(ctx.settings.state_dir, job_id, attempt), attempt):
        if (
            gap.stream in view.streams
            and (view.ranks is None or gap.rank in view.ranks)
            and (view.hosts is None or gap.host in view.hosts)
        ):
            size = describe_bytes(gap.missing_bytes)
            ctx.echo(
                f"rank {gap.rank} on {gap.host}: {size} of its std{gap.stream} are lost ({gap.why},"
                f" {format_time(gap.at_s)})"
            )
