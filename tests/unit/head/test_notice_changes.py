"""Who is told follows the settings while the controller runs, also where their disk hangs."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import pytest

from ascendrun.core.errors import InvalidInputError
from ascendrun.head.notify import notifier
from tests.lib.notice_head import Head, target
from tests.lib.web_service import Say, await_that, settings_text


def test_a_url_file_is_read_at_every_sending(heads: Any, serve: Any, tmp_path: Path) -> None:
    service = serve()
    head = heads(settings_text([{"type": "generic", "url_file": "url"}]))
    head.move(head.submit(), "FAILED")
    await_that(lambda: head.rows()["generic"]["answer"])
    assert head.rows()["generic"]["answer"].key == "notify.cannot-read"
    (tmp_path / "url").write_text(service.url() + "\n")
    head.await_state("generic", "delivered")


def test_a_changed_settings_file_is_followed_and_a_broken_one_is_not(heads: Any, serve: Any, capfd: Any) -> None:
    one, other = serve(), serve()
    head = heads(settings_text([target(one)]))
    job = head.submit()
    head.file.write_text("notify: [{type: carrier-pigeon}]\n")
    with pytest.raises(InvalidInputError):
        head.read()
    await_that(lambda: head.notifier.settings() is None or "carrier-pigeon" in "".join(capfd.readouterr()))
    head.file.write_text(settings_text([target(other, name="other")]))

    def names() -> list[str] | None:
        settings = head.notifier.settings()
        return [one.name for one in settings.targets] if settings else None

    await_that(lambda: names() == ["other"])
    head.move(job, "FAILED")
    other.await_asked(1)
    assert one.asked == []


def test_settings_on_a_disk_that_hangs_stop_neither_the_loop_nor_the_notices(
    heads: Any, serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = serve(), serve()
    head = heads(settings_text([target(one)]))
    job = head.submit()
    head.beat()
    hanging = tmp_path / "hanging"
    os.mkfifo(hanging)  # who opens it waits until somebody writes
    os.replace(hanging, head.file)
    opened: list[int] = []

    def is_read() -> bool:
        head.beat()
        with contextlib.suppress(OSError):
            opened.append(os.open(head.file, os.O_WRONLY | os.O_NONBLOCK))
        return bool(opened)

    await_that(is_read)
    monkeypatch.setattr(notifier, "PATIENCE_S", 120.0)
    began_mono = time.monotonic()
    head.move(job, "FAILED")
    assert time.monotonic() - began_mono < notifier.PATIENCE_S  # it is not waited for a second time
    one.await_asked(1)
    with os.fdopen(opened[0], "w") as writer:
        writer.write(settings_text([target(other, name="other")]))
    await_that(lambda: [named.name for named in head.notifier.settings().targets] == ["other"])


def test_notices_for_a_target_that_is_gone_are_given_up(heads: Any, serve: Any, tmp_path: Path) -> None:
    head = heads(settings_text([target(serve(default=Say(500)))]))
    job = head.submit()
    head.move(job, "FAILED")
    await_that(lambda: head.rows()["generic"]["answer"])
    head.notifier.close(bound_s=0.1)
    head.file.write_text("color: never\n")
    later = Head(tmp_path)
    try:
        later.notifier.start()
        later.await_state("generic", "given up")
        assert later.rows()["generic"]["answer"].key == "notice.target-removed"
        assert later.store.events.of(job.id)[-1].values["reply"].key == "notice.target-removed"
    finally:
        later.close()
