"""The training loop: equal steps on one rank or many, and a resumed run equals an uninterrupted run.

A step that is neither logged nor evaluated nor saved waits for nothing: losses, norms and stop requests of a step are
read while the next one runs, and nothing is logged, evaluated or saved before those of its steps were read.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Callable

import torch
from torch import nn

from ascendrun.programs.devices.accelerator import worker_context
from ascendrun.programs.errors import ProgramError
from ascendrun.programs.trainer.checkpoint import SupersededError
from ascendrun.programs.trainer.data import Batch, Loader, Plan, Share, Source, Unit, deal, seed_of
from ascendrun.programs.trainer.dropout import drop_by_sample, pass_of
from ascendrun.programs.trainer.metrics import Reporter, StepTotals, open_profiler
from ascendrun.programs.trainer.resume import Checkpoints
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.strategies.engine import Engine, size_of
from ascendrun.programs.trainer.strategies.parallel import eager
from ascendrun.programs.trainer.task import Ending, NonFiniteError, Part, Progress, SaveError, Settings, Task
from ascendrun.text import listed


class Loop:
    """One rank's part of one training. `source`: a Source of batches, or a Plan, whose rows the task batches.

    `identity`: values that must be equal in a checkpoint to resume from it.
    """

    def __init__(
        self,
        here: Runtime,
        engine: Engine,
        source: Any,
        task: Task,
        settings: Settings,
        *,
        folder: Path,
        identity: Mapping[str, Any] | None = None,
    ) -> None:
        self.here, self.engine, self.task, self.settings = here, engine, task, settings
        self.device, self.drops = here.device, drop_by_sample(engine.module)
        self.source: Source = source if hasattr(source, "share") else self._loader(source)
        self.checkpoints = Checkpoints(here, engine, settings, folder=folder, identity=identity or {})
        self.totals = StepTotals(here, task.parts, scales=engine.precision.scales)
        self.reporter = Reporter(here, settings, parts=task.parts, steps_per_epoch=self.source.steps_per_epoch)
        self.resume, self.load_best = self.checkpoints.resume, self.checkpoints.load_best
        self.clock = self.reporter.clock
        self.evaluations = dict(task.evaluations) or {"": settings.eval_steps}
        self._share: Share | None = None
        self._flags: Callable[[], list[float]] = list
        self._weight = 1.0
        self._deadline_s = 0.0

    def _loader(self, plan: Plan) -> Loader:
        settings = self.settings
        return Loader(
            plan,
            self.task.collate,
            rank=self.here.rank,
            world_size=self.here.world_size,
            micro_batch=settings.micro_batch_size,
            steps=settings.steps,
            workers=settings.dataloader_num_workers,
            context=worker_context(self.here.family),
            micro_tokens=settings.max_tokens_per_micro_batch,
            has_keys=self.drops,
        )

    @property
    def progress(self) -> Progress:
        return self.checkpoints.progress

    def find_micro_batch(self, longest: Sequence[Unit], *, largest: int = 0) -> int:
        """Find the largest micro-batch that fits, up to `largest` (0: this rank's part of a step), before `run`. It is
        tested with the `longest` rows of the data. Raises DeviceOutOfMemoryError."""
        assert isinstance(self.source, Loader)
        share = len(deal(self.source.plan.units(0), 0, self.here.world_size)[0])
        size = find_micro_batch(self.here, lambda rows: self._attempt(longest, rows), largest=largest or share)
        self.source.micro_batch = size
        return size

    def _attempt(self, longest: Sequence[Unit], rows: int) -> None:
        units = [longest[i % len(longest)] for i in range(rows)]
        self.clock.begin()
        try:
            # Without the wrapper and its exchange: a rank out of memory would leave others waiting.
            self._pass(self.task.collate(units, 0), last=False, model=self.engine.module)
        finally:
            self.engine.drop_gradients()

    # --- the run ---

    def run(self) -> Ending:
        """Train to the end, from the step that `resume` set. STOPPED or OUT_OF_TIME: a checkpoint was saved.

        Raises NonFiniteError after a step with inf or NaN, SaveError when the last state could not be saved,
        SupersededError when a later attempt of this training has the checkpoint directory.
        """
        progress, settings, checkpoints = self.progress, self.settings, self.checkpoints
        self._deadline_s = time.monotonic() + settings.max_time_s if settings.max_time_s else float("inf")
        interrupted: Ending | None = None
        try:
            with open_profiler(settings.profile_dir, self.here, steps=settings.profile_steps) as profiled:
                if not progress.step and settings.eval_on_start:
                    for name in [name for name, every in self.evaluations.items() if every]:
                        self._evaluate(name)
                if not progress.ended and progress.step < settings.steps:
                    self._begin()
                while not progress.ended:
                    if progress.step < settings.steps:
                        interrupted = self._read_flags()
                        if interrupted is not None:
                            self._settle()
                            break
                        self._step()
                        profiled()
                    self._after_step()
                    if checkpoints.saver.thread is not None:
                        checkpoints.saver.poll()
        except (
            NonFiniteError,
            SaveError,
            SupersededError,
        ):  # raised by all ranks together: pending saves are completed for the resume
            checkpoints.saver.wait()
            raise
        self.source.close()
        with self.here.phase("checkpoint"):
            checkpoints.saver.wait()
            checkpoints.save_last()
        if interrupted is not None:
            self.here.log(
                listed("program.stopped", step=progress.step, steps=settings.steps, directory=checkpoints.saver.parent)
            )
            return interrupted
        self.here.record(event="end", step=progress.step)
        return Ending.FINISHED if progress.step >= settings.steps else Ending.EARLY

    def _begin(self) -> None:
        """Load the first batches, and start to exchange their weight. A run takes at least one step."""
        self._share = self.source.share(self.progress.step)
        trained = sum(size_of(weight) for weight in self.engine.module.parameters() if weight.requires_grad)
        self.reporter.start(self.progress.step, trained, self.here.sum([float(self._share.tokens)])[0])
        self._flags = self.here.start_sum([0.0] * 5 + [self._share.weight])

    def _send_flags(self) -> None:
        """Start to tell all ranks what the next step has to know of this one."""
        is_late = time.monotonic() > self._deadline_s
        kept = self.checkpoints
        problems = [kept.is_superseded, kept.problem is not None, self.totals.problem is not None]
        weight = self._share.weight if self._share else 0.0
        flags = [*map(float, [self.here.stop_requested, is_late, *problems]), weight]
        self._flags = self.here.start_sum(flags, late=self.here.accelerator.synchronize)

    def _read_flags(self) -> Ending | None:
        """Read what all ranks told after the last step. Not None: a rank received a stop signal, or the time is up."""
        self.clock.begin()
        is_stopped, is_late, is_superseded, has_failed, is_bad, self._weight = self._flags()
        self.clock.mark("comm_s")
        if is_superseded:
            raise SupersededError(self.checkpoints.saver.parent)
        if is_bad:
            self._refuse()
        if has_failed and self.settings.on_save_failure == "stop":
            raise SaveError(self.checkpoints.problem or listed("program.save-failed-elsewhere"))
        if self.progress.step % self.source.updates:
            return None
        return Ending.STOPPED if is_stopped else Ending.OUT_OF_TIME if is_late else None

    def _step(self) -> None:
        """Run one optimizer step over all ranks, and load the batches of the next."""
        step, clock = self.progress.step, self.clock
        if self._share is None:  # on policy
            self._share = self.source.share(step)
            self._weight = self.here.sum([self._share.weight])[0]
        share = self._share
        assert share.step == step
        self.engine.begin(step)
        # What is not dropped by sample follows from step and rank: a resumed run draws the same, even on other nodes.
        self.here.accelerator.seed(seed_of(self.settings.seed, 3, step, self.here.rank))
        passes = [self._pass(piece, last=i + 1 == len(share.pieces)) for i, piece in enumerate(share.pieces)]
        norm = self.engine.finish(self.settings.max_grad_norm)
        clock.mark("optimizer_s")
        self.totals.add(share, passes, norm, self._weight)
        self.totals.read()  # the step before
        has_next = not self.source.on_policy and step + 1 < self.settings.steps
        self._share = self.source.share(step + 1) if has_next else None
        clock.mark("data_s")
        clock.end()
        self.progress.step += 1
        self._send_flags()

    def _pass(
        self, batch: Batch, *, last: bool, model: nn.Module | None = None
    ) -> tuple[torch.Tensor, Mapping[str, Part]]:
        """Run forward and backward of one micro-batch. Return its summed loss, and the parts of the loss.

        The sum is divided by the weight of all micro-batches of all ranks, so that their gradients add up to those of
        one rank with the complete batch.
        """
        here, clock, device = self.here, self.clock, self.device
        tensors = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.tensors.items()}
        clock.mark("data_s")
        seed, step = self.settings.seed, self.progress.step
        dropped = pass_of(batch, device, seed=seed, step=step) if self.drops else contextlib.nullcontext()
        with dropped, self.engine.accumulate(last=last):
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

    # --- after a step: report, evaluate, save ---

    def _after_step(self) -> None:
        progress, settings = self.progress, self.settings
        step, last = progress.step, progress.step >= settings.steps
        evaluations = [name for name, every in self.evaluations.items() if every and (step % every == 0 or last)]
        is_logged = self.totals.has_steps and (step % settings.logging_steps == 0 or last)
        is_saved = bool(settings.save_steps) and step % settings.save_steps == 0 and step % self.source.updates == 0
        if is_logged or evaluations or is_saved or last:
            self._settle()
        if is_logged:
            self.reporter.report(step, self.engine.rate(step - 1))
        for name in evaluations:
            self._evaluate(name)
        progress.ended = progress.ended or last
        if is_saved and not progress.ended:
            with self.here.phase("checkpoint"):
                self.checkpoints.save()

    def _settle(self) -> None:
        """Wait for all steps so far, and count them over all ranks. Raises NonFiniteError on every rank."""
        self.totals.read(everything=True)
        sums = self.here.sum([float(self.totals.problem is not None), *self.totals.take()])
        if sums[0]:
            self._refuse()
        self.reporter.count(sums[1:], self.totals)

    def _refuse(self) -> None:
        """Raise NonFiniteError on every rank, with the problems of the first step that has some."""
        found = [each for each in self.here.gather(self.totals.problem) if each]
        step = min(each.step for each in found)
        found = [each for each in found if each.step == step]
        shown = [each for each in found if each.is_of_loss] or found[:1]  # a loss makes the norm of all ranks bad
        raise NonFiniteError(listed("program.non-finite", step=step + 1, problems=[each.text() for each in shown]))

    def _evaluate(self, name: str) -> None:
        """Evaluate the model; keep its weights if it is the best so far."""
        started_s, progress, settings = time.monotonic(), self.progress, self.settings
        self.engine.module.eval()
        with torch.no_grad(), eager(), self.here.phase("evaluation"):
            found = self.task.evaluate(name, progress.step)
        scores = {name: float(score) for name, score in found.items()}  # a checkpoint has no numbers of NumPy
        self.engine.module.train()
        self.reporter.exclude(seconds := time.monotonic() - started_s)
        if not scores:
            return
        progress.history.append({"step": progress.step, **scores})
        is_best = settings.best in scores and self.checkpoints.compare(scores[settings.best])
        self.reporter.evaluation(progress.step, scores, seconds, is_best=is_best)


class DeviceOutOfMemoryError(ProgramError):
    """A single sample does not fit in device memory."""


def find_micro_batch(here: Runtime, attempt: Callable[[int], None], *, largest: int) -> int:
    """Return the largest micro-batch up to `largest` that fits on every rank. Raises DeviceOutOfMemoryError.
    `attempt(size)`: a forward and backward pass with `size` of the longest rows, if possible without communication:
    a rank that fails in it leaves its peers waiting. All ranks call this together and get the same result.
    """
    size = largest
    while True:
        has_failed = runs_out(here, attempt, size)
        gc.collect()
        here.accelerator.empty_cache()
        ranks = [rank for rank, failed in enumerate(here.gather(has_failed)) if failed]
        if not ranks:
            here.log(listed("program.micro-batch-found", size=size))
            return size
        if size == 1:
            raise DeviceOutOfMemoryError(listed("program.sample-does-not-fit", rank=ranks[0]))
        here.log(listed("program.micro-batch-too-large", size=size, rank=ranks[0]))
        size //= 2


def runs_out(here: Runtime, attempt: Callable[[int], None], size: int) -> bool:
    """Return whether memory runs out. The error, which holds the tensors of its frames, is freed on return."""
    try:
        attempt(size)
        here.accelerator.synchronize()
    except Exception as error:
        if not here.accelerator.is_out_of_memory(error):
            raise
        return True
    return False
