"""Outputs of a job as they arrive: the bottom line of the terminal, and the lines about their end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from ascendrun.cli.errors import hint_lines, warning_lines
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.cli.screen import Screen
    from ascendrun.cluster import FetchReply


def fetch_outputs(replies: Iterable[FetchReply], screen: Screen) -> list[FetchReply]:
    """Show the progress; return the last reply of each host."""
    english = "fetching outputs: {files} of {total_files} files, {done:bytes} of {total:bytes}"
    return _watch(replies, screen, lambda **counts: Text("outputs.progress", english, **counts))


def copy_files(replies: Iterable[FetchReply], screen: Screen) -> list[FetchReply]:
    """Do as `fetch_outputs`, for files that are not outputs."""
    english = "copying: {files} of {total_files} files, {done:bytes} of {total:bytes}"
    return _watch(replies, screen, lambda **counts: Text("cp.progress", english, **counts))


def _watch(replies: Iterable[FetchReply], screen: Screen, text: Callable[..., Text]) -> list[FetchReply]:
    newest: dict[str, FetchReply] = {}
    ended: list[FetchReply] = []
    try:
        for reply in replies:
            newest[reply.host] = reply
            if reply.ended:
                ended.append(newest.pop(reply.host))
            screen.progress(str(text(**_counts(list(newest.values())))) if newest else "")
    finally:
        screen.close()
    return ended


def _counts(replies: list[FetchReply]) -> dict[str, int]:
    return {
        "files": sum(reply.files for reply in replies),
        "total_files": sum(reply.total_files for reply in replies),
        "done": sum(reply.done_bytes for reply in replies),
        "total": sum(reply.total_bytes for reply in replies),
    }


def missing_texts(replies: Iterable[FetchReply]) -> Iterator[Text]:
    """Return one message for the hosts on which the same patterns match no file."""
    hosts: dict[tuple[str, ...], list[str]] = {}
    for reply in replies:
        if reply.missing:
            hosts.setdefault(reply.missing, []).append(reply.host)
    for patterns, names in hosts.items():
        values = {"hosts": tuple(sorted(names)), "patterns": list(patterns)}
        yield Text("outputs.missing", "{hosts:hosts}: no file matches {patterns}", **values)


def problem_hints(replies: Iterable[FetchReply]) -> list[Text | str]:
    """Return each hint of a problem once."""
    hints = [reply.problem.hint for reply in replies if reply.problem is not None and reply.problem.hint is not None]
    return list({str(hint): hint for hint in hints}.values())


def output_lines(job_id: str, replies: list[FetchReply]) -> Iterator[str]:
    """Return the lines about fetched outputs: problems first, each directory with its files last."""
    for missing in missing_texts(replies):
        yield from warning_lines(missing)
    for reply in replies:
        if reply.problem is not None:
            why = reply.problem.message
            yield from warning_lines(
                Text("outputs.problem", "{host}: outputs not fetched: {why}", host=reply.host, why=why)
            )
            yield from hint_lines(reply.problem.hint or f"ascendrun fetch {job_id}")
    sizes: dict[str, list[int]] = {}
    for reply in replies:
        if reply.files:
            size = sizes.setdefault(reply.folder, [0, 0])
            size[0], size[1] = size[0] + reply.files, size[1] + reply.done_bytes
    for folder, (files, size_bytes) in sizes.items():
        values = {"files": files, "size": size_bytes, "directory": folder}
        yield str(Text("outputs.directory", "outputs: {directory} ({files:plural file files}, {size:bytes})", **values))
