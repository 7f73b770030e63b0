"""All methods of a report on one split: the model, the model without some inputs, the baselines, another model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

import numpy as np

from ascendrun.programs.trainer.checkpoint import replace_text
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trajectory.batches import LEVELS, Groups
from ascendrun.programs.trajectory.data import Options
from ascendrun.programs.trajectory.evaluation.baselines import METHODS, baselines, missing
from ascendrun.programs.trajectory.evaluation.compare import MODEL, as_lines, compare, summary_line
from ascendrun.programs.trajectory.points.tracks import Floats
from ascendrun.programs.trajectory.records import Record
from ascendrun.programs.trajectory.tokens import Encoded
from ascendrun.text import Text

Ask = Callable[[Sequence[Encoded]], Floats]
METHODS_FILE = "methods.json"


@dataclass(frozen=True)
class Judged:
    """The class probabilities of each method for the same pieces, their ships and classes."""

    names: list[str]
    ships: list[str]
    truth: list[int]
    methods: dict[str, Floats]

    def save(self, folder: Path) -> None:
        rows = {name: np.round(each, 5).tolist() for name, each in self.methods.items()}
        content = {"names": self.names, "ships": self.ships, "truth": self.truth, "methods": rows}
        replace_text(folder / METHODS_FILE, json.dumps(content) + "\n")

    @staticmethod
    def load(folder: Path) -> Judged:
        found = json.loads((folder / METHODS_FILE).read_text(encoding="utf-8"))
        methods = {name: np.array(rows) for name, rows in found.pop("methods").items()}
        return Judged(**found, methods=methods)

    @staticmethod
    def joined(parts: Sequence[Judged]) -> Judged:
        """Return the pieces of several folds together, with the methods that all of them have."""
        methods = [name for name in parts[0].methods if all(name in part.methods for part in parts)]
        return Judged(
            parts[0].names,
            [ship for part in parts for ship in part.ships],
            [label for part in parts for label in part.truth],
            {name: np.concatenate([part.methods[name] for part in parts]) for name in methods},
        )

    def report(self, seed: int) -> tuple[dict[str, Any], list[str]]:
        """Return the comparison as JSON, and its lines for the text."""
        compared = compare(self.methods, self.truth, self.ships, seed=seed)
        lines = as_lines(compared)
        said = [summary_line(compared), missing()]
        if "other" in compared and (ahead := compared["other"].ahead):
            said.append(
                Text(
                    "program.brought",
                    "accuracy by ship, this model against --compare_with: {value:+.3f}, {low:+.3f} to {high:+.3f}",
                    value=ahead["accuracy"].value,
                    low=ahead["accuracy"].low,
                    high=ahead["accuracy"].high,
                )
            )
        note = Text("program.intervals", "in brackets: 95 % of 1000 draws of as many ships")
        return {name: each.as_json() for name, each in compared.items()}, [
            *lines,
            str(note),
            *map(str, filter(None, said)),
        ]


def judge(
    ask: Ask,
    train: Sequence[Encoded],
    samples: Sequence[Encoded],
    records: Sequence[Record],
    here: Runtime,
    *,
    names: Sequence[str],
    vocabulary: Mapping[str, int],
    options: Options,
    seconds: float,
    known: Mapping[str, Floats] | None = None,
) -> Judged:
    """Ask all methods for the classes of `samples`; all ranks must call it together. `seconds`: as long as the model
    trained; `known`: methods that were asked already."""
    groups = Groups.make(vocabulary)
    known = known or {}
    methods = {name: rows for name, rows in known.items() if name not in METHODS}
    methods = {MODEL: methods.pop(MODEL) if MODEL in methods else ask(samples), **methods}
    if (groups.of > 0).any():
        methods["no_place"] = ask([groups.without(each, levels=0, has_size=True) for each in samples])
    if (groups.of < 0).any():
        methods["no_size"] = ask([groups.without(each, levels=LEVELS, has_size=False) for each in samples])
    kinds = options["baselines"]
    size, classes = len(vocabulary), len(names)
    methods.update(
        baselines(train, samples, here, words=size, classes=classes, seconds=seconds, methods=kinds, known=known)
    )
    return Judged(list(names), [record.ship for record in records], [sample.label for sample in samples], methods)
