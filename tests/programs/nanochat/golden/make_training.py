"""Write training.json and training.safetensors here, by upstream's own code: karpathy/nanochat at commit 92d63d4.

    git clone https://github.com/karpathy/nanochat /tmp/upstream && git -C /tmp/upstream checkout 92d63d4
    TORCHDYNAMO_DISABLE=1 PYTHONPATH=/tmp/upstream python tests/programs/nanochat/golden/make_training.py /tmp/upstream

The arithmetic of scripts/base_train.py, a script without functions, is run from its text with other arguments, up to
its optimizer and schedules; no part of it is kept here. The weights of the tiny model are stored after each step.
"""

from __future__ import annotations

import json
import re
import sys
import types
from pathlib import Path

import torch
from nanochat.gpt import GPT, GPTConfig
from safetensors.torch import save_file
from start import MOMENTA, first_weight, tokens

HERE = Path(__file__).parent
DEPTHS = (4, 12, 20, 26)
AT = (0, 1, 39, 40, 200, 399, 400, 0.2, 0.34, 0.35, 0.36, 0.5, 0.7, 0.9, 0.999)
"""Steps, or fractions of all steps."""
TINY = {"sequence_len": 512, "vocab_size": 50, "n_layer": 3, "n_head": 2, "n_kv_head": 1, "n_embd": 24}


def between(text: str, start: str, end: str) -> str:
    return text[text.index(start) : text.index(end)]


def recipe(script: str, depth: int) -> dict:
    """Run the parts of the script that scale the training, and sample its schedules."""
    arguments = re.findall(r'add_argument\("--([a-z0-9-]+)"(?:, type=\w+)?(?:, default=([^,)]+))?', script)
    values = {name.replace("-", "_"): eval(default) if default else False for name, default in arguments}
    world = {
        "args": types.SimpleNamespace(**{**values, "depth": depth}),
        "math": __import__("math"),
        "torch": torch,
        "GPT": GPT,
        "GPTConfig": GPTConfig,
        "vocab_size": 32768,
        "print0": lambda *_: None,
        "resuming": False,
    }
    exec(between(script, "def build_model_meta", "# Build the model, move to device"), world)
    world["model"] = world["build_model_meta"](depth)
    exec(between(script, "# Get the parameter counts", "if resuming:\n    optimizer.load_state_dict"), world)
    exec(between(script, "# num_iterations: either it is given", "# Training loop"), world)
    steps = world["num_iterations"]
    groups = [
        {key: group[key] for key in sorted(group) if key != "params"}
        | {"shapes": sorted({tuple(each.shape) for each in group["params"]}), "count": len(group["params"])}
        for group in world["optimizer"].param_groups
    ]
    at = sorted({int(each * steps) if isinstance(each, float) else each for each in AT})
    return {
        "steps": steps,
        "batch": world["total_batch_size"],
        "weight_decay": world["weight_decay_scaled"],
        "flops_per_token": world["num_flops_per_token"],
        "counts": world["param_counts"],
        "windows": [window for window, _ in world["model"].window_sizes],
        "groups": groups,
        "schedule": [
            [step, world["get_lr_multiplier"](step), world["get_muon_momentum"](step), world["get_weight_decay"](step)]
            for step in at
        ],
    }


def three_steps() -> tuple[dict, dict]:
    """Train a tiny model in float32; two micro-batches a step. Only the last weights are stored."""
    with torch.device("meta"):
        model = GPT(GPTConfig(**TINY))
    model.to_empty(device="cpu")
    model.init_weights()
    with torch.no_grad():
        for number, weight in enumerate(model.state_dict().values()):
            weight.copy_(first_weight(number, weight.shape))
    optimizer = model.setup_optimizer(weight_decay=0.2)
    ids, losses = tokens(), []
    for step in range(3):
        for micro in ids[step]:
            loss = model(micro[:, :-1].contiguous(), micro[:, 1:].contiguous())
            (loss / len(ids[step])).backward()
            losses.append(float(loss))
        for group in optimizer.param_groups:
            if group["kind"] == "muon":
                group["momentum"] = MOMENTA[step]
        optimizer.step()
        model.zero_grad(set_to_none=True)
    order = list(model.state_dict())
    return model.state_dict(), {"sizes": TINY, "weights": order, "losses": losses}


def main() -> None:
    script = (Path(sys.argv[1]) / "scripts" / "base_train.py").read_text()
    tensors, facts = three_steps()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, HERE / "training.safetensors")
    golden = {"three_steps": facts, "recipes": {str(depth): recipe(script, depth) for depth in DEPTHS}}
    (HERE / "training.json").write_text(json.dumps(golden, indent=1) + "\n")


main()
