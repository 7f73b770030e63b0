"""The model, and how it is optimized: Muon for matrices, AdamW for the rest, and their rates by step.

A decoder with rotary positions, norms without weights, ReLU squared and untied embeddings. Preset `classic` is the
architecture that transformers knows as NanoChat; weights have its names. `current` adds

    windows            layers attend to a quarter of the context, every fourth and the last one to all of it
    value embeddings   every other layer adds a second embedding of the token to its values, by a gate
    scales             of the residual stream and of the embedding, which each layer adds again
    smear              a token's embedding gets part of that of the token before
    backout            what the middle layer had is subtracted before the logits
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ascendrun.programs.devices.attention import attention
from ascendrun.programs.generation.cache import Attends
from ascendrun.programs.nanochat.sizes import ON_CHATS, SMEAR_CHANNELS, VE_GATE_CHANNELS, Horizon, Sizes
from ascendrun.programs.trainer import schedule
from ascendrun.programs.trainer.optim import Group, OptimizerPlan
from ascendrun.programs.trainer.schedule import Schedule

SOFTCAP = 15.0
SHARPNESS = 1.2
"""Factor of queries and keys after their norm, in `current`."""
ROTARY_BASE = {"classic": 10_000.0, "current": 100_000.0}
EPSILON = {"classic": 1e-6, "current": torch.finfo(torch.float32).eps}
SMEARED = -1
"""The cache's layer of embeddings before the smear."""


def norm(x: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Divide by the root of the mean square."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)).to(x.dtype)


def rotary_embeddings(positions: torch.Tensor, width: int, base: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (cosines, sines) of rows x length x 1 x width / 2, in float32."""
    channels = torch.arange(0, width, 2, dtype=torch.float32, device=positions.device)
    angles = positions[..., None].float() * (1.0 / base ** (channels / width))
    return angles.cos()[:, :, None], angles.sin()[:, :, None]


def apply_rotary_emb(x: torch.Tensor, cos_sin: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Turn each pair of channels, one of each half, by minus its angle."""
    cos, sin = (each.to(x.dtype) for each in cos_sin)
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos + second * sin, second * cos - first * sin), -1)


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class CausalSelfAttention(nn.Module):
    def __init__(self, sizes: Sizes, layer: int) -> None:
        super().__init__()
        self.layer, self.head, self.epsilon = layer, sizes.head, EPSILON[sizes.preset]
        self.sharpness = 1.0 if sizes.is_classic else SHARPNESS
        self.window = None if sizes.is_classic else sizes.window_sizes[layer] + 1  # the token itself too
        self.q_proj = linear(sizes.hidden, sizes.hidden)
        self.k_proj = linear(sizes.hidden, sizes.kv_dim)
        self.v_proj = linear(sizes.hidden, sizes.kv_dim)
        self.o_proj = linear(sizes.hidden, sizes.hidden)
        has_values = sizes.has_ve(layer)
        self.ve_gate = linear(VE_GATE_CHANNELS, sizes.kv_heads) if has_values else None

    def forward(self, x: torch.Tensor, ve: torch.Tensor | None, cos_sin: Any, cache: Attends | None) -> torch.Tensor:
        """`ve`: the value embeddings of these tokens."""
        shape = (*x.shape[:2], -1, self.head)
        q, k, v = (project(x).view(shape) for project in (self.q_proj, self.k_proj, self.v_proj))
        if self.ve_gate is not None and ve is not None:
            gate = 3 * torch.sigmoid(self.ve_gate(x[..., :VE_GATE_CHANNELS]))
            v = v + (gate[..., None] * ve.view(shape)).to(v.dtype)
        q, k = (norm(apply_rotary_emb(each, cos_sin), self.epsilon) * self.sharpness for each in (q, k))
        if cache is None:
            seen = attention(q, k, v, causal=True, window=self.window)
        else:
            seen = cache.attend(self.layer, q, k, v, window=self.window)
        return self.o_proj(seen.reshape(x.shape))  # type: ignore[no-any-return]


