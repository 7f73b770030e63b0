"""Training with DeepSpeed: ZeRO by ds_config.json, checkpoints by the engine."""

import argparse
import os

import deepspeed
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_data():
    """Replace this by your data set: every rank makes the same one, and the sampler gives each rank its part."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4096, 16, generator=generator)
    return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--save_steps", type=int, default=100)
    parser.add_argument("--output_dir", default="out")
    parser.add_argument("--local_rank", help="deepspeed adds it; LOCAL_RANK has the same value")
    options = parser.parse_args()

    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 1)
    engine, _, _, _ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), config="ds_config.json"
    )
    data = make_data()
    sampler = DistributedSampler(data, seed=0)
    loader = DataLoader(data, engine.train_micro_batch_size_per_gpu(), sampler=sampler)
    os.makedirs(options.output_dir, exist_ok=True)
    # ascendrun names the newest checkpoint that is complete on every node; without it, the file `latest` does.
    tag = os.path.basename(os.environ.get("ASCENDRUN_RESUME_PATH", "")) or None
    place, _ = engine.load_checkpoint(options.output_dir, tag)
    step = engine.global_steps if place else 0
    while step < options.steps:
        epoch, done = divmod(step, len(loader))
        sampler.set_epoch(epoch)
        for number, (inputs, targets) in enumerate(loader):
            if number < done:  # done before the checkpoint
                continue
            loss = torch.nn.functional.mse_loss(engine(inputs.to(engine.device)), targets.to(engine.device))
            engine.backward(loss)
            engine.step()
            step += 1
            if engine.global_rank == 0:
                print(f"step {step}/{options.steps}, loss: {loss.item():.4f}", flush=True)
            if step % options.save_steps == 0 or step == options.steps:
                engine.save_checkpoint(options.output_dir)
            if step == options.steps:
                break


if __name__ == "__main__":
    main()
