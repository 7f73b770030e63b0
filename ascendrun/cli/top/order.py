"""In which order the rows of `top` stand, however they are shown."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ascendrun.health.top.rows import Choice
    from ascendrun.health.top.view import TopView

SORT_NAMES = ("host", "util", "mem", "power", "temp", "step", "job", "age")
"""As health/toprows.SORTS has them, which is imported when there is something to sort."""


@dataclass(frozen=True)
class Order:
    """`by`: one of SORT_NAMES."""

    by: str = "host"
    is_reversed: bool = False
    by_host: bool = False


def arrange(view: TopView, choice: Choice, order: Order) -> TopView:
    """The chosen rows in the wished order."""
    from ascendrun.health.top.rows import choose_view, sort_rows

    chosen = choose_view(view, choice)
    return replace(chosen, rows=sort_rows(chosen.rows, order.by, reverse=order.is_reversed))
