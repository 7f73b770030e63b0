"""How lines of logs are printed, and what is missing in them."""

from __future__ import annotations

from datetime import datetime

from ascendrun.cli.context import CliContext
from ascendrun.cli.errors import warning_lines
from ascendrun.cli.sanitise import sanitise
from ascendrun.cli.screen import Screen
from ascendrun.core.logs.folding import FoldedLine
from ascendrun.core.logs.log_view import LogView
from ascendrun.head.state.state_dir import spool_dir
from ascendrun.query.log_gaps import read_gaps
from ascendrun.text import Text
from ascendrun.text.format import fold_numbers


def format_line(view: LogView, line: FoldedLine, screen: Screen) -> str:
    """`[0-3] text`, made harmless, with its time when the view has times."""
    text = sanitise(line.text)
    if view.has_prefix:
        text = f"{screen.paint_rank(f'[{fold_numbers(line.ranks)}]', line.ranks[0])} {text}"
    if view.has_times:
        text = f"{format_time(line.at_s)} {text}"
    return text


def format_time(at_s: float | None) -> str:
    """Local time to the millisecond, with its offset from UTC; dots when it is not known."""
    if at_s is None:
        return "..." + " " * 26
    return datetime.fromtimestamp(at_s).astimezone().isoformat(timespec="milliseconds")


def print_gaps(ctx: CliContext, job_id: str, attempt: int, view: LogView) -> None:
    """One warning for each gap in a stream that was chosen."""
    for gap in read_gaps(spool_dir(ctx.settings.state_dir, job_id, attempt), attempt):
        if (
            gap.stream in view.streams
            and (view.ranks is None or gap.rank in view.ranks)
            and (view.hosts is None or gap.host in view.hosts)
        ):
            message = Text(
                "cli.log-gap",
                "rank {rank} on {host}: {size:bytes} of std{stream} were lost ({why}, {time})",
                rank=gap.rank,
                host=gap.host,
                size=gap.missing_bytes,
                stream=gap.stream,
                why=gap.why,
                time=format_time(gap.at_s),
            )
            ctx.echo("\n".join(warning_lines(message)))
