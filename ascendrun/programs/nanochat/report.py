"""The stage report: report.md of the stages of a training, from the report.json and evaluation.json that they wrote."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ascendrun.programs.errors import InvalidDataError, check_writable
from ascendrun.programs.trainer.checkpoint import replace_text
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.text import Text

Facts = Mapping[str, Any]
LIBRARIES = ("ascendrun", "torch", "torch_npu", "tokenizers", "transformers")
UNKNOWN = "-"


def report_stage(options: Facts, here: Runtime) -> None:
    """Write report.md of the directories of `report_dirs`, on rank 0's node, where the evaluations are."""
    if here.is_first:
        output = Path(options["output_dir"]).absolute()
        check_writable(output)
        replace_text(output / "report.md", page_of([read_stage(Path(path)) for path in options["report_dirs"]]))
        here.log("program.report", "report: {file}", file=output / "report.md")
    here.record(done=True)


def read_stage(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return (path, what the stage wrote). Raises InvalidDataError."""
    for name in ("evaluation.json", "report.json"):
        try:
            found = json.loads((folder / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise InvalidDataError(
                "program.bad-report", "{file}: cannot be read: {reason}", file=folder / name, reason=repr(error)
            ) from error
        if isinstance(found, dict):
            return str(folder), found
    raise InvalidDataError(
        "program.no-stage-report", "{directory}: no report.json or evaluation.json of a stage", directory=folder
    )


def page_of(stages: Sequence[tuple[str, Facts]]) -> str:
    trained = [(path, found) for path, found in stages if "training" in found]
    scored = [found for _, found in stages if "tasks" in found]
    parts = [
        f"# {Text('program.report-title', 'Report of a training')}",
        section(Text("program.report-system", "System"), table(("", ""), system())),
    ]
    if trained:
        names = [
            Text("program.report-stage", "stage"),
            Text("program.report-parameters", "parameters"),
            Text("program.report-steps", "steps"),
            Text("program.report-tokens", "tokens"),
            "tokens/s",
            "MFU",
            Text("program.report-devices", "devices"),
            Text("program.report-hours", "device-hours"),
        ]
        parts.append(section(Text("program.report-stages", "Stages"), table(names, map(work, trained))))
        note = "Speed and hours are of the last run of a stage, after its last resume, with evaluations."
        parts.append(str(Text("program.report-note", note)))
    data = [(path, facts) for path, found in stages for facts in [found.get("data")] if isinstance(facts, dict)]
    if data:
        rows = ((path, ", ".join(f"{name} {shown(value)}" for name, value in facts.items())) for path, facts in data)
        parts.append(section(Text("program.report-data", "Data"), table(("", ""), rows)))
    if any(found.get("evaluations") for _, found in trained):
        parts.append(section(Text("program.report-validation", "Validation"), validation(trained)))
    if scored:
        parts.append(section(Text("program.report-scores", "Scores"), scores(scored)))
        parts.append(section(Text("program.report-samples", "Samples"), samples(scored[-1])))
    return "\n\n".join(parts) + "\n"


def section(title: Text, body: str) -> str:
    return f"## {title}\n\n{body}"


def table(names: Iterable[Any], rows: Iterable[Sequence[Any]]) -> str:
    head = [str(name) for name in names]
    lines = [head, ["---"] * len(head), *([str(cell) for cell in row] for row in rows)]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines
    )


def shown(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return UNKNOWN if value is None else str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"


def system() -> list[tuple[str, str]]:
    """Return facts of this node and of the code."""
    found = [("git", git_state()), ("Python", platform.python_version())]
    for name in LIBRARIES:
        try:
            found.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            continue
    return [*found, ("OS", platform.platform()), ("CPU", f"{platform.machine()}, {os.cpu_count()}")]


def git_state() -> str:
    """Return the commit of the working directory, with a mark if files differ from it; unknown without a repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN


def work(stage: tuple[str, Facts]) -> list[str]:
    path, found = stage
    model, training, run = (found.get(name) or {} for name in ("model", "training", "run"))
    hours, used = run.get("device_hours"), run.get("mfu")
    return [
        path,
        shown(model.get("weights")),
        shown(training.get("steps")),
        shown(training.get("tokens_seen")),
        UNKNOWN if run.get("tokens_per_s") is None else f"{run['tokens_per_s']:,.0f}",
        UNKNOWN if used is None else f"{used:.1%}",
        f"{run['ranks']} x {run['device']}" if run else UNKNOWN,
        UNKNOWN if hours is None else f"{hours:.3f}",
    ]


def validation(trained: Sequence[tuple[str, Facts]]) -> str:
    """Return a table of the first and the last evaluation of each training."""
    names = [
        Text("program.report-stage", "stage"),
        Text("program.report-steps", "steps"),
        Text("program.report-scores", "Scores"),
    ]
    rows = []
    for path, found in trained:
        every = found.get("evaluations") or []
        for each in every[:1] + every[1:][-1:]:
            values = ", ".join(f"{name} {shown(value)}" for name, value in each.items() if name != "step")
            rows.append((path, each["step"], values))
    return table(names, rows)


def scores(scored: Sequence[Facts]) -> str:
    """Return a table with a column for each model, in order: what each stage changed."""
    columns = [
        {
            **{name: value for name, value in found.items() if name in ("bits_per_byte", "loss", "mean_centered")},
            **{
                f"{name} {key}": scores[key] for name, scores in found["tasks"].items() for key in ("score", "centered")
            },
        }
        for found in scored
    ]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = ([name, *(shown(column.get(name)) for column in columns)] for name in names)
    return table(["", *(found.get("model", UNKNOWN) for found in scored)], rows)


def samples(found: Facts) -> str:
    names = [
        Text("program.report-task", "task"),
        Text("program.report-reply", "reply"),
        Text("program.report-answer", "right answer"),
    ]
    every = (
        (task, each["reply"], each["answer"])
        for task, each_task in found["tasks"].items()
        for each in each_task["samples"]
    )
    return table(names, every)
