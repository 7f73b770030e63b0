"""Fits a line with Ray Train: the workers are on all nodes of the job, and the driver prints the progress."""

import argparse

import ray
import ray.train
import ray.train.torch
import torch


def train(config):
    torch.manual_seed(ray.train.get_context().get_world_rank())  # each worker has its own samples
    model = ray.train.torch.prepare_model(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(1, config["steps"] + 1):
        inputs = torch.randn(64, 8)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print({"step": step, "loss": loss.item()}, flush=True)
    ray.train.report({"step": step, "loss": loss.item(), "weight": next(model.parameters())[0, 0].item()})


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    ray.init()
    scaling = ray.train.ScalingConfig(num_workers=options.workers, placement_strategy="SPREAD")
    trainer = ray.train.torch.TorchTrainer(train, train_loop_config={"steps": options.steps}, scaling_config=scaling)
    print(trainer.fit().metrics, flush=True)


if __name__ == "__main__":
    main()
