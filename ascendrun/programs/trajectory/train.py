"""The training loop: a step is the same on one rank or many, and a resumed run is the same as one never stopped."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ContextManager, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ascendrun.programs.trainer import checkpoint
from ascendrun.programs.trainer.start import Runtime
from ascendrun.programs.trajectory.batches import augment, epoch_batches, locate, share_of
from ascendrun.programs.trajectory.data import Options, Samples
from ascendrun.programs.trajectory.evaluate import predict, score
from ascendrun.programs.trajectory.model import Classifier, pad
from ascendrun.programs.trajectory.tokens import UNKNOWN, Ids

FREE_TO_CHANGE = ("mode", "model", "data", "output", "device", "resume", "log_every", "checkpoint_every",
                  "keep_checkpoints", "timeout_s", "micro_batch")
"""Options that may differ between a checkpoint and the run that goes on from it; data is compared by content."""


class CannotResume(Exception):
    """The newest checkpoint belongs to another training."""


@dataclass
class Progress:
    """Where training stands, in plain values that a checkpoint can hold. `step`: steps done. `best_step` None: not
    evaluated yet. `ended`: nothing is left to train."""

    step: int = 0
    best_step: Optional[int] = None
    best_macro_f1: float = -1.0
    evaluations_since_best: int = 0
    ended: bool = False
    history: List[Dict[str, Any]] = field(default_factory=list)


@dataclass
class Meter:
    """What happened since the last line of progress."""

    loss: torch.Tensor
    weight: float = 0.0
    tokens: int = 0
    samples: int = 0
    since_s: float = field(default_factory=time.monotonic)


class Trainer:
    """One rank's share of one training: its model, optimizer, place in the data, and its folder of checkpoints."""

    def __init__(self, options: Options, samples: Samples, model: Classifier, runtime: Runtime, folder: Path) -> None:
        self.options, self.samples, self.runtime, self.folder = options, samples, runtime, folder
        self.train_set = samples.encoded["train"]
        self.model = model.to(runtime.device)
        self.optimizer = make_optimizer(self.model, lr=options["lr"], weight_decay=options["weight_decay"])
        self.progress = Progress()
        self.best_weights: Optional[Dict[str, torch.Tensor]] = None
        self.batches_per_epoch = math.ceil(len(self.train_set) / options["batch_size"])
        self.steps = options["epochs"] * self.batches_per_epoch
        if options["max_steps"]:
            self.steps = min(self.steps, options["max_steps"])
        self.eval_every = options["eval_every"] or self.batches_per_epoch
        self.class_weights = class_weights(samples.labels("train"), len(samples.names), options["class_weights"])
        self.loss = nn.CrossEntropyLoss(reduction="none", label_smoothing=options["label_smoothing"])
        self.identity = identity_of(options, samples)
        self._epoch = -1
        self._batches: List[List[int]] = []

    # --- the loop ---

    def run(self) -> bool:
        """Trains to the end, from wherever `resume` put it; False when a stop was asked for and a checkpoint saved."""
        parallel = self.wrap()
        meter = self.new_meter()
        while not self.progress.ended:
            if self.progress.step < self.steps:
                self.step(parallel, meter)
            self.after_step(meter)
            if meter.samples == 0:
                meter = self.new_meter()
            if self.runtime.any_stop():
                self.save()
                return False
        return True

    def wrap(self) -> nn.Module:
        """The model under DDP. A pass whose gradients are thrown away comes first: DDP lays its buckets anew after
        its first pass, sums round differently then, and a resumed run would differ from one never stopped."""
        if self.runtime.control is None:
            return self.model
        ids = [self.runtime.device.index] if self.runtime.device.index is not None else None
        parallel = DistributedDataParallel(self.model, device_ids=ids)
        self.backward(parallel, self.batch_of(0), epoch=0)
        self.optimizer.zero_grad(set_to_none=True)
        return parallel

    def step(self, parallel: nn.Module, meter: Meter) -> None:
        number = self.progress.step
        rate = learning_rate(number, self.steps, peak=self.options["lr"], warmup=self.options["warmup"])
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        # Dropout's random numbers follow from the step, so a resumed run needs no saved generator.
        torch.manual_seed(seed_of(self.options["seed"], number, self.runtime.rank))
        batch = self.batch_of(number)
        epoch, _ = locate(number, self.batches_per_epoch)
        loss, tokens = self.backward(parallel, batch, epoch=epoch)
        if self.options["clip"]:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.options["clip"])
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        meter.loss += loss
        meter.weight += self.weight_of(batch)
        meter.tokens += tokens
        meter.samples += len(batch)
        self.progress.step += 1

    def backward(self, parallel: nn.Module, batch: Sequence[int], *, epoch: int) -> Tuple[torch.Tensor, int]:
        """Adds this rank's gradients of the global batch; returns its summed weighted loss and its number of words.

        The sum is divided by the weight of the whole batch, which every rank knows, so that the
        ranks' gradients add up to those of one rank with the whole batch.
        """
        mine = share_of(batch, self.runtime.rank, self.runtime.world_size)
        scale = self.runtime.world_size / self.weight_of(batch)
        total, tokens = torch.zeros((), device=self.runtime.device), 0
        pieces = micro_batches(mine, self.options["micro_batch"])
        for i, piece in enumerate(pieces):
            # A rank without a sample of its own goes along with a sample that weighs nothing.
            rows = [self.row(number, epoch) for number in piece or batch[:1]]
            labels = [self.train_set[number].label for number in piece or batch[:1]]
            weights = [self.class_weights[label] if piece else 0.0 for label in labels]
            with quiet(parallel) if i + 1 < len(pieces) else contextlib.nullcontext():
                loss = self.piece_loss(parallel, rows, labels, weights)
                (loss * scale).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
            tokens += sum(len(row) for row in rows) if piece else 0
        return total, tokens

    def piece_loss(self, parallel: nn.Module, rows: Sequence[Ids], labels: List[int],
                   weights: List[float]) -> torch.Tensor:
        device = self.runtime.device
        ids, lengths = pad(rows, multiple=self.options["pad_multiple"])
        with torch.autocast(device.type, torch.bfloat16, enabled=self.options["dtype"] == "bfloat16"):
            logits = parallel(ids.to(device), lengths.to(device))
        losses: torch.Tensor = self.loss(logits.float(), torch.tensor(labels, device=device))
        return (losses * torch.tensor(weights, device=device)).sum()

    def row(self, number: int, epoch: int) -> Ids:
        options = self.options
        return augment(self.train_set[number], min_points=options["min_points"], crop=options["crop"],
                       hide=options["hide"], unknown=self.samples.vocabulary[UNKNOWN],
                       key=(options["seed"], epoch, number))

    def batch_of(self, step: int) -> List[int]:
        """The global batch of a step: follows from the step alone, so a checkpoint needs no sampler."""
        epoch, place = locate(step, self.batches_per_epoch)
        if epoch != self._epoch:
            self._epoch = epoch
            self._batches = epoch_batches(
                [len(sample) for sample in self.train_set], batch_size=self.options["batch_size"],
                window=self.options["window"], seed=self.options["seed"], epoch=epoch)
        return self._batches[place]

    def weight_of(self, batch: Sequence[int]) -> float:
        return sum(self.class_weights[self.train_set[number].label] for number in batch)

    # --- after a step: report, evaluate, keep ---

    def after_step(self, meter: Meter) -> None:
        step, last = self.progress.step, self.progress.step >= self.steps
        if meter.samples and (step % self.options["log_every"] == 0 or last):
            self.report(meter)
        if step % self.eval_every == 0 or last:
            self.evaluate()
        self.progress.ended = self.progress.ended or last
        every = self.options["checkpoint_every"]
        if self.progress.ended or (every and step % every == 0):
            self.save()

    def report(self, meter: Meter) -> None:
        tokens, loss = self.runtime.sum([float(meter.tokens), float(meter.loss)])
        seconds = max(time.monotonic() - meter.since_s, 1e-9)
        rate = self.optimizer.param_groups[0]["lr"]
        epoch = self.progress.step / self.batches_per_epoch
        self.runtime.record(step=self.progress.step, steps=self.steps, epoch=round(epoch, 3), loss=loss / meter.weight,
                            lr=rate, tokens_per_s=tokens / seconds, samples_per_s=meter.samples / seconds)
        self.runtime.say(f"step {self.progress.step}/{self.steps} epoch {epoch:.1f} loss {loss / meter.weight:.4f} "
                         f"lr {rate:.2e} tokens/s {tokens / seconds:,.0f}")
        meter.samples = 0

    def new_meter(self) -> Meter:
        return Meter(torch.zeros((), device=self.runtime.device))

    def evaluate(self) -> None:
        """Scores the validation split; keeps the weights when they are the best so far."""
        started_s = time.monotonic()
        probabilities = predict(self.model, self.samples.encoded["val"], self.runtime,
                                batch_size=self.options["batch_size"], multiple=self.options["pad_multiple"])
        scores = score(self.samples.labels("val"), probabilities.argmax(1).tolist(), self.samples.names)
        progress = self.progress
        better = scores.macro_f1 > progress.best_macro_f1
        progress.history.append({"step": progress.step, "macro_f1": scores.macro_f1, "accuracy": scores.accuracy})
        if better:
            progress.best_step, progress.best_macro_f1 = progress.step, scores.macro_f1
            progress.evaluations_since_best = 0
            self.best_weights = copy_weights(self.model)
        else:
            progress.evaluations_since_best += 1
        patience = self.options["patience"]
        progress.ended = bool(patience) and progress.evaluations_since_best >= patience
        self.runtime.record(step=progress.step, eval_macro_f1=scores.macro_f1, eval_accuracy=scores.accuracy,
                            eval_seconds=time.monotonic() - started_s)
        self.runtime.say(f"step {progress.step}/{self.steps} validation macro F1 {scores.macro_f1:.3f} "
                         f"accuracy {scores.accuracy:.3f}{' (best so far)' if better else ''}")

    # --- checkpoints ---

    def save(self) -> None:
        """Rank 0 writes; nobody waits, for a rank that goes on meets rank 0 again at the next collective."""
        if not self.runtime.is_first:
            return
        progress = self.progress
        facts = {"identity": self.identity, "best_step": progress.best_step, "macro_f1": progress.best_macro_f1}
        if progress.best_step is not None and self.best_weights is not None:
            best = self.folder / checkpoint.folder_name("best", progress.best_step)
            if checkpoint.fault(best) is not None:
                checkpoint.save(self.folder, "best", progress.best_step, {"model": self.best_weights}, facts=facts)
        state = {"model": copy_weights(self.model), "optimizer": self.optimizer.state_dict(),
                 "progress": asdict(progress)}
        path = checkpoint.save(self.folder, "step", progress.step, state, facts=facts)
        checkpoint.prune(self.folder, keep=self.options["keep_checkpoints"],
                         best_steps=[] if progress.best_step is None else [progress.best_step])
        self.runtime.record(step=progress.step, checkpoint=str(path))

    def resume(self) -> bool:
        """Goes on from the newest complete checkpoint that rank 0 has; False when it has none. Raises CannotResume."""
        state = self.runtime.share(self.read_newest() if self.runtime.is_first else None)
        if state is None:
            return False
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress = Progress(**state["progress"])
        self.best_weights = state["best"]
        self.runtime.say(f"resumed at step {self.progress.step}/{self.steps}")
        return True

    def read_newest(self) -> Optional[Dict[str, Any]]:
        checkpoint.clear_leftovers(self.folder)
        newest = checkpoint.newest_complete(self.folder)
        if newest is None:
            return None
        facts = checkpoint.facts_of(newest)
        differs = [name for name, value in self.identity.items() if facts["identity"].get(name) != value]
        if differs:
            shown = ", ".join(f"{name} was {facts['identity'].get(name)}, is {self.identity[name]}" for name in differs)
            raise CannotResume(f"{newest} is of another training: {shown}; "
                               "use another checkpoint folder, the old options, or --resume=never")
        state = checkpoint.load(newest)
        state["best"] = None
        if state["progress"]["best_step"] is not None:
            best = self.folder / checkpoint.folder_name("best", state["progress"]["best_step"])
            problem = checkpoint.fault(best)
            if problem is not None:
                raise CannotResume(f"{best}, which {newest.name} names as the best so far, is not whole: {problem}; "
                                   "remove both, or use --resume=never")
            state["best"] = checkpoint.load(best)["model"]
        return state


