"""logs --files: every file of an attempt on the head node, and which files could not be collected."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ascendrun.cli.output import Column, format_many, format_table
from ascendrun.head.spool.artifact_store import hosts_awaited, read_artifacts, read_hccl_settings
from ascendrun.head.state.state_dir import spool_dir
from ascendrun.text import Text
from ascendrun.text.format import fold_hosts, format_bytes

if TYPE_CHECKING:
    from ascendrun.cli.context import CliContext
    from ascendrun.cluster import JobView
    from ascendrun.core.logs.log_view import LogView

OWN_FILE = re.compile(
    r"^(?:rank-(?P<rank>\d+)\.(?P<kind>out|err|metrics|error)|(?P<name>events|samples|clock))(?:\.\d+)?$"
)
KINDS = {"out": "output", "err": "errors", "metrics": "metrics", "error": "error file"}


@dataclass(frozen=True)
class FileRow:
    """`kind`: output, errors, metrics, error file, events, samples, clock, or the name under which it was collected.
    `path` None: the file is not here, `note` has the reason. `note`: also that it was truncated."""

    host: str
    kind: str
    rank: int | None
    bytes: int | None
    path: str | None
    source: str | None = None
    note: str | None = None


def print_files(ctx: CliContext, job: JobView, attempt: int, view: LogView, output: str | None) -> None:
    folder = spool_dir(ctx.settings.state_dir, job.id, attempt)
    hosts = [host for host in job.hosts if view.hosts is None or host in view.hosts]
    rows = [
        row
        for host in hosts
        for row in list_files(folder, host)
        if view.ranks is None or row.rank is None or row.rank in view.ranks
    ]
    if output not in (None, "table", "wide"):
        assert output is not None
        sys.stdout.write(format_many(rows, output, name="files", kind=FileRow))
    elif rows:
        sys.stdout.write(
            format_table(
                rows,
                [
                    Column("HOST", lambda row: row.host),
                    Column("KIND", lambda row: row.kind),
                    Column("RANK", lambda row: "" if row.rank is None else str(row.rank)),
                    Column("SIZE", lambda row: "" if row.bytes is None else format_bytes(row.bytes)),
                    Column("PATH", lambda row: row.path or f"({row.note})"),
                    Column("NOTE", lambda row: (row.note or "") if row.path else ""),
                    Column("FROM", lambda row: row.source or "", is_wide=True),
                ],
                wide=output == "wide",
            )
        )
    if rows and output in (None, "table", "wide"):
        sys.stdout.write(_format_settings(folder, hosts))
    for host in hosts_awaited(ctx.settings.state_dir, job.id, attempt):
        ctx.echo(Text("logs.files-pending", "{host}: collection of files is still running", host=host))


@dataclass(frozen=True)
class _Setting:
    name: str
    value: str
    origin: str
    hosts: list[str]


def _format_settings(folder: Path, hosts: list[str]) -> str:
    """Return a table of the settings that HCCL logged; hosts with equal values share a row. "" without any."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for host in hosts:
        for name, one in read_hccl_settings(read_artifacts(folder, host)).items():
            value = "" if one.value is None else one.value + one.unit
            found.setdefault((name, value, one.origin), []).append(host)
    rows = [_Setting(*key, hosts) for key, hosts in sorted(found.items())]
    return (
        ""
        if not rows
        else "\n"
        + format_table(
            rows,
            [
                Column("HCCL SETTING", lambda row: row.name),
                Column("VALUE", lambda row: row.value),
                Column("SET BY", lambda row: row.origin),
                Column("HOSTS", lambda row: fold_hosts(row.hosts)),
            ],
        )
    )


def list_files(attempt_dir: Path, host: str) -> Iterator[FileRow]:
    """Yield output and metrics by rank, then collected files, then those that could not be collected."""
    folder = attempt_dir / host
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = OWN_FILE.match(path.name)
        if match:
            rank = None if match["rank"] is None else int(match["rank"])
            found.append(
                (
                    rank is None,
                    rank or 0,
                    path.name,
                    FileRow(host, KINDS.get(match["kind"] or "", match["name"]), rank, path.stat().st_size, str(path)),
                )
            )
    for _no_rank, _rank, _name, row in sorted(found, key=lambda one: one[:3]):
        yield row
    gathered = read_artifacts(attempt_dir, host)
    for file in gathered.files:
        note = None
        if file.of_bytes is None or file.of_bytes > file.bytes:
            note = str(Text("logs.file-truncated", "truncated, whole size: {size:bytes}", size=file.of_bytes))
        yield FileRow(host, file.name, None, file.bytes, str(file.path), file.source, note)
    for name, text in gathered.problems:
        yield FileRow(host, name, None, None, None, None, str(text))
