"""Output of log lines, gaps in them and lists of log files."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from ascendrun.cli.output import PEOPLE, Column, format_record, format_table, print_rows
from ascendrun.cli.sanitise import sanitise
from ascendrun.cluster import LogFile
from ascendrun.core.logs.log_lines import label_processes, process_label
from ascendrun.core.records import format_rfc3339
from ascendrun.text import Text
from ascendrun.text.format import fold_hosts, format_bytes

if TYPE_CHECKING:
    from ascendrun.cli.context import CliContext
    from ascendrun.cli.screen import Screen
    from ascendrun.cluster import AttemptFiles, LogGap, LogView
    from ascendrun.core.logs.folding import FoldedLine
    from ascendrun.core.logs.log_lines import LogLine


def format_line(view: LogView, line: FoldedLine, screen: Screen) -> str:
    """Return `[0-3] text`, sanitised, with its time when the view has times; of a view that does not fold: a record."""
    if not view.folds:
        return format_record(line_record(line.lines[0]), "jsonl").rstrip("\n")
    text = sanitise(line.text)
    if view.has_prefix:
        text = f"{screen.paint_rank(f'[{label_processes(line.ranks)}]', line.ranks[0])} {text}"
    if view.has_times:
        text = f"{format_time(line.at_s)} {text}"
    return text


def line_record(line: LogLine) -> dict[str, Any]:
    """Return a line for programs. `time`: arrival by the clock of this machine, None: not recorded. `rank` None: the
    line is of the process that starts the ranks of the host."""
    return {
        "time": None if line.at_s is None else format_rfc3339(line.at_s),
        "host": line.host,
        "rank": line.rank if line.rank >= 0 else None,
        "stream": line.stream,
        "attempt": line.attempt,
        "text": line.text,
    }


def format_time(at_s: float | None) -> str:
    """Return local time to the millisecond, with its offset from UTC; dots when it is not known."""
    if at_s is None:
        return "..." + " " * 26
    return datetime.fromtimestamp(at_s).astimezone().isoformat(timespec="milliseconds")


def print_gaps(ctx: CliContext, gaps: Iterable[LogGap]) -> None:
    """Print one warning for each gap."""
    for gap in gaps:
        ctx.warn(
            Text(
                "cli.log-gap",
                "{process} on {host}: {size:bytes} of std{stream} were lost ({why}, {time})",
                process=process_label(gap.rank) if gap.rank < 0 else f"rank {gap.rank}",
                host=gap.host,
                size=gap.missing_bytes,
                stream=gap.stream,
                why=gap.why,
                time=format_time(gap.at_s),
            )
        )


@dataclass(frozen=True)
class _HcclRow:
    name: str
    value: str
    origin: str
    hosts: list[str]


def print_files(ctx: CliContext, found: AttemptFiles, output: str | None) -> None:
    """Print the files of an attempt, its HCCL settings from the logs, and the hosts of pending files."""
    if found.files or output not in PEOPLE:
        columns = [
            Column("HOST", lambda row: row.host),
            Column("KIND", lambda row: row.kind),
            Column("RANK", lambda row: "" if row.rank is None else str(row.rank)),
            Column("SIZE", lambda row: "" if row.bytes is None else format_bytes(row.bytes)),
            Column("PATH", lambda row: row.path or f"({row.note})"),
            Column("NOTE", lambda row: str(row.note or "") if row.path else ""),
            Column("FROM", lambda row: row.source or "", is_wide=True),
        ]
        print_rows(found.files, columns, output, name="files", kind=LogFile, is_cut=False)
    if found.files and found.hccl_settings and output in PEOPLE:
        alike: dict[tuple[str, str, str], list[str]] = {}
        for host, setting in found.hccl_settings:
            value = "" if setting.value is None else setting.value + setting.unit
            alike.setdefault((setting.name, value, setting.origin), []).append(host)
        table = format_table(
            [_HcclRow(*key, hosts) for key, hosts in sorted(alike.items())],
            [
                Column("HCCL SETTING", lambda row: row.name),
                Column("VALUE", lambda row: row.value),
                Column("SET BY", lambda row: row.origin),
                Column("HOSTS", lambda row: fold_hosts(row.hosts)),
            ],
        )
        sys.stdout.write(f"\n{table}")
    for host in found.pending_hosts:
        ctx.echo(Text("logs.files-pending", "{host}: collection of files is still running", host=host))
