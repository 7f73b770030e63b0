"""Which tests compare numbers within a tolerance: their outcome may follow from the order in which a processor adds."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[1]
COMPARE = frozenset({"allclose", "approx", "assert_close", "isclose"})
SMALL = 1e-3
"""A number up to this is a tolerance, wherever a test has it."""


def compares_within_a_tolerance(item: Any) -> bool:
    """Whether the test, a fixture of it, or a function of the tests that one of them names does."""
    parameters = getattr(item, "callspec", None)
    fixtures = (one.func for found in item._fixtureinfo.name2fixturedefs.values() for one in found)
    return _is_small(parameters.params.values() if parameters else ()) or any(
        COMPARE.intersection(code.co_names) or _is_small([*code.co_consts, *values])
        for code, values in _reached([item.function, *fixtures])
    )


def _is_small(values: Iterable[object]) -> bool:
    return any(isinstance(value, float) and 0 < value <= SMALL for value in values)


def _reached(functions: list[Any]) -> Iterator[tuple[CodeType, list[object]]]:
    """Each code of the tests that these lead to, with the globals that it names."""
    seen = set()
    while functions:
        function = functions.pop()
        if not inspect.isfunction(function) or function in seen:
            continue
        seen.add(function)
        function = inspect.unwrap(function)
        if TESTS not in Path(inspect.getfile(function)).parents:
            continue
        for code in _nested(function.__code__):
            values = [function.__globals__[name] for name in code.co_names if name in function.__globals__]
            functions += [value for value in values if callable(value)]
            yield code, values


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _nested(one)


def keep_only_those(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect every other test."""
    others = {item for item in items if item.get_closest_marker("counts") or not compares_within_a_tolerance(item)}
    config.hook.pytest_deselected(items=[item for item in items if item in others])
    items[:] = [item for item in items if item not in others]
