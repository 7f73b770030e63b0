"""Hosts that fall silent are told once, together, and again when they are back."""

from ascendrun.core.events import Event
from ascendrun.core.reachability import GATHER_S, ReachabilityWatch, unreachable_hosts


def words(**liveness: str) -> dict[str, str]:
    return liveness


def test_hosts_behind_one_switch_are_one_line_and_only_one() -> None:
    watch = ReachabilityWatch()
    assert watch.update(words(a1="UNREACHABLE", a2="ALIVE"), now_s=0.0) == ()
    assert watch.update(words(a1="UNREACHABLE", a2="UNREACHABLE"), now_s=1.0) == ()
    lines = watch.update(words(a1="UNREACHABLE", a2="UNREACHABLE"), now_s=GATHER_S)
    assert lines == (("unreachable", ("a1", "a2")),)
    assert watch.update(words(a1="UNREACHABLE", a2="UNREACHABLE"), now_s=GATHER_S * 9) == ()


def test_a_connection_made_anew_within_moments_is_not_worth_a_word() -> None:
    watch = ReachabilityWatch()
    watch.update(words(a="UNREACHABLE"), now_s=0.0)
    watch.update(words(a="ALIVE"), now_s=GATHER_S / 2)
    assert watch.update(words(a="UNREACHABLE"), now_s=GATHER_S) == ()
    assert watch.update(words(a="UNREACHABLE"), now_s=GATHER_S * 1.9) == ()


def test_who_answers_again_is_told_and_may_fall_silent_again() -> None:
    watch = ReachabilityWatch()
    story = []
    for step, word in enumerate(["UNREACHABLE", "UNREACHABLE", "ALIVE", "ALIVE", "UNREACHABLE", "UNREACHABLE"]):
        story += watch.update(words(a=word), now_s=step * GATHER_S)
    assert [kind for kind, _ in story] == ["unreachable", "reachable", "unreachable"]
    assert unreachable_hosts([Event(code, hosts=hosts) for code, hosts in story]) == {"a"}


def test_a_new_controller_says_nothing_twice() -> None:
    story = [Event("unreachable", hosts=("a1", "a2", "b")), Event("waiting"), Event("reachable", hosts=("a2",))]
    assert unreachable_hosts(story) == {"a1", "b"}
    watch = ReachabilityWatch(unreachable_hosts(story))
    for step in range(5):
        assert watch.update(words(a1="UNREACHABLE", b="SUSPECT"), now_s=step * GATHER_S) == ()
