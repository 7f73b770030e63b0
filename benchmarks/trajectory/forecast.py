"""How often the speed of a training is inside the range that the plan prints after one recorded run.

    python -m benchmarks.trajectory.forecast [--runs 10] [--steps 60]

The same training runs 1 + --runs times on one rank of this CPU. The first is the recorded run, whose range the others
are compared with. Writes results/forecast.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from statistics import median

from ascendrun.core.jobfile.spec import parse_program_options
from ascendrun.options import make_arguments, with_defaults
from ascendrun.planner.cost import Devices, RecordedRun, with_history
from ascendrun.planner.plan import make_plan
from ascendrun.planner.training import Training, load_programs
from ascendrun.programs.trajectory import rules as trajectory

RESULTS = Path(__file__).with_name("results") / "forecast.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=60)
    asked = parser.parse_args()
    args = {
        "data_path": "generated",
        "synthetic_tracks": 200,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "global_batch_size": 16,
        "max_steps": asked.steps,
        "num_train_epochs": 100,
        "logging_steps": 10,
        "dtype": "float32",
        "baselines": "",
        "boosted_trees": False,
        "device": "cpu",
        "eval_steps": 10 * asked.steps,
    }
    first, loads = run("0", args), [os.getloadavg()[0]]
    options = with_defaults(load_programs(parse_program_options)["trajectory"], args)
    training = Training("trajectory", options, frozenset(args), 1, 1, ("here",), "cpu")
    work = trajectory.workload(training)
    assert work is not None
    work, devices = with_history(
        work, Devices("cpu", 1, 1, compute_bytes=4), [first], lambda recorded: trajectory.workload(training)
    )
    costs = make_plan(training, devices, work=work).cost
    assert costs is not None and costs.tokens_per_s is not None
    planned, measured = costs.tokens_per_s, []
    for number in range(asked.runs):
        measured.append(run(str(number + 1), args).tokens_per_s)
        loads.append(os.getloadavg()[0])
    found = {
        "date": date.today().isoformat(),
        "planned_tokens_per_s": [round(planned.low), round(planned.high)],
        "range": round(planned.high / planned.low, 2),
        "recorded_tokens_per_s": round(first.tokens_per_s),
        "measured_tokens_per_s": [round(each) for each in measured],
        "inside": sum(planned.low <= each <= planned.high for each in measured),
        "runs": asked.runs,
        "load": [round(each, 1) for each in loads],
        "cores": os.cpu_count(),
    }
    text = json.dumps(found, indent=1)
    RESULTS.write_text(text + "\n")
    print(text)


def run(name: str, args: dict[str, object]) -> RecordedRun:
    """Train, and read what a later plan would read of it."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics"
        environ = {**os.environ, "ASCENDRUN_METRICS_FILE": str(metrics), "OMP_NUM_THREADS": "1"}
        environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
        command = [sys.executable, "-m", "ascendrun.programs.trajectory", *make_arguments(args)]  # type: ignore[arg-type]
        subprocess.run(command, cwd=folder, env=environ, stdout=subprocess.DEVNULL, check=True)
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    start = next(line for line in lines if line.get("event") == "start")
    speeds = [line["tokens_per_s"] for line in lines if line.get("tokens_per_s") and "event" not in line]
    tokens = start["tokens_per_step"]
    per_token = start["flops_per_step"] / tokens
    return RecordedRun(name, 1, start["parameters"], median(speeds[1:] or speeds), tokens, per_token)


if __name__ == "__main__":
    main()
