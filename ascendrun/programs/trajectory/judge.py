"""All methods of a report on one split: the model, the model without some inputs, another model, and simpler methods on
the same inputs, the same split and the same time: scikit-learn, where installed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Callable

import numpy as np

from ascendrun.programs.errors import in_a_line
from ascendrun.programs.trainer.checkpoint import replace_json, replace_text
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trajectory import scores as scoring
from ascendrun.programs.trajectory.data import Options, Samples
from ascendrun.programs.trajectory.points.tracks import Floats
from ascendrun.programs.trajectory.rules import METHODS
from ascendrun.programs.trajectory.split import LEAKY
from ascendrun.programs.trajectory.tokens import LEVELS, Encoded, Groups
from ascendrun.text import Text, listed

Ask = Callable[[Sequence[Encoded]], Floats]
METHODS_FILE = "methods.json"


SIMPLE = ("forest", "boosting", "tokens")
PERFECT = 0.995
"""Macro F1 by ship from which a simple method raises the suspicion that the class is in what it reads."""


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
        compared = scoring.compare(self.methods, self.truth, self.ships, seed=seed)
        lines = scoring.as_lines(compared)
        said = [scoring.summary_line(compared), missing()]
        if "other" in compared and (ahead := compared["other"].ahead):
            said.append(
                listed(
                    "program.brought",
                    value=ahead["accuracy"].value,
                    low=ahead["accuracy"].low,
                    high=ahead["accuracy"].high,
                )
            )
        note = listed("program.intervals")
        return {name: asdict(each) for name, each in compared.items()}, [
            *lines,
            str(note),
            *map(str, filter(None, said)),
        ]

    def scores(self, method: str = scoring.MODEL) -> scoring.Scores:
        return scoring.score(self.truth, self.methods[method].argmax(1).tolist(), self.names)

    def write(
        self, folder: Path, split: str, more: Mapping[str, Any], *, seed: int, is_leaky: bool, last: Sequence[str] = ()
    ) -> str:
        """Write report.txt and report.json; return the text without the confusion matrix.

        `more`: for report.json. `last`: lines after the comparison.
        """
        scores = self.scores()
        comparison, lines = self.report(seed)
        suspects = [name for name in SIMPLE if name in comparison and is_perfect(comparison[name])]
        first = [str(LEAKY), ""] if is_leaky else []
        if suspects:
            suspected = listed("program.perfect-baseline", methods=[scoring.NAMES[name] for name in suspects])
            first += [str(suspected), ""]
        text = "\n".join([*first, scoring.as_table(scores), "", *lines, *last])
        replace_text(folder / "report.txt", f"{text}\n\n{scoring.as_confusion(scores)}\n")
        replace_json(
            folder / "report.json",
            {split: asdict(scores), "comparison": comparison, "leak_suspected": suspects, **more},
        )
        return text


def judge(
    ask: Ask,
    samples: Samples,
    split: str,
    here: Runtime,
    options: Options,
    *,
    seconds: float,
    known: Mapping[str, Floats] | None = None,
) -> Judged:
    """Ask all methods for the classes of a split; all ranks must call it together. `seconds`: as long as the model
    trained; `known`: methods that were asked already. Each rank fits some of the baselines."""
    names, vocabulary, rows = samples.names, samples.vocabulary, samples.encoded[split]
    train = [sample for sample in samples.encoded["train"] if sample.label >= 0]
    groups = Groups.make(vocabulary)
    known = known or {}
    methods = {name: each for name, each in known.items() if name not in METHODS}
    methods = {scoring.MODEL: methods.pop(scoring.MODEL) if scoring.MODEL in methods else ask(rows), **methods}
    if (groups.of > 0).any():
        methods["no_place"] = ask([groups.without(each, levels=0, has_size=True) for each in rows])
    if (groups.of < 0).any():
        methods["no_size"] = ask([groups.without(each, levels=LEVELS, has_size=False) for each in rows])
    truth = np.array([sample.label for sample in train])
    share = np.bincount(truth, minlength=len(names)) / len(truth)
    kinds = options["baselines"]
    found: dict[str, Floats] = {"majority": np.tile(share, (len(rows), 1)), **known}
    if missing() is None:
        limit_s = here.share(max(seconds, LEAST_S))
        ranks = here.world_size if len(train) > FEW_PIECES else 1
        mine = [name for name in kinds if name not in known][here.rank :: ranks] if here.rank < ranks else []
        fitted: dict[str, Floats | str] = {}
        for name in mine:
            try:
                fitted[name] = fit(name, train, truth, rows, len(vocabulary), len(names), limit_s)
            except Exception as error:  # of any kind, from another library: it must not cost the model its report
                fitted[name] = in_a_line(error)
        for name, answers in (item for each in here.gather(fitted) for item in each.items()):
            if isinstance(answers, str):
                here.log(listed("program.no-baseline", name=name, error=answers))
            else:
                found[name] = answers
    methods.update({name: found[name] for name in ("majority", *kinds) if name in found})
    return Judged(names, [record.ship for record in samples.records[split]], samples.labels(split), methods)


def is_perfect(compared: Mapping[str, Any]) -> bool:
    return bool(compared["ships"]["macro_f1"]["value"] >= PERFECT)


LEAST_S = 5.0
"""Seconds that each method may use in any case."""
FEW_PIECES = 10_000
"""With so few training pieces one rank fits all methods: on others, the import of scikit-learn takes longest."""

THREADS = min(4, os.cpu_count() or 1)
"""Of the forest: while it grows, the ranks wait."""


def missing() -> Text | None:
    """Return what to install; None: scikit-learn is there."""
    if importlib.util.find_spec("sklearn") is not None:
        return None
    return listed("program.no-scikit-learn")


def fit(
    name: str,
    train: Sequence[Encoded],
    truth: Any,
    samples: Sequence[Encoded],
    words: int,
    classes: int,
    limit_s: float,
) -> Floats:
    from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
    from sklearn.linear_model import LogisticRegression

    model: Any
    if name == "tokens":
        model = LogisticRegression(C=0.3, warm_start=True)
        rows, asked = counts_of(train, words), counts_of(samples, words)
        grow(model, "max_iter", [5] * 40, rows, truth, limit_s)
    else:
        rows, asked = table_of(train, words), table_of(samples, words)
        known = ~np.isnan(rows)
        varies = rows.max(0, where=known, initial=-np.inf) > rows.min(0, where=known, initial=np.inf)
        rows, asked = rows[:, varies], asked[:, varies]  # scikit-learn fails on a column without any number
        forest = RandomForestClassifier(warm_start=True, random_state=0, n_jobs=THREADS)
        boosting = HistGradientBoostingClassifier(
            warm_start=True, early_stopping=False, max_leaf_nodes=15, random_state=0
        )
        model, parameter, sizes = (
            (forest, "n_estimators", (5, *range(25, 201, 25)))
            if name == "forest"
            else (boosting, "max_iter", (5, 20, 40, 60))
        )
        grow(model, parameter, sizes, rows, truth, limit_s)
    if name == "forest":
        model.set_params(n_jobs=1)  # threads add the answers of the trees in any order
    probabilities = np.zeros((len(samples), classes))
    probabilities[:, model.classes_] = model.predict_proba(asked)
    return probabilities


def grow(model: Any, parameter: str, sizes: Sequence[int], rows: Any, truth: Any, limit_s: float) -> None:
    """Fit the model larger and larger, each time from where it was, until the time is over."""
    started_s = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a regression that has not converged yet is fitted further
        for size in sizes:
            model.set_params(**{parameter: size}).fit(rows, truth)
            if time.monotonic() - started_s > limit_s:
                return


def table_of(samples: Sequence[Encoded], words: int) -> Any:
    """Return the summaries, or the counts of tokens where the texts have no summary."""
    if all(len(sample.values) for sample in samples):
        return np.stack([sample.values for sample in samples]).astype(np.float64)
    return counts_of(samples, words).toarray()


def counts_of(samples: Sequence[Encoded], words: int) -> Any:
    """Return how often each token is in each track, as square roots, a sparse matrix."""
    csr_matrix: Any = importlib.import_module("scipy.sparse").csr_matrix
    rows = [sample.ids() for sample in samples]
    where = np.repeat(np.arange(len(rows)), [len(each) for each in rows])
    counts = csr_matrix((np.ones(len(where)), (where, np.concatenate(rows))), shape=(len(rows), words))
    counts.sum_duplicates()
    counts.data = np.sqrt(counts.data)
    return counts
