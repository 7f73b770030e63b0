"""Generates texts on some ranks with a sharded model; each rank has prompts of its own, the last has none."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ascendrun.programs.devices import accelerator, attention
from ascendrun.programs.generation.cache import Attends, Call, of_transformers
from ascendrun.programs.generation.engine import Completion, Generator, Sampling, choose, generate
from ascendrun.programs.qwen_lora import base
from ascendrun.programs.trainer import optim, runtime
from ascendrun.programs.trainer.strategies.parallel import wrap

WORDS, HEADS, SHARED, WIDTH = 61, 4, 2, 8


class Layer(nn.Module):
    def __init__(self, number: int, window: int | None) -> None:
        super().__init__()
        self.number, self.window = number, window
        self.qkv = nn.Linear(HEADS * WIDTH, (HEADS + 2 * SHARED) * WIDTH)
        self.back = nn.Linear(HEADS * WIDTH, HEADS * WIDTH)

    def forward(self, x: torch.Tensor, cache: Attends | None) -> torch.Tensor:
        heads = self.qkv(torch.nn.functional.layer_norm(x, x.shape[-1:])).unflatten(-1, (-1, WIDTH))
        q, k, v = heads.split((HEADS, SHARED, SHARED), 2)
        if cache is None:
            seen = attention.attention(q, k, v, window=self.window)
        else:
            seen = cache.attend(self.number, q, k, v, window=self.window)
        return x + self.back(seen.flatten(2))


class Plain(nn.Module):
    """A torch model with the protocol of generation: one layer with a window, one without."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, HEADS * WIDTH), nn.Embedding(512, HEADS * WIDTH)
        self.layers = nn.ModuleList([Layer(0, 9), Layer(1, None)])
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.3)

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        cache: Attends | None = None,
        keep: torch.Tensor | slice = slice(None),
    ) -> torch.Tensor:
        x = self.words(ids) + self.places(positions)
        for layer in self.layers:
            x = layer(x, cache)
        return x[:, keep] @ self.words.weight.T


def naive(call: Call, text: Completion) -> list[int]:
    """Generate without a cache: every token has a pass over all tokens before it."""
    fresh = Completion(text.prompt, text.limit, text.sampling, text.stop, text.hook)
    while not fresh.ended:
        ids = torch.tensor([[*fresh.prompt, *fresh.tokens]])
        with torch.no_grad():
            logits = call(ids, torch.arange(ids.shape[1])[None], None, torch.tensor([ids.shape[1] - 1]))  # type: ignore[arg-type]
        fresh.append(int(choose(logits[:, -1], [fresh.sampling], [fresh.next_chance()])[0]))
    return fresh.tokens


SETTINGS = (
    Sampling(0.0),
    Sampling(1.0, seed=1),
    Sampling(0.8, top_k=9, seed=2),
    Sampling(1.2, top_p=0.8, seed=3),
    Sampling(1.0, top_k=30, top_p=0.9, seed=4),
)


def texts_of(words: int, lengths: Sequence[int], *, limit: int = 10) -> list[Completion]:
    """Prompts of these lengths, and all ways to sample in turn."""
    chance = torch.Generator().manual_seed(5)
    return [
        Completion(
            torch.randint(2, words, (length,), generator=chance).tolist(),
            limit + number % 7,
            SETTINGS[number % len(SETTINGS)],
            frozenset({0, 1}),
        )
        for number, length in enumerate(lengths)
    ]


def main(argv: Sequence[str]) -> None:
    asked: dict[str, Any] = json.loads(argv[0])
    runtime.run(lambda here: work(asked, here), timeout_s=60)


def work(asked: dict[str, Any], here: runtime.Runtime) -> None:
    torch.manual_seed(0)
    model = base.build(base.shape_config("tiny", vocab_size=80))
    texts = texts_of(80, asked["lengths"])
    wanted = [naive(of_transformers(model.eval()), each) for each in texts]
    precision = accelerator.choose_precision("float32", here.accelerator)
    engine = wrap(
        model,
        here,
        strategy=asked["strategy"],
        make_optimizer=lambda module: optim.adamw(module, 0.1),
        precision=precision,
    )
    engine.module.eval()
    generator = Generator.of(engine, of_transformers(engine.model), context=200, rows=3)
    mine = texts[here.rank :: here.world_size - 1] if here.rank < here.world_size - 1 else []
    found = [generate(generator, mine), generate(generator, [])]
    right = wanted[here.rank :: here.world_size - 1] if mine else []
    Path(f"found-{here.rank}.json").write_text(json.dumps({"found": found, "wanted": [right, []]}))
