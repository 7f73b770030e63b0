"""Where a training is in its data: the batches of the epoch, and the random numbers that lead to the next one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from ascendrun.programs.devices.accelerator import Accelerator

Random = Mapping[str, Any]


@dataclass
class Position:
    """The position of one rank. `batches`: completed ones of this epoch. `start`: the random state before the first of
    them, which decides their order; None: the epoch has not started."""

    accelerator: Accelerator
    batches: int = 0
    start: Random | None = None
    resumed: Mapping[str, Any] | None = None
    """State of a checkpoint that the next iteration of the data continues from."""
    pending: Random | None = None
    """Random state to set before the next batch, so that what happens between a checkpoint and that batch, such as a
    validation, leaves the training as it would be after a resume."""
    generator: dict[str, torch.Tensor] = field(default_factory=dict)

    def completed(self, batch: int, *, is_last: bool) -> None:
        """Note that a batch, counted from 0 in its epoch, is trained on."""
        self.batches = 0 if is_last else batch + 1

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, in plain values and tensors."""
        self.hold()
        is_inside = self.batches > 0 and self.start is not None
        return {"batches": self.batches, "start": self.start if is_inside else None, "random": self.pending}

    def hold(self) -> None:
        """Note the random state, which the next batch of the training continues from: a
        validation does not change it."""
        if self.pending is None:
            self.pending = self.accelerator.rng_state()

    def load(self, state: Mapping[str, Any]) -> None:
        self.batches, self.resumed, self.pending = int(state["batches"]), state, None

    def settle(self) -> None:
        """Set the random state that a checkpoint was saved with, once."""
        if self.pending is not None:
            self.accelerator.set_rng_state(self.pending)
            self.pending = None


class LateLoader:
    """A loader that is iterated when the first batch is needed: an iterator draws random numbers, and its workers start
    with the order of its epoch. Other attributes are those of the loader inside."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader


class ResumableLoader(LateLoader):
    """A loader of training data that continues in the middle of an epoch: a map-style data set read in this process
    skips indices only; any other reads the batches again that were trained on, because its workers may use random
    numbers."""

    def __init__(self, loader: Iterable[Any], position: Position) -> None:
        super().__init__(loader)
        self.position = position

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: a checkpoint has the position of every rank. Lightning asks this of a loader that resumes."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """No effect, see `state_dict`."""

    def __iter__(self) -> Iterator[Any]:
        here, resumed = self.position, self.position.resumed
        here.resumed = None
        skipped = 0
        if resumed is None:
            here.settle()
        else:
            here.pending = None
            here.accelerator.set_rng_state(resumed["start"] or resumed["random"])
            skipped = int(resumed["batches"])
            self._set_generator(resumed["start"])
        here.start = self._random()

        def arrive() -> None:
            if resumed is not None and skipped:
                here.accelerator.set_rng_state(resumed["random"])

        batches = iter(self._without(skipped, arrive))
        while True:
            here.settle()
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch

    def _random(self) -> Random:
        state = {name: value for name, value in self.position.accelerator.rng_state().items() if name != "device"}
        generator = getattr(self.loader, "generator", None)
        return state if generator is None else {**state, "generator": generator.get_state()}

    def _set_generator(self, state: Random | None) -> None:
        generator = getattr(self.loader, "generator", None)
        if generator is not None and state is not None and "generator" in state:
            generator.set_state(state["generator"])

    def _without(self, count: int, arrive: Any) -> Iterable[Any]:
        if count == 0:
            return self.loader
        if is_skippable(self.loader):
            return remaining(self.loader, count, arrive)
        return replayed(self.loader, count, arrive)


def is_skippable(loader: Any) -> bool:
    """Return whether skipped indices leave the batches behind them as they are: no worker draws random numbers."""
    return type(loader) is DataLoader and loader.num_workers == 0 and not isinstance(loader.dataset, IterableDataset)


def remaining(loader: Any, count: int, arrive: Any) -> Iterable[Any]:
    """Return a loader of the batches after the first `count`. `arrive` is called before the first of them is read."""
    options = {"collate_fn": loader.collate_fn, "pin_memory": loader.pin_memory, "generator": loader.generator}
    if loader.batch_sampler is None:
        options.update(batch_size=None, sampler=Later(loader.sampler, count, arrive))
    else:
        options["batch_sampler"] = Later(loader.batch_sampler, count, arrive)
    return DataLoader(loader.dataset, **options)


def replayed(loader: Iterable[Any], count: int, arrive: Any) -> Iterator[Any]:
    batches = iter(loader)
    with contextlib.suppress(StopIteration):
        for _ in range(count):
            next(batches)
    arrive()
    yield from batches


class Later:
    """The indices of a sampler without the first ones."""

    def __init__(self, sampler: Any, count: int, arrive: Any) -> None:
        self.sampler, self.count, self.arrive = sampler, count, arrive

    def __len__(self) -> int:
        return max(0, len(self.sampler) - self.count)

    def __iter__(self) -> Iterator[Any]:
        indices = iter(self.sampler)
        for _ in range(self.count):
            next(indices, None)
        self.arrive()
        yield from indices
