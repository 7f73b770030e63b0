"""Generation of many texts at once: new ones join and finished ones leave between two tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Callable

import torch

from ascendrun.planner.cost import SHARDED
from ascendrun.programs.generation.cache import MULTIPLE, Attends, Cache, Call, Decode, Prefill, rounded
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.strategies.engine import Engine

NOT_FINITE = -1
"""The token of a row whose logits are inf or NaN."""
SMALLEST = 1e-30


@dataclass(frozen=True)
class Sampling:
    """`temperature` 0: the most likely token. `top_k`: only the k most likely, 0: all. `top_p`: only the most likely
    ones that together have this probability. `seed`: of this text; its tokens do not depend on other rows."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


def choose(logits: torch.Tensor, settings: Sequence[Sampling], chances: Sequence[float]) -> torch.Tensor:
    """Return a token for each row of `logits`. `chances`: a number from 0 to 1 for each row, which decides."""
    logits = logits.float()
    best = logits.argmax(-1)
    if any(each.temperature > 0 for each in settings):
        drawn = draw(logits, settings, chances)
        is_greedy = torch.tensor([each.temperature <= 0 for each in settings]).to(logits.device)
        best = torch.where(is_greedy, best, drawn)
    return torch.where(torch.isfinite(logits.sum(-1)), best, torch.full_like(best, NOT_FINITE))


def draw(logits: torch.Tensor, settings: Sequence[Sampling], chances: Sequence[float]) -> torch.Tensor:
    """Draw from the distribution's inverse: the first token up to which the probabilities sum to the row's chance."""

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32).to(logits.device)[:, None]

    scaled = logits / column([each.temperature if each.temperature > 0 else 1.0 for each in settings])
    if any(each.top_k or each.top_p < 1 for each in settings):
        size = logits.shape[-1]
        only_k = all(0 < each.top_k < size for each in settings)
        ordered = scaled.topk(max(each.top_k for each in settings) if only_k else size, -1).values
        places = torch.arange(ordered.shape[-1]).to(logits.device)[None, :]
        is_out = places >= column([each.top_k or size for each in settings])
        probabilities = torch.softmax(ordered.masked_fill(is_out, float("-inf")), -1)
        before = probabilities.cumsum(-1) - probabilities  # of the tokens that are more likely
        is_out |= (before >= column([each.top_p if each.top_p < 1 else 2.0 for each in settings])) & (places > 0)
        least = ordered.masked_fill(is_out, float("inf")).amin(-1, keepdim=True)
        scaled = scaled.masked_fill(scaled < least, float("-inf"))
    sums = torch.softmax(scaled, -1).cumsum(-1)
    wanted = (column(chances) * sums[:, -1:]).clamp(min=SMALLEST)  # above 0: a first token without any is not drawn
    return torch.searchsorted(sums, wanted)[:, 0]


PREFILL_ROWS, PREFILL_TOKENS = 8, 8192
"""Most texts, and tokens with padding, of a pass that reads new ones; a single longer text is read all the same."""
BURST = 4
"""Tokens between two agreements of ranks with a sharded model on whether any of them has work."""


@dataclass(eq=False)
class Completion:
    """A text that is generated. `stop`: tokens that end it, which are not part of it. `limit`: tokens at most.

    `hook(text)`: called after each token; the tokens that it returns come next, whatever the model would choose.
    `given`: places in `tokens` of those that the hook returned. `final`: the token of `stop` that ended it.
    `ended`: stop, length, cancelled, or error (the model's numbers are not finite); None: not yet.
    """

    prompt: Sequence[int]
    limit: int
    sampling: Sampling = Sampling(temperature=0.0)
    stop: frozenset[int] = frozenset()
    hook: Callable[[Completion], Sequence[int]] | None = None
    key: Any = None
    tokens: list[int] = field(default_factory=list)
    ended: str | None = None
    given: set[int] = field(default_factory=set)
    final: int | None = None
    forced: deque[int] = field(default_factory=deque)
    chance: torch.Generator = field(default_factory=torch.Generator)

    def __post_init__(self) -> None:
        self.chance.manual_seed(self.sampling.seed)

    def next_chance(self) -> float:
        return float(torch.rand((), generator=self.chance)) if self.sampling.temperature > 0 else 0.0

    def append(self, token: int) -> None:
        if self.forced:
            self.given.add(len(self.tokens))
            token = self.forced.popleft()
        if token == NOT_FINITE:
            self.ended = "error"
        elif token in self.stop:
            self.ended, self.final = "stop", token
        else:
            self.tokens.append(token)
            if self.hook is not None and not self.forced:
                self.forced.extend(self.hook(self))
            if len(self.tokens) >= self.limit:
                self.ended = "length"


