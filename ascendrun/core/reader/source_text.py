"""A user's file as lines of text, and its problems in order; shared by job files and hostfiles."""

from __future__ import annotations

from collections.abc import Sequence

from ascendrun.core.errors import Problem
from ascendrun.text import Text

MAX_PROBLEMS = 500
"""More problems of one input are only counted."""

_UTF16 = (b"\xff\xfe", b"\xfe\xff")
SAVE_AS_UTF8 = Text("source.save-utf8", "save the file as UTF-8")
NUL = Text("source.nul", "NUL character not allowed")
REMOVE = Text("source.remove", "remove it")
INIT_HINT = Text("jobfile.init-hint", "`ascendrun init NAME` writes a job file to start from")


def decode_text(data: str | bytes, file: str, *, max_bytes: int) -> tuple[list[str], list[Problem]]:
    """Return the readable lines without their ends (\\n, \\r\\n) and byte order mark, and all problems.

    In a line with a problem U+FFFD replaces each unreadable part: columns stay correct and the rest can be read.
    """
    raw = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    if len(raw) > max_bytes:
        text = Text("source.too-long", "file too long ({size} bytes; at most {limit})", size=len(raw), limit=max_bytes)
        return [], [Problem(file, None, None, text)]
    if raw.startswith(_UTF16):
        return [], [Problem(file, 1, 1, Text("source.utf16", "unsupported encoding UTF-16"), SAVE_AS_UTF8)]
    if raw.startswith(b"\xef\xbb\xbf"):
        raw = raw[3:]
    lines: list[str] = []
    problems: list[Problem] = []
    for number, chunk in enumerate(raw.split(b"\n"), start=1):
        chunk = chunk[:-1] if chunk.endswith(b"\r") else chunk
        lines.append(_decode_line(chunk, number, file, problems))
    return lines, problems


def in_order(problems: Sequence[Problem]) -> list[Problem]:
    """Return the problems sorted by place, without duplicates, at most MAX_PROBLEMS. Those without a line are last."""
    unique = list(dict.fromkeys(problems))
    unique.sort(key=lambda problem: (problem.line is None, problem.line or 0, problem.column or 0))
    if len(unique) <= MAX_PROBLEMS:
        return unique
    rest = Text("source.more", "and {count} more problems", count=len(unique) - MAX_PROBLEMS)
    return [*unique[:MAX_PROBLEMS], Problem(unique[0].file, None, None, rest)]


def _decode_line(chunk: bytes, number: int, file: str, problems: list[Problem]) -> str:
    try:
        line = chunk.decode("utf-8")
    except UnicodeDecodeError as error:
        column = len(chunk[: error.start].decode("utf-8")) + 1
        text = Text("source.not-utf8", "byte {byte} is not valid UTF-8", byte=f"0x{chunk[error.start]:02x}")
        problems.append(Problem(file, number, column, text, SAVE_AS_UTF8))
        line = chunk.decode("utf-8", "replace")
    if "\0" in line:
        problems.append(Problem(file, number, line.index("\0") + 1, NUL, REMOVE))
    return line.replace("\0", "\ufffd")
