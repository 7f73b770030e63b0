"""Dataclasses whose methods are made at the first use behave as those of the standard library."""

from __future__ import annotations

import copy
import threading
from dataclasses import FrozenInstanceError, field, fields, is_dataclass, replace
from typing import Generic, TypeVar

import pytest

from ascendrun.core.dataclass import dataclass

T = TypeVar("T")


def make_classes() -> tuple[type, type]:
    @dataclass(frozen=True)
    class Base(Generic[T]):
        x: int
        names: list[str] = field(default_factory=list)

    @dataclass(frozen=True)
    class Heir(Base[int]):
        """Has a docstring."""

        size: int = 3

        def __post_init__(self) -> None:
            object.__setattr__(self, "size", self.size * 2)

    return Base, Heir


def is_made(kind: type) -> bool:
    return "__repr__" in vars(kind)


def test_nothing_is_made_before_the_first_use() -> None:
    base, heir = make_classes()
    assert not is_made(base) and not is_made(heir)
    base(1)
    assert is_made(base) and not is_made(heir)


@pytest.mark.parametrize(
    "use", [fields, is_dataclass, lambda kind: kind(1), lambda kind: kind(x=1, names=[]), lambda kind: kind(1, size=3)]
)
def test_any_first_use_makes_the_class_and_its_bases(use) -> None:
    base, heir = make_classes()
    assert use(heir)
    assert is_made(base) and is_made(heir)
    assert [one.name for one in fields(heir)] == ["x", "names", "size"]


def test_instances_are_those_of_the_standard_library() -> None:
    base, heir = make_classes()
    one = heir(1, names=["a"], size=4)
    assert (one.x, one.names, one.size) == (1, ["a"], 8)
    assert repr(one).endswith("Heir(x=1, names=['a'], size=8)")
    assert one == heir(1, ["a"], 4) and one != base(1, ["a"])
    assert replace(base(1), x=2) == base(2) == copy.copy(base(2))
    assert hash(heir(1, (), 2)) == hash(heir(1, (), 2))
    assert heir.__doc__ == "Has a docstring."
    with pytest.raises(FrozenInstanceError):
        one.x = 2
    with pytest.raises(TypeError, match="x"):
        heir()


def test_a_class_without_options_and_an_undecorated_heir() -> None:
    @dataclass
    class Counter:
        count: int = 0

    class Named(Counter):
        name = "n"

    named = Named(2)
    named.count += 1
    assert (named.count, named, Counter()) == (3, Named(3), Counter(0))


def test_threads_that_use_a_class_first_at_one_time_get_complete_instances() -> None:
    faults: list[BaseException] = []
    for _ in range(20):
        _, heir = make_classes()
        start = threading.Barrier(4)

        def use(kind: type = heir, start: threading.Barrier = start) -> None:
            try:
                start.wait(60)
                assert {kind(1, ()): kind.__name__}[kind(1, ())] == "Heir"
            except BaseException as error:
                faults.append(error)

        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not faults
