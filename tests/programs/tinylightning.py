"""A Lightning script as a user would write it, with the plugin: rows that are shuffled, dropout, a validation."""

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, Dataset

import ascendrun.lightning as plugin

DEFAULTS: dict[str, Any] = {
    "epochs": 2,
    "rows": 24,
    "save_steps": 3,
    "workers": 0,
    "accumulate": 1,
    "validate_every": 2,
    "die_at": -1,
    "stop_at": -1,
    "resumes": True,
    "device": "cpu",
    "precision": "auto",
    "strategy": "auto",
    "how": {},
    "width": 0,
}


class Rows(Dataset[Any]):
    """Rows with noise of the global generator."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(number)) + 0.1 * torch.rand(8)
        return number, x, x.sum()


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)
        self.dropout = torch.nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(torch.relu(self.inner(x)))


class Model(pl.LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        wide = (torch.nn.Linear(8, width), torch.nn.Linear(width, width), torch.nn.Linear(width, 8))
        self.layers = torch.nn.ModuleList([Layer(), Layer(), *(wide if width else ())])
        self.head = torch.nn.Linear(8, 1)
        self.seen: list[tuple[int, int, list[int], float]] = []

    def loss_of(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return ((self.head(x)[:, 0] - y) ** 2).mean()

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        rows, x, y = batch
        loss = self.loss_of(x, y)
        self.seen.append((self.trainer.current_epoch, number, rows.tolist(), float(loss.detach())))
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("val_loss", self.loss_of(*batch[1:]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.01, total_steps=plugin.steps_of(self.trainer)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Accident(pl.Callback):
    """Ends rank 0 before a step, after the checkpoints of earlier steps are complete; or asks it to stop."""

    def __init__(self, *, die_at: int, stop_at: int) -> None:
        self.die_at, self.stop_at = die_at, stop_at

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 0 and trainer.global_step == self.stop_at:
            os.kill(os.getpid(), 15)
        if trainer.global_step == self.die_at:
            trainer.strategy.checkpoint_io.wait()
            trainer.strategy.barrier()
            os._exit(9)


def main(argv: Sequence[str]) -> None:
    options = {**DEFAULTS, **json.loads(argv[0])}
    torch.set_num_threads(1)
    accident = Accident(die_at=options["die_at"], stop_at=options["stop_at"])
    pl.seed_everything(3)
    chosen = plugin.settings(
        device=options["device"],
        precision=options["precision"],
        strategy=options["strategy"],
        callbacks=[accident],
        save_steps=options["save_steps"],
        **options["how"],
    )
    trainer = pl.Trainer(
        **chosen,
        max_epochs=options["epochs"],
        accumulate_grad_batches=options["accumulate"],
        val_check_interval=options["validate_every"],
        num_sanity_val_steps=1,
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model(options["width"])
    train = DataLoader(Rows(options["rows"]), batch_size=4, shuffle=True, num_workers=options["workers"])
    path = plugin.resume() if options["resumes"] else None
    try:
        trainer.fit(model, train, DataLoader(Rows(8), batch_size=4), ckpt_path=path)
    finally:
        facts = {
            "seen": model.seen,
            "rank": trainer.global_rank,
            "world": trainer.world_size,
            "device": str(trainer.strategy.root_device),
            "steps": trainer.global_step,
            "held": sum(getattr(each, "_local_tensor", each).numel() for each in model.parameters()),
        }
        with open(f"facts-{trainer.global_rank}.json", "w") as file:
            json.dump(facts, file)
    weights = trainer.strategy.lightning_module_state_dict()
    if trainer.is_global_zero:
        torch.save({name: weight.cpu() for name, weight in weights.items()}, "final.pt")
    raise SystemExit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
