"""Losses of 20 steps in float32, recorded from an earlier commit, that later trainers must repeat.

`OMP_NUM_THREADS=1 python tests/programs/recorded.py TREE` runs every case with the programs of the checkout TREE (with
its .venv) and writes recorded.json beside this file. Those of trajectory are of its present inputs, recorded with
one rank for all numbers of ranks; those of hsdp are those of fsdp2. `--old-names` writes the options as commit
b87d4b6 called them.
"""

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path

from tests.ports import free_port

FILE = Path(__file__).with_name("recorded.json")
STEPS = 20
TRAJECTORY = {
    "data_path": "generated", "synthetic_tracks": 80,
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "global_batch_size": 12, "num_train_epochs": 9, "max_steps": STEPS, "logging_steps": 1, "dropout": 0.0,
    "random_crop_prob": 0.0, "eval_steps": 100, "dtype": "float32", "baselines": "",
    "boosted_trees": "false",
}  # fmt: skip
QWEN_LORA = {
    "data_path": "generated", "synthetic_samples": 120,
    "global_batch_size": 8, "max_steps": STEPS, "learning_rate": 0.002, "warmup_steps": 2,
    "cutoff_len": 128, "lora_r": 4, "logging_steps": 1, "num_sample_prompts": 0, "save_steps": 0, "val_size": 0,
    "dtype": "float32", "lora_dropout": 0.0, "gradient_checkpointing": "false",
}  # fmt: skip
CASES = {
    **{f"trajectory-{ranks}": ("trajectory", ranks, TRAJECTORY) for ranks in (1, 2, 4)},
    "qwen_lora-ddp-1": ("qwen_lora", 1, {**QWEN_LORA, "strategy": "ddp"}),
    **{
        f"qwen_lora-{strategy}-{ranks}": ("qwen_lora", ranks, {**QWEN_LORA, "strategy": strategy})
        for strategy in ("ddp", "fsdp2", "zero3")
        for ranks in (2, 4)
    },
    "qwen_lora-hsdp-4": ("qwen_lora", 4, {**QWEN_LORA, "strategy": "hsdp", "shard_size": 2}),
}
"""By name: program, number of ranks, options. Without dropout, whose random numbers depend on the number of ranks."""
OLD_NAMES = {
    "synthetic_tracks": "tracks", "hidden_size": "hidden", "num_hidden_layers": "layers",
    "num_attention_heads": "heads", "global_batch_size": "batch_size", "num_train_epochs": "epochs",
    "logging_steps": "log_every", "random_crop_prob": "crop", "eval_steps": "eval_every", "synthetic_samples": "rows",
    "learning_rate": "lr", "warmup_steps": "warmup", "num_sample_prompts": "samples", "save_steps": "checkpoint_every",
    "val_size": "val_fraction", "gradient_checkpointing": "checkpointing", "strategy": "how",
}  # fmt: skip


def arguments(options: dict[str, object], *, are_old: bool = False) -> list[str]:
    given = {name: value for name, value in options.items() if not (are_old and value == "generated")}
    return [f"--{OLD_NAMES.get(name, name) if are_old else name}={value}" for name, value in given.items()]


def losses_of(tree: Path, program: str, ranks: int, options: list[str]) -> list[float]:
    port = str(free_port())
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(ranks):
            environ = {
                **os.environ,
                "PYTHONPATH": str(tree),
                "OMP_NUM_THREADS": "1",
                "PYTHONWARNINGS": "ignore::FutureWarning",
                "ASCENDRUN_METRICS_FILE": f"{folder}/metrics-{rank}",
                "ASCENDRUN_METRICS": f"{folder}/metrics-{rank}",  # its name at b87d4b6
                "ASCENDRUN_CHECKPOINT_DIR": f"{folder}/ckpt",
            }
            if ranks > 1:
                address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                environ.update(address, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
            command = [str(tree / ".venv/bin/python"), "-m", f"ascendrun.programs.{program}", *options]
            processes.append(subprocess.Popen(command, cwd=folder, env=environ, stdout=subprocess.DEVNULL))
        assert [process.wait() for process in processes] == [0] * ranks, (program, ranks)
        lines = [json.loads(line) for line in Path(folder, "metrics-0").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tree", type=Path)
    parser.add_argument("--old-names", action="store_true")
    parser.add_argument("--out", type=Path, default=FILE)
    given = parser.parse_args()
    found = {}
    for name, (program, ranks, options) in CASES.items():
        found[name] = losses_of(given.tree.absolute(), program, ranks, arguments(options, are_old=given.old_names))
        print(name, found[name][0], found[name][-1], flush=True)
    given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
