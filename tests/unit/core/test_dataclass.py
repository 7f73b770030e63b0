"""Dataclasses behave as those of the standard library, and are read from JSON by the types of their fields."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, field, fields, is_dataclass, replace
from enum import Enum
from typing import Any, Generic, TypeVar

import pytest

from ascendrun.core.dataclass import dataclass, load_dataclass
from ascendrun.text import Text, to_json

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


class Colour(Enum):
    RED = "red"


@dataclass(frozen=True)
class Part:
    size: float
    colour: Colour | None = None


@dataclass(frozen=True)
class Whole:
    parts: tuple[Part, ...]
    by_rank: Mapping[int, Part]
    pair: tuple[int, str] = (0, "")
    why: Text | str | None = None
    names: frozenset[str] = frozenset()
    raw: Any = field(default=None, metadata={"read": None})


def test_json_becomes_what_the_types_of_the_fields_say() -> None:
    whole = Whole((Part(1.5, Colour.RED),), {3: Part(2)}, (4, "x"), Text("t.why", "why"), frozenset({"n"}), {"a": [1]})
    row = json.loads(json.dumps({**to_json(whole), "parts": [{"size": 1.5, "colour": "red", "new": 1}]}))
    assert load_dataclass(Whole, row) == whole
    assert load_dataclass(Whole, {"parts": [], "by_rank": {}, "why": None}) == Whole((), {})


@pytest.mark.parametrize("row", [{}, {"parts": 1, "by_rank": {}}, {"parts": [{"size": "1"}], "by_rank": {}}])
def test_what_is_no_such_json_is_refused(row: dict[str, Any]) -> None:
    with pytest.raises((AttributeError, TypeError, ValueError)):
        load_dataclass(Whole, row)
