"""The interpreter's time for each thread of a controller."""

from __future__ import annotations

from ascendrun.head.loop.controller import switch_interval_s


def test_replies_of_few_hosts_do_not_wait_and_with_many_the_loop_has_its_time() -> None:
    few, many = switch_interval_s(10), switch_interval_s(1000)
    assert few == switch_interval_s(1)
    assert 0.004 < many < 0.02
