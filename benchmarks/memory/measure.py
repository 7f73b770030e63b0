"""`python -m benchmarks.memory.measure [--device cuda] [CASE…]`: each case on real ranks, beside its estimate.

On one card the cases that share a model run with a single rank. Writes results/DEVICE.csv and prints a table.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.memory.cases import CASES

REPO = Path(__file__).resolve().parents[2]
PARTS = ("weights", "gradients", "optimizer", "activations", "buffers")
RESULTS = Path(__file__).resolve().parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda", "npu"])
    parser.add_argument("--devices", type=int, default=0, help="how many cards there are; 0: two on the CPU, else one")
    parser.add_argument("--out", type=Path, help="default: the results beside this file")
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE")
    asked = parser.parse_args()
    cards = asked.devices or (2 if asked.device == "cpu" else 1)
    rows = [run(name, asked.device, min(CASES[name].ranks, cards)) for name in asked.cases]
    with open(asked.out or RESULTS / f"{asked.device}.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def run(name: str, device: str, ranks: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        processes: list[subprocess.Popen[bytes]] = []
        for rank in range(ranks):
            env = {
                **os.environ,
                "PYTHONPATH": str(REPO),
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_RANK": str(rank),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "DS_ACCELERATOR": device,
                "MEMORY_CASES": "large",
            }
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.memory.rank", name, device, str(out)],
                    env=env,
                    cwd=folder,
                    stdout=subprocess.DEVNULL,
                )
            )
        codes = [process.wait() for process in processes]
        if any(codes):
            raise SystemExit(f"{name}: exit codes {codes}")
        found = json.loads(out.read_text())
    measured, estimated = found["measured"], found["estimated"]
    parts = {part: round(found["need"].get(part, 0) / 1e6, 1) for part in PARTS}
    off = round(estimated / measured - 1, 3)
    print(
        f"{name:<45} {ranks} rank(s) measured {measured / 1e6:8.1f} MB, estimated {estimated / 1e6:8.1f} MB, "
        f"off {off:+.1%}",
        flush=True,
    )
    return {
        "case": name,
        "device": device,
        "ranks": ranks,
        "measured_mb": round(measured / 1e6, 1),
        "estimated_mb": round(estimated / 1e6, 1),
        "off": off,
        **parts,
    }


if __name__ == "__main__":
    main()
