"""Cells of devices: what a page shows of one, and its HTML, made once for all devices that look the same."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from jinja2 import Environment, pass_environment
from markupsafe import Markup

from ascendrun.cli import output as out
from ascendrun.health.top.view import TopRow
from ascendrun.text import Text, language

FRESH_S = 15.0
"""Seconds after which a measurement is no longer shown as present."""
PROBLEMS = {
    "health": Text("dashboard.problem-health", "device not healthy"),
    "link": Text("dashboard.problem-link", "link of a device is down"),
    "external": Text("dashboard.problem-external", "process of another job on a device"),
    "slow": Text("dashboard.problem-slow", "slow rank"),
    "unreachable": Text("dashboard.problem-unreachable", "host unreachable"),
}


class Cell(NamedTuple):
    """A device, or a rank of a host without devices: its CPU is the load. Without `is_fresh` only problems are known
    that are found without a sample."""

    name: str
    problems: tuple[str, ...]
    is_fresh: bool = False
    is_device: bool = True
    load: int | None = None
    rank: int | None = None
    job_name: str | None = None
    memory: tuple[int | None, int | None] = (None, None)
    temperature_c: int | None = None
    power_w: int | None = None
    health: str | None = None

    @property
    def title(self) -> str:
        if not self.is_fresh:
            return str(Text("dashboard.not-seen", "not observed in the last 15 s"))
        parts: list[object] = [] if self.rank is None else [f"rank {self.rank}", self.job_name]
        if self.load is not None:
            parts.append(f"{self.load}%" if self.is_device else f"CPU {self.load}%")
        if self.memory[0] is not None:
            parts.append(" / ".join(map(out.describe_memory, self.memory)))
        parts += [] if self.temperature_c is None else [f"{self.temperature_c} °C"]
        parts += [] if self.power_w is None else [f"{self.power_w} W"]
        parts += [] if self.health is None else [self.health]
        return " · ".join(map(str, [*parts, *(PROBLEMS[name] for name in self.problems if name in PROBLEMS)]))


def cell(row: TopRow) -> Cell:
    """Return a device as it was within FRESH_S."""
    is_device, sample = row.device is not None, row.metrics
    name = str(row.device) if is_device else f"r{row.rank}"
    age_s = row.age_s if is_device else row.rank_age_s
    if age_s is None or age_s > FRESH_S:
        return Cell(name, tuple(one for one in row.problems if one in ("slow", "unreachable")))
    return Cell(
        name,
        row.problems,
        is_fresh=True,
        is_device=is_device,
        load=_rounded(sample.utilisation if is_device else row.rank_metrics.cpu),
        rank=row.rank,
        job_name=row.job_name,
        memory=(sample.memory_used_bytes, sample.memory_total_bytes),
        temperature_c=_rounded(sample.temperature_c),
        power_w=_rounded(sample.power_w),
        health=sample.health,
    )


def _rounded(value: float | None) -> int | None:
    return None if value is None else round(value)


@pass_environment
def cells_html(environment: Environment, cells: Sequence[Cell]) -> Markup:
    """Return the HTML of cells: a filter of the templates."""
    lang = language()
    return Markup("").join(_html(environment, lang, one) for one in cells)


@lru_cache(maxsize=1 << 14)
def _html(environment: Environment, _lang: str, one: Cell) -> Markup:
    return Markup(environment.get_template("parts.html").module.cell(one))  # type: ignore[attr-defined]