class Generator:
    """A model, its cache and the texts in progress. Call `step` until it returns False.

    `ranks`: of a model that is sharded over them, which all of them must run equally often, each with its own texts:
    a rank without any runs an empty row. None: this rank has the whole model. `context`: tokens of a text with its
    prompt. `multiple`: lengths of prompts and of what is attended to are padded to it, for fewer shapes.
    """

    def __init__(
        self,
        call: Call,
        device: torch.device,
        *,
        context: int,
        rows: int = 32,
        ranks: Runtime | None = None,
        multiple: int = 1,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.call, self.device, self.autocast = call, device, autocast
        self.context, self.most_rows, self.multiple = context, rows, multiple
        self.ranks = ranks if ranks is not None and ranks.world_size > 1 else None
        self.cache = Cache()
        self.waiting: deque[Completion] = deque()
        self.active: list[Completion] = []
        """The texts of the cache's rows, in order."""
        self.passes = 0

    @classmethod
    def of(cls, engine: Engine, call: Call, *, context: int, rows: int = 32) -> Generator:
        """Make the generator of a trainer's engine."""
        here = engine.here
        ranks = here if engine.strategy in SHARDED else None
        return cls(
            call,
            here.device,
            context=context,
            rows=rows,
            ranks=ranks,
            multiple=1 if here.family == "cpu" else MULTIPLE,
            autocast=engine.autocast,
        )

    def reserve(self) -> None:
        """Take the memory of the whole cache now: too little shows before the first request."""
        self.cache = Cache(self.most_rows, self.context)
        generate(self, [Completion([0], 2)])

    def add(self, text: Completion) -> None:
        """Queue a text. Raises ValueError if its prompt is empty or leaves no room for a token."""
        if not 0 < len(text.prompt) < self.context:
            raise ValueError(f"prompt of {len(text.prompt)} tokens; expected 1 to {self.context - 1}")
        text.limit = min(text.limit, self.context - len(text.prompt))
        if text.limit <= 0:
            text.ended = "length"
        else:
            self.waiting.append(text)

    def cancel(self, text: Completion, reason: str = "cancelled") -> None:
        """End a text; its row is free from the next step on."""
        text.ended = text.ended or reason
        if text in self.waiting:
            self.waiting.remove(text)

    def clear(self) -> None:
        """Forget all texts and what is cached of them."""
        self.active, self.waiting, self.cache = [], deque(), Cache(self.cache.rows, self.cache.capacity)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.active)

    @torch.no_grad()
    def step(self) -> bool:
        """Read new texts into free rows and generate a token of every row; of sharded models several. Return whether
        any rank had work."""
        self.drop_ended()
        admitted = self.admit()
        if self.ranks is None:
            if admitted:
                self.prefill(admitted)
                self.drop_ended()
            if self.active:
                self.decode()
            return bool(admitted) or self.has_work
        reads, work = (any(each) for each in zip(*self.ranks.gather((bool(admitted), bool(admitted or self.has_work)))))
        if reads:
            self.prefill(admitted) if admitted else self.idle()
        for _ in range(BURST if work else 0):
            self.drop_ended()
            self.decode() if self.active else self.idle()
        return work

    def drop_ended(self) -> None:
        """Free the rows of ended texts; the last rows move into them."""
        for row in reversed([row for row, text in enumerate(self.active) if text.ended]):
            last = self.active.pop()
            if row < len(self.active):
                self.cache.copy(len(self.active), row, cached(last))
                self.active[row] = last

    def admit(self) -> list[Completion]:
        """Take the texts of the next pass from the queue, as many as there are rows for."""
        found: list[Completion] = []
        while self.waiting and len(found) < min(PREFILL_ROWS, self.most_rows - len(self.active)):
            longest = max(len(each.prompt) for each in (*found, self.waiting[0]))
            if found and rounded(longest, self.multiple) * (len(found) + 1) > PREFILL_TOKENS:
                break
            found.append(self.waiting.popleft())
        return found

    def prefill(self, texts: Sequence[Completion]) -> None:
        """Read these texts into the rows after the active ones. Equal prompts are read once."""
        first, different = len(self.active), list({tuple(each.prompt): each for each in texts}.values())
        row_of = {tuple(each.prompt): row for row, each in enumerate(different)}
        lengths = [len(each.prompt) for each in different]
        width = rounded(max(lengths), self.multiple)
        self.cache.reserve(first + len(texts), max(width, max(lengths) + 1))
        ids = torch.zeros(len(different), width, dtype=torch.int64)
        for row, each in enumerate(different):
            ids[row, : lengths[row]] = torch.tensor(each.prompt)
        kept = sorted(set(lengths))
        places = torch.tensor([length - 1 for length in kept])
        logits = self.run(ids, torch.arange(width).expand(len(different), width), Prefill(self.cache, first), places)
        rows = [row_of[tuple(each.prompt)] for each in texts]
        places = torch.tensor([kept.index(lengths[row]) for row in rows])
        in_order = [*different, *(each for each in texts if each not in different)]
        for at, each in enumerate(in_order[len(different) :], start=first + len(different)):
            self.cache.copy(first + row_of[tuple(each.prompt)], at, len(each.prompt))
        self.active += in_order
        self.append(texts, logits[torch.tensor(rows).to(self.device), places.to(self.device)])

    def decode(self) -> None:
        lengths = [cached(text) for text in self.active]
        self.cache.reserve(len(self.active), max(lengths) + 1)
        ids = torch.tensor([[text.tokens[-1]] for text in self.active])
        positions = torch.tensor(lengths)[:, None]
        cache = Decode(self.cache, lengths, self.device, self.multiple)
        logits = self.run(ids, positions, cache, torch.tensor([0]))
        self.append(self.active, logits[:, 0])

    def idle(self) -> None:
        """Take part in a pass of a sharded model without a text."""
        self.run(
            torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64), Prefill(None), torch.tensor([0])
        )

    def run(self, ids: torch.Tensor, positions: torch.Tensor, cache: Attends, keep: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        with self.autocast():
            return self.call(ids.to(self.device), positions.to(self.device), cache, keep.to(self.device))

    def append(self, texts: Sequence[Completion], logits: torch.Tensor) -> None:
        chances = [each.next_chance() for each in texts]
        chosen: list[int] = choose(logits, [each.sampling for each in texts], chances).tolist()
        for text, token in zip(texts, chosen):
            text.append(token)


def cached(text: Completion) -> int:
    """Return the number of cached tokens: all but the newest one."""
    return len(text.prompt) + len(text.tokens) - 1


def generate(generator: Generator, texts: Sequence[Completion]) -> list[list[int]]:
    """Generate these texts. All ranks of a sharded model call it together, each with its own, also with none."""
    for text in texts:
        generator.add(text)
    while generator.step():
        pass
    return [text.tokens for text in texts]
