"""Arithmetic that spares a wasted start: do the batches divide, does it fit on a card, what would."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, List, Optional, Sequence, Tuple

from torch import nn

from ascendrun.programs.trainer import memory
from ascendrun.programs.trainer.accelerator import Precision
from ascendrun.programs.trainer.chips import chip_of
from ascendrun.programs.trainer.simulate import Shapes, Simulated, Step, simulate


@dataclass(frozen=True)
class Report:
    """`lines`: what was reckoned. `problems`: why it would not run well, each with the way out. `chosen` None: no way
    of sharing the model fits."""

    lines: Tuple[str, ...]
    problems: Tuple[str, ...]
    chosen: Optional[memory.Need]


def nearest_multiples(value: int, of: int) -> Tuple[int, int]:
    """The nearest valid numbers below and above; the one below is at least `of`."""
    below = max(of, value // of * of)
    return below, below if below == value else below + of if below < value else below


def batch_problems(*, batch_size: int, world_size: int, micro_batch: int, samples: int) -> List[str]:
    """`batch_size`: samples a step over all ranks; `micro_batch`: a rank's at once, 0: its share; `samples`: of all."""
    unit = world_size * (micro_batch or 1)
    problems = []
    if batch_size < world_size:
        problems.append(f"--batch_size={batch_size} on {world_size} ranks leaves {world_size - batch_size} without a "
                        f"sample in every step; take {world_size} or more, or fewer devices")
    elif batch_size % unit:
        below, above = nearest_multiples(batch_size, unit)
        shown = f"{world_size} ranks" + (f" x --micro_batch={micro_batch}" if micro_batch else "")
        problems.append(f"--batch_size={batch_size} does not divide by {unit} ({shown}), so ranks wait for others; "
                        f"take {below}" + (f" or {above}" if above != below else ""))
    if batch_size > samples:
        problems.append(f"--batch_size={batch_size}, but there are {samples} samples")
    return problems


def steps_of(*, samples: int, batch_size: int, epochs: int) -> int:
    """Optimizer steps of the whole training."""
    return epochs * -(-samples // batch_size)


def reckon(build: Callable[[], nn.Module], step: Step, shapes: Shapes, *, precision: Precision, world_size: int,
           family: str, card: str = "", card_bytes: Optional[int] = None, pieces: int = 1, micro_batch: int = 1,
           ways: Sequence[str] = ("ddp", "fsdp2", "zero3"), has_checkpointing: bool = False) -> Report:
    """Memory of a model by each of `ways`; see `weigh`."""
    return weigh(lambda is_cast: simulate(build, step, shapes, precision=precision, is_cast=is_cast),
                 precision=precision, world_size=world_size, family=family, card=card, card_bytes=card_bytes,
                 pieces=pieces, micro_batch=micro_batch, ways=ways, has_checkpointing=has_checkpointing)


def weigh(look: Callable[[bool], Simulated], *, precision: Precision, world_size: int, family: str, card: str = "",
          card_bytes: Optional[int] = None, pieces: int = 1, micro_batch: int = 1,
          ways: Sequence[str] = ("ddp", "fsdp2", "zero3"), has_checkpointing: bool = False) -> Report:
    """Memory by each of `ways`, from fast to slow, with offloading last; see memory.needs for the other words.

    `look(is_cast)`: one simulated step, weights in the compute precision or not; asked once for each.

    `card`: the chip's name, for its memory, unless `card_bytes` says it. Without either nothing can fail to fit.
    """
    chip = chip_of(card) if card else None
    if card_bytes is None and chip is not None and chip.memory_gb is not None:
        card_bytes = int(chip.memory_gb * memory.GB)
    candidates = []
    seen = {is_cast: look(is_cast) for is_cast in sorted({way in ("fsdp2", "zero3") for way in ways})}
    for way in ways:
        plain = "none" if way == "ddp" and world_size == 1 else way
        simulated = seen[way in ("fsdp2", "zero3")]
        candidates.append(memory.needs(simulated, how=plain, world_size=world_size, precision=precision, pieces=pieces))
        if way == "zero3":
            candidates.append(memory.needs(simulated, how=way, world_size=world_size, precision=precision,
                                           offload_optimizer=True, offload_weights=True))
    millions = simulated.parameters / 1e6, simulated.trained / 1e6
    lines = [f"{millions[0]:,.1f} M weights, {millions[1]:,.1f} M trained; {precision.reason}"]
    lines += [memory.as_sentence(need, card_bytes, family) for need in candidates]
    if card_bytes is None:
        return Report(tuple(lines), (), candidates[0])
    chosen = memory.choose(candidates, card_bytes, family)
    if chosen is not None:
        said = f"chosen: {chosen.how}{', offloaded' if chosen.host else ''}, the fastest that fits"
        return Report((*lines, said), (), chosen)
    least = min(candidates, key=lambda need: need.on_card(family))
    ways_out = memory.ways_out(least, micro_batch=micro_batch, has_checkpointing=has_checkpointing, how=least.how)
    problem = f"{memory.as_sentence(least, card_bytes, family)}; try {', or '.join(ways_out)}"
    return Report(tuple(lines), (problem,), None)
