"""Checkpoints of Lightning in the format of the bundled programs: complete or absent, hashed, found by the launcher."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Callable

import numpy as np
import torch

from ascendrun.lightning.package import part
from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trainer import checkpoint
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.saver import Saved, Saver
from ascendrun.programs.trainer.task import CannotResumeError
from ascendrun.text import Text

Base: Any = part("plugins.io.TorchCheckpointIO")
PLAIN: tuple[Any, ...] = (bool, int, float, str, bytes)
"""Types of plain values; what is derived from them is saved as them."""


class StepCheckpoints(Base):  # type: ignore[misc]
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
            raise CannotResumeError(
                "lightning.no-checkpoint",
                "{directory}: no complete checkpoint of Lightning found\nhint: use another checkpoint directory",
                directory=self.directory,
            )
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
    problems.append(
        Text(
            "lightning.not-plain",
            "{place}: a value of type {type} cannot be saved\n"
            "hint: keep numbers, strings, tensors, lists and dictionaries there",
            place=place.lstrip("/"),
            type=type(value).__name__,
        )
    )
    return None
