"""Waiting for what other threads put into a queue."""

import queue
import threading
from contextlib import suppress

from ascendrun.head.waiting import get_within

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
