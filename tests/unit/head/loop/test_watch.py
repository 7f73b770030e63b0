"""A beat of the controller's loop that is late is reported with what held the loop."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

import pytest

from ascendrun.core.pulse import Clock, Pulse
from ascendrun.head.loop.steps import Guard
from ascendrun.head.loop.watch import LoopWatch
from ascendrun.head.spool.collector import PRUNE_EVERY_S, LogPruner, NodeSpool
from ascendrun.head.waiting import run_within


class Loop:
    """A loop of which one beat takes `held_s` in a function of ours."""

    def __init__(self) -> None:
        self.now = 0.0
        self.watch = LoopWatch(lambda: self.now)

    def run(self, held_s: float) -> None:
        self.watch.start()
        self.watch.close()
        self.watch.beat(0.25)
        self.watch.expect(0.25)
        pruner = LogPruner(lambda host, have: None)
        pruner._due_mono -= PRUNE_EVERY_S
        posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        posted.put(lambda: pruner.tick(self._hold(held_s)))
        run_within(posted, Guard(), until_mono=0.0, most=1)
        self.watch.beat(0.25)

    def _hold(self, held_s: float) -> Iterator[tuple[str, NodeSpool]]:
        self.now += held_s
        looking = threading.Thread(target=self.watch.look)
        looking.start()
        looking.join()
        yield from ()


def test_a_stall_names_the_function_that_held_the_loop(capsys: pytest.CaptureFixture[str]) -> None:
    loop = Loop()
    loop.run(3.0)
    stall = loop.watch.stall
    assert stall is not None and stall.seconds == 2.75
    assert stall.handler == "tick (head/spool/collector.py)" and "(head/spool/collector.py):" in stall.line
    assert stall.handler in capsys.readouterr().out
    assert loop.watch.recent_s() == 2.75
    loop.now += 61.0
    assert loop.watch.recent_s() == 0.0 and loop.watch.stall is stall


def test_a_beat_that_is_a_little_late_is_no_stall(capsys: pytest.CaptureFixture[str]) -> None:
    loop = Loop()
    loop.run(0.7)
    assert loop.watch.stall is None and loop.watch.recent_s() == pytest.approx(0.45)
    assert not capsys.readouterr().out


def test_the_pulse_carries_the_stall() -> None:
    loop = Loop()
    loop.run(3.0)
    sent = Pulse(1.0, 1.0, "boot", 7, late_s=loop.watch.recent_s(), stall=loop.watch.stall)
    received = Pulse.from_json(sent.to_json())
    assert received == sent and received.is_fresh(Clock(1.0, 1.0, "boot"))
