"""The golden three steps by our training, on one rank or two; as a program it writes losses and weights of rank 0."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn import functional

from ascendrun.programs.devices.accelerator import Precision
from ascendrun.programs.nanochat.export import our_name
from ascendrun.programs.nanochat.model import NanoChat, make_model, setup_optimizer
from ascendrun.programs.nanochat.sizes import Horizon, Sizes
from ascendrun.programs.trainer import optim, runtime
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.strategies.parallel import wrap
from tests.programs.nanochat.golden.start import MOMENTA, first_weight, tokens

GOLDEN = json.loads(Path(__file__).with_name("golden").joinpath("training.json").read_text())["three_steps"]
FLOAT = Precision(torch.float32, torch.float32, False, "float32")


def main(argv: list[str]) -> None:
    runtime.run(write, family="cpu", timeout_s=120)


def write(here: Runtime) -> None:
    model, losses = train(here)
    shared = here.gather(losses)
    if here.is_first:
        save_file({name: each.detach().contiguous() for name, each in model.named_parameters()}, "weights.safetensors")
        Path("losses.json").write_text(json.dumps(shared))


def train(here: Runtime) -> tuple[NanoChat, list[float]]:
    """Return the model and the loss of each of this rank's micro-batches; the ranks share those of a step."""
    theirs = GOLDEN["sizes"]
    names = ("n_layer", "n_embd", "n_head", "n_kv_head", "vocab_size", "sequence_len")
    model = make_model(Sizes(*(theirs[name] for name in names)), seed=0)
    weights = dict(model.named_parameters())
    assert {our_name(name) for name in GOLDEN["weights"]} == set(weights)
    with torch.no_grad():
        for number, name in enumerate(GOLDEN["weights"]):
            weight = weights[our_name(name)]
            weight.copy_(first_weight(number, weight.shape))
    strategy = "none" if here.world_size == 1 else "ddp"
    engine = wrap(model, here, strategy=strategy, make_optimizer=plan_of, precision=FLOAT)
    losses = []
    for step, batch in enumerate(tokens()):
        engine.begin(step)
        mine = batch[here.rank :: here.world_size]
        for number, micro in enumerate(mine):
            with engine.accumulate(last=number == len(mine) - 1):
                loss = functional.cross_entropy(engine.model(micro[:, :-1]).flatten(0, 1), micro[:, 1:].flatten())
                engine.backward(loss / len(mine))
            losses.append(loss.item())
        engine.finish(0.0)
    return model, losses


def plan_of(model: NanoChat) -> optim.OptimizerPlan:
    """The options of upstream's setup_optimizer itself, without a schedule but for the momentum; ranks share states."""
    options = {
        "embedding_lr": 0.2, "unembedding_lr": 0.004, "matrix_lr": 0.02, "scalar_lr": 0.5,
        "warmup_steps": 0, "warmdown_ratio": 0.0, "final_lr_frac": 1.0,
    }  # fmt: skip
    plan = setup_optimizer(model, options, Horizon(0, 0, 10**9, 1.0, 0.2), shard=True)
    muon, *others = plan.groups
    changed = optim.Group(muon.params, "muon", muon.lr, 0.2, momentum=lambda step: MOMENTA[step])
    return optim.OptimizerPlan([changed, *others], shard=True)
