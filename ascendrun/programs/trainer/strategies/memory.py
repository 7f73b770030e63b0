"""The memory that a training needs on one device, estimated before a device is in use."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch

from ascendrun.planner import cost
from ascendrun.planner.chips import chip_of
from ascendrun.planner.cost import GB, PARTS
from ascendrun.programs.devices.accelerator import Accelerator, Precision, choose_precision
from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trainer.strategies.engine import STRATEGIES
from ascendrun.programs.trainer.strategies.simulate import Simulated
from ascendrun.programs.trainer.strategies.zero3 import BUCKET_ELEMENTS
from ascendrun.text import Text

NPU_NAMES = ("310", "910", "950")


@dataclass(frozen=True)
class Target:
    """The devices of a training. `memory_bytes`, `peak_flops`: of one device, None: unknown."""

    family: str
    precision: Precision
    world_size: int
    memory_bytes: int | None = None
    peak_flops: float | None = None


def target_of(here: Accelerator, dtype: str, world_size: int, *, chip: str = "") -> Target:
    """Return the devices of this machine, or of a chip model that need not be present. On a CPU the ranks of a node
    share its memory. Raises InvalidDataError for an unknown chip or an unsupported dtype."""
    if not chip:
        total = here.memory_total_bytes()
        if total is not None and here.family == "cpu":
            total //= max(1, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
        peak = here.chip.peak_tflops if here.chip is not None else None
        return Target(here.family, choose_precision(dtype, here), world_size, total, peak and peak * 1e12)
    model = chip_of(chip)
    if model is None:
        raise InvalidDataError(
            "program.unknown-chip", "--chip={chip}: unknown chip; examples: 910B3, 910A, H100", chip=chip
        )
    family = "npu" if model.name.startswith(NPU_NAMES) else "cuda"
    module = SimpleNamespace(is_bf16_supported=lambda: model.has_bf16)
    precision = choose_precision(dtype, Accelerator(family, here.device, chip, module))
    memory_bytes = None if model.memory_gb is None else int(model.memory_gb * GB)
    return Target(family, precision, world_size, memory_bytes, model.peak_tflops and model.peak_tflops * 1e12)


@dataclass(frozen=True)
class Need:
    """Bytes on the device of one rank. `buffers`: for communication. `host`: offloaded, in the node's memory."""

    strategy: str
    world_size: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    host: int = 0

    @property
    def tensors(self) -> int:
        """The program's own tensors at the peak."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers

    def allocated(self, family: str) -> int:
        """Return the peak that the allocator reports."""
        return self.tensors + cost.WORKSPACE[family]

    def on_device(self, family: str) -> int:
        """Return the bytes including the overhead of the allocator and the runtime."""
        return self.tensors + cost.overhead_of(self.tensors, family)

    def fits(self, target: Target) -> bool:
        """Return whether it fits; true if the memory of the device is unknown."""
        return target.memory_bytes is None or self.on_device(target.family) <= target.memory_bytes


def needs(
    simulated: Simulated, target: Target, *, strategy: str, pieces: int = 1, offload: bool = False, shard_size: int = 0
) -> Need:
    """Estimate the bytes of one rank. `simulated`: one piece; in compute precision for sharded models. `pieces`:
    passes per step. `offload`: weights and optimizer to host memory. `shard_size`, of hsdp: ranks that hold a model."""
    assert strategy in STRATEGIES, strategy
    if strategy in ("fsdp2", "hsdp"):
        shards = shard_size or target.world_size
        need = fully_sharded(simulated, replace(target, world_size=shards), pieces, offload=offload)
        return replace(need, strategy=strategy, world_size=target.world_size)
    if strategy == "zero3":
        return zero3(simulated, target, offload=offload)
    weights, trained = simulated.weights, simulated.trained_bytes
    # Gradients are freed after each step, except for those in the flat buffer of the NPU's fused optimizer.
    is_freed = pieces == 1 and target.family != "npu"
    gradients = non_activation_bytes(simulated) if is_freed else trained
    return Need(strategy, target.world_size, weights, gradients, 2 * trained, simulated.activations, 0)


def non_activation_bytes(simulated: Simulated) -> int:
    """Return gradient bytes in addition to peak activations. Gradients grow while activations shrink, so their joint
    peak is less than the sum of both peaks, unless an earlier piece of the step left its gradients."""
    rest = simulated.weights + 2 * simulated.trained_bytes + simulated.activations
    return max(0, simulated.whole_step - rest)


def fully_sharded(simulated: Simulated, target: Target, pieces: int, *, offload: bool) -> Need:
    """Estimate fsdp2. A rank holds its shard, and the weights outside layers, gathered from the first pass on. The peak
    is in the loss, with all layers sharded, or in a layer: that layer and the next gathered, and unsharded gradients.
    Gradients are summed and sharded layer by layer; those of weights outside layers, at the end of the pass."""
    precision, world_size = target.precision, target.world_size
    trained = simulated.trained * width(precision.weights)
    weights = (simulated.parameters - simulated.trained) * width(precision.compute) + trained
    sharded = -(-weights // world_size), -(-trained // world_size)
    fraction = simulated.trained / max(1, simulated.parameters)
    outside, layer = simulated.outside_layers, simulated.largest_layer
    unsharded = int((outside + layer) * fraction * width(torch.float32) / width(precision.compute))
    moments = (simulated.activations, outside), (simulated.activations_in_layers, outside + 2 * layer + unsharded)
    activations, buffers = max(moments, key=sum)
    kept = trained if pieces > 1 else -(-non_activation_bytes(simulated) // world_size)
    on_device = (0, 0, 0) if offload else (sharded[0], kept, 2 * sharded[1])
    host = sharded[0] + 3 * sharded[1] if offload else 0
    return Need("fsdp2", world_size, *on_device, activations, buffers, host)


def zero3(simulated: Simulated, target: Target, *, offload: bool) -> Need:
    """Estimate ZeRO-3. DeepSpeed keeps float32 copies of trained weights and moments, and buckets of a fixed size."""
    each, world_size = width(target.precision.compute), target.world_size
    weights, trained = -(-simulated.weights // world_size), -(-simulated.trained // world_size)
    optimizer, gradients = trained * 12, trained * (each + 4)
    buffers = 2 * min(BUCKET_ELEMENTS, simulated.trained) * each + 2 * simulated.largest_layer
    on_device = (0, gradients, 0) if offload else (weights, gradients, optimizer)
    host = optimizer + trained * 4 + weights if offload else 0
    return Need("zero3", world_size, *on_device, simulated.activations, buffers, host)


def width(dtype: torch.dtype) -> int:
    return torch.empty((), dtype=dtype).element_size()


def as_sentence(need: Need, target: Target) -> Text:
    """Format: ddp over 8 ranks: 71.0 GiB of 64.0 GiB per device (weights 60.9 GiB, …)."""
    memory = amounts(need, target)
    if need.strategy == "none":
        return Text("program.one-rank-memory", "one rank: {memory}", memory=memory)
    text = "{strategy} over {ranks} ranks: {memory}"
    return Text("program.strategy-ranks", text, strategy=need.strategy, ranks=need.world_size, memory=memory)


def amounts(need: Need, target: Target) -> Text:
    """Format: 71.0 GiB of 64.0 GiB per device (weights 60.9 GiB, …)."""
    limit, host = target.memory_bytes, need.host
    overhead = cost.overhead_of(need.tensors, target.family)
    sizes = {name: size for name in PARTS if (size := getattr(need, name, overhead))}
    return Text(
        "program.memory",
        "{total:bytes}{limit} {place}{host} ({parts})",
        total=need.on_device(target.family),
        limit=Text("program.memory-limit", " of {limit:bytes}", limit=limit) if limit else "",
        place=Text("program.per-process", "per process")
        if target.family == "cpu"
        else Text("program.per-device", "per device"),
        host=Text("program.memory-host", " and {host:bytes} of host memory per rank", host=host) if host else "",
        parts=[
            Text("program.memory-part", "{part} {size:bytes}", part=PARTS[name], size=size)
            for name, size in sizes.items()
        ],
    )


def fixes(need: Need, *, micro_batch: int, has_checkpointing: bool) -> list[Text | str]:
    """Return possible changes if it does not fit, the largest part first."""
    found: list[Text | str] = []
    if need.activations > max(need.weights, need.optimizer):
        if micro_batch > 1:
            found.append(f"--micro_batch_size={max(1, micro_batch // 2)}")
        if not has_checkpointing:
            found.append("--gradient_checkpointing=true")
        found.append(Text("program.shorter-samples", "shorter samples"))
    if need.strategy in ("none", "ddp"):
        found.append(Text("program.shard", "--strategy=fsdp2 on more devices"))
    elif not need.host:
        found.append(Text("program.offload", "--cpu_offload=true (slow)"))
    return [*found, Text("program.more-devices", "more devices")]
