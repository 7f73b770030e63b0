"""One notice to one target, now: over HTTP, or to the operator's command; what came of it holds no credential."""

from __future__ import annotations

import json
import os
import re
import threading
import time

from ascendrun.core.logs.redaction import hide_values, redact_text
from ascendrun.core.notice_formats import Verdict, append_path, generic_body, judge_answer, make_request
from ascendrun.core.notice_settings import UnreadableCredentialsError, read_credentials
from ascendrun.core.notices import TEXT_LIMIT, Notice, Target, describe
from ascendrun.head.notify.hook import run_hook
from ascendrun.head.notify.http_client import Cut, RequestFailedError, ask_web

SHOWN_CHARACTERS = 1500
_NOT_FOR_HOOKS = ("ASCENDRUN_FAILPOINT",)


def deliver(
    notice: Notice, target: Target, *, ask_s: float, cut: Cut | None = None, stop: threading.Event | None = None
) -> Verdict:
    """Tries once. Never raises for what the target or its files do wrong: the verdict says it, credentials hidden."""
    if target.kind == "hook":
        return _run_hook(notice, target, stop)
    try:
        url, secret = read_credentials(target)
    except UnreadableCredentialsError as error:
        return Verdict("retry", str(error))
    request = make_request(notice, target, url=url, secret=secret, now_s=time.time())
    try:
        answer = ask_web(request.url, headers=request.headers, body=request.body, deadline_s=ask_s, cut=cut)
        verdict = judge_answer(target.kind, answer.status, answer.headers, answer.body)
    except RequestFailedError as error:
        verdict = Verdict("retry", str(error))
    return Verdict(verdict.outcome, _hide(verdict.says, url, secret), verdict.wait_s)


def press(target: Target, *, ask_s: float, cut: Cut | None = None) -> str | None:
    """Asks the URL of a dead-man's switch once; what went wrong, None: nothing."""
    try:
        url, _ = read_credentials(target)
    except UnreadableCredentialsError as error:
        return str(error)
    try:
        answer = ask_web(append_path(url, ""), headers={}, body=None, deadline_s=ask_s, cut=cut)
    except RequestFailedError as error:
        return _hide(str(error), url, None)
    return None if 200 <= answer.status < 300 else f"it answers {answer.status}"


def _hide(text: str, url: str, secret: str | None) -> str:
    """A service may send back what it got: neither the URL nor any longer piece of it is shown."""
    host = url.split("/")[2:3]
    pieces = [piece for piece in re.split("[/?&=]", url) if len(piece) >= 12 and piece not in host]
    return hide_values(text, [url, secret, *pieces])


def _run_hook(notice: Notice, target: Target, stop: threading.Event | None) -> Verdict:
    body = (
        json.dumps(generic_body(notice, describe(notice, target.language), target.language), ensure_ascii=False) + "\n"
    )
    try:
        end = run_hook(
            target.command,
            stdin=body.encode(),
            env=_hook_env(notice, target.language),
            timeout_s=target.timeout_s,
            stop=stop,
        )
    except (OSError, ValueError) as error:
        return Verdict("refused", f"{target.command[0]} cannot be run: {getattr(error, 'strerror', None) or error}")
    if end.code is None and stop is not None and stop.is_set():
        return Verdict("retry", "the controller ended while it ran")
    output = redact_text(end.output.decode("utf-8", "replace").strip())[-SHOWN_CHARACTERS:]
    if end.is_fine:
        return Verdict("delivered", output)
    how = (
        f"was killed after {target.timeout_s:g} s"
        if end.code is None
        else f"exited {end.code}"
        if end.code >= 0
        else f"died of signal {-end.code}"
    )
    return Verdict("refused", f"{target.command[0]} {how}" + (f": {output}" if output else ""))


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
