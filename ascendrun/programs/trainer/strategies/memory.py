"""What a training needs on one card, reckoned before a card is taken; and which way of sharing the model fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ascendrun.programs.trainer.devices.accelerator import Precision
from ascendrun.programs.trainer.strategies.engine import STRATEGIES
from ascendrun.programs.trainer.strategies.simulate import Simulated
from ascendrun.programs.trainer.strategies.zero3 import BUCKET_ELEMENTS
from ascendrun.text import Text

GB, MB = 2**30, 2**20
FRAGMENTED = 0.06
"""Share that the caching allocator holds beyond what tensors use."""
CONTEXT_BYTES: Mapping[str, int] = {"cpu": 0, "cuda": int(0.6 * GB), "npu": int(1.5 * GB)}
"""Runtime and kernels, and the buffers of two communicators: HCCL takes twice HCCL_BUFFSIZE, 200 MB, for each."""
WORKSPACE_BYTES: Mapping[str, int] = {"cpu": 0, "cuda": 64 * 2**20, "npu": 0}
"""What matrix products take from the allocator for themselves: cuBLAS and cuBLASLt 32 MiB each, seen on an H200 with
torch 2.11 as the same 64 MiB beside every model. NPU: not known, never measured."""


@dataclass(frozen=True)
class Need:
    """Bytes on the device of one rank. `buffers`: what exchanging needs. `host`: offloaded, in the node's memory."""

    how: str
    world_size: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    host: int = 0

    @property
    def tensors(self) -> int:
        """What the program's own tensors take at the peak."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers

    def allocated(self, family: str) -> int:
        """What the allocator's peak will say."""
        return self.tensors + WORKSPACE_BYTES[family]

    def on_card(self, family: str) -> int:
        """With what the allocator and the runtime take on top."""
        return int(self.allocated(family) * (1 + (FRAGMENTED if family != "cpu" else 0))) + CONTEXT_BYTES[family]


def needs(
    simulated: Simulated,
    *,
    how: str,
    world_size: int,
    precision: Precision,
    pieces: int = 1,
    offload_optimizer: bool = False,
    offload_weights: bool = False,
) -> Need:
    """`simulated`: of one piece; cast to the compute precision for fsdp2 and zero3. `pieces`: passes a step."""
    assert how in STRATEGIES, how
    if how in ("none", "ddp"):
        return replicated(simulated, how=how, world_size=world_size, pieces=pieces)
    if how == "fsdp2":
        return fully_sharded(simulated, world_size, precision, pieces, offload=offload_weights or offload_optimizer)
    return zero3(simulated, world_size, precision, offload_optimizer=offload_optimizer, offload_weights=offload_weights)


def replicated(simulated: Simulated, *, how: str, world_size: int, pieces: int) -> Need:
    """Under DDP gradients live in the buckets, from the first step to the last."""
    weights, trained = simulated.weights, simulated.trained_bytes
    gradients = beside_activations(simulated) if how == "none" and pieces == 1 else trained
    return Need(how, world_size, weights, gradients, 2 * trained, simulated.activations, 0)


def beside_activations(simulated: Simulated) -> int:
    """Gradients come while activations go, so what both need together is less than the sum of their most, unless an
    earlier piece of the step left its gradients there."""
    rest = simulated.weights + 2 * simulated.trained_bytes + simulated.activations
    return max(0, simulated.whole_step - rest)