def make_optimizer(model: nn.Module, *, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW that decays matrices but neither biases nor norms."""
    matrices = [weight for weight in model.parameters() if weight.ndim >= 2]
    vectors = [weight for weight in model.parameters() if weight.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98))


def learning_rate(step: int, steps: int, *, peak: float, warmup: float) -> float:
    """Rises in a line over the first `warmup` share of the steps, then falls along a cosine to 1/20 of the peak."""
    rise = max(1, round(steps * warmup))
    if step < rise:
        return peak * (step + 1) / rise
    way = (step - rise) / max(1, steps - rise)
    return peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * way)))


def class_weights(labels: Sequence[int], classes: int, how: str) -> List[float]:
    """The weight of each class, 1 on average over the samples; a class without samples weighs nothing."""
    counts = np.bincount(labels, minlength=classes).astype(np.float64)
    power = {"none": 0.0, "sqrt": 0.5, "balanced": 1.0}[how]
    weights = np.where(counts > 0, np.maximum(counts, 1.0) ** -power, 0.0)
    return [float(weight) for weight in weights * counts.sum() / (weights * counts).sum()]


def micro_batches(mine: Sequence[int], size: int) -> List[List[int]]:
    """At least one piece, be it empty: every rank must take part in every step."""
    if not size or len(mine) <= size:
        return [list(mine)]
    return [list(mine[i:i + size]) for i in range(0, len(mine), size)]


def quiet(parallel: nn.Module) -> ContextManager[Any]:
    """Gradients stay local within: only the last piece of a step is summed over ranks."""
    return parallel.no_sync() if isinstance(parallel, DistributedDataParallel) else contextlib.nullcontext()


def seed_of(seed: int, step: int, rank: int) -> int:
    return int(np.random.SeedSequence([seed, 3, step, rank]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def copy_weights(model: nn.Module) -> Dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}


def identity_of(options: Mapping[str, Any], samples: Samples) -> Dict[str, Any]:
    """What must agree between a checkpoint and the run that goes on from it."""
    kept = {name: value for name, value in options.items() if name not in FREE_TO_CHANGE}
    return {**kept, "data": samples.digest[:16]}
