"""Waiting for what other threads put into a queue, and threads that start in the background."""

import os
import queue
import threading
import weakref
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from ascendrun.head import waiting
from ascendrun.head.waiting import get_within, in_background
from tests.lib.vcluster.processes import await_that

ROUNDS = 20_000


def test_a_wait_ends_although_its_time_is_over_when_it_begins() -> None:
    items: queue.SimpleQueue[int] = queue.SimpleQueue()

    def take() -> None:
        for number in range(ROUNDS):
            items.put(number)
            assert get_within(items, 1.0) == number
            with suppress(queue.Empty):
                get_within(items, 1e-7)

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


def test_an_item_of_another_thread_ends_the_wait_and_none_is_lost() -> None:
    items: queue.SimpleQueue[int] = queue.SimpleQueue()
    thread = threading.Thread(target=lambda: [items.put(number) for number in range(ROUNDS)])
    thread.start()
    assert [get_within(items, 60.0) for _ in range(ROUNDS)] == [*range(ROUNDS)]
    thread.join()
    with suppress(queue.Empty):
        raise AssertionError(get_within(items, 0.0))


def test_a_call_in_the_background_is_kept_no_longer_than_it_runs() -> None:
    class Owner:
        def work(self) -> None:
            names.put(threading.current_thread().name)

    names: queue.SimpleQueue[str] = queue.SimpleQueue()
    owner = Owner()
    is_there = weakref.ref(owner)
    in_background(owner.work, "owner's work")
    del owner
    assert get_within(names, 60.0) == "owner's work"
    await_that(lambda: is_there() is None, deadline_s=20.0)


def test_a_thread_that_cannot_be_started_is_started_later_and_those_after_it_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(thread: threading.Thread) -> None:
        if thread.name == "first" and refused.acquire(blocking=False):
            raise RuntimeError("can't start new thread")
        real(thread)

    real: Any = threading.Thread.start
    refused = threading.Semaphore(2)
    ran: queue.SimpleQueue[str] = queue.SimpleQueue()
    monkeypatch.setattr(waiting, "RETRY_S", 0.001)
    monkeypatch.setattr(threading.Thread, "start", start)
    for name in ("first", "second"):
        in_background(partial(ran.put, name), name)
    assert {get_within(ran, 60.0), get_within(ran, 60.0)} == {"first", "second"}
    assert not refused.acquire(blocking=False)


def test_a_call_that_waits_holds_up_none_behind_it() -> None:
    ran: queue.SimpleQueue[float] = queue.SimpleQueue()
    for after_s in (3600.0, 0.02, 0.0, 0.01):
        in_background(partial(ran.put, after_s), "one of four", after_s=after_s)
    assert {get_within(ran, 60.0) for _ in range(3)} == {0.0, 0.01, 0.02}


def test_a_child_after_a_fork_has_a_background_too() -> None:
    def run_one() -> bool:
        ran: queue.SimpleQueue[int] = queue.SimpleQueue()
        in_background(partial(ran.put, 2), "two", after_s=0.001)
        in_background(partial(ran.put, 1), "one")
        with suppress(queue.Empty):
            return {get_within(ran, 20.0), get_within(ran, 20.0)} == {1, 2}
        return False

    assert run_one()
    child = os.fork()
    if child == 0:
        has_run = False
        try:
            has_run = run_one()
        finally:
            os._exit(0 if has_run else 1)  # else the child would run the tests that follow
    assert os.waitpid(child, 0)[1] == 0
