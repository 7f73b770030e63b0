"""Where the batches of a step come from: a plan that is known in advance, or the model itself (rollouts)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Callable, Protocol

from ascendrun.programs.devices.accelerator import worker_context
from ascendrun.programs.trainer.data import Batch, Collate, Loader, Plan, Share
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.task import Settings


class Source(Protocol):
    """`share(step)`: this rank's part of a step, a function of the step (and, if `on_policy`, of the weights then).

    `updates`: steps for which it makes batches at once; checkpoints fall on multiples of it.
    """

    on_policy: bool
    updates: int
    steps_per_epoch: int

    def share(self, step: int) -> Share: ...
    def close(self) -> None: ...


class Planned:
    """The rows of a plan, batched by a loader while the device computes."""

    on_policy, updates = False, 1

    def __init__(self, plan: Plan, collate: Collate, here: Runtime, settings: Settings) -> None:
        self.plan, self.steps_per_epoch = plan, plan.steps_per_epoch
        self.loader = Loader(
            plan,
            collate,
            rank=here.rank,
            world_size=here.world_size,
            workers=settings.dataloader_num_workers,
            micro_batch=settings.micro_batch_size,
            steps=settings.steps,
            micro_tokens=settings.max_tokens_per_micro_batch,
            context=worker_context(here.family),
        )

    def share(self, step: int) -> Share:
        return self.loader.share(step)

    def close(self) -> None:
        self.loader.close()


Make = Callable[[int], Sequence[Sequence[Batch]]]
"""make(step): this rank's micro-batches of each of the next `updates` steps, from the present weights."""


class Rollouts:
    """Batches that the model makes, after the update of the step before; never in advance.

    `make` takes its random numbers from (seed, step, example, sample), so that neither the number of ranks nor a
    resume changes a sample: after a kill the same rollouts are made again.
    """

    on_policy = True

    def __init__(self, make: Make, here: Runtime, *, updates: int = 1, steps_per_epoch: int = 1) -> None:
        self.make, self.here, self.updates, self.steps_per_epoch = make, here, updates, steps_per_epoch
        self.made: Sequence[Sequence[Batch]] = ()

    def share(self, step: int) -> Share:
        if step % self.updates == 0:
            self.made = self.make(step)
        pieces = list(self.made[step % self.updates])
        passes = max(self.here.gather(len(pieces)))
        # Sharded models communicate in every pass, so every rank takes equally many.
        pieces += [Batch(pieces[0].tensors, 0.0, 0, 0)] * (passes - len(pieces))
        return Share.of(step, [], pieces)

    def close(self) -> None:
        pass
