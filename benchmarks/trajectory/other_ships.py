"""How well the classifier does on ships and in waters that it has not seen, beside simpler methods and another version.

    python -m benchmarks.trajectory.other_ships WORK --data tracks.csv.gz --earlier CHECKOUT --parts folds,halves

`--data`: a file with the columns of `ais_us`: vessel_id, vessel_class, lon and split. `--earlier`: a checkout of commit
b87d4b6. Each part is a set of trainings with the settings of folds.yaml, one CPU process with one thread each:

- folds: five folds by ship over all ships; earlier: the same ships and folds with the earlier program;
- halves: trained west of the median longitude and tested east of it, and the other way round;
- inputs: the inputs one by one, in five folds over the ships that are not test ships in the data;
- far: the inputs one by one, in halves over the same ships;
- pieces: weights and draws by ship in five folds over the same ships, cut into pieces of five points;
- time: both programs in turns on the first fold, CPU seconds.

A training that is complete is not repeated: the same command adds seeds and parts, or goes on. The results of all that
is there are written to results/other_ships.json and .md, next to those of other parts that are in the file. Scores of
several seeds are the means of single models; the ranges are 95 % of 1000 draws of as many ships, the same for all
methods and seeds.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable

import numpy as np
import yaml

from ascendrun.programs.trainer.checkpoint import replace_text, replacing
from ascendrun.programs.trajectory.judge import METHODS_FILE, Judged
from ascendrun.programs.trajectory.scores import (
    DRAWS,
    MODEL,
    SCORES,
    Interval,
    interval,
    measure,
    scores_of_draws,
    verdict_of,
)
from ascendrun.programs.trajectory.split import deal, split_records

HERE = Path(__file__).resolve().parent
FOLDS = 5
EARLIER_NAMES = {
    "data_path": "data", "max_speed_knots": "max_knots", "num_train_epochs": "epochs", "output_dir": "output",
    "global_batch_size": "batch_size", "hidden_size": "hidden", "num_hidden_layers": "layers", "learning_rate": "lr",
    "token_mask_prob": "hide", "label_smoothing_factor": "label_smoothing", "save_steps": "checkpoint_every",
    "metric_for_best_model": "keep_best_by", "logging_steps": "log_every",
}  # fmt: skip
"""Option names of the earlier program, where they differ."""
INPUTS: dict[str, dict[str, Any]] = {
    "all": {},
    "without place": {"inputs": "size,summary"},
    "without size": {"inputs": "place,summary"},
    "without summary and trees": {"inputs": "place,size", "boosted_trees": "false"},
    "never hidden in training": {"place_dropout_prob": 0, "size_dropout_prob": 0},
}
FAR = {name: INPUTS[name] for name in ("all", "without place", "without summary and trees", "never hidden in training")}
PIECES: dict[str, dict[str, Any]] = {
    "every piece alike": {},
    "ship_weights: sqrt": {"ship_weights": "sqrt"},
    "ship_weights: balanced": {"ship_weights": "balanced"},
    "sample_by: ship": {"sample_by": "ship"},
}
OF_PIECES = {"segment_size": 5, "min_segment_size": 5}
EARLIER_GRAMMARS = {"earlier bins": "motion", "earlier bins, with size": "motion_size"}


@dataclass(frozen=True)
class Training:
    """One process. `folder`: in WORK, shared by the folds of a run. `earlier`: of the other checkout."""

    folder: str
    part: str
    variant: str
    seed: int
    fold: int
    options: Mapping[str, Any] = field(default_factory=dict)
    earlier: bool = False

    @property
    def name(self) -> str:
        return f"{self.folder}/{self.fold}"


@dataclass(frozen=True)
class Ship:
    id: str
    ship: str
    label: str
    split: str | None = None


class Files:
    """The data with another split column, or without one, in WORK/data."""

    def __init__(self, data: Path, folder: Path) -> None:
        opened = gzip.open(data, "rt", newline="") if data.suffix == ".gz" else open(data, newline="")
        with opened as lines:
            self._rows = list(csv.DictReader(lines))
        self._folder = folder
        self._splits: dict[Path, tuple[Callable[[str], str | None], bool]] = {}
        self.ships = {row["vessel_id"]: row for row in reversed(self._rows)}  # the first row of each
        self.is_test = {ship for ship, row in self.ships.items() if row["split"] == "test"}
        longitudes = sorted(float(row["lon"]) for row in self.ships.values())
        self.middle = longitudes[len(longitudes) // 2]

    def add(self, name: str, split_of: Callable[[str], str | None], *, develop: bool) -> Path:
        """Return the path of the file `name` with the split of each ship, None: no split column; `make` writes it.
        `develop`: without test ships."""
        path = self._folder / f"{name}.csv"
        self._splits[path] = split_of, develop
        return path

    def make(self, path: Path) -> None:
        if path.is_file():
            return
        split_of, develop = self._splits[path]
        kept = [row for row in self._rows if not (develop and row["vessel_id"] in self.is_test)]
        rows = [{**row, "split": split_of(row["vessel_id"])} for row in kept]
        if rows[0]["split"] is None:
            rows = [{key: value for key, value in row.items() if key != "split"} for row in rows]
        write_table(path, rows)

    def all(self, *, develop: bool) -> Path:
        return self.add("develop" if develop else "all", lambda ship: None, develop=develop)

    def half(self, half: str, seed: int, *, develop: bool) -> Path:
        """Return the file whose training ships are those of one half of the area, and its test ships all others."""

        def split_of(ship: str) -> str:
            is_west = float(self.ships[ship]["lon"]) < self.middle
            return deal(ship, val=0.15, test=0.0, seed=seed) if is_west == (half == "west") else "test"

        return self.add(f"{half}-{seed}" + "-develop" * develop, split_of, develop=develop)

    def fold(self, seed: int, fold: int, *, develop: bool) -> Path:
        """Return the file with the split that the program makes of this fold, for a program without folds."""
        pieces = [
            Ship(ship, ship, row["vessel_class"])
            for ship, row in self.ships.items()
            if not (develop and ship in self.is_test)
        ]
        parts = split_records(pieces, val=0.15, test=0.15, seed=seed, use_column=False, folds=FOLDS, fold=fold)
        of = {piece.ship: name for name, part in parts.items() for piece in part}
        return self.add(f"fold-{seed}-{fold}" + "-develop" * develop, of.__getitem__, develop=develop)


def trainings(part: str, files: Files, seed: int, *, tested: int = FOLDS) -> Iterator[Training]:
    """Yield the trainings of a part with one seed. `tested`: folds of the parts inputs and pieces."""
    folds = {"folds": FOLDS, "seed": seed}
    if part == "folds":
        for fold in range(FOLDS):
            yield Training(
                f"folds-{seed}", part, "", seed, fold, {**folds, "fold": fold, "data_path": files.all(develop=False)}
            )
    elif part == "halves":
        for number, half in enumerate(("west", "east")):
            data = files.half(half, seed, develop=False)
            yield Training(f"halves-{seed}-{half}", part, "", seed, number, {"seed": seed, "data_path": data})
    elif part == "far":
        for variant, options in FAR.items():
            for number, half in enumerate(("west", "east")):
                data = files.half(half, seed, develop=True)
                more = {"seed": seed, "data_path": data, "baselines": "", **options}
                yield Training(f"far-{seed}-{half}-{slug(variant)}", part, variant, seed, number, more)
    elif part in ("inputs", "pieces"):
        data, own = files.all(develop=True), OF_PIECES if part == "pieces" else {}
        for variant, options in (INPUTS if part == "inputs" else PIECES).items():
            for fold in range(tested):
                more = {**folds, "fold": fold, "data_path": data, "baselines": "", **own, **options}
                yield Training(f"{part}-{seed}-{slug(variant)}", part, variant, seed, fold, more)
        for variant, grammar in EARLIER_GRAMMARS.items() if part == "inputs" else ():
            for fold in range(tested):
                more = {"seed": seed, "data_path": files.fold(seed, fold, develop=True), "grammar": grammar}
                yield Training(f"{part}-{seed}-{grammar}-{fold}", part, variant, seed, fold, more, earlier=True)
    elif part == "earlier":
        for fold in range(FOLDS):
            more = {"seed": seed, "data_path": files.fold(seed, fold, develop=False), "grammar": "motion"}
            yield Training(f"earlier-{seed}-{fold}", part, "", seed, fold, more, earlier=True)
    elif part == "time":
        data = files.fold(1, 0, develop=False)
        for name, more, earlier in (
            ("now", {"baselines": ""}, False),
            ("now, with the baselines", {}, False),
            ("earlier", {"grammar": "motion"}, True),
        ):
            options = {"seed": 1, "data_path": data, **more}
            yield Training(f"time-{seed}-{slug(name)}", part, name, seed, 0, options, earlier=earlier)
    else:
        raise SystemExit(f"unknown part {part}")


def write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with replacing(path) as fresh, open(fresh, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def slug(text: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in text) or "plain"


def train(each: Training, work: Path, earlier: Path | None) -> None:
    """Train, if that was not done, and record the seconds."""
    folder = work / each.folder
    done = folder / f"done-{each.fold}.json"
    if done.is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    settings = yaml.safe_load((HERE / "folds.yaml").read_text(encoding="utf-8"))["args"]
    kept = {name: value for name, value in settings.items() if name not in ("data_path", "folds", "seed")}
    options = {**kept, "device": "cpu", "output_dir": "out", **each.options}
    tree = HERE.parents[1]
    if each.earlier:
        assert earlier is not None, "--earlier is required"
        tree, options = earlier, {EARLIER_NAMES.get(name, name): value for name, value in options.items()}
    command = [sys.executable, "-m", "ascendrun.programs.trajectory"]
    command += [f"--{name}={value}" for name, value in options.items()]
    metrics = str(folder / f"metrics-{each.fold}")
    env = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "ASCENDRUN_METRICS_FILE": metrics}
    started_s = time.monotonic()
    with open(folder / f"log-{each.fold}", "w") as log:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        print(f"{each.name}: failed, see {log.name}", flush=True)
        return
    seconds = {"wall_s": time.monotonic() - started_s, "cpu_s": usage.ru_utime + usage.ru_stime}
    replace_text(done, json.dumps({key: round(value, 1) for key, value in seconds.items()}) + "\n")
    print(f"{each.name}: {seconds['wall_s']:.0f} s", flush=True)


# --- results ---


def read(each: Training, work: Path) -> Judged | None:
    """Return the answers of a finished training; None: it is not there."""
    folder = work / each.folder
    if not (folder / f"done-{each.fold}.json").is_file():
        return None
    if "folds" in each.options:
        return Judged.load(folder / "out" / f"fold-{each.fold}")
    if (folder / "out" / METHODS_FILE).is_file():
        return Judged.load(folder / "out")
    lines = [json.loads(line) for line in (folder / "out" / "predictions.jsonl").read_text().splitlines()]
    names = sorted(lines[0]["probabilities"])
    rows = np.array([[line["probabilities"][name] for name in names] for line in lines])
    truth = [names.index(line["truth"]) for line in lines]
    return Judged(names, [line["ship"] for line in lines], truth, {MODEL: rows})


@dataclass
class Answers:
    """The answers of one training, or of several on other ships, by ship: the mean over its pieces."""

    ships: list[str]
    truth: Any
    rows: dict[str, Any]

    @staticmethod
    def of(judged: Judged) -> Answers:
        ships, numbers = np.unique(np.asarray(judged.ships), return_inverse=True)
        truth = np.zeros(len(ships), dtype=np.int64)
        truth[numbers] = judged.truth
        votes = {}
        for name, rows in judged.methods.items():
            sums = np.zeros((len(ships), rows.shape[1]))
            np.add.at(sums, numbers, rows)
            votes[name] = sums / np.bincount(numbers)[:, None]
        return Answers(ships.tolist(), truth, votes)


def compared(seeds: Sequence[Answers], *, first: str = MODEL) -> dict[str, Any]:
    """Return, for each method, the mean over the seeds of each score, and by how much `first` is ahead of it."""
    assert all(each.ships == seeds[0].ships and (each.truth == seeds[0].truth).all() for each in seeds)
    count = len(seeds[0].ships)
    draws = np.random.default_rng(7).multinomial(count, np.full(count, 1 / count), size=DRAWS)
    draws = np.vstack([np.ones(count, dtype=draws.dtype), draws])  # the first is the data itself
    scores = {}
    for name in (name for name in seeds[0].rows if all(name in each.rows for each in seeds)):
        classes = seeds[0].rows[name].shape[1]
        found = [
            scores_of_draws(np.arange(count), each.truth, each.rows[name].argmax(1), draws, classes) for each in seeds
        ]
        scores[name] = {score: np.mean([each[score] for each in found], axis=0) for score in SCORES}
    return {
        name: {
            **{score: vars(interval(values)) for score, values in each.items()},
            "accuracy_of_seeds": [round(float((each.rows[name].argmax(1) == each.truth).mean()), 4) for each in seeds],
            "ece": round(float(np.mean([measure(each.rows[name], each.truth).ece for each in seeds])), 4),
            "ahead": {score: ahead(scores[first][score] - values) for score, values in each.items()},
        }
        for name, each in scores.items()
    }


def ahead(difference: Any) -> dict[str, Any]:
    found: Interval = interval(difference)
    return {**vars(found), "verdict": verdict_of(found)}


def results(work: Path, files: Files, seeds: Sequence[int], *, tested: int = FOLDS) -> dict[str, Any]:
    """Return what the finished trainings say; a seed counts where all its trainings are there."""
    answers: dict[tuple[str, str], dict[int, Answers]] = {}
    for part in ("folds", "halves", "far", "inputs", "pieces"):
        for seed in seeds:
            by_variant: dict[str, list[Judged | None]] = {}
            for each in trainings(part, files, seed, tested=tested):
                by_variant.setdefault(each.variant, []).append(read(each, work))
            for variant, parts in by_variant.items():
                there = [each for each in parts if each is not None]
                if len(there) == len(parts):
                    answers.setdefault((part, variant), {})[seed] = Answers.of(Judged.joined(there))
    found: dict[str, Any] = {}
    for (part, variant), by_seed in answers.items():
        if part in ("folds", "halves"):
            found[part] = {"seeds": sorted(by_seed), **tell(list(by_seed.values()))}
        else:
            mine = found.setdefault(part, {"seeds": sorted(by_seed), "ships": 0, "variants": {}})
            base = answers.get((part, next(iter(PIECES if part == "pieces" else INPUTS))), {})
            same = [seed for seed in by_seed if seed in base]
            if not same:
                continue
            rows = {}
            for method in (MODEL, "network"):
                pairs = [
                    Answers(base[s].ships, base[s].truth, {"all": base[s].rows[method], "own": own})
                    for s in same
                    if (own := by_seed[s].rows.get(method)) is not None
                ]
                if pairs:
                    rows[method] = compared(pairs, first="all")["own"]
            mine["ships"] = len(base[same[0]].ships)
            mine["variants"][variant] = rows
    beside = [pair for seed in seeds if (pair := beside_earlier(work, files, seed)) is not None]
    if beside:
        alike = [pair for pair in beside if pair[0] == beside[0][0]]
        found["beside the earlier program"] = {
            "seeds": [pair[1] for pair in alike],
            "folds": alike[0][0],
            **tell([pair[2] for pair in alike]),
        }
    times: dict[str, list[float]] = {}
    for seed in seeds:
        for turn in trainings("time", files, seed):
            done = work / turn.folder / f"done-{turn.fold}.json"
            if done.is_file():
                times.setdefault(turn.variant, []).append(json.loads(done.read_text())["cpu_s"])
    return {**found, "time": {"cpu_s": times}} if times else found


def beside_earlier(work: Path, files: Files, seed: int) -> tuple[list[int], int, Answers] | None:
    """Return the folds that both programs have finished, the seed, and their answers; None: there is no such fold."""
    pairs = {}
    for mine, theirs in zip(trainings("folds", files, seed), trainings("earlier", files, seed)):
        own, other = read(mine, work), read(theirs, work)
        if own is not None and other is not None:
            pairs[mine.fold] = own, other
    if not pairs:
        return None
    both = Answers.of(Judged.joined([own for own, _ in pairs.values()]))
    others = Answers.of(Judged.joined([other for _, other in pairs.values()]))
    assert both.ships == others.ships and (both.truth == others.truth).all()
    return list(pairs), seed, Answers(both.ships, both.truth, {MODEL: both.rows[MODEL], "earlier": others.rows[MODEL]})


def tell(seeds: Sequence[Answers]) -> dict[str, Any]:
    return {"ships": len(seeds[0].ships), "methods": compared(seeds)}


def as_markdown(found: Mapping[str, Any]) -> str:
    lines = ["# Other ships and other waters", "", "Written by `python -m benchmarks.trajectory.other_ships`.", ""]
    for part, each in found.items():
        if part == "time":
            lines += ["## time", "", "| | CPU seconds of each turn |", "|---|---|"]
            lines += [f"| {name} | {' '.join(map(str, turns))} |" for name, turns in each["cpu_s"].items()]
            continue
        names = ", ".join(map(str, each["seeds"]))
        folds = f"; folds {', '.join(map(str, each['folds']))}" if "folds" in each else ""
        lines += [f"## {part}", "", f"{each['ships']} ships; seeds {names}{folds}", ""]
        what = "the model is ahead by" if "methods" in each else "all inputs are ahead by"
        lines += [f"| | macro F1 | accuracy | ECE | {what} (macro F1; accuracy) |", "|---|---|---|---|---|"]
        rows = each.get("methods") or {
            f"{variant}: {'complete' if method == MODEL else 'network alone'}": row
            for variant, methods in each["variants"].items()
            for method, row in methods.items()
        }
        lines += [
            f"| {name} | {ranged(row['macro_f1'])} | {ranged(row['accuracy'])} | {row['ece']:.3f} | "
            + "; ".join(f"{ranged(row['ahead'][score], sign='+')} {row['ahead'][score]['verdict']}" for score in SCORES)
            + " |"
            for name, row in rows.items()
        ]
        lines.append("")
    return "\n".join(lines) + "\n"


def ranged(score: Mapping[str, float], *, sign: str = "") -> str:
    return f"{score['value']:{sign}.3f} ({score['low']:{sign}.3f} to {score['high']:{sign}.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--earlier", type=Path)
    parser.add_argument("--parts", default="", help="to train, in this order; none: only write the results")
    parser.add_argument("--seeds", default="1,2,3", help="with time: turns")
    parser.add_argument("--folds", type=int, default=FOLDS, help="of the five, those of the parts inputs and pieces")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "other_ships.json")
    given = parser.parse_args()
    work, earlier = given.work.absolute(), given.earlier and given.earlier.absolute()
    files = Files(given.data, work / "data")
    seeds = [int(seed) for seed in given.seeds.split(",")]
    wanted = [
        each
        for part in filter(None, given.parts.split(","))
        for seed in seeds
        for each in trainings(part, files, seed, tested=given.folds)
    ]
    for each in wanted:
        files.make(each.options["data_path"])
    with ThreadPoolExecutor(given.workers) as pool:
        list(pool.map(lambda each: train(each, work, earlier), wanted))
    kept = json.loads(given.out.read_text(encoding="utf-8")) if given.out.is_file() else {}
    found = {**kept, **results(work, files, seeds, tested=given.folds)}
    replace_text(given.out, json.dumps(found, indent=1) + "\n")
    replace_text(given.out.with_suffix(".md"), as_markdown(found))


if __name__ == "__main__":
    main()
