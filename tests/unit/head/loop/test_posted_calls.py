"""Posted calls leave the loop when its next tick is due; those that are there wait for the next time."""

import queue
from typing import Callable

import pytest

from ascendrun.head.waiting import run_within

CALL_S = 0.1


class Loop:
    """A loop whose calls take CALL_S each."""

    def __init__(self, calls: int) -> None:
        self.now, self.done = 100.0, list[int]()
        self.posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        for number in range(calls):
            self.posted.put(lambda number=number: self._take(number))

    def _take(self, number: int) -> None:
        self.now += CALL_S
        self.done.append(number)

    def turn(self, for_s: float, most: int = 1000) -> None:
        run_within(self.posted, lambda call: call(), until_mono=self.now + for_s, most=most, clock=lambda: self.now)


def test_calls_end_when_the_tick_is_due_and_none_is_lost() -> None:
    loop = Loop(7)
    loop.turn(0.25)
    assert loop.done == [0, 1, 2]
    loop.turn(-5.0)
    assert loop.done == [0, 1, 2, 3], "with ticks that are late there is still progress"
    loop.turn(9.0)
    assert loop.done == [0, 1, 2, 3, 4, 5, 6]


def test_so_many_calls_have_their_results_stored_together_and_no_more() -> None:
    loop = Loop(5)
    loop.turn(9.0, most=4)
    assert loop.done == [0, 1, 2, 3]


@pytest.mark.parametrize("for_s", [0.0, -1.0])
def test_without_a_call_the_tick_comes_in_time(for_s: float) -> None:
    loop = Loop(0)
    loop.turn(for_s)
    assert loop.done == [] and loop.now == 100.0
