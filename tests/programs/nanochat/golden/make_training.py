"""Write training.json and *.safetensors here, by upstream's own code: karpathy/nanochat at commit 92d63d4.

    git clone https://github.com/karpathy/nanochat /tmp/upstream && git -C /tmp/upstream checkout 92d63d4
    export OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 PYTHONPATH=/tmp/upstream
    python tests/programs/nanochat/golden/make_training.py /tmp/upstream

The arithmetic of scripts/base_train.py, a script without functions, is run from its text with other arguments, up to
its optimizer and schedules; no part of it is kept here. The weights of the tiny model are stored after three steps, of
one rank; on two ranks they are the same. gloo has no mean over ranks: `means_of_gloo` gives it sums and divides.
"""

import json
import re
import sys
import tempfile
import types
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from nanochat.gpt import GPT, GPTConfig
from safetensors.torch import load_file, save_file
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


def three_steps(rank: int = 0, world: int = 1) -> tuple[dict, dict]:
    """Train a tiny model in float32; two micro-batches a step, which two ranks share. The last weights are stored."""
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
        mine = ids[step][rank::world]
        for micro in mine:
            loss = model(micro[:, :-1].contiguous(), micro[:, 1:].contiguous())
            (loss / len(mine)).backward()
            losses.append(float(loss))
        for group in optimizer.param_groups:
            if group["kind"] == "muon":
                group["momentum"] = MOMENTA[step]
        optimizer.step()
        model.zero_grad(set_to_none=True)
    order = list(model.state_dict())
    return model.state_dict(), {"sizes": TINY, "weights": order, "losses": losses}


def means_of_gloo() -> None:
    """Let gloo average: its sums, divided by the ranks."""
    usual = {name: getattr(dist, name) for name in ("all_reduce", "reduce_scatter_tensor")}

    def averaged(name: str):
        def run(out: torch.Tensor, *given: torch.Tensor, op: object, async_op: bool):
            usual[name](out, *given)
            out.div_(dist.get_world_size())
            future = torch.futures.Future()
            future.set_result(None)
            return types.SimpleNamespace(get_future=lambda: future)

        return run

    for name in usual:
        setattr(dist, name, averaged(name))


def one_of_two(rank: int, folder: str) -> None:
    """Train as one of two ranks; rank 0 writes the losses of both, and how far the weights are from those of one."""
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    means_of_gloo()
    tensors, facts = three_steps(rank, 2)
    losses = [None, None]
    dist.all_gather_object(losses, facts["losses"])
    if rank == 0:
        alone = load_file(HERE / "training.safetensors")
        difference = max(float((tensors[name] - alone[name]).norm() / alone[name].norm()) for name in alone)
        Path(folder, "facts").write_text(json.dumps({"losses": losses, "difference": difference}))
    dist.destroy_process_group()


def two_ranks() -> dict:
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(one_of_two, (folder,), nprocs=2)
        return json.loads(Path(folder, "facts").read_text())


def main() -> None:
    script = (Path(sys.argv[1]) / "scripts" / "base_train.py").read_text()
    tensors, facts = three_steps()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, HERE / "training.safetensors")
    golden = {
        "three_steps": facts,
        "two_ranks": two_ranks(),
        "recipes": {str(depth): recipe(script, depth) for depth in DEPTHS},
    }
    (HERE / "training.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
