"""Writes checkpoints with the libraries themselves: `python -m tests.programs.librarycheckpoints DIR`, on two ranks for
torch and DeepSpeed, without RANK for transformers."""

import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

STEPS = (10, 20)


def write_dcp(parent: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for step in STEPS:
        weights = {f"layer.{i}.weight": distribute_tensor(torch.randn(64, 8), mesh, [Shard(0)]) for i in range(3)}
        dcp.save({**weights, "step": step}, checkpoint_id=str(parent / f"step_{step}"))


def write_deepspeed(parent: Path, stage: int) -> None:
    import deepspeed
    from deepspeed.ops import __compatible_ops__ as compatible

    compatible["deepspeed_shm_comm"] = False  # it is compiled for half a minute, and serves inference only
    deepspeed.init_distributed(dist_backend="gloo", dist_init_required=False, verbose=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    own = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=own, config=config, dist_init_required=False)
    for step in range(1, STEPS[-1] + 1):
        engine.backward(engine(torch.ones(1, 8)).sum())
        engine.step()
        if step in STEPS:
            engine.save_checkpoint(str(parent))


def write_transformers(parent: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    config = LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    rows = [{"input_ids": torch.tensor([1, 2, 3, i]), "labels": torch.tensor([1, 2, 3, i])} for i in range(4)]
    arguments = TrainingArguments(
        str(parent), max_steps=STEPS[-1], save_steps=STEPS[0], per_device_train_batch_size=1, report_to=[], use_cpu=True
    )
    Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows).train()


def main(folder: Path) -> None:
    warnings.filterwarnings("ignore")
    os.environ["DS_ACCELERATOR"] = "cpu"
    if "RANK" not in os.environ:
        write_transformers(folder / "transformers")
    else:
        dist.init_process_group("gloo")
        write_dcp(folder / "dcp")
        for stage in (2, 3):
            write_deepspeed(folder / f"zero{stage}", stage)
        dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
