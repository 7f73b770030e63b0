"""A minimal data-parallel training that keeps ascendrun's contract: metrics, checkpoint signal, resume, exit 0."""

import argparse
import json
import os
import signal
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

BACKENDS = {"npu": "hccl", "cuda": "nccl", "cpu": "gloo"}


def choose_device():
    try:
        import torch_npu  # noqa: F401  (brings torch.npu)
    except ImportError:
        pass
    local_rank = int(os.environ["LOCAL_RANK"])
    for family in ("npu", "cuda"):
        if hasattr(torch, family) and getattr(torch, family).is_available():
            device = torch.device(family, local_rank)
            getattr(torch, family).set_device(device)
            return device
    return torch.device("cpu")


def report(line):
    if "ASCENDRUN_METRICS_FILE" in os.environ:
        with open(os.environ["ASCENDRUN_METRICS_FILE"], "a") as metrics:
            metrics.write(json.dumps({"timestamp": time.time(), **line}) + "\n")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--local_rank", help="what deepspeed's launcher adds; the environment says it too")
    epochs = parser.parse_args().epochs

    told_to_stop = []
    signal.signal(signal.SIGTERM, lambda *_: told_to_stop.append(True))

    device = choose_device()
    dist.init_process_group(BACKENDS[device.type])
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(16, 1).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    # The folder must be one that every node sees; each epoch starts where the last saved one ended.
    path = os.path.join(os.environ.get("ASCENDRUN_CHECKPOINT_DIR", "."), "model.pt")
    first_epoch = 0
    if os.path.exists(path):
        saved = torch.load(path, map_location="cpu")
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first_epoch = saved["epoch"] + 1

    for epoch in range(first_epoch, epochs):
        data = torch.Generator().manual_seed(1000 * epoch + rank)  # replace: this rank's part of your data
        inputs = torch.randn(256, 16, generator=data).to(device)
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # All ranks stop after the same epoch, also when the signal reached them around its end.
        stop = torch.tensor([float(bool(told_to_stop))], device=device)
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if rank == 0:
            report({"step": epoch + 1, "loss": loss.item(), "epoch": epoch})
            print("epoch %d loss %.4f" % (epoch, loss.item()), flush=True)
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            torch.save(
                {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, path + ".new"
            )
            os.replace(path + ".new", path)
        if stop.item():
            break
    # gloo's threads need a moment after the last collective: without it a rank can hang in its own exit.
    dist.barrier()
    time.sleep(0.05)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
