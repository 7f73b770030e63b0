"""Delivery of one notification to one target, over HTTP or to a command; the result contains no credential."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from dataclasses import replace
from typing import Any

from ascendrun.core.logs.redaction import hide_values, redact_text
from ascendrun.core.notice_formats import DeliveryResult, append_path, generic_body, make_request, read_reply
from ascendrun.core.notices import TEXT_LIMIT, Notice, Target, describe
from ascendrun.head.notify.credentials import UnreadableCredentialsError, read_credentials
from ascendrun.head.notify.hook import run_hook
from ascendrun.head.notify.http_client import Cancellation, RequestFailedError, http_request
from ascendrun.text import Text

SHOWN_CHARACTERS = 1500
_NOT_FOR_HOOKS = ("ASCENDRUN_FAILPOINT",)


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
        from ascendrun.head.notify.apprise_client import deliver_by_apprise

        return deliver_by_apprise(notice, target, url)
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


def _run_hook(notice: Notice, target: Target, stop: threading.Event | None) -> DeliveryResult:
    program = target.command[0]
    body = json.dumps(generic_body(notice, describe(notice, target.language), target.language), ensure_ascii=False)
    env, timeout_s = _hook_env(notice, target.language), target.timeout_s
    try:
        end = run_hook(target.command, stdin=f"{body}\n".encode(), env=env, timeout_s=timeout_s, stop=stop)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        failed = Text("notice.hook-failed", "cannot run {program}: {error}", program=program, error=why)
        return DeliveryResult("refused", failed)
    if end.code is None and stop is not None and stop.is_set():
        return DeliveryResult("retry", Text("notice.hook-interrupted", "interrupted by the end of the controller"))
    output = redact_text(end.output.decode("utf-8", "replace").strip())[-SHOWN_CHARACTERS:]
    if end.code == 0:
        return DeliveryResult("delivered", output)
    if end.code is None:
        how = Text(
            "notice.hook-timeout", "{program} was killed after {limit_s:g} s", program=program, limit_s=timeout_s
        )
    elif end.code >= 0:
        how = Text("notice.hook-exit", "{program} exited with code {code}", program=program, code=end.code)
    else:
        how = Text("notice.hook-signal", "{program} was killed by signal {signal}", program=program, signal=-end.code)
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
