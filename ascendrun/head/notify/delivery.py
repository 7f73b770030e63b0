"""Delivery of one notification to one target, over HTTP, by Apprise or to a command; the result contains no credential.

URL and secret of a target are read for each request from the files that have them.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from dataclasses import replace
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from ascendrun.core.logs.redaction import hide_values, redact_text
from ascendrun.core.notices import TEXT_LIMIT, Notice, Target, describe
from ascendrun.core.notices.formats import DeliveryResult, append_path, generic_body, make_request, read_reply
from ascendrun.core.notices.settings import url_problem
from ascendrun.head.command import run_command
from ascendrun.head.notify.http_client import Cancellation, RequestFailedError, http_request
from ascendrun.text import Text, TextError

SECRET_BYTES = 8192
_NOT_FOR_HOOKS = ("ASCENDRUN_FAILPOINT",)


class UnreadableCredentialsError(TextError):
    """A file with a URL or a secret cannot be used; the message names the file, never its content."""


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


def deliver(
    notice: Notice,
    target: Target,
    *,
    timeout_s: float,
    cancellation: Cancellation | None = None,
    stop: threading.Event | None = None,
) -> DeliveryResult:
    """Try once. Never raise for faults of the target or its files: they are in the result, credentials masked."""
    if target.type == "hook":
        return _run_hook(notice, target, stop)
    try:
        url, secret = read_credentials(target)
    except UnreadableCredentialsError as error:
        return DeliveryResult("retry", error.message)
    if target.type == "apprise":
        return _deliver_by_apprise(notice, target, url)
    request = make_request(notice, target, url=url, secret=secret, now_s=time.time())
    try:
        response = http_request(
            request.url, headers=request.headers, body=request.body, deadline_s=timeout_s, cancellation=cancellation
        )
        result = read_reply(target.type, response.status, response.headers, response.body)
    except RequestFailedError as error:
        result = DeliveryResult("retry", error.message)
    return replace(result, reply=_hide(result.reply, url, secret))


def ping(target: Target, *, timeout_s: float, cancellation: Cancellation | None = None) -> Text | str | None:
    """Request the URL of a dead man's switch once; return the problem, None: none."""
    try:
        url, _ = read_credentials(target)
    except UnreadableCredentialsError as error:
        return error.message
    try:
        url_only = append_path(url, "")
        response = http_request(url_only, headers={}, body=None, deadline_s=timeout_s, cancellation=cancellation)
    except RequestFailedError as error:
        hidden: Text | str = _hide(error.message, url, None)
        return hidden
    status = response.status
    return None if 200 <= status < 300 else Text("notice.status", "response status {status}", status=status)


def _hide(reply: Any, url: str, secret: str | None) -> Any:
    """Mask the URL, longer parts of it and the secret in a reply: a service may return the request."""
    if isinstance(reply, Text):
        values = {name: _hide(value, url, secret) for name, value in reply.values.items()}
        return Text(reply.key, reply.english, **values)
    host = url.split("/")[2:3]
    pieces = [piece for piece in re.split("[/?&=]", url) if len(piece) >= 12 and piece not in host]
    return hide_values(reply, [url, secret, *pieces]) if isinstance(reply, str) else reply


def _deliver_by_apprise(notice: Notice, target: Target, url: str) -> DeliveryResult:
    """Try once. Apprise reports only whether a service accepted it; what it logs may contain credentials and is
    dropped."""
    try:
        apprise: Any = import_module("apprise")  # 40 MB and 0.3 s, for those who use it
    except ImportError:
        message = Text("notice.no-apprise", "apprise is not installed: run `pip install 'ascendrun[notify]'`")
        return DeliveryResult("refused", message)
    logging.getLogger("apprise").disabled = True
    sender = apprise.Apprise()
    if not sender.add(url):
        return DeliveryResult("refused", Text("notice.apprise-url", "Apprise does not accept the URL"))
    words = describe(notice, target.language)
    kind = apprise.NotifyType.FAILURE if words.is_bad else apprise.NotifyType.INFO
    body = "\n".join(f"{name}: {value}" for name, value in words.facts)
    if sender.notify(title=words.title, body=body, notify_type=kind, body_format=apprise.NotifyFormat.TEXT):
        return DeliveryResult("delivered", Text("notice.apprise-sent", "sent by Apprise"))
    return DeliveryResult("retry", Text("notice.apprise-failed", "Apprise reports that the service did not accept it"))


def _run_hook(notice: Notice, target: Target, stop: threading.Event | None) -> DeliveryResult:
    body = json.dumps(generic_body(notice, describe(notice, target.language), target.language), ensure_ascii=False)
    env, timeout_s = _hook_env(notice, target.language), target.timeout_s
    code, output, how = run_command(target.command, f"{body}\n".encode(), env, timeout_s, stop)
    if code is None and stop is not None and stop.is_set():
        return DeliveryResult("retry", Text("notice.hook-interrupted", "interrupted by the end of the controller"))
    if code == 0:
        return DeliveryResult("delivered", output)
    return DeliveryResult(
        "refused", Text("notice.hook-output", "{how}: {output}", how=how, output=output) if output else how
    )


def _hook_env(notice: Notice, lang: str) -> dict[str, str]:
    facts = {
        "NOTICE_ID": notice.id,
        "NOTICE_KIND": notice.kind,
        "JOB_ID": notice.job,
        "JOB_NAME": notice.name,
        "STATE": notice.state,
        "ATTEMPT": notice.attempt,
        "HOSTS": ",".join(notice.hosts),
        "REASON": redact_text(notice.reason.render(lang)[:TEXT_LIMIT]),
    }
    env = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_HOOKS}
    env.update(
        {f"ASCENDRUN_{name}": str(value).replace("\0", " ") for name, value in facts.items() if value is not None}
    )
    return env
