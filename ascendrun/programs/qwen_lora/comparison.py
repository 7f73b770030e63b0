"""The mode compare: two finished runs side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trainer.checkpoint import replace_json
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.text import Text
from ascendrun.text.format import pad_left


def compare(options: Mapping[str, Any], here: Runtime) -> None:
    """Compare two runs on the same budget: write comparison.json and a table. Raises InvalidDataError."""
    if len(options["compare_dirs"]) != 2:
        raise InvalidDataError("program.compare-two", "--compare_dirs: expected the output directories of two runs")
    reports = []
    for name in options["compare_dirs"]:
        path = Path(name) / "report.json"
        if not path.is_file():
            raise InvalidDataError(
                "program.no-report",
                "{path}: report not found; the run did not finish, or used another directory or node",
                path=path,
            )
        reports.append(json.loads(path.read_text(encoding="utf-8")))
    first, second = reports
    budget = [(each["training"]["steps"], each["training"]["samples"]) for each in reports]
    if budget[0] != budget[1]:
        raise InvalidDataError(
            "program.other-budgets",
            "the runs have different budgets: {first} and {second} steps and samples",
            first=budget[0],
            second=budget[1],
        )
    rows = [(name, first["final"][name], second["final"][name]) for name in first["final"] if name in second["final"]]
    here.log("program.compare", "{steps} steps, {samples} samples each", steps=budget[0][0], samples=budget[0][1])
    difference = pad_left(Text("program.difference", "difference"), 12)
    here.log(f"{'':<18}{options['compare_dirs'][0]:>14}{options['compare_dirs'][1]:>14}{difference}")
    for name, one, other in rows:
        here.log(f"{name.replace('_', ' '):<18}{one:>14.4f}{other:>14.4f}{other - one:>+12.4f}")
    output = Path(options["output_dir"]).absolute()
    final = {name: [one, other] for name, one, other in rows}
    replace_json(output / "comparison.json", {"runs": list(options["compare_dirs"]), "final": final})
    here.record(done=True)
