"""What a training keeps of itself: its progress, checkpoints of it, the best model; and how it continues from them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ascendrun.planner.rules import other_training
from ascendrun.programs.trainer import checkpoint
from ascendrun.programs.trainer.checkpoint import SupersededError
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.saver import Saved, Saver
from ascendrun.programs.trainer.strategies.engine import Engine
from ascendrun.programs.trainer.task import CannotResumeError, Progress, SaveError, Settings
from ascendrun.text import Text, listed


class Checkpoints:
    """The checkpoints of one training. `identity`: values that must be equal in a checkpoint to resume from it."""

    def __init__(
        self, here: Runtime, engine: Engine, settings: Settings, *, folder: Path, identity: Mapping[str, Any]
    ) -> None:
        self.here, self.engine, self.settings, self.identity = here, engine, settings, dict(identity)
        self.progress = Progress()
        self.best_weights: dict[str, torch.Tensor] | None = None
        self.best_is_saved = True
        self.saver = Saver(
            here,
            folder,
            shards=engine.shards,
            strategy=engine.strategy,
            keep_last=settings.save_total_limit,
            in_background=settings.save_in_background,
            on_saved=self._after_save,
        )
        self.saved_step: int | None = None
        self.problem: Text | None = None
        """Why the last save failed; None: it did not."""
        self.is_superseded = False
        """Whether a later attempt of this training has the directory."""

    def compare(self, score: float) -> bool:
        """Note the score of an evaluation; return whether it is the best, whose weights are then kept."""
        progress, settings = self.progress, self.settings
        best = progress.best_score
        is_better = best is None or (score < best if settings.best_is_low else score > best)
        if is_better:
            progress.best_step, progress.best_score, progress.evaluations_since_best = progress.step, score, 0
            self.best_weights, self.best_is_saved = self.engine.full_weights(), False
            return True
        progress.evaluations_since_best += 1
        progress.ended = 0 < settings.early_stopping_patience <= progress.evaluations_since_best
        return False

    def save(self) -> None:
        """Save a checkpoint; it is written during the training. All ranks call it together."""
        progress = self.progress
        self.saved_step = progress.step
        state = self.engine.state()
        common = {
            "pieces": checkpoint.as_plain(state.common),
            **state.plain,
            "progress": asdict(progress),
            "random": self.here.gather(self.here.accelerator.rng_state()),
        }
        facts = {
            "identity": self.identity,
            "best_step": progress.best_step,
            "strategy": self.engine.strategy,
            "world_size": self.here.world_size,
            "shards": self.engine.shards[0],
        }
        best = None
        if not self.best_is_saved and progress.best_step is not None and self.best_weights is not None:
            best = (progress.best_step, {"model": self.best_weights})
        self.best_is_saved = True
        own = {"pieces": checkpoint.as_plain(state.own)}
        self.saver.save(progress.step, common, own, facts=facts, best=best)

    def save_last(self) -> None:
        """Save the state at the end of this run and wait for completion. Raises SaveError on every rank if the save
        failed and the run depends on it, SupersededError if a later attempt has the directory."""
        if self.saved_step != self.progress.step or any(self.here.gather(self.problem)):
            self.save()
        self.saver.wait()
        if any(self.here.gather(self.is_superseded)):
            raise SupersededError(self.saver.parent)
        problems = [problem for problem in self.here.gather(self.problem) if problem]
        if problems and (not self.progress.ended or self.settings.on_save_failure == "stop"):
            raise SaveError(problems[0])

    def _after_save(self, saved: Saved) -> None:
        self.here.record(**saved.record())
        self.problem = saved.failure()
        if self.problem is not None:
            self.best_is_saved, self.is_superseded = False, saved.is_superseded
            print(self.problem, file=sys.stderr, flush=True)

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
                raise CannotResumeError(listed("program.no-checkpoint-at", path=choice))
        if found is None:
            return False
        self._check_identity(found.facts, found.folder)
        if "counts" not in found.common:  # DeepSpeed's own state of each rank
            raise CannotResumeError(listed("program.checkpoint-of-earlier-zero3", directory=found.folder))
        self.engine.load_state(found.read, found.common)
        self.progress = Progress(**found.common["progress"])
        if self.here.rank < len(found.common["random"]):
            self.here.accelerator.set_rng_state(found.common["random"][self.here.rank])
        if self.progress.best_step is not None:
            best = self.saver.read_best(self.progress.best_step, found.folder.parent)
            if best is None:
                raise CannotResumeError(
                    listed("program.best-missing", step=self.progress.best_step, directory=found.folder)
                )
            self.best_weights = best["model"] if self.here.is_first else {}
            self.best_is_saved = is_own
        self.saved_step = self.progress.step if is_own else None
        if is_own:
            self.saver.origin = self.progress.step, str(found.facts.get("save", ""))
        self.here.log(listed("program.resumed", step=self.progress.step, steps=self.settings.steps))
        self.here.record(event="resume", step=self.progress.step, checkpoint=str(found.folder))
        return True

    def inherit(self, place: Path) -> bool:
        """Load the optimizer's state from the newest checkpoint of another training of this model; False: there is
        none. All ranks call it together."""
        found = self.saver.find(place)
        if found is None:
            return False
        self.engine.optimizer.load(found.read, found.common["counts"])
        return True

    def _check_identity(self, facts: Mapping[str, Any], folder: Path) -> None:
        problem = other_training(str(folder), facts.get("identity", {}), self.identity)
        if problem is not None:
            raise CannotResumeError.of([problem.text])

    def load_best(self) -> int | None:
        """Load the best model's weights into the model. Return its step; None: no best model. All ranks call it."""
        if self.progress.best_step is None:
            return None
        self.engine.load_weights(self.here.share(self.best_weights or {}))
        return self.progress.best_step