class MLP(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.fc1 = linear(sizes.hidden, 4 * sizes.hidden)
        self.fc2 = linear(4 * sizes.hidden, sizes.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(functional.relu(self.fc1(x)).square())  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, sizes: Sizes, layer: int) -> None:
        super().__init__()
        self.epsilon = EPSILON[sizes.preset]
        self.self_attn, self.mlp = CausalSelfAttention(sizes, layer), MLP(sizes)

    def forward(self, x: torch.Tensor, ve: torch.Tensor | None, cos_sin: Any, cache: Attends | None) -> torch.Tensor:
        x = x + self.self_attn(norm(x, self.epsilon), ve, cos_sin, cache)
        return x + self.mlp(norm(x, self.epsilon))  # type: ignore[no-any-return]


class NanoChat(nn.Module):
    """Build with `make_model`: the weights of a new module have no values yet.

    `recomputes`: activations of the layers are computed again in the backward pass.
    """

    def __init__(self, sizes: Sizes, *, recomputes: bool = False) -> None:
        super().__init__()
        self.sizes, self.recomputes, self.epsilon = sizes, recomputes, EPSILON[sizes.preset]
        self.head, self.is_classic = sizes.head, sizes.is_classic
        self.embed_tokens = nn.Embedding(sizes.padded_vocabulary, sizes.hidden)
        self.layers = nn.ModuleList([Block(sizes, layer) for layer in range(sizes.layers)])
        self.lm_head = linear(sizes.hidden, sizes.padded_vocabulary)
        if sizes.is_classic:
            return
        self.value_embeds = nn.ModuleDict(
            {
                str(layer): nn.Embedding(sizes.padded_vocabulary, sizes.kv_dim)
                for layer in range(sizes.layers)
                if sizes.has_ve(layer)
            }
        )
        self.resid_lambdas = nn.Parameter(torch.empty(sizes.layers))
        self.x0_lambdas = nn.Parameter(torch.empty(sizes.layers))
        self.smear_gate = linear(SMEAR_CHANNELS, 1)
        self.smear_lambda = nn.Parameter(torch.empty(1))
        self.backout_lambda = nn.Parameter(torch.empty(1))

    def forward(
        self,
        ids: torch.Tensor,
        *,
        positions: torch.Tensor | None = None,
        cache: Attends | None = None,
        keep: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return logits in float32, of all tokens or of the places `keep`. `cache`: of the tokens before these."""
        sizes = self.sizes
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
        cos_sin = rotary_embeddings(positions, self.head, ROTARY_BASE[sizes.preset])
        x = norm(self.embed_tokens(ids), self.epsilon)
        x = self.classic(x, cos_sin, cache) if self.is_classic else self.current(ids, x, cos_sin, cache)
        x = norm(x if keep is None else x[:, keep], self.epsilon)
        logits = self.lm_head(x)[..., : sizes.vocabulary].float()
        return SOFTCAP * torch.tanh(logits / SOFTCAP)

    def classic(self, x: torch.Tensor, cos_sin: Any, cache: Attends | None) -> torch.Tensor:
        for layer in self.layers:
            x = self.run(layer, x, None, cos_sin, cache)
        return x

    def current(self, ids: torch.Tensor, x: torch.Tensor, cos_sin: Any, cache: Attends | None) -> torch.Tensor:
        gate = self.smear_lambda * torch.sigmoid(self.smear_gate(x[..., :SMEAR_CHANNELS]))
        before = functional.pad(x[:, :-1], (0, 0, 1, 0)) if cache is None else cache.before(SMEARED, x)
        x = x0 = x + (gate * before).to(x.dtype)
        x_backout = x
        for number, layer in enumerate(self.layers):
            x = self.resid_lambdas[number] * x + self.x0_lambdas[number] * x0
            ve = self.value_embeds[str(number)](ids) if str(number) in self.value_embeds else None
            x = self.run(layer, x, ve, cos_sin, cache)
            x_backout = x if number == self.sizes.layers // 2 else x_backout
        return x - self.backout_lambda * x_backout

    def run(self, layer: nn.Module, *given: Any) -> torch.Tensor:
        if self.recomputes and self.training and torch.is_grad_enabled():
            return checkpoint(layer, *given, use_reentrant=False)  # type: ignore[no-any-return]
        return layer(*given)  # type: ignore[no-any-return]

    # --- what it says of itself ---

    def flops_per_token(self) -> float:
        return self.sizes.flops_per_token

    def cache_bytes(self, rows: int, length: int, *, element_bytes: int = 2) -> int:
        return self.sizes.cache_bytes(rows, length, element_bytes=element_bytes)


def make_model(sizes: Sizes, *, seed: int, recomputes: bool = False) -> NanoChat:
    """Return a new model on the CPU; its weights follow from the seed."""
    model = empty_model(sizes, recomputes=recomputes).to_empty(device="cpu")
    init_weights(model, torch.Generator().manual_seed(seed))
    return model


def empty_model(sizes: Sizes, *, recomputes: bool = False) -> NanoChat:
    """Return a model without memory for its weights."""
    with torch.device("meta"):
        return NanoChat(sizes, recomputes=recomputes)


@torch.no_grad()
def init_weights(model: NanoChat, chance: torch.Generator) -> None:
    """Set all weights. Matrices are uniform with the standard deviation 1 / sqrt(hidden); those that write to the
    residual stream are zero, so that a new model computes the logits of its embedding."""
    sizes = model.sizes
    bound = math.sqrt(3 / sizes.hidden)

    def uniform(weight: torch.Tensor, low: float, high: float) -> None:
        weight.uniform_(low, high, generator=chance)

    model.embed_tokens.weight.normal_(0.0, 0.8, generator=chance)
    model.lm_head.weight.normal_(0.0, 0.001, generator=chance)
    for layer in model.layers:
        attention: Any = layer.self_attn
        for each in (attention.q_proj, attention.k_proj, attention.v_proj):
            uniform(each.weight, -bound, bound)
        uniform(layer.mlp.fc1.weight, -0.4 * bound, 0.4 * bound)  # type: ignore[union-attr,arg-type]
        attention.o_proj.weight.zero_()
        layer.mlp.fc2.weight.zero_()  # type: ignore[union-attr,operator]
        if attention.ve_gate is not None:
            uniform(attention.ve_gate.weight, 0.0, 0.02)
    if sizes.is_classic:
        return
    for table in model.value_embeds.values():
        uniform(table.weight, -bound, bound)  # type: ignore[arg-type]
    way = torch.arange(sizes.layers) / max(1, sizes.layers - 1)
    model.resid_lambdas.copy_(1.15 - 0.10 * way)
    model.x0_lambdas.copy_(0.20 - 0.15 * way)
    uniform(model.smear_gate.weight, 0.0, 0.02)
    model.smear_lambda.zero_()
    model.backout_lambda.fill_(0.2)


RATE_WIDTH = 768
"""Hidden size of the model whose AdamW rates were tuned; others are scaled by its root."""
SMEAR_RATE = 0.2
MOMENTUM_START, MOMENTUM, MOMENTUM_END = 0.85, 0.97, 0.90
MOMENTUM_WARMUP = 400
CHAT_MOMENTUM, CHAT_MOMENTUM_WARMUP = 0.95, 300
ADAMW: Mapping[str, tuple[tuple[float, float], float]] = {
    "unembedding": ((0.8, 0.96), 0.01),
    "embedding": ((0.8, 0.995), 0.001),
    "value_embedding": ((0.8, 0.995), 0.01),
    "resid_lambdas": ((0.8, 0.95), 0.05),
    "x0_lambdas": ((0.96, 0.95), 0.0),
    "smear": ((0.8, 0.95), 0.0),
}
"""Betas and weight decay of each group of AdamW."""


def get_lr_multiplier(options: Mapping[str, Any], steps: int) -> Schedule:
    """Return the shape of all rates: up, level, and down over the last part of the training."""
    level = schedule.trapezoid(
        steps, warmup=options["warmup_steps"], warmdown=options["warmdown_ratio"], floor=options["final_lr_frac"]
    )
    return schedule.scaled(options.get("init_lr_frac", 1.0), level)


def get_muon_momentum(options: Mapping[str, Any], steps: int) -> Schedule:
    """Return Muon's momentum: in base it rises over the first steps, and falls while the rates fall; on conversations
    it rises to a lower level and stays, which in rl it has from the start."""
    if options.get("mode") == "rl":
        return schedule.ramp(CHAT_MOMENTUM, CHAT_MOMENTUM, 0)
    if options.get("mode") in ON_CHATS:
        return schedule.ramp(MOMENTUM_START, CHAT_MOMENTUM, CHAT_MOMENTUM_WARMUP)
    down = round(options["warmdown_ratio"] * steps)
    rise, fall = (schedule.ramp(MOMENTUM_START, MOMENTUM, MOMENTUM_WARMUP), schedule.ramp(MOMENTUM, MOMENTUM_END, down))
    return lambda step: rise(step) if step < MOMENTUM_WARMUP or step < steps - down else fall(step - (steps - down))


def rates_of(options: Mapping[str, Any], horizon: Horizon, hidden: int) -> dict[str, float]:
    """Return the peak rate of each group of AdamW."""
    scale = horizon.rate_scale
    by_width = scale * (hidden / RATE_WIDTH) ** -0.5
    return {
        "unembedding": options["unembedding_lr"] * by_width,
        "embedding": options["embedding_lr"] * by_width,
        "value_embedding": 0.5 * options["embedding_lr"] * by_width,
        "resid_lambdas": 0.01 * options["scalar_lr"] * scale,
        "x0_lambdas": options["scalar_lr"] * scale,
        "smear": SMEAR_RATE,
    }


def setup_optimizer(model: NanoChat, options: Mapping[str, Any], horizon: Horizon, *, shard: bool) -> OptimizerPlan:
    """Return the groups of a model. `shard`: each rank keeps the optimizer's state of its part of the weights."""
    shape = get_lr_multiplier(options, horizon.steps)
    fall = horizon.weight_decay * 0.5  # Muon's, to 0 as a cosine
    params: dict[str, list[Any]] = {
        "unembedding": list(model.lm_head.parameters()),
        "embedding": list(model.embed_tokens.parameters()),
    }
    if not model.sizes.is_classic:
        params.update(
            value_embedding=list(model.value_embeds.parameters()),
            resid_lambdas=[model.resid_lambdas],
            x0_lambdas=[model.x0_lambdas],
            smear=[model.smear_gate.weight, model.smear_lambda, model.backout_lambda],
        )
    matrices = Group(
        list(model.layers.parameters()),
        "muon",
        lr=schedule.scaled(options["matrix_lr"] * horizon.rate_scale, shape),
        weight_decay=lambda step: fall * (1 + math.cos(math.pi * min(1.0, step / horizon.steps))),
        momentum=get_muon_momentum(options, horizon.steps),
    )
    rates = rates_of(options, horizon, model.sizes.hidden)
    return OptimizerPlan(
        [matrices]
        + [
            Group(each, "adamw", schedule.scaled(rates[name], shape), ADAMW[name][1], ADAMW[name][0], eps=1e-10)
            for name, each in params.items()
        ],
        shard=shard,
    )
