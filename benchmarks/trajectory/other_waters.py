"""How well the classifier does on two public samples of AIS from other seas, with its defaults and nothing tuned.

    python -m benchmarks.trajectory.other_waters WORK --data DIRECTORY

`--data`: has both files of SOURCES, from data/ of github.com/Argenni/AIS_data_reconstruction at commit
d7d4c25ade5ad53bb879235e28312686550bc33. Their points are irregular. The columns are given the names and units that the
program reads. Ships with fewer than 10 points or without a class, and classes of fewer than 8 ships, are dropped. Each
training has five folds by ship and one CPU process with one thread. One that is complete is not repeated.

The results are written to results/other_waters.json and .md: each score is the mean over the seeds of single models, by
ship, with the range of 95% of 1000 draws of as many ships.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from ascendrun.programs.trainer.checkpoint import replace_text
from ascendrun.programs.trajectory.judge import Judged
from ascendrun.programs.trajectory.scores import MODEL, SCORES
from benchmarks.trajectory.by_ships import run
from benchmarks.trajectory.other_ships import FOLDS, HERE, Answers, compared, ranged, write_table

SIMPLE, PARTS = ("forest", "boosting", "tokens"), ("network", "boosting")
LEAST_POINTS, LEAST_SHIPS, GOAL_AHEAD, GOAL_ECE = 10, 8, 1.05, 0.08
CLASSES = {
    "Passenger": ("passenger", "high speed craft", "hsc"),
    "Tanker": ("tanker",),
    "Tug_Tow": ("tug", "towing"),
    "Cargo": ("cargo", "bulk carrier", "container", "vehicles carrier", "reefer"),
    "Fishing": ("fishing",),
    "Pleasure_Sailing": ("sailing", "pleasure"),
    "Dredging": ("dredg",),
    "": ("unknown", "unspecified", "undefined"),
}
"""Classes of `ais_us` by what a ship type contains, the first that fits; other types are classes as they are."""
Row = Mapping[str, str]


def baltic(row: Row) -> dict[str, Any]:
    """Return a row of the Baltic file in the program's columns. Ends and sides are distances to the antenna."""
    return {
        "vessel_id": row["mmsi"], "time": row["timestamp"], "lat": row["lat"], "lon": row["long"], "sog": row["sog"],
        "cog": row["cog"], "heading": "", "length": total(row, "dimBow", "dimStern"),
        "width": total(row, "dimPort", "dimStarboard"), "vessel_class": class_of(row["shipType"]),
    }  # fmt: skip


def gibraltar(row: Row) -> dict[str, Any]:
    """Return a row of the Gibraltar file in the program's columns. Its speeds are in tenths of a knot."""
    return {
        "vessel_id": row["MMSI"], "time": row["TIMESTAMP_UTC"], "lat": row["LAT"], "lon": row["LON"],
        "sog": float(row["SPEED_KNOTSx10"]) / 10, "cog": row["COURSE"], "heading": row["HEADING"],
        "length": row["LENGTH"], "width": row["WIDTH"], "vessel_class": class_of(row["VESSEL_TYPE"]),
    }  # fmt: skip


def total(row: Row, *names: str) -> float | str:
    return sum(float(row[name]) for name in names) if all(row[name] for name in names) else ""


def class_of(kind: str) -> str:
    text = kind.lower()
    return next((name for name, parts in CLASSES.items() if any(part in text for part in parts)), kind)


SOURCES: dict[str, tuple[str, str, Callable[[Row], dict[str, Any]]]] = {
    "Baltic Sea": (
        "decoded_reports_baltic_all_ships_april_2018_micro_20k_sample_ais_data.csv",
        "204f5b0c349b89c71899e8c3a382d6c1c49d6a19a9879a76cea1f4d1e25e8ae0",
        baltic,
    ),
    "Strait of Gibraltar": (
        "decoded_traffic_Gibraltar_Straight_all_ships_2016A_micro_20k_sample_ais_data.csv",
        "50d0fea2fdebfb27e0e103ccd7fb96901055060b8874e1758271a68c065988cd",
        gibraltar,
    ),
}


def convert(file: Path, digest: str, row_of: Callable[[Row], dict[str, Any]], path: Path) -> dict[str, int]:
    """Write the usable ships of a source to `path`; return the number of ships of each class."""
    assert hashlib.sha256(file.read_bytes()).hexdigest() == digest, f"{file} is another version"
    with open(file, newline="", encoding="utf-8") as lines:
        rows = [row_of(row) for row in csv.DictReader(lines, delimiter=";")]
    points = Counter(row["vessel_id"] for row in rows)
    rows = [row for row in rows if points[row["vessel_id"]] >= LEAST_POINTS and row["vessel_class"]]
    classes = Counter({row["vessel_id"]: row["vessel_class"] for row in rows}.values())
    rows = [row for row in rows if classes[row["vessel_class"]] >= LEAST_SHIPS]
    write_table(path, rows)
    return {name: count for name, count in classes.most_common() if count >= LEAST_SHIPS}


