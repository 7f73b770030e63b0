"""One report as one HTML file: no network, no other file, readable without scripts."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, Callable

from ascendrun import __version__, text
from ascendrun.cli.output import describe_attempt_failure, describe_memory, describe_seconds, headline, sanitise_line
from ascendrun.cli.report.charts import chart_json, chart_title
from ascendrun.core.jobs.reasons import CONFIDENCE, Detail
from ascendrun.health.diagnosis import Diagnosis
from ascendrun.health.diagnosis.render import who
from ascendrun.health.report.time_use import USES
from ascendrun.text import Rendered, Text
from ascendrun.text.format import fold_hosts

if TYPE_CHECKING:
    from jinja2 import BaseLoader, Environment, Template

    from ascendrun.health.report.data import Caveat, JobMetrics, Report, StageRow

SHOWN_EVENTS = 40
SHOWN_DEVICES = 64
"""More devices than this are folded."""
SHOWN_EVIDENCE = 5
UNITS = 10_000
"""Width of the bars in the units of their drawing."""
LABELS: Mapping[str, Text] = {
    "title": Text("report.title", "Report"),
    "diagnosis": Text("report.diagnosis", "Diagnosis"),
    "time": Text("report.time", "Time use"),
    "caveats": Text("report.caveats", "Notes"),
    "stages": Text("report.stages", "Stages"),
    "stage": Text("report.stage", "stage"),
    "job": Text("report.job", "job"),
    "state": Text("report.state", "state"),
    "loss": Text("report.loss", "last loss"),
    "scores": Text("report.scores", "scores"),
    "device_hours": Text("report.device-hours", "device-hours"),
    "tokens_per_s": Text("report.tokens-per-s", "tokens/s"),
    "mfu": Text("report.mfu", "MFU"),
    "attempts": Text("report.attempts", "Attempts"),
    "devices": Text("report.devices", "Devices"),
    "events": Text("report.events", "Events"),
    "use": Text("report.use", "use"),
    "duration": Text("report.duration", "duration"),
    "ratio": Text("report.ratio", "share"),
    "meaning": Text("report.meaning", "meaning"),
    "total": Text("report.total", "total"),
    "attempt": Text("report.attempt", "attempt"),
    "started": Text("report.started", "started"),
    "ended": Text("report.ended", "ended"),
    "steps": Text("report.steps", "steps"),
    "resumed": Text("report.resumed", "resumed at"),
    "kept": Text("report.kept", "training kept"),
    "nodes": Text("report.nodes", "nodes"),
    "ran": Text("report.ran", "ran"),
    "lost_steps": Text("report.lost-steps", "steps lost"),
    "cause": Text("report.cause", "cause"),
    "status": Text("report.status", "status"),
    "in_progress": Text("report.in-progress", "in progress"),
    "device": Text("report.device", "device"),
    "chip": Text("report.chip", "chip"),
    "utilisation": Text("report.utilisation", "utilisation (mean)"),
    "power": Text("report.power", "power (mean)"),
    "temperature": Text("report.temperature", "temperature (maximum)"),
    "memory": Text("report.memory", "memory (maximum)"),
    "when": Text("report.when", "time"),
    "kind": Text("report.kind", "kind"),
    "message": Text("report.message", "message"),
    "no_charts": Text("report.no-charts", "No charts: the program wrote no metrics, and there are no samples."),
    "no_script": Text("report.no-script", "Charts require JavaScript. Everything else on this page does not."),
}
STAGE_COLUMNS = ("stage", "job", "state", "ran", "device_hours", "steps", "tokens_per_s", "mfu", "loss", "scores")
TILE_NAMES: Mapping[str, Text] = {
    "effective": Text("report.tile-effective", "effective training time"),
    "wall": Text("report.tile-wall", "from submission to end"),
    "wall-live": Text("report.tile-wall-live", "since submission"),
    "steps": Text("report.tile-steps", "steps"),
    "loss": Text("report.tile-loss", "last loss"),
    "step_s": Text("report.tile-step-s", "step time (median)"),
    "throughput": Text("report.tile-throughput", "throughput (median)"),
    "hours-npu": Text("report.tile-hours-npu", "NPU-hours"),
    "hours-cuda": Text("report.tile-hours-cuda", "GPU-hours"),
    "hours-cpu": Text("report.tile-hours-cpu", "process-hours"),
    "energy": Text("report.tile-energy", "kWh of the devices"),
}
PLANNED_NAMES: Mapping[str, tuple[Text, Callable[[float], str]]] = {
    "memory_bytes": (
        Text("report.planned-memory", "memory of a device, measured (planned)"),
        lambda value: describe_memory(int(value)),
    ),
    "tokens_per_s": (Text("report.planned-tokens", "tokens/s, measured (planned)"), lambda value: number(value)),
    "hours": (
        Text("report.planned-hours", "hours of training, measured (planned)"),
        lambda value: number(value, digits=3),
    ),
}
CAVEATS: Mapping[str, str] = {
    "no-steps": (
        "An attempt reported no steps. The effective training time is unknown. Call ascendrun.log(step=…) in the "
        "program, or set progress.pattern in the job file (docs/metrics.md)."
    ),
    "no-times": (
        "The metrics have no timestamps. All of the running time counts as training, or as lost if the attempt failed."
    ),
    "no-checkpoint": "The job failed and reported no checkpoint. Its last attempt counts as lost.",
    "diverged": "The loss or the gradient norm is not finite in {lines:plural line lines}, first at step {step}.",
    "energy-partly": (
        "Power was measured for {known:percent} of the time that the devices were reserved. The energy "
        "is that of this part."
    ),
    "energy-unknown": "Power was not measured. The energy is unknown.",
    "thinned": "The metrics are long. One of every {every} step lines was read.",
}


def make_page(report: Report) -> str:
    """Return the complete page, in the language of the process. Times: time zone of this machine."""
    from markupsafe import Markup

    style = read_asset("vendor/uplot/uPlot.min.css") + "\n" + read_asset("report.css")
    script = "\n".join(map(read_asset, ("vendor/uplot/uPlot.iife.min.js", "charts.js", "report.js")))
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; base-uri 'none'; "
        "form-action 'none'"
    )
    events = [
        {"at_s": event.at_s, "code": event.code, "severity": event.severity.value, "message": str(event.message())}
        for event in report.events
    ]
    return _template().render(
        lang="zh-CN" if text.language() == "zh" else "en",
        t={name: str(label) for name, label in LABELS.items()},
        policy=Markup(policy),
        style=Markup(style),
        script=Markup(script),
        chart_data=Markup(chart_json(report.charts, report.made_at_s)),
        report=report,
        header=list(_header(report)),
        tiles=list_tiles(report),
        diagnosis=report.diagnosis and diagnosis_values(report.diagnosis),
        units=UNITS,
        bar=list(_bar(report)),
        strip=list(_strip(report)),
        time=[
            {**vars(it), "name": USES[it.use].name, "meaning": USES[it.use].meaning} for it in report.time if it.seconds
        ],
        caveats=[describe_caveat(caveat) for caveat in report.caveats],
        stage_columns=STAGE_COLUMNS,
        stages=[stage_cells(row) for row in report.stages],
        chart_titles=[chart_title(chart) for chart in report.charts],
        attempts=attempt_rows(report),
        are_devices_folded=len(report.devices) > SHOWN_DEVICES,
        older_events=events[:-SHOWN_EVENTS],
        newest_events=events[-SHOWN_EVENTS:],
        more_events=Text("report.more-events", "{count:plural event events} more", count=len(events) - SHOWN_EVENTS),
        footer=Text(
            "report.footer",
            "ascendrun {version}, {when}; times are local ({zone})",
            version=__version__,
            when=when(report.made_at_s),
            zone=datetime.fromtimestamp(report.made_at_s).astimezone().strftime("UTC%z"),
        ),
    )


@cache
def _template() -> Template:
    return html_environment().from_string(read_asset("report.html"))


def html_environment(loader: BaseLoader | None = None) -> Environment:
    """Return templates whose strings are sanitised and escaped: names of jobs, hosts or programs never become
    markup."""
    from jinja2 import Environment
    from markupsafe import Markup

    def finalize(value: Any) -> Any:
        is_foreign = isinstance(value, (str, Rendered)) and not isinstance(value, Markup)
        return sanitise_line(str(value)) if is_foreign else value

    environment = Environment(autoescape=True, finalize=finalize, loader=loader)
    environment.filters.update(
        when=when, duration=duration, percent=percent, measured=_measured, memory=_memory, count=count
    )
    return environment


def read_asset(name: str) -> str:
    """Return a file of ascendrun/web."""
    found = resources.files("ascendrun.web")
    for part in name.split("/"):
        found = found.joinpath(part)
    return found.read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


# ---------------------------------------------------------------- values


def when(at_s: float | None) -> str:
    return "–" if at_s is None else datetime.fromtimestamp(at_s).strftime("%Y-%m-%d %H:%M:%S")


def number(value: float | None, *, digits: int = 4) -> str:
    """Return four digits, thousands with commas; – for None."""
    if value is None or not math.isfinite(value):
        return "–" if value is None else str(value)
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def duration(seconds: float) -> str:
    return f"{seconds:.1f}s" if seconds < 10 else describe_seconds(seconds)


def percent(ratio: float | None) -> str:
    return "–" if ratio is None else f"{100 * ratio:.1f}%"


def _measured(value: float | None, unit: str) -> str:
    return "–" if value is None else f"{value:.0f}{unit}"


def _memory(value: float | None) -> str:
    return "–" if value is None else describe_memory(int(value))


def count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def describe_steps(first: int | None, last: int | None) -> str:
    return "–" if first is None or last is None else f"{first:,}–{last:,}"


def _reason(reason: Detail, job: str) -> str:
    """Return the first line, and the command for the others."""
    lines = str(reason).strip()
    if "\n" not in lines:
        return lines
    return str(Text("report.more-lines", "{line} (all of it: ascendrun show {job})", line=headline(lines), job=job))


# ---------------------------------------------------------------- parts


def stage_cells(row: StageRow) -> dict[str, str]:
    """Return the cells of a stage by column."""
    return {
        "stage": row.stage,
        "job": row.job,
        "state": row.state,
        "ran": duration(row.ran_s),
        "device_hours": number(row.device_hours, digits=3),
        "steps": count(row.steps),
        "tokens_per_s": number(row.tokens_per_s),
        "mfu": percent(row.mfu),
        "loss": number(row.loss),
        "scores": text.enumerate_texts(
            f"{name.replace('_', ' ')} {number(value)}" for name, value in row.scores.items()
        )
        or "–",
    }


def _header(report: Report) -> Iterator[str]:
    if report.is_terminal and report.ended_at_s is not None:
        span = Text("report.from-to", "{start} to {end}", start=when(report.created_at_s), end=when(report.ended_at_s))
    else:
        span = Text("report.since", "since {start}", start=when(report.created_at_s))
    yield str(span)
    yield describe_place(report)
    if report.reason:
        yield _reason(report.reason, report.id)
    if report.file:
        yield str(Text("report.file", "file {file}", file=report.file))


def describe_place(report: Report) -> str:
    """Return text such as: on npu[01-04], 32 ranks"""
    values = {"hosts": report.hosts, "ranks": report.world_size}
    return str(Text("report.hosts-and-ranks", "on {hosts:hosts}, {ranks:plural rank ranks}", **values))


def attempt_rows(report: Report) -> list[dict[str, Any]]:
    """Return the values of each attempt for a table."""
    return [
        {
            **vars(it),
            "nodes": fold_hosts(it.hosts),
            "steps": describe_steps(it.first_step, it.last_step),
            "reason": _reason(it.reason, report.id),
            "cause": describe_attempt_failure(it.failure),
        }
        for it in report.attempts
    ]


def list_tiles(report: Report) -> list[tuple[str, str]]:
    """Return the main values with their names; only known values, but the cost always."""
    metrics, cost = report.metrics, report.cost
    unknown = str(Text("report.unknown", "unknown"))
    steps = number(metrics.steps)
    if metrics.total_steps not in (None, metrics.steps):
        steps = str(Text("report.of-steps", "{steps} of {total}", steps=steps, total=number(metrics.total_steps)))
    optional = {
        "steps": steps if metrics.steps is not None else None,
        "loss": number(metrics.loss) if metrics.loss is not None else None,
        "step_s": f"{number(metrics.step_s, digits=3)} s" if metrics.step_s is not None else None,
        "throughput": _throughput(metrics),
    }
    tiles: list[tuple[str | None, Text | str]] = [
        (unknown if report.effective_ratio is None else percent(report.effective_ratio), TILE_NAMES["effective"]),
        (duration(report.wall_s), TILE_NAMES["wall" if report.is_terminal else "wall-live"]),
        *((value, TILE_NAMES[name]) for name, value in optional.items()),
        *((number(value), name) for name, value in list(metrics.evals.items())[:3]),
        *_planned_tiles(report),
    ]
    hours = unknown if cost.device_hours is None else number(cost.device_hours, digits=3)
    tiles.append((hours, TILE_NAMES[f"hours-{cost.device_type}"]))
    if cost.energy_kwh is not None:
        label = TILE_NAMES["energy"]
        if cost.energy_known is not None and cost.energy_known < 0.98:
            known = cost.energy_known
            label = Text(
                "report.tile-energy-partly", "kWh of the devices, measured {known:percent} of the time", known=known
            )
        tiles.append((number(cost.energy_kwh, digits=3), label))
    elif cost.device_type != "cpu":
        tiles.append((unknown, TILE_NAMES["energy"]))
    return [(value, str(label)) for value, label in tiles if value is not None]


def _throughput(metrics: JobMetrics) -> str | None:
    """Return tokens/s, samples/s and MFU in one line; None: none is known."""
    parts = [
        None if metrics.tokens_per_s is None else f"{number(metrics.tokens_per_s)} tokens/s",
        None if metrics.samples_per_s is None else f"{number(metrics.samples_per_s)} samples/s",
        None if metrics.mfu is None else f"MFU {percent(metrics.mfu)}",
    ]
    return text.enumerate_texts(filter(None, parts)) or None


def _planned_tiles(report: Report) -> Iterator[tuple[str, Text]]:
    for name, (label, write) in PLANNED_NAMES.items():
        if name in report.planned:
            measured = report.measured[name]
            low, high = map(write, report.planned[name])
            yield f"{'–' if measured is None else write(measured)} ({low} – {high})", label
    if report.fewer is not None:
        label = Text(
            "report.efficiency",
            "efficiency, compared with {job} on {ranks:plural rank ranks}",
            job=report.fewer.job,
            ranks=report.fewer.ranks,
        )
        yield percent(report.fewer.ratio), label


def describe_caveat(caveat: Caveat) -> str:
    return text.fill(f"report.caveat-{caveat.code}", CAVEATS[caveat.code], caveat.values)


def list_diagnosis(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """Return (name, value) of the diagnosis below its first sentence."""
    rows: list[tuple[Text, Text | str]] = []
    if diagnosis.ranks or diagnosis.hosts:
        first = Text("report.first-failing-rank", "first failing rank")
        rows.append((first, who(diagnosis.ranks, diagnosis.hosts)))
    rows += [(Text("explain.cause", "cause"), diagnosis.cause)] if diagnosis.cause else []
    rows += [(Text("explain.hint", "hint"), diagnosis.hint)] if diagnosis.hint else []
    return [(str(name), str(value)) for name, value in rows]


def describe_confidence(diagnosis: Diagnosis) -> str:
    return str(CONFIDENCE[diagnosis.confidence.value])


def diagnosis_values(diagnosis: Diagnosis) -> Mapping[str, Any]:
    lines = [(proof.file, headline(str(proof.text))) for proof in diagnosis.evidence[:SHOWN_EVIDENCE]]
    return {
        "message": diagnosis.message,
        "confidence": describe_confidence(diagnosis),
        "fields": list_diagnosis(diagnosis),
        "evidence": [f"{file}  {line}" if file else line for file, line in lines],
    }


def _rect(x: float, width: float, use: str, title: str) -> Mapping[str, str]:
    return {"x": f"{x:.1f}", "width": f"{width:.1f}", "use": use, "title": title}


def _bar(report: Report) -> Iterator[Mapping[str, str]]:
    """Yield the total time, sorted by use."""
    x = 0.0
    for it in report.time:
        yield _rect(x, it.ratio * UNITS, it.use, f"{USES[it.use].name}: {duration(it.seconds)}")
        x += it.ratio * UNITS


def _strip(report: Report) -> Iterator[Mapping[str, str]]:
    """Yield the time in chronological order."""
    scale = UNITS / report.wall_s if report.wall_s else 0.0
    for span in report.timeline if scale else ():
        title = Text("report.attempt-span", "{use}, attempt {attempt}", use=USES[span.use].name, attempt=span.attempt)
        x, width = (span.started_at_s - report.created_at_s) * scale, (span.ended_at_s - span.started_at_s) * scale
        yield _rect(x, width, span.use, str(title))
