"""Selection and order of the rows of `top`: filter, sort, fold idle hosts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Any, Callable

from ascendrun.core.dataclass import dataclass
from ascendrun.core.measurement import metrics_of
from ascendrun.core.samples import DeviceSample
from ascendrun.health.top.join import natural_key, place_key
from ascendrun.health.top.view import HostRow, TopRow, TopView

IDLE_PERCENT = 5.0
FOLD_FROM = 3
"""Minimum number of similar idle hosts that are folded to one line."""

SORTS: Mapping[str, Callable[[TopRow], Any]] = {
    "host": lambda row: None,
    **{
        row.column.key: attrgetter(f"metrics.{name}")
        for name, row in metrics_of(DeviceSample).items()
        if row.column is not None and row.column.sorts
    },
    "step": lambda row: row.slower_by if row.slower_by is not None else row.progress.step_s,
    "job": lambda row: None if row.job is None else (natural_key(row.job), row.rank or 0),
    "age": lambda row: row.age_s,
}
"""Sort orders: metrics descending, hosts and names ascending, unknown values always last."""
ASCENDING = ("host", "job")


@dataclass(frozen=True)
class Order:
    """Sort order. `by`: a name of SORTS. `by_host`: one line per host."""

    by: str = "host"
    is_reversed: bool = False
    by_host: bool = False


@dataclass(frozen=True)
class Choice:
    """Row filter: of this job, on these hosts (names or globs), with problems, with a job, with this text."""

    job: str | None = None
    hosts: tuple[str, ...] = ()
    only_problems: bool = False
    only_busy: bool = False
    text: str = ""


@dataclass(frozen=True)
class IdleHosts:
    """Hosts with the same number and kind of devices, all idle and healthy. `samples`: of all their devices."""

    hosts: tuple[str, ...]
    devices: tuple[int, ...]
    samples: tuple[DeviceSample, ...]
    age_s: float | None
    problems: tuple[str, ...] = ()


def choose_rows(rows: Sequence[TopRow], choice: Choice) -> tuple[TopRow, ...]:
    return tuple(row for row in rows if _is_chosen(row, choice))


def _is_chosen(row: TopRow, choice: Choice) -> bool:
    if choice.job is not None and choice.job not in (row.job, row.job_name):
        return False
    if choice.only_problems and not row.problems:
        return False
    if choice.only_busy and row.job is None:
        return False
    return matches_host(row.host, choice.hosts) and (not choice.text or matches_text(row, choice.text))


def matches_host(host: str, requested: Collection[str]) -> bool:
    """Return whether a name or glob matches the host; without any, every host matches."""
    return not requested or any(fnmatchcase(host, one) for one in requested)


def matches_text(row: TopRow, text: str) -> bool:
    """Return whether the text is in, or a glob for, the host, job, job name, chip, health or a problem of the row."""
    names = (row.host, row.job, row.job_name, row.metrics.name, row.metrics.health, *row.problems)
    values = [name for name in names if name]
    if row.rank is not None:
        values.append(f"rank{row.rank}")
    requested = text.lower()
    has_glob = any(character in requested for character in "*?[")
    return any(fnmatchcase(value.lower(), requested) if has_glob else requested in value.lower() for value in values)


def sort_rows(rows: Sequence[TopRow], by: str, *, reverse: bool = False) -> tuple[TopRow, ...]:
    """Sort by one of SORTS. Rows without the value are last, also in reverse."""
    if by == "host":
        return tuple(sorted(rows, key=place_key, reverse=reverse))
    value = SORTS[by]
    placed = sorted(rows, key=place_key)
    known = [row for row in placed if value(row) is not None]
    known.sort(key=value, reverse=(by in ASCENDING) == reverse)
    return (*known, *(row for row in placed if value(row) is None))


@dataclass(frozen=True)
class HostLine:
    """A host with all its rows, and its host row."""

    host: str
    rows: tuple[TopRow, ...]
    itself: HostRow


def rows_by_host(rows: Sequence[TopRow], hosts: Sequence[HostRow] = ()) -> tuple[HostLine, ...]:
    """Return hosts in the order of their first rows."""
    known = {one.host: one for one in hosts}
    found: dict[str, list[TopRow]] = {}
    for row in rows:
        found.setdefault(row.host, []).append(row)
    return tuple(
        HostLine(host, tuple(here), known.get(host) or HostRow(host, None, ())) for host, here in found.items()
    )


def fold_idle(rows: Sequence[TopRow]) -> tuple[TopRow | IdleHosts, ...]:
    """Fold each group of FOLD_FROM or more similar idle hosts to one line at the end."""
    alike: dict[tuple[Any, ...], list[HostLine]] = {}
    for line in rows_by_host(rows):
        if all(_is_idle(row) for row in line.rows):
            first, metrics = line.rows[0], line.rows[0].metrics
            key = (
                first.device_type,
                metrics.name,
                metrics.memory_total_bytes,
                metrics.link_up,
                first.problems,
                tuple(row.device for row in line.rows),
            )
            alike.setdefault(key, []).append(line)
    folded = {line.host: key for key, group in alike.items() if len(group) >= FOLD_FROM for line in group}
    kept: list[TopRow | IdleHosts] = [row for row in rows if row.host not in folded]
    for key in dict.fromkeys(folded.values()):
        kept.append(_fold(alike[key]))
    return tuple(kept)


def _is_idle(row: TopRow) -> bool:
    metrics = row.metrics
    return (
        row.job is None
        and row.device is not None
        and set(row.problems) <= {"stale"}
        and metrics.health is not None
        and metrics.utilisation is not None
        and metrics.utilisation <= IDLE_PERCENT
    )


def _fold(group: Sequence[HostLine]) -> IdleHosts:
    rows = [row for line in group for row in line.rows]
    ages = [row.age_s for row in rows if row.age_s is not None]
    return IdleHosts(
        hosts=tuple(line.host for line in group),
        devices=tuple(row.device for row in group[0].rows if row.device is not None),
        samples=tuple(row.metrics for row in rows),
        age_s=max(ages) if ages else None,
        problems=rows[0].problems,
    )


def choose_view(view: TopView, choice: Choice) -> TopView:
    """Return the view with the chosen rows, and with matching hosts and jobs without rows."""
    rows = choose_rows(view.rows, choice)
    shown = {row.host for row in rows}
    jobs = tuple(row for row in view.jobs if choice.job is None or choice.job in (row.job.id, row.job.name))
    requested = {row.job.id for row in jobs}
    hosts = tuple(host for host in view.hosts if host.host in shown or _is_shown_without_rows(host, choice, requested))
    return replace(view, rows=rows, hosts=hosts, jobs=jobs)


def _is_shown_without_rows(host: HostRow, choice: Choice, jobs: Collection[str]) -> bool:
    """Return whether a host without a shown row is shown because it has no data."""
    if host.why is None or not matches_host(host.host, choice.hosts):
        return False
    if (choice.job is not None or choice.only_busy) and not set(jobs) & set(host.jobs):
        return False
    if choice.only_problems and host.why not in ("unreachable", "no-reply"):
        return False
    return choice.text.lower() in host.host.lower()


def arrange(view: TopView, choice: Choice, order: Order) -> TopView:
    """Return the chosen rows in the requested order."""
    chosen = choose_view(view, choice)
    return replace(chosen, rows=sort_rows(chosen.rows, order.by, reverse=order.is_reversed))
