"""Bytes of a user's file to lines of text: size, encoding and NUL are checked here, once for every format."""

from __future__ import annotations

from ascendrun.core.errors import Problem

_UTF16 = (b"\xff\xfe", b"\xfe\xff")


def decode_text(data: str | bytes, file: str, *, max_bytes: int) -> tuple[list[str], list[Problem]]:
    """The readable lines without their ends (\\n, \\r\\n), a leading byte order mark dropped, and what is wrong.

    In a line with a problem U+FFFD stands for what cannot be read, so that places stay true and the rest can be read.
    """
    raw = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    if len(raw) > max_bytes:
        return [], [
            Problem(
                file, None, None, f"is {len(raw)} bytes long; at most {max_bytes} are read", "is it the right file?"
            )
        ]
    if raw.startswith(_UTF16):
        return [], [Problem(file, 1, 1, "is UTF-16", "save it as UTF-8")]
    if raw.startswith(b"\xef\xbb\xbf"):
        raw = raw[3:]
    lines: list[str] = []
    problems: list[Problem] = []
    for number, chunk in enumerate(raw.split(b"\n"), start=1):
        chunk = chunk[:-1] if chunk.endswith(b"\r") else chunk
        lines.append(_decode_line(chunk, number, file, problems))
    return lines, problems


def _decode_line(chunk: bytes, number: int, file: str, problems: list[Problem]) -> str:
    try:
        line = chunk.decode("utf-8")
    except UnicodeDecodeError as error:
        column = len(chunk[: error.start].decode("utf-8")) + 1
        problems.append(
            Problem(file, number, column, f"byte 0x{chunk[error.start]:02x} is not UTF-8", "save the file as UTF-8")
        )
        line = chunk.decode("utf-8", "replace")
    if "\0" in line:
        problems.append(Problem(file, number, line.index("\0") + 1, "NUL character", "delete it"))
    return line.replace("\0", "\ufffd")
