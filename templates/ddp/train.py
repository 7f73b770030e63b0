"""Data-parallel training with torch alone: any device, any number of nodes, continues from its checkpoint."""

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BACKENDS = {"npu": "hccl", "cuda": "nccl", "cpu": "gloo"}


def choose_device():
    try:
        import torch_npu  # noqa: F401
    except ImportError:
        pass
    for family in ("npu", "cuda"):
        if hasattr(torch, family) and getattr(torch, family).is_available():
            device = torch.device(family, int(os.environ["LOCAL_RANK"]))
            getattr(torch, family).set_device(device)
            return device
    return torch.device("cpu")


def make_data():
    """Replace this by your data set: every rank makes the same one, and the sampler gives each rank its part."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4096, 16, generator=generator)
    return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch_size", type=int, default=32, help="rows of one rank")
    parser.add_argument("--save_steps", type=int, default=100)
    parser.add_argument("--output_dir", default="out")
    options = parser.parse_args()

    device = choose_device()
    dist.init_process_group(BACKENDS[device.type])
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(16, 1).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = make_data()
    sampler = DistributedSampler(data, seed=0)
    loader = DataLoader(data, options.batch_size, sampler=sampler)

    os.makedirs(options.output_dir, exist_ok=True)
    path, step = os.path.join(options.output_dir, "checkpoint.pt"), 0
    if os.path.exists(path):
        saved = torch.load(path, map_location="cpu")
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]

    while step < options.steps:
        epoch, done = divmod(step, len(loader))
        sampler.set_epoch(epoch)
        for number, (inputs, targets) in enumerate(loader):
            if number < done:  # done before the checkpoint
                continue
            loss = torch.nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if rank == 0:
                print(f"step {step}/{options.steps}, loss: {loss.item():.4f}", flush=True)
                if step % options.save_steps == 0 or step == options.steps:
                    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                    torch.save(state, path + ".new")
                    os.replace(path + ".new", path)
            if step == options.steps:
                break
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
