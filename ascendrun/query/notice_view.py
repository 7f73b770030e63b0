"""Targets of notifications for display: of a URL only its host, no secret."""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascendrun.core.errors import ConflictError, NotFoundError
from ascendrun.core.notices import NoticeSettings, Target, make_test_notice
from ascendrun.head.notify.delivery import UnreadableCredentialsError, deliver, ping, read_credentials, where_of
from ascendrun.head.state.store import Store
from ascendrun.text import Text, suggestion

TEST_S = 15.0


@dataclass(frozen=True)
class NoticeTargetView:
    """One target. `where`: the host of its URL, or the command. `waiting`: number of undelivered notifications.
    `last_…`: of the last notification that was tried. `problem`: why it cannot work, None: no problem found."""

    name: str
    type: str
    where: str
    events: tuple[str, ...]
    jobs: tuple[str, ...]
    lang: str
    waiting: int
    last_at_s: float | None
    last_state: str | None
    last_reply: str | None
    problem: Text | str | None
    origin: str


@dataclass(frozen=True)
class NoticeTestResult:
    """Result of a test. `outcome`: delivered, retry (would be tried again) or refused. `reply`: of the service."""

    name: str
    type: str
    outcome: str
    reply: str


def view_targets(settings: NoticeSettings, state_dir: Path) -> tuple[NoticeTargetView, ...]:
    with Store.open_for_reading(state_dir) as store:
        rows = store.notices.newest(limit=1000)
    views = []
    for target in settings.targets:
        own = [row for row in rows if row["target"] == target.name]
        tried: Mapping[str, Any] = next((row for row in own if row["tried_at_s"] is not None), {})
        problem, reply = _problem(target), tried.get("answer")
        view = NoticeTargetView(
            name=target.name,
            type=target.type,
            where=where_of(target),
            events=tuple(sorted(target.suffixes)) if target.type == "deadman" else target.events,
            jobs=target.jobs,
            lang=target.language,
            waiting=sum(row["state"] in ("waiting", "sending") for row in own),
            last_at_s=tried.get("tried_at_s"),
            last_state=tried.get("state"),
            last_reply=None if reply is None else str(reply),
            problem=None if problem is None else str(problem),
            origin=settings.origins.get(target.block, ""),
        )
        views.append(view)
    return tuple(views)


def _problem(target: Target) -> Text | str | None:
    """Return the problem of a target: command not executable, file unreadable or readable by others; None: none."""
    if target.type == "hook":
        program = target.command[0]
        is_there = os.access(program, os.X_OK) if "/" in program else True
        return None if is_there else Text("notify.cannot-run", "cannot run {program}", program=program)
    try:
        read_credentials(target)
    except UnreadableCredentialsError as error:
        return error.message
    for path in (target.url_file, target.secret_file):
        if path is not None and os.stat(path).st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            return Text("notify.readable", "other users can read {path}; run chmod 600", path=path)
    return None


def send_tests(settings: NoticeSettings, *, name: str | None) -> tuple[NoticeTestResult, ...]:
    """Send a test notification to the target of that name, None: to all; immediately, without the queue.

    Raises NotFoundError for an unknown name, ConflictError if there is no target at all.
    """
    targets = [target for target in settings.targets if name in (None, target.name)]
    if not settings.targets:
        raise ConflictError.of(
            "notify.none",
            "no notification targets are configured",
            "add notify, hook or deadman to the settings file; see docs/notices.md",
        )
    if not targets:
        known = [target.name for target in settings.targets]
        raise NotFoundError(
            Text("notify.unknown-target", "unknown notification target {name:quote}", name=name),
            hint=suggestion(str(name), known),
        )
    with ThreadPoolExecutor(len(targets)) as pool:
        return tuple(pool.map(_send_test, targets))


def _send_test(target: Target) -> NoticeTestResult:
    if target.type == "deadman":
        problem = ping(target, timeout_s=TEST_S)
        return NoticeTestResult(target.name, target.type, "retry" if problem else "delivered", str(problem or ""))
    notice = make_test_notice(head=socket.gethostname(), at_s=time.time())
    result = deliver(notice, target, timeout_s=TEST_S)
    return NoticeTestResult(target.name, target.type, result.outcome, str(result.reply))