def train(data: Path, folder: Path, seed: int) -> None:
    """Train the five folds with the program's defaults, if that was not done."""
    if (folder / "out" / "report.json").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    options = {"data_path": data, "folds": FOLDS, "seed": seed, "device": "cpu", "output_dir": "out"}
    arguments = [f"--{name}={value}" for name, value in options.items()]
    child = get_context("fork").Process(target=run, args=(arguments, folder))
    child.start()
    child.join()
    print(f"{folder.name}: {'done' if not child.exitcode else f'failed, see {folder}/log'}", flush=True)


def results(folders: Mapping[int, Path], classes: Mapping[str, int]) -> dict[str, Any] | None:
    """Return the scores over the seeds whose folds are complete; None: there is none."""
    there = {seed: folder / "out" for seed, folder in folders.items() if (folder / "out" / "report.json").is_file()}
    if not there:
        return None
    judged = {seed: [Judged.load(out / f"fold-{n}") for n in range(FOLDS)] for seed, out in there.items()}
    reports = [
        json.loads((out / f"fold-{n}" / "report.json").read_text()) for out in there.values() for n in range(FOLDS)
    ]
    seeds = [Answers.of(Judged.joined(parts)) for parts in judged.values()]
    methods = compared(seeds)
    best = max((name for name in SIMPLE if name in methods), key=lambda name: methods[name]["macro_f1"]["value"])
    ahead = methods[best]["ahead"]["macro_f1"]
    own, other = methods[MODEL], methods[best]["macro_f1"]["value"]
    return {
        "classes": dict(classes),
        "ships": len(seeds[0].ships),
        "seeds": sorted(there),
        "trees_weight": [report["trees_weight"] for report in reports],
        "temperature": [round(report["temperature"], 2) for report in reports],
        "best_simple": best,
        "times_best_simple": round(own["macro_f1"]["value"] / other, 3),
        "reaches_goal": {
            "macro F1": own["macro_f1"]["value"] >= GOAL_AHEAD * other and ahead["low"] > 0,
            "calibration": own["ece"] <= GOAL_ECE,
            "never worse than a part": all(
                methods[part]["ahead"]["macro_f1"]["value"] >= 0 for part in PARTS if part in methods
            ),
        },
        "methods": methods,
    }


def as_markdown(found: Mapping[str, Any]) -> str:
    lines = ["# Other seas", "", "Written by `python -m benchmarks.trajectory.other_waters`.", ""]
    for name, each in found.items():
        classes = ", ".join(f"{kind} {count}" for kind, count in each["classes"].items())
        lines += [f"## {name}", "", f"Ships with at least {LEAST_POINTS} points: {classes}.", ""]
        lines += [f"{each['ships']} ships with a track; seeds {', '.join(map(str, each['seeds']))}.", ""]
        lines += [
            "| | macro F1 | accuracy | ECE | the program is ahead by (macro F1; accuracy) |",
            "|---|---|---|---|---|",
        ]
        lines += [
            f"| {method} | {ranged(row['macro_f1'])} | {ranged(row['accuracy'])} | {row['ece']:.3f} | "
            + "; ".join(f"{ranged(row['ahead'][score], sign='+')} {row['ahead'][score]['verdict']}" for score in SCORES)
            + " |"
            for method, row in each["methods"].items()
        ]
        goals = ", ".join(
            f"{goal} {'yes' if is_reached else 'no'}" for goal, is_reached in each["reaches_goal"].items()
        )
        lines += ["", f"{each['times_best_simple']} times the macro F1 of {each['best_simple']}. Goals: {goals}."]
        lines += [f"Weight of the trees: {' '.join(f'{weight:.1f}' for weight in each['trees_weight'])}.", ""]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", default="1,2")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "other_waters.json")
    given = parser.parse_args()
    work, seeds, found = given.work.absolute(), [int(seed) for seed in given.seeds.split(",")], {}
    for name, (file, digest, row_of) in SOURCES.items():
        data = work / "data" / f"{name.replace(' ', '-')}.csv"
        classes = convert(given.data / file, digest, row_of, data)
        folders = {seed: work / f"{data.stem}-{seed}" for seed in seeds}
        for seed, folder in folders.items():
            train(data, folder, seed)
            if each := results(folders, classes):
                found[name] = each
                replace_text(given.out, json.dumps(found, indent=1) + "\n")
                replace_text(given.out.with_suffix(".md"), as_markdown(found))


if __name__ == "__main__":
    main()
