"""What network, trees and both bring on few and on many ships, with the default settings and with those of folds.yaml.

    python -m benchmarks.trajectory.by_ships WORK --data tracks.csv.gz --data-test 500

`--data`: a file with the columns of `ais_us`: vessel_id, vessel_class and split. Its test ships are not used. Of the
others, `--data-test` are the ships that every model is scored on; the training and validation ships are drawn from the
rest, 15% of them for validation. One CPU process with one thread. A training that is complete is not repeated. After
each, the results of all that is there are written to results/by_ships.json and .md.

Scores are by ship: the mean over the draws. "program ahead" has the range of 95% of 1000 draws of as many test ships.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import yaml

from ascendrun.programs.trainer.checkpoint import replace_text
from ascendrun.programs.trajectory import __main__ as program
from ascendrun.programs.trajectory.judge import Judged
from ascendrun.programs.trajectory.scores import MODEL
from ascendrun.programs.trajectory.split import deal
from ascendrun.programs.trajectory.stages import training  # noqa: F401 - imported once, by the parent of all trainings
from benchmarks.trajectory.other_ships import Answers, Files, compared, ranged

HERE = Path(__file__).resolve().parent
SHIPS = (20, 50, 100, 200, 400)
METHODS = {
    MODEL: "both", "network": "network", "boosting": "trees", "forest": "random forest", "tokens": "token regression",
}  # fmt: skip


def settings_of(name: str) -> dict[str, Any]:
    if name == "defaults":
        return {"max_speed_knots": 0}
    given = yaml.safe_load((HERE / "folds.yaml").read_text(encoding="utf-8"))["args"]
    return {key: value for key, value in given.items() if key not in ("data_path", "folds", "seed")}


def make_data(files: Files, folder: Path, count: int, draw: int, tested: int) -> Path:
    def order(text: str) -> list[str]:
        others = [ship for ship in files.ships if ship not in files.is_test]
        return sorted(others, key=lambda ship: hashlib.sha256(f"{text}:{ship}".encode()).digest())

    test = set(order("test")[:tested])
    drawn = set([ship for ship in order(f"draw-{draw}") if ship not in test][:count])

    def split_of(ship: str) -> str:
        return "test" if ship in test else deal(ship, val=0.15, test=0.0, seed=draw) if ship in drawn else "none"

    path = files.add(f"{count}-{draw}", split_of, develop=True)
    if not path.is_file():
        files.make(path)
        lines = path.read_text(encoding="utf-8").splitlines()
        replace_text(path, "\n".join(line for line in lines if not line.endswith(",none")) + "\n")
    return path


def train(data: Path, folder: Path, name: str, draw: int) -> None:
    if (folder / "out" / "report.json").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    options = {**settings_of(name), "data_path": data, "seed": draw, "device": "cpu", "output_dir": "out"}
    child = get_context("fork").Process(
        target=run, args=([f"--{key}={value}" for key, value in options.items()], folder)
    )
    child.start()
    child.join()
    print(f"{folder.name}: {'done' if not child.exitcode else f'failed, see {folder}/log'}", flush=True)


def run(arguments: Sequence[str], folder: Path) -> None:
    """Train in this process, which has the imports of its parent."""
    os.chdir(folder)
    log = os.open("log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    torch.set_num_threads(1)
    program.main(arguments)


def results(work: Path, names: Sequence[str], draws: Sequence[int]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        for count in SHIPS:
            folders = [work / f"{name}-{count}-{draw}" / "out" for draw in draws]
            there = [folder for folder in folders if (folder / "report.json").is_file()]
            if not there:
                continue
            weights = [json.loads((folder / "report.json").read_text())["trees_weight"] for folder in there]
            rows = compared([Answers.of(Judged.load(folder)) for folder in there])
            rows = {name_of: rows[method] for method, name_of in METHODS.items() if method in rows}
            found.setdefault(name, {})[str(count)] = {"draws": len(there), "trees_weight": weights, "methods": rows}
    return found


def as_markdown(found: dict[str, Any]) -> str:
    lines = ["# By number of ships", "", "Written by `python -m benchmarks.trajectory.by_ships`.", ""]
    for name, by_count in found.items():
        lines += [f"## {name}", "", "| ships | draws | weight of the trees | " + " | ".join(METHODS.values()) + " |"]
        lines += ["|---|---|---|" + "---|" * len(METHODS)]
        for count, each in by_count.items():
            scores = [each["methods"].get(method) for method in METHODS.values()]
            cells = [f"{row['macro_f1']['value']:.3f} ECE {row['ece']:.3f}" if row else "" for row in scores]
            weights = " ".join(f"{weight:.1f}" for weight in each["trees_weight"])
            lines.append(f"| {count} | {each['draws']} | {weights} | " + " | ".join(cells) + " |")
        lines += [
            "",
            "| ships | both ahead of network | of trees | of the forest | of the regression |",
            "|---|---|---|---|---|",
        ]
        for count, each in by_count.items():
            cells = [ranged(row["ahead"]["macro_f1"], sign="+") for row in list(each["methods"].values())[1:]]
            lines.append(f"| {count} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--data-test", type=int, default=500)
    parser.add_argument("--draws", default="1,2")
    parser.add_argument("--settings", default="defaults,folds.yaml")
    given = parser.parse_args()
    work, draws = given.work.absolute(), [int(draw) for draw in given.draws.split(",")]
    files, names = Files(given.data, work / "data"), given.settings.split(",")
    for draw in draws:
        for name in names:
            for count in SHIPS:
                data = make_data(files, work, count, draw, given.data_test)
                train(data, work / f"{name}-{count}-{draw}", name, draw)
                write(results(work, names, draws))


def write(found: dict[str, Any]) -> None:
    replace_text(HERE / "results" / "by_ships.json", json.dumps(found, indent=1) + "\n")
    replace_text(HERE / "results" / "by_ships.md", as_markdown(found))


if __name__ == "__main__":
    main()
