"""The trajectory program on this machine's GPU, in under three minutes: speed at two sizes, and whether it learns what
a CPU learns. From the repository's root, without network:

    python3 -m benchmarks.trajectory.cuda_check            # --family cpu --quick shows the same without a GPU

Prints one JSON object: tokens/s and MFU of the quickstart's model and of a Qwen2.5-0.5B-shaped one, and the largest
relative difference between the losses of the first steps on the CPU and on the device, float32 both.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
PARITY = {
    "data_path": "generated",
    "synthetic_tracks": 120,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "global_batch_size": 32,
    "num_train_epochs": 2,
    "dropout": 0.0,
    "logging_steps": 1,
    "dtype": "float32",
    "grammar": "motion",
}
QUICKSTART = {"tracks": 2000, "epochs": 5, "log_every": 20, "dtype": "auto", "grammar": "motion"}
LARGE = {
    "data_path": "generated",
    "synthetic_tracks": 1500,
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "global_batch_size": 128,
    "num_train_epochs": 50,
    "max_steps": 80,
    "eval_steps": 1000000,
    "logging_steps": 10,
    "dtype": "auto",
    "load_best_model_at_end": "false",
    "grammar": "motion",
    "save_steps": 0,
    "learning_rate": 0.0003,
    "random_crop_prob": 0.0,
}
QUICK_LARGE = {
    **LARGE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "global_batch_size": 16,
    "max_steps": 6,
    "logging_steps": 2,
    "data_path": "generated",
    "synthetic_tracks": 200,
}


def train(options: dict[str, Any], family: str, limit_s: float) -> dict[str, Any]:
    """Runs the program as a launcher would; the metrics lines, or how it ended."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics"
        argv = [
            sys.executable,
            "-m",
            "ascendrun.programs.trajectory",
            f"--device={family}",
            "--output_dir=out",
            *(f"--{name}={value}" for name, value in options.items()),
        ]
        environ = {
            **os.environ,
            "PYTHONPATH": str(REPO),
            "ASCENDRUN_METRICS_FILE": str(metrics),
            "OMP_NUM_THREADS": "8",
        }
        began_s = time.monotonic()
        try:
            ended = subprocess.run(
                argv,
                cwd=folder,
                env=environ,
                timeout=limit_s,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"error": f"not done after {limit_s} s"}
        if ended.returncode:
            return {"error": ended.stdout[-2000:]}
        lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
        return {"lines": lines, "seconds": round(time.monotonic() - began_s, 1)}


def speed(told: dict[str, Any]) -> dict[str, Any]:
    """Of the later half of the run: the first steps make kernels."""
    if "error" in told:
        return told
    steps = [line for line in told["lines"] if "tokens_per_s" in line]
    later = steps[len(steps) // 2 :]
    begun = next(line for line in told["lines"] if line.get("event") == "start")
    names = ("step_s", "data_s", "forward_s", "backward_s", "optimizer_s", "device_memory_bytes", "mfu")
    return {
        "seconds": told["seconds"],
        "parameters": begun["parameters"],
        "last_loss": steps[-1]["loss"],
        "tokens_per_s": round(max(line["tokens_per_s"] for line in later)),
        **{name: later[-1][name] for name in names if name in later[-1]},
        "scores": {
            name: value
            for line in told["lines"]
            for name, value in line.items()
            if name.startswith(("test_", "baseline_"))
        },
    }


def parity(family: str) -> dict[str, Any]:
    pair = [train(PARITY, each, 60) for each in ("cpu", family)]
    if any("error" in told for told in pair):
        return {"error": [told.get("error") for told in pair]}
    losses: list[list[float]] = [[line["loss"] for line in told["lines"] if "loss" in line] for told in pair]
    differences = [abs(one - other) / abs(one) for one, other in zip(*losses)]
    return {
        "steps": len(differences),
        "largest_relative_difference": max(differences),
        "first": [each[0] for each in losses],
        "last": [each[-1] for each in losses],
        "agrees": max(differences) < 5e-3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="cuda", choices=("cuda", "npu", "cpu"))
    parser.add_argument("--quick", action="store_true", help="a small model instead of the large one")
    arguments = parser.parse_args()
    began_s = time.monotonic()
    told = {
        "family": arguments.family,
        "parity": parity(arguments.family),
        "quickstart": speed(
            train({**QUICKSTART, **({"tracks": 200} if arguments.quick else {})}, arguments.family, 90)
        ),
        "large": speed(train(QUICK_LARGE if arguments.quick else LARGE, arguments.family, 120)),
    }
    told["seconds"] = round(time.monotonic() - began_s, 1)
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
