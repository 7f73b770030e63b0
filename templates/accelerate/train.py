"""Training with Accelerate: its checkpoints have the model, the optimizer, the random states and the sampler."""

import argparse
import os

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def make_data():
    """Replace this by your data set. Accelerate gives each rank its part of every batch."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4096, 16, generator=generator)
    return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))


def newest_of(folder):
    steps = [int(name.rpartition("-")[2]) for name in os.listdir(folder) if name.startswith("step-")]
    return max(steps, default=0)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch_size", type=int, default=32, help="rows of one rank")
    parser.add_argument("--save_steps", type=int, default=100)
    parser.add_argument("--output_dir", default="out")
    options = parser.parse_args()

    accelerator = Accelerator()
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(make_data(), options.batch_size, shuffle=True)
    )
    os.makedirs(options.output_dir, exist_ok=True)
    step = newest_of(options.output_dir)
    if step:
        accelerator.load_state(os.path.join(options.output_dir, f"step-{step}"))
    while step < options.steps:
        part = accelerator.skip_first_batches(loader, step % len(loader))
        for inputs, targets in part:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            accelerator.print(f"step {step}/{options.steps}, loss: {loss.item():.4f}", flush=True)
            if step % options.save_steps == 0 or step == options.steps:
                folder = os.path.join(options.output_dir, f"step-{step}")
                accelerator.save_state(os.path.join(options.output_dir, f"part-{step}"))
                accelerator.wait_for_everyone()
                if accelerator.is_main_process:
                    os.rename(os.path.join(options.output_dir, f"part-{step}"), folder)
            if step == options.steps:
                break
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
