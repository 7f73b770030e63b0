"""A beat of the controller's loop that is late is reported with what held the loop."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from ascendrun.core.pulse import Clock, Pulse
from ascendrun.head.loop.controller import TICK_S, TOGETHER
from ascendrun.head.loop.steps import Guard
from ascendrun.head.loop.watch import LoopWatch
from ascendrun.head.spool.collector import PRUNE_EVERY_S, LogPruner, NodeSpool
from ascendrun.head.waiting import run_within
from tests.lib.small_world import N1, Node, World


class Loop:
    """A loop of which one beat takes `held_s` in a function of ours."""

    def __init__(self) -> None:
        self.now = 0.0
        self.watch = LoopWatch(lambda: self.now)

    def run(self, held_s: float) -> None:
        self.watch.start()
        self.watch.close()
        self._tick()
        pruner = LogPruner(lambda host, have: None)
        pruner._due_mono -= PRUNE_EVERY_S
        posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        posted.put(lambda: pruner.tick(self._hold(held_s)))
        run_within(posted, Guard(), until_mono=0.0, most=1)
        self._tick()

    def serve(self, calls: Sequence[Callable[[], None]]) -> None:
        """Run posted calls as the controller's loop does, until none is left."""
        self.watch.start()
        self.watch.close()
        posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        for call in calls:
            posted.put(call)
        self._tick()
        while not posted.empty():
            run_within(posted, Guard(), until_mono=self.now + TICK_S, most=TOGETHER, clock=lambda: self.now)
            self._tick()

    def _tick(self) -> None:
        self.watch.beat(TICK_S)
        self.watch.expect(TICK_S)

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


class SlowNode(Node):
    """A node each of whose requests holds the loop."""

    def __init__(self, loop: Loop) -> None:
        super().__init__("key-n1")
        self.loop = loop

    def answer(self, request: Any) -> Any:
        list(self.loop._hold(1.0))
        return super().answer(request)


def test_with_many_calls_the_loop_is_late_by_one_of_them_and_each_time_is_logged_with_its_handler(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    loop, took_s = Loop(), list[float]()
    world.nodes["n1"] = SlowNode(loop)
    world.running(N1)
    link: Any = world.get(N1)
    link.is_up = True

    def connect() -> None:
        began = loop.now
        world.jobs.on_up(link)
        took_s.append(loop.now - began)

    loop.serve([connect] * 20)
    stall, lines = loop.watch.stall, capsys.readouterr().out.splitlines()
    assert len(took_s) == 20 and min(took_s) >= 1.0
    assert loop.watch.recent_s() == max(took_s) - TICK_S
    assert stall is not None and stall.handler == "on_up (head/loop/live_jobs.py)"
    assert len(lines) == 20 and all(stall.handler in line for line in lines)


def test_the_pulse_carries_the_stall() -> None:
    loop = Loop()
    loop.run(3.0)
    sent = Pulse(1.0, 1.0, "boot", 7, late_s=loop.watch.recent_s(), stall=loop.watch.stall)
    received = Pulse.from_json(sent.to_json())
    assert received == sent and received.is_fresh(Clock(1.0, 1.0, "boot"))
