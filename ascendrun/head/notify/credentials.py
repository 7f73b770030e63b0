"""URL and secret of a target, read for each request from the files that have them."""

from __future__ import annotations

from urllib.parse import urlsplit

from ascendrun.core.notice_settings import url_problem
from ascendrun.core.notices import Target
from ascendrun.text import Text

SECRET_BYTES = 8192


class UnreadableCredentialsError(ValueError):
    """A file with a URL or a secret cannot be used; the message names the file, never its content."""

    def __init__(self, message: Text) -> None:
        super().__init__(message)
        self.message = message


def read_credentials(target: Target) -> tuple[str, str | None]:
    """Return (URL, secret) of the target as now in its files. Raises UnreadableCredentialsError."""
    url = target.url if target.url_file is None else _read_line(target.url_file)
    secret = target.secret if target.secret_file is None else _read_line(target.secret_file)
    problem = url_problem(url or "", target.type)
    if problem:
        where = target.url_file or target.name
        raise UnreadableCredentialsError(
            Text("notify.target-url", "{target}: {problem}", target=where, problem=problem)
        )
    assert url is not None
    return url, secret


def where_of(target: Target) -> str:
    """Return the host of the URL (of Apprise: its scheme), or the command; never a path or parameter of a URL."""
    if target.type == "hook":
        return target.command[0]
    try:
        url, _ = read_credentials(target)
    except UnreadableCredentialsError:
        return "?"
    parts = urlsplit(url)
    if target.type == "apprise":  # the place of the host may be a token
        return f"{parts.scheme}://…"
    return f"{parts.scheme}://{parts.hostname}{f':{parts.port}' if parts.port else ''}/…"


def _read_line(path: str) -> str:
    try:
        with open(path, "rb") as opened:
            raw = opened.read(SECRET_BYTES + 1)
    except OSError as error:
        message = Text("notify.cannot-read", "cannot read {path}: {error}", path=path, error=error.strerror)
        raise UnreadableCredentialsError(message) from error
    try:
        lines = raw.decode("utf-8").split()
    except UnicodeDecodeError:
        lines = []
    if len(lines) != 1 or len(raw) > SECRET_BYTES:
        raise UnreadableCredentialsError(
            Text("notify.one-line", "{path}: expected exactly one line without spaces", path=path)
        )
    return lines[0]
