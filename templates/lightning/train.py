"""Train codon's model with PyTorch Lightning: `ascendrun submit job.yaml`, or `python train.py --data_path=generated`.

Options are those of the program codon (`python train.py --help`). docs/lightning.md explains the plugin.
"""

import sys
from pathlib import Path

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

import ascendrun.lightning
from ascendrun.programs.codon import train as codon
from ascendrun.programs.codon.__main__ import OPTIONS
from ascendrun.programs.codon.files import save_model
from ascendrun.programs.codon.genes import read_genes
from ascendrun.programs.codon.vocabulary import ORGANISMS
from ascendrun.programs.errors import ProgramError
from ascendrun.programs.trainer.data import Buckets
from ascendrun.programs.trainer.options import parse_or_exit, read_table


class Codons(pl.LightningModule):
    def __init__(self, options, task):
        super().__init__()
        self.options, self.task = options, task
        self.model = codon.start(options, None, task.genes.names)

    def training_step(self, batch, number):
        tensors, weight = batch
        every = self.trainer.strategy.reduce(torch.tensor(weight, device=self.device), reduce_op="sum")
        # Lightning averages gradients over ranks, and ranks have different numbers of masked codons.
        loss = self.task.loss(self.model, tensors) * self.trainer.world_size / every
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        own = self.options
        weights = [weight for weight in self.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(
            weights, lr=own["learning_rate"], betas=codon.BETAS, weight_decay=own["weight_decay"]
        )
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            max_lr=own["learning_rate"],
            total_steps=ascendrun.lightning.steps_of(self.trainer),
            pct_start=own["warmup_ratio"],
            cycle_momentum=False,
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Shares(Dataset):
    """By step of the whole training: this rank's share of its batch, and the number of masked codons in it."""

    def __init__(self, task, plan, rank, ranks):
        self.task, self.plan, self.rank, self.ranks = task, plan, rank, ranks

    def __getitem__(self, step):
        units = self.plan.units(step)
        mine = units[self.rank :: self.ranks]
        batch = self.task.collate(mine or units[:1], step)
        return batch.tensors, batch.weight if mine else 0.0


class Steps(Sampler):
    """The numbers of the steps of an epoch. Lightning calls set_epoch."""

    def __init__(self, per_epoch):
        self.per_epoch, self.epoch = per_epoch, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.per_epoch

    def __iter__(self):
        return iter(range(self.epoch * self.per_epoch, (self.epoch + 1) * self.per_epoch))


class Data(pl.LightningDataModule):
    def __init__(self, options, task):
        super().__init__()
        self.options, self.task = options, task
        lengths = task.genes.lengths[task.train]
        window = options["length_bucket_batches"]
        self.plan = Buckets(lengths, batch_size=options["global_batch_size"], seed=options["seed"], window=window)

    def train_dataloader(self):
        shares = Shares(self.task, self.plan, self.trainer.global_rank, self.trainer.world_size)
        workers = self.options["dataloader_num_workers"]
        return DataLoader(shares, batch_size=None, sampler=Steps(self.plan.steps_per_epoch), num_workers=workers)


def main(argv):
    options = parse_or_exit(argv, read_table(OPTIONS))
    pl.seed_everything(options["seed"])
    task = codon.MaskedCodons(read_genes(options, ORGANISMS), options, multiple=options["pad_to_multiple_of"] or 1)
    trainer = pl.Trainer(
        **ascendrun.lightning.settings(
            device=options["device"],
            precision=options["dtype"],
            save_steps=options["save_steps"],
            save_total_limit=options["save_total_limit"],
            timeout_s=options["dist_timeout_s"],
        ),
        max_epochs=options["num_train_epochs"],
        max_steps=options["max_steps"] or -1,
        use_distributed_sampler=False,
        log_every_n_steps=options["logging_steps"],
        logger=False,
        enable_checkpointing=False,
    )
    module = Codons(options, task)
    trainer.fit(module, Data(options, task), ckpt_path=ascendrun.lightning.resume())
    if trainer.is_global_zero:
        save_model(module.model, task.genes.names, Path(options["output_dir"]) / "final")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ProgramError as error:
        sys.exit(f"error: {error}")
