"""The callback of a training: checkpoints, an end at a stop signal, steps and losses for `ascendrun ps`."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

from ascendrun import client
from ascendrun.lightning.checkpoints import StepCheckpoints, plain
from ascendrun.lightning.package import IS_OLD, part
from ascendrun.lightning.position import Position
from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trainer import runtime
from ascendrun.programs.trainer.saver import Saved
from ascendrun.programs.trainer.task import SaveError
from ascendrun.text import Text

Base: Any = part("callbacks.Callback")
LENGTHS = ("total_steps", "_schedule_phases")
"""What a OneCycleLR keeps of the length of its training; a resumed training has its own, which may be longer."""


class Supervision(client.Callback, Base):  # type: ignore[misc]
    """Saves every `save_steps` steps and at the end. After a stop signal, all ranks save after the same step, and the
    process ends with code 0: `fit` does not return.

    Metrics are those of `ascendrun.callback`. `save_steps` 0: checkpoints at the end and at a stop only.
    """

    def __init__(self, checkpoints: StepCheckpoints, *, save_steps: int) -> None:
        super().__init__()
        self.checkpoints, self.save_steps = checkpoints, save_steps
        self.position: Position | None = None
        self.stop_requested = False
        self.saved_step = self.seen_step = 0
        self.problem: Text | None = None
        self.stopped_at: int | None = None
        checkpoints.on_saved = self._after_save

    def __getattr__(self, name: str) -> Any:
        """Have no events but Lightning's: 1.9 refuses an object that answers to those of transformers."""
        raise AttributeError(name)

    # --- signals ---

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Check what will be saved, and hold stop signals back until the first step: Lightning's handler, which is
        installed between, would broadcast from inside a signal handler."""
        if stage != "fit":
            return
        self.position = trainer.strategy.position
        problems: list[Text] = []
        plain(dict(getattr(pl_module, "hparams", {})), "hyper_parameters", problems)
        if problems:
            raise InvalidDataError.of(problems)
        signal.pthread_sigmask(signal.SIG_BLOCK, runtime.stop_signals())

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        self.saved_step = self.seen_step = trainer.global_step
        for number in runtime.stop_signals():
            signal.signal(number, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, runtime.stop_signals())

    def _note(self, number: int, frame: object) -> None:
        self.stop_requested = True
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    # --- steps ---

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        assert self.position is not None
        self.position.completed(batch_idx, is_last=bool(trainer.is_last_batch))
        if trainer.global_step == self.seen_step:  # gradients are accumulated
            return
        self.seen_step = trainer.global_step
        self.checkpoints.poll()
        stops = any(trainer.strategy.here.gather(self.stop_requested))
        if stops or self.save_steps and self.seen_step % self.save_steps == 0:
            self._save(trainer)
        if stops:
            self._finish(trainer)
            self.stopped_at = self.seen_step
            trainer.strategy.here.log("lightning.stopped", "stopped at step {step}: saved", step=self.seen_step)
            raise SystemExit(0)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self.position is not None:
            self.position.hold()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Save the end, unless it is saved: a longer training may resume from it. Raises SaveError on all ranks."""
        super().on_train_end(trainer, pl_module)
        if trainer.global_step > self.saved_step:
            self._save(trainer)
        self._finish(trainer)

    def _save(self, trainer: Any) -> None:
        self.saved_step = trainer.global_step
        trainer.save_checkpoint(str(self.checkpoints.path_of(trainer.global_step)))

    def _finish(self, trainer: Any) -> None:
        self.checkpoints.wait()
        problems = [each for each in trainer.strategy.here.gather(self.problem) if each]
        if problems:
            raise SaveError(problems[0])

    def _after_save(self, saved: Saved) -> None:
        client.record(**saved.record())
        self.problem = saved.failure()
        if self.problem is not None:
            print(self.problem, flush=True)

    # --- state ---

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the random states of all ranks. All ranks call it, as they save together."""
        if self.position is None or self.checkpoints.here is None:
            return {}
        return {"ranks": self.checkpoints.here.gather(self.position.state())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where the checkpoint was saved. Another number of ranks continues in the same epoch, with random
        numbers of its own."""
        ranks = list(state_dict.get("ranks", ()))
        here = self.checkpoints.here
        if self.position is not None and here is not None and len(ranks) == here.world_size:
            self.position.load(ranks[here.rank])

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Let the schedule have the length of this training, not of the one that saved. Lightning 1.9 would train on
        the last batch again: it counts a batch as completed after the hook that saved."""
        if IS_OLD:
            for counts in checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"].values():
                if isinstance(counts, dict):
                    counts["completed"] = counts["processed"]
        for state in checkpoint.get("lr_schedulers", ()):
            for name in LENGTHS:
                state.pop(name, None)

    # --- ends ---

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, runtime.stop_signals())
        if not isinstance(exception, SystemExit):
            runtime.write_error_file(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, runtime.stop_signals())
        self.checkpoints.wait()
