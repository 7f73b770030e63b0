"""The training loop: equal steps on one rank or many, and a resumed run equals an uninterrupted run."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ascendrun.programs.trainer.batch_finder import find_micro_batch
from ascendrun.programs.trainer.data import Batch, Loader, Plan, Share, Unit, deal, seed_of
from ascendrun.programs.trainer.devices.accelerator import worker_context
from ascendrun.programs.trainer.metrics import Meter, StepClock, mfu, mfu_words, peak_flops
from ascendrun.programs.trainer.profiling import open_profiler
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.saver import Saved, Saver
from ascendrun.programs.trainer.strategies.engine import Engine, size_of
from ascendrun.programs.trainer.task import (
    CannotResumeError,
    Ending,
    NonFiniteError,
    Part,
    Progress,
    SaveError,
    Settings,
    Task,
)
from ascendrun.text import Text


class Loop:
    """One rank's part of one training. `identity`: values that must be equal in a checkpoint to resume from it."""

    def __init__(
        self,
        here: Runtime,
        engine: Engine,
        plan: Plan,
        task: Task,
        settings: Settings,
        *,
        folder: Path,
        identity: Mapping[str, Any] | None = None,
    ) -> None:
        self.here, self.engine, self.plan, self.task, self.settings = here, engine, plan, task, settings
        self.identity = dict(identity or {})
        self.progress = Progress()
        self.best_weights: dict[str, torch.Tensor] | None = None
        self.best_is_saved = True
        self.saver = Saver(
            here,
            folder,
            is_sharded=engine.is_sharded,
            keep_last=settings.save_total_limit,
            in_background=settings.save_in_background,
            on_saved=self._after_save,
        )
        self.saved_step: int | None = None
        self.save_problem: Text | None = None
        self.clock = StepClock(here.accelerator)
        self.meter = Meter()
        self.peak = peak_flops(here.accelerator, settings.peak_tflops)
        self.loader = Loader(
            plan,
            task.collate,
            rank=here.rank,
            world_size=here.world_size,
            workers=settings.dataloader_num_workers,
            micro_batch=settings.micro_batch_size,
            steps=settings.steps,
            micro_tokens=settings.max_tokens_per_micro_batch,
            context=worker_context(here.family),
        )
        self._share: Share | None = None
        self._weight = 0.0

    def find_micro_batch(self, longest: Sequence[Unit], *, largest: int = 0) -> int:
        """Find the largest micro-batch that fits, up to `largest` (0: this rank's part of a step), before `run`. It is
        tested with the `longest` rows of the data. Raises batch_finder.DeviceOutOfMemoryError."""
        share = len(deal(self.plan.units(0), 0, self.here.world_size)[0])
        size = find_micro_batch(self.here, lambda rows: self._attempt(longest, rows), largest=largest or share)
        self.loader.micro_batch = size
        return size

    def _attempt(self, longest: Sequence[Unit], rows: int) -> None:
        units = [longest[i % len(longest)] for i in range(rows)]
        self._weight = 1.0
        self.clock.begin()
        try:
            # Without the wrapper: DDP may communicate in a pass, and a rank out of memory would leave others waiting.
            self._pass(self.task.collate(units, 0), last=False, model=self.engine.module)
        finally:
            self.engine.drop_gradients()

    # --- the run ---

    def run(self) -> Ending:
        """Train to the end, from the step that `resume` set. STOPPED or OUT_OF_TIME: a checkpoint was saved.

        Raises NonFiniteError before a step with inf or NaN, SaveError when the last state could not be saved.
        """
        try:
            interrupted = self._train()
        except (NonFiniteError, SaveError):  # raised by all ranks together: pending saves are completed for the resume
            self.saver.wait()
            raise
        self.loader.close()
        if self.progress.ended:
            interrupted = None
        self.saver.wait()
        self._save_last()
        if interrupted is not None:
            return interrupted
        self.here.record(event="end", step=self.progress.step)
        return Ending.FINISHED if self.progress.step >= self.settings.steps else Ending.EARLY

    def _train(self) -> Ending | None:
        """Run all steps. Return why training was interrupted; None: it was not."""
        started_s = time.monotonic()
        settings, progress = self.settings, self.progress
        with open_profiler(settings.profile_dir, self.here, steps=settings.profile_steps) as profiler:
            if not progress.ended and progress.step < settings.steps:
                self._prepare()
            self.meter = Meter()
            interrupted: Ending | None = None
            while not progress.ended and interrupted is None:
                if progress.step < settings.steps:
                    is_late = 0 < settings.max_time_s < time.monotonic() - started_s
                    interrupted = self._step(is_late=is_late)
                    profiler.step()
                self._after_step()
                self.saver.poll()
        return interrupted

    def _prepare(self) -> None:
        """Load the first batches and their weight over all ranks; under DDP also run a pass and discard its gradients.

        DDP rebuilds its buckets after its first pass, which changes the rounding of sums, and a resumed run would
        differ from an uninterrupted run.
        """
        share = self.loader.share(self.progress.step)
        self._share, self._weight = share, self.here.sum([share.weight])[0]
        self._record_start(self.here.sum([float(share.tokens)])[0])
        if self.engine.strategy != "ddp":
            return
        buffers = {name: tensor.clone() for name, tensor in self.engine.module.named_buffers()}
        self._pass(share.pieces[0], last=True)
        self.engine.drop_gradients()
        for name, tensor in self.engine.module.named_buffers():
            tensor.copy_(buffers[name])

    def _step(self, *, is_late: bool) -> Ending | None:
        """Run one optimizer step over all ranks. Not None: a rank received a stop signal, or the time is up."""
        step, share, clock = self.progress.step, self._share, self.clock
        assert share is not None and share.step == step
        self.engine.set_lr(self.settings.rate(step))
        # Random numbers follow from step and rank, so a resumed run draws the same numbers, even on other nodes.
        self.here.accelerator.seed(seed_of(self.settings.seed, 3, step, self.here.rank))
        clock.begin()
        passes = [self._pass(piece, last=i + 1 == len(share.pieces)) for i, piece in enumerate(share.pieces)]
        following = self.loader.share(step + 1) if step + 1 < self.settings.steps else None
        clock.mark("data_s")
        loss = float(torch.stack([total for total, _ in passes]).sum())  # waits for the device
        is_bad = not math.isfinite(loss)
        sums = self.here.sum(
            [
                float(self.here.stop_requested),
                float(is_late),
                float(is_bad),
                float(self.save_problem is not None),
                0.0 if is_bad else loss,
                share.tokens,
                share.samples,
                following.weight if following else 0.0,
                *self._parts_of(share, [parts for _, parts in passes]),
            ]
        )
        clock.mark("comm_s")
        if sums[2]:
            self._refuse(share, Text("program.bad-loss", "the loss is {loss}", loss=loss) if is_bad else None)
        norm = self.engine.finish(self.settings.max_grad_norm)
        clock.mark("optimizer_s")
        clock.end()
        if not math.isfinite(norm) and not self.engine.precision.scales:
            self._refuse(share, Text("program.bad-norm", "the gradient norm is {norm}", norm=norm))
        self._count(sums, share, norm)
        self._share, self._weight = following, sums[7]
        self.progress.step += 1
        if sums[3] and self.settings.on_save_failure == "stop":
            raise SaveError(
                self.save_problem
                or Text("program.save-failed-elsewhere", "a checkpoint could not be written on another rank")
            )
        return Ending.STOPPED if sums[0] else Ending.OUT_OF_TIME if sums[1] else None

    def _pass(
        self, batch: Batch, *, last: bool, model: nn.Module | None = None
    ) -> tuple[torch.Tensor, Mapping[str, Part]]:
        """Run forward and backward of one piece. Return its summed loss, and the parts of the loss.

        The sum is divided by the weight of all pieces of all ranks, so that their gradients add up to those of one
        rank with the complete batch.
        """
        here, clock = self.here, self.clock
        tensors = {name: tensor.to(here.device, non_blocking=True) for name, tensor in batch.tensors.items()}
        clock.mark("data_s")
        with self.engine.accumulate(last=last):
            with self.engine.autocast():
                answer = self.task.loss(model or self.engine.model, tensors)
            total, parts = answer if isinstance(answer, tuple) else (answer, {})
            if batch.weight == 0:
                total, parts = total * 0.0, {}
            clock.mark("forward_s")
            # A step without targets has no gradient, and a weight of 0.
            self.engine.backward(total * (here.world_size / self._weight if self._weight else 0.0))
        if last and self.engine.gradients_ready is not None:
            clock.mark("backward_s", self.engine.gradients_ready)
            clock.mark("comm_s")
        else:
            clock.mark("backward_s")
        return total.detach(), {name: (part.detach(), weight) for name, (part, weight) in parts.items()}

    def _parts_of(self, share: Share, passes: list[Mapping[str, Part]]) -> list[float]:
        """Return three numbers for each of the task's parts: summed loss, weight, samples."""
        numbers: list[float] = []
        for name in self.task.parts:
            mine = [parts[name] for parts in passes if name in parts]
            numbers += [
                sum(float(part) for part, _ in mine),
                sum(float(weight) for _, weight in mine),
                share.groups.get(name, 0.0),
            ]
        return numbers

    def _refuse(self, share: Share, mine: Text | None) -> None:
        """Raise NonFiniteError on every rank, with the problems of all ranks."""
        numbers: list[int | str] = [number for unit in share.units for number in unit]
        problems = self.here.gather(
            mine
            and Text(
                "program.bad-on-rank",
                "{what} on rank {rank} (samples {samples})",
                what=mine,
                rank=self.here.rank,
                samples=numbers[:8] + (["…"] if len(numbers) > 8 else []),
            )
        )
        raise NonFiniteError(
            "program.non-finite",
            "step {step}: {problems}; the step was not taken, older checkpoints are valid\n"
            "hint: lower --learning_rate, or inspect these samples",
            step=share.step + 1,
            problems=[each for each in problems if each],
        )

    def _count(self, sums: list[float], share: Share, norm: float) -> None:
        meter = self.meter
        meter.loss += sums[4]
        meter.weight += self._weight
        meter.tokens += sums[5]
        meter.samples += sums[6]
        meter.steps += 1
        meter.grad_norm = norm if math.isfinite(norm) else None  # under float16: the search for a scale, not divergence
        for i, name in enumerate(self.task.parts):
            so_far = meter.parts.setdefault(name, [0.0, 0.0, 0.0])
            meter.parts[name] = [old + new for old, new in zip(so_far, sums[8 + 3 * i : 11 + 3 * i])]

    # --- after a step: report, evaluate, keep ---

    def _after_step(self) -> None:
        step, settings = self.progress.step, self.settings
        last = step >= settings.steps
        if self.meter.steps and (step % settings.logging_steps == 0 or last):
            self._report()
        if settings.eval_steps and (step % settings.eval_steps == 0 or last):
            self._evaluate()
        self.progress.ended = self.progress.ended or last
        every = settings.save_steps
        if every and step % every == 0 and not self.progress.ended:
            self.save()

    def _report(self) -> None:
        """Write one metrics line on every rank, and print one line on rank 0."""
        self.here.accelerator.synchronize()
        meter, self.meter = self.meter, Meter()
        times = self.clock.mean()
        step, steps = self.progress.step, self.settings.steps
        if not self.here.is_first:
            self.here.record(step=step, **times, device_memory_bytes=self.here.accelerator.memory_bytes())
            return
        loss = meter.loss / meter.weight if meter.weight else None
        rate, epoch = self.settings.rate(step - 1), step / self.plan.steps_per_epoch
        tokens_per_s = meter.per_second(meter.tokens)
        used = mfu(tokens_per_s, self.settings.flops_per_token, self.peak, self.here.world_size)
        self.here.record(
            step=step,
            total_steps=steps,
            epoch=round(epoch, 3),
            loss=loss,
            learning_rate=rate,
            grad_norm=meter.grad_norm,
            tokens_per_s=tokens_per_s,
            samples_per_s=meter.per_second(meter.samples),
            device_memory_bytes=self.here.accelerator.memory_bytes(),
            **({} if used is None else {"mfu": used}),
            **times,
            **{f"loss_{name}": part[0] / part[1] for name, part in meter.parts.items() if part[1]},
            **{f"samples_{name}": part[2] for name, part in meter.parts.items()},
        )
        shown = "-" if loss is None else f"{loss:.4f}"
        print(
            str(
                Text(
                    "program.progress",
                    "step {step}/{steps} epoch {epoch:.1f} loss {loss} lr {rate:.2e} tokens/s {speed:,.0f}",
                    step=step,
                    steps=steps,
                    epoch=epoch,
                    loss=shown,
                    rate=rate,
                    speed=tokens_per_s,
                )
            )
            + mfu_words(used),
            flush=True,
        )

    def _record_start(self, tokens: float) -> None:
        """Record the start. `tokens`: of the first step, used as typical number."""
        trained = sum(size_of(weight) for weight in self.engine.module.parameters() if weight.requires_grad)
        self.here.record(
            event="start",
            step=self.progress.step,
            total_steps=self.settings.steps,
            parameters=trained,
            world_size=self.here.world_size,
            tokens_per_step=tokens,
            flops_per_step=tokens * self.settings.flops_per_token or None,
            peak_flops=self.peak,
        )

    def _evaluate(self) -> None:
        """Evaluate the model; keep its weights if it is the best so far."""
        started_s, progress, settings = time.monotonic(), self.progress, self.settings
        self.engine.module.eval()
        with torch.no_grad():
            scores = self.task.evaluate(progress.step)
        self.engine.module.train()
        if not scores:
            return
        progress.history.append({"step": progress.step, **scores})
        note = self._compare(scores) if settings.best else ""
        self.here.record(
            step=progress.step,
            eval_duration_s=time.monotonic() - started_s,
            **{f"eval_{name}": value for name, value in scores.items()},
        )
        shown = " ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in scores.items())
        self.here.log(
            "program.evaluation",
            "step {step}/{steps} evaluation: {scores}{note}",
            step=progress.step,
            steps=settings.steps,
            scores=shown,
            note=note,
        )
        self.meter.since_s += time.monotonic() - started_s

    def _compare(self, scores: Mapping[str, float]) -> Text | str:
        progress, settings = self.progress, self.settings
        score, best = scores[settings.best], progress.best_score
        is_better = best is None or (score < best if settings.best_is_low else score > best)
        if is_better:
            progress.best_step, progress.best_score, progress.evaluations_since_best = progress.step, score, 0
            self.best_weights, self.best_is_saved = self.engine.full_weights(), False
            return Text("program.best-so-far", " (best so far)")
        progress.evaluations_since_best += 1
        progress.ended = 0 < settings.early_stopping_patience <= progress.evaluations_since_best
        return ""

    # --- checkpoints ---

    def save(self) -> None:
        """Save a checkpoint; it is written during the training. All ranks call it together."""
        progress = self.progress
        self.saved_step = progress.step
        common = {
            **self.engine.common_state(),
            "progress": asdict(progress),
            "random": self.here.gather(self.here.accelerator.rng_state()),
        }
        facts = {
            "identity": self.identity,
            "best_step": progress.best_step,
            "strategy": self.engine.strategy,
            "world_size": self.here.world_size,
        }
        best = None
        if not self.best_is_saved and progress.best_step is not None and self.best_weights is not None:
            best = (progress.best_step, {"model": self.best_weights})
        self.best_is_saved = True
        self.saver.save(progress.step, common, self.engine.own_state(), facts=facts, best=best)

    def _save_last(self) -> None:
        """Save the state at the end of this run and wait for completion. Raises SaveError on every rank if the save
        failed and the run depends on it."""
        if self.saved_step != self.progress.step or any(self.here.gather(self.save_problem)):
            self.save()
        self.saver.wait()
        problems = [problem for problem in self.here.gather(self.save_problem) if problem]
        if problems and (not self.progress.ended or self.settings.on_save_failure == "stop"):
            raise SaveError(problems[0])

    def _after_save(self, saved: Saved) -> None:
        self.save_problem = None
        if saved.problem is None:
            self.here.record(
                event="checkpoint",
                step=saved.step,
                duration_s=round(saved.seconds, 3),
                size_bytes=saved.bytes,
                path=str(saved.path),
            )
            return
        self.best_is_saved = False
        self.save_problem = Text(
            "program.checkpoint-failed",
            "the checkpoint of step {step} could not be written to {directory}: {problem}; older checkpoints "
            "are unchanged",
            step=saved.step,
            directory=saved.path.parent,
            problem=saved.problem,
        )
        self.here.record(event="checkpoint-failed", step=saved.step, problem=saved.problem)
        print(self.save_problem, file=sys.stderr, flush=True)

    def resume(self, choice: str = "auto") -> bool:
        """Resume from the newest complete checkpoint; False: there is none, or `choice` is never.

        `choice`: auto, never, or the path of a checkpoint or of a directory of them, which is used if this run has
        no checkpoint itself. Raises CannotResumeError, also if that path has none.
        """
        if choice == "never":
            return False
        found = self.saver.find()
        is_own = found is not None
        if found is None and choice != "auto":
            found = self.saver.find(Path(choice))
            if found is None:
                raise CannotResumeError(
                    "program.no-checkpoint-at",
                    "--resume_from_checkpoint={path}: no complete checkpoint found",
                    path=choice,
                )
        if found is None:
            return False
        self._check_identity(found.facts, found.folder)
        self.engine.load_state(found.common, found.own)
        self.progress = Progress(**found.common["progress"])
        if self.here.rank < len(found.common["random"]):
            self.here.accelerator.set_rng_state(found.common["random"][self.here.rank])
        if self.progress.best_step is not None:
            best = self.saver.read_best(self.progress.best_step, found.folder.parent)
            if best is None:
                raise CannotResumeError(
                    "program.best-missing",
                    "the best model (step {step}), which {directory} refers to, is not complete on any node\n"
                    "hint: remove that checkpoint, or set --resume_from_checkpoint=never",
                    step=self.progress.best_step,
                    directory=found.folder,
                )
            self.best_weights = best["model"] if self.here.is_first else {}
            self.best_is_saved = is_own
        self.saved_step = self.progress.step if is_own else None
        self.here.log(
            "program.resumed", "resumed at step {step}/{steps}", step=self.progress.step, steps=self.settings.steps
        )
        self.here.record(event="resume", step=self.progress.step, checkpoint=str(found.folder))
        return True

    def _check_identity(self, facts: Mapping[str, Any], folder: Path) -> None:
        theirs = facts.get("identity", {})
        differs = [
            Text(
                "program.option-differs",
                "{name} was {old}, is {new}",
                name=name,
                old=shown(theirs.get(name)),
                new=shown(value),
            )
            for name, value in self.identity.items()
            if theirs.get(name) != value
        ]
        strategy, ranks = facts.get("strategy"), facts.get("world_size")
        sharded = {strategy, self.engine.strategy} - {"none", "ddp"}
        if sharded and (strategy, ranks) != (self.engine.strategy, self.here.world_size):
            differs.append(
                Text(
                    "program.layout-differs",
                    "the model was sharded over {ranks} ranks ({strategy}), now over {now} ({current})",
                    ranks=ranks,
                    strategy=strategy,
                    now=self.here.world_size,
                    current=self.engine.strategy,
                )
            )
        if differs:
            raise CannotResumeError(
                "program.other-training",
                "{directory} belongs to another training: {differs}\n"
                "hint: use another checkpoint directory, the old options, or --resume_from_checkpoint=never",
                directory=folder,
                differs=list(differs),
            )

    def load_best(self) -> int | None:
        """Load the best model's weights into the model. Return its step; None: no best model. All ranks call it."""
        if self.progress.best_step is None:
            return None
        self.engine.load_weights(self.here.share(self.best_weights or {}))
        return self.progress.best_step


def shown(value: Any) -> Any:
    return "(none)" if value in (None, "", []) else value