def fully_sharded(simulated: Simulated, world_size: int, precision: Precision, pieces: int, *, offload: bool) -> Need:
    """Beside its part a rank holds what is in no layer, gathered from the first pass on. The most is needed either
    where the words are told from each other, all layers at rest, or at work on a layer: that one and the next gathered,
    and whole gradients, which are summed and cut layer by layer, and at the end of the pass for what is in none."""
    trained = simulated.trained * width(precision.weights)
    weights = (simulated.parameters - simulated.trained) * width(precision.compute) + trained
    sharded = -(-weights // world_size), -(-trained // world_size)
    share = simulated.trained / max(1, simulated.parameters)
    outside, layer = simulated.outside_layers, simulated.largest_layer
    whole = int((outside + layer) * share * width(torch.float32) / width(precision.compute))
    moments = (simulated.activations, outside), (simulated.activations_in_layers, outside + 2 * layer + whole)
    activations, buffers = max(moments, key=sum)
    kept = trained if pieces > 1 else -(-beside_activations(simulated) // world_size)
    on_card = (0, 0, 0) if offload else (sharded[0], kept, 2 * sharded[1])
    return Need("fsdp2", world_size, *on_card, activations, buffers, host=sharded[0] + 3 * sharded[1] if offload else 0)


def zero3(
    simulated: Simulated, world_size: int, precision: Precision, *, offload_optimizer: bool, offload_weights: bool
) -> Need:
    """DeepSpeed keeps float32 copies of trained weights beside moments, and buckets of a fixed size."""
    each = width(precision.compute)
    weights, trained = -(-simulated.weights // world_size), -(-simulated.trained // world_size)
    optimizer = trained * 12
    buffers = 2 * min(BUCKET_ELEMENTS, simulated.trained) * each + 2 * simulated.largest_layer
    gradients = trained * (each + 4)
    host = (optimizer + trained * 4 if offload_optimizer else 0) + (weights if offload_weights else 0)
    return Need(
        "zero3",
        world_size,
        0 if offload_weights else weights,
        gradients,
        0 if offload_optimizer else optimizer,
        simulated.activations,
        buffers,
        host,
    )


def width(dtype: torch.dtype) -> int:
    return torch.empty((), dtype=dtype).element_size()


def fits(need: Need, card_bytes: int, family: str) -> bool:
    return need.on_card(family) <= card_bytes


def as_sentence(need: Need, device_bytes: int | None, family: str) -> Text:
    """ddp over 8 ranks: 71.0 GB of 64.0 GB per device (weights 60.9 GB, …)."""
    memory = amounts(need, device_bytes, family)
    if need.how == "none":
        return Text("program.one-rank-memory", "one rank: {memory}", memory=memory)
    text = "{strategy} over {ranks} ranks: {memory}"
    return Text("program.strategy-ranks", text, strategy=need.how, ranks=need.world_size, memory=memory)


def amounts(need: Need, device_bytes: int | None, family: str) -> Text:
    """71.0 GB of 64.0 GB per device (weights 60.9 GB, …)."""
    names = ("weights", "gradients", "optimizer", "activations", "buffers")
    return Text(
        "program.memory",
        "{total}{limit} {place}{host} ({parts})",
        total=shown(need.on_card(family)),
        limit=Text("program.memory-limit", " of {limit}", limit=shown(device_bytes)) if device_bytes else "",
        place=(
            Text("program.per-process", "per process") if family == "cpu" else Text("program.per-device", "per device")
        ),
        host=(
            Text("program.memory-host", " and {host} of host memory per rank", host=shown(need.host))
            if need.host
            else ""
        ),
        parts=[f"{name} {shown(getattr(need, name))}" for name in names if getattr(need, name)],
    )


def shown(count: int) -> str:
    return f"{count / GB:.1f} GB" if count >= GB else f"{max(1, round(count / MB))} MB"


def fixes(need: Need, *, micro_batch: int, has_checkpointing: bool, how: str) -> list[str]:
    """Return what a person can change when it does not fit, the largest part first."""
    found: list[Text | str] = []
    if need.activations > max(need.weights, need.optimizer):
        if micro_batch > 1:
            found.append(f"--micro_batch_size={max(1, micro_batch // 2)}")
        if not has_checkpointing:
            found.append("--gradient_checkpointing=true")
        found.append(Text("program.shorter-samples", "shorter samples"))
    if how in ("none", "ddp"):
        found.append(Text("program.shard", "--strategy=fsdp2 on more devices"))
    elif not need.host:
        found.append(Text("program.offload", "--cpu_offload=true (slow)"))
    found.append(Text("program.more-devices", "more devices, or LoRA instead of full training"))
    return [str(each) for each in found]
