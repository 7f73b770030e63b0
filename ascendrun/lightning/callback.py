"""The callback of a training: an end at a stop signal, steps and losses for `ascendrun ps`, and checkpoints in the
format of the bundled programs: complete or absent, hashed, found by the launcher."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Callable

import numpy as np
import torch

from ascendrun import client
from ascendrun.lightning.package import IS_OLD, part
from ascendrun.lightning.strategies import Position
from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trainer import checkpoint, runtime
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.saver import Saved, Saver
from ascendrun.programs.trainer.task import CannotResumeError, SaveError
from ascendrun.text import Text, listed

CheckpointIO: Any = part("plugins.io.TorchCheckpointIO")
PLAIN: tuple[Any, ...] = (bool, int, float, str, bytes)
"""Types of plain values; what is derived from them is saved as them."""


class StepCheckpoints(CheckpointIO):  # type: ignore[misc]
    """Checkpoints `step-NNNNNNNN` of one directory, or of directories of that name on hosts without a shared disk.
    Other paths, such as those of a ModelCheckpoint, are files of Lightning.

    All ranks call the methods together. `here` is set by the strategy. `on_saved` is called in the training's thread.
    """

    def __init__(self, directory: Path, *, keep: int = 2) -> None:
        super().__init__()
        self.directory, self.keep = directory, keep
        self.here: Runtime | None = None
        self.on_saved: Callable[[Saved], None] = lambda saved: None
        self._saver: Saver | None = None

    @property
    def saver(self) -> Saver:
        """The writer, made at the first use, which claims the directory for this start of the training."""
        if self._saver is None:
            assert self.here is not None, "checkpoints are used before Strategy.setup_environment"
            self._saver = Saver(
                self.here,
                self.directory,
                shards=(1, 0),
                keep_last=self.keep,
                on_saved=lambda saved: self.on_saved(saved),
            )
        return self._saver

    def path_of(self, step: int) -> Path:
        return self.directory / checkpoint.folder_name("step", step)

    def owns(self, path: Any) -> bool:
        place = Path(str(path)).absolute()
        return place.parent == self.directory and checkpoint.NAME.match(place.name) is not None

    def save_checkpoint(self, content: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if not self.owns(path):
            super().save_checkpoint(content, path, storage_options)
            return
        problems: list[Text] = []
        state = plain(content, "", problems)
        if problems:
            raise InvalidDataError.of(problems)
        assert self.here is not None
        facts = {"world_size": self.here.world_size, "shards": 1, "framework": "lightning"}
        self.saver.save(int(content["global_step"]), {"pieces": {}, "lightning": state}, {}, facts=facts)

    def load_checkpoint(self, path: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Return the state of a checkpoint on every rank: from the own directory, the newest one of which every part is
        on some host. Raises CannotResumeError."""
        if not self.owns(path):
            return dict(super().load_checkpoint(path, *arguments, **options))
        found = self.saver.find()
        if found is None or "lightning" not in found.common:
            raise CannotResumeError(listed("lightning.no-checkpoint", directory=self.directory))
        self.saver.origin = int(found.common["lightning"]["global_step"]), str(found.facts.get("save", ""))
        return dict(found.common["lightning"])

    def remove_checkpoint(self, path: Any) -> None:
        if not self.owns(path):
            super().remove_checkpoint(path)

    def wait(self) -> None:
        """Wait until no write is in progress."""
        if self._saver is not None:
            self._saver.wait()

    def poll(self) -> None:
        if self._saver is not None:
            self._saver.poll()


def plain(value: Any, place: str, problems: list[Text]) -> Any:
    """Return a state as tensors and plain values, which are read back without running code; add others to
    `problems`."""
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        return value.detach()
    for kind in PLAIN:
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {key: plain(item, f"{place}/{key}", problems) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [plain(item, f"{place}/{at}", problems) for at, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, np.ndarray) and value.dtype != object:
        return torch.from_numpy(value.copy())
    problems.append(listed("lightning.not-plain", place=place.lstrip("/"), type=type(value).__name__))
    return None


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
        self.saved_step = self.seen_step = 0
        self.problem: Text | None = None
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
        runtime.listen_for_stop(trainer.strategy.here)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, runtime.stop_signals())

    # --- steps ---

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        assert self.position is not None
        self.position.completed(batch_idx, is_last=bool(trainer.is_last_batch))
        if trainer.global_step == self.seen_step:  # gradients are accumulated
            return
        self.seen_step = trainer.global_step
        self.checkpoints.poll()
        here = trainer.strategy.here
        stops = any(here.gather(here.stop_requested))
        if stops or self.save_steps and self.seen_step % self.save_steps == 0:
            self._save(trainer)
        if stops:
            self._finish(trainer)
            here.log(listed("lightning.stopped", step=self.seen_step))
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
