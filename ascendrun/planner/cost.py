"""Memory and time of a step for each strategy, from sizes alone; and the cheapest strategy that fits.

Times are ranges. Computing takes FLOPs / (peak x efficiency), exchanges bytes / bandwidth; a step takes at least the
longer of both and at most their sum. An efficiency comes from earlier runs of the same program on the same device, else
from ASSUMED. Bandwidths are those of LINKS unless measured. `with_history` takes the speed from runs that were recorded
on the same hosts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Optional

from ascendrun.planner.models import Workload
from ascendrun.text import Text, listed

GB = 2**30
ASSUMED: Mapping[str, tuple[float, float]] = {"npu": (0.15, 0.5), "cuda": (0.2, 0.55)}
"""Fraction of the peak that trainings reach, where no run of this program was recorded on the device."""
LINKS: Mapping[str, tuple[float, float]] = {"npu": (28e9, 12e9), "cuda": (200e9, 12e9), "cpu": (4e9, 1e9)}
"""Bytes a second that one rank exchanges inside a host and between hosts: assumed, and not verified by a document or a
measurement. They stand for HCCS of an Atlas 800T A2, NVLink 4, memory; RoCE of 200 Gbit/s at half its rate, Ethernet of
10 Gbit/s. The plan prints them as not verified."""
LATENCY_S = 60e-6
"""Seconds that each exchange takes beside its bytes: assumed. Sharded strategies have one for each layer and pass."""
BUCKET_BYTES = 25 << 20
"""Gradients that ddp sums over ranks in one exchange: large enough for the network, small enough to overlap."""
SHARDED = ("fsdp2", "hsdp", "zero3")
ZERO_BUCKET_ELEMENTS = 50_000_000
"""Gradients that DeepSpeed collects in one exchange; it has two such buffers."""
CONTEXT: Mapping[str, int] = {"cpu": 0, "cuda": int(0.6 * GB), "npu": int(1.5 * GB)}
"""Runtime and kernels, and the buffers of two communicators: HCCL allocates twice HCCL_BUFFSIZE, 200 MB, for each."""
WORKSPACE: Mapping[str, int] = {"cpu": 0, "cuda": 64 * 2**20, "npu": 2048 * 2048}
"""Memory of every model beside its tensors. CUDA: of matrix products, cuBLAS and cuBLASLt 32 MiB each, measured on an
H200 with torch 2.11. NPU: the mask of attention, 2048 x 2048 bytes; what its operators allocate is unknown."""
FRAGMENTED: Mapping[str, float] = {"cpu": 0.0, "cuda": 0.06, "npu": 0.06}
"""Fraction that the caching allocator holds beyond the memory of the tensors."""
RECOMPUTED = 4 / 3
"""Arithmetic of a step with recomputed activations, compared with one without."""
OFFLOADED = 2.5
"""Time of a step whose weights and optimizer are in host memory, compared with one without."""
DEEPSPEED = 1.15
"""Time of a step of DeepSpeed's zero3 compared with that of fsdp2, which gathers the same weights."""
FORMULA = 0.25
"""Possible error of the memory by formula, as a fraction of the activations."""
PARTS: Mapping[str, Text] = {
    "weights": listed("program.part-weights"),
    "gradients": listed("program.part-gradients"),
    "optimizer": listed("program.part-optimizer"),
    "activations": listed("program.part-activations"),
    "buffers": listed("program.part-buffers"),
    "overhead": listed("program.part-overhead"),
}
"""What the memory of a device is used for."""


@dataclass(frozen=True)
class Range:
    """A number between `low` and `high`. `source`: measured, recorded, or assumed."""

    low: float
    high: float

    def times(self, factor: float) -> Range:
        return Range(self.low * factor, self.high * factor)

    def over(self, number: float) -> Range:
        """Return `number` divided by this range."""
        return Range(number / self.high, number / self.low)


@dataclass(frozen=True)
class Devices:
    """`peak_flops` None: unknown. `recorded`: FLOPs per second and rank that runs of this program reached, None: no
    run. `in_host`, `between`: bytes per second and rank; None: of LINKS. `host_bytes`: memory of a host for each of its
    ranks, None: unknown."""

    family: str
    ranks: int
    ranks_per_host: int
    peak_flops: float | None = None
    memory_bytes: int | None = None
    compute_bytes: int = 2
    recorded: Range | None = None
    in_host: float | None = None
    between: float | None = None
    host_bytes: int | None = None

    @property
    def are_links_measured(self) -> bool:
        return bool(self.in_host) and (bool(self.between) or self.ranks <= self.ranks_per_host)

    @property
    def links(self) -> tuple[float, float]:
        in_host, between = LINKS[self.family]
        return self.in_host or in_host, self.between or between

    @property
    def speed(self) -> Range | None:
        """FLOPs per second of a rank."""
        if self.recorded is not None:
            return self.recorded
        if self.peak_flops is None or self.family not in ASSUMED:
            return None
        low, high = ASSUMED[self.family]
        return Range(self.peak_flops * low, self.peak_flops * high)


@dataclass(frozen=True)
class Layout:
    """How a model is distributed."""

    strategy: str
    recomputes: bool = False
    offloads: bool = False

    def text(self) -> Text:
        return listed(
            "plan.layout",
            strategy=self.strategy,
            recompute=listed("plan.recompute") if self.recomputes else "",
            offload=listed("plan.offloaded") if self.offloads else "",
        )


def overhead_of(tensors: int, family: str) -> int:
    """Return the bytes that the allocator and the runtime hold on a device beside this many of tensors."""
    allocated = tensors + WORKSPACE[family]
    return int(allocated * FRAGMENTED[family]) + WORKSPACE[family] + CONTEXT[family]


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank. `parts`: all that is on the device, by name of PARTS; `host`: in the memory of its host."""

    parts: Mapping[str, int]
    host: int = 0

    @classmethod
    def of(cls, tensors: Mapping[str, int], family: str, *, host: int = 0) -> Memory:
        """Add what the allocator and the runtime take beside the tensors."""
        return cls({**tensors, "overhead": overhead_of(sum(tensors.values()), family)}, host)

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def allocated(self, family: str) -> int:
        """Return the peak that the allocator of the device reports."""
        return self.total - self.parts["overhead"] + WORKSPACE[family]

    @property
    def range(self) -> Range:
        off = int(FORMULA * self.parts.get("activations", 0))
        return Range(self.total - off, self.total + off)


@dataclass(frozen=True)
class Option:
    """One layout with its memory and the seconds of a step, None: unknown. `fits` None: unknown."""

    layout: Layout
    memory: Memory
    step_s: Range | None
    fits: bool | None


@dataclass(frozen=True)
class Choice:
    """`options`: all that were compared, fastest first; `chosen` None: none fits, or it is unknown."""

    options: tuple[Option, ...]
    chosen: Option | None
    reason: Text | None = None


def layouts(strategies: Sequence[str], *, recompute: bool | None, offload: bool) -> list[Layout]:
    found = [
        Layout(strategy, each, offload)
        for strategy in strategies
        for each in ((False, True) if recompute is None else (recompute,))
        if not offload or strategy in SHARDED
    ]
    if len(strategies) > 1 and "zero3" in strategies and not offload:
        found += [Layout("zero3", each, True) for each in ((True,) if recompute is None else (recompute,))]
    return found


def strategies_for(devices: Devices, *, scales: bool, has_deepspeed: bool = True) -> tuple[str, ...]:
    """Return the strategies that these devices can run: sharding requires peers, fsdp2 has no loss scaling. hsdp is the
    same as fsdp2 on one host."""
    found = ["ddp"]
    if devices.ranks > 1 and not scales:
        found += ["hsdp", "fsdp2"] if 1 < devices.ranks_per_host < devices.ranks else ["fsdp2"]
    if devices.ranks > 1 and has_deepspeed:
        found.append("zero3")
    return tuple(found)


def compare(work: Workload, devices: Devices, found: Sequence[Layout], *, shard_size: int = 0) -> Choice:
    """Return all layouts with memory and time; the fastest that fits is chosen."""
    options = []
    for layout in found:
        memory = memory_of(work, devices, layout, shard_size=shard_size)
        exchange_s = exchange_time(work, devices, layout, shard_size=shard_size)
        options.append(Option(layout, memory, step_time(work, devices, layout, exchange_s), fits(memory, devices)))
    return choose(options)


def fits(memory: Memory, devices: Devices) -> bool | None:
    """Return whether a rank fits into its device and its part of the host; None: unknown."""
    if devices.host_bytes is not None and of_host(memory, devices) > devices.host_bytes:
        return False
    return None if devices.memory_bytes is None else memory.range.low <= devices.memory_bytes


def of_host(memory: Memory, devices: Devices) -> int:
    """Return the least bytes of host memory of a rank: on a CPU everything is there."""
    return memory.host + (int(memory.range.low) if devices.family == "cpu" else 0)


def choose(options: Sequence[Option]) -> Choice:
    """Choose the fastest option that fits; without times, the first in the given order."""
    order = sorted(
        range(len(options)),
        key=lambda at: (options[at].step_s.high if (options[at].step_s) else 0.0, at),  # type: ignore[union-attr]
    )
    usable = [options[at] for at in order if options[at].fits is not False]
    return Choice(tuple(options[at] for at in order), usable[0] if usable else None)


def step_time(work: Workload, devices: Devices, layout: Layout, exchange_s: float) -> Range | None:
    speed = devices.speed
    if speed is None:
        return None
    flops = work.tokens_per_step / devices.ranks * work.flops_per_token * (RECOMPUTED if layout.recomputes else 1.0)
    seconds = speed.over(flops)
    if devices.recorded is not None and layout.strategy in ("ddp", "none"):
        return seconds  # the exchange was part of the recorded time
    factor = (DEEPSPEED if layout.strategy == "zero3" else 1.0) * (OFFLOADED if layout.offloads else 1.0)
    return Range(max(seconds.low, exchange_s), seconds.high + exchange_s).times(factor)


def exchange_time(work: Workload, devices: Devices, layout: Layout, *, shard_size: int = 0) -> float:
    """Return the seconds that the bytes take which a rank receives in a step, without overlap."""
    ranks, in_host, between = devices.ranks, *devices.links
    if ranks == 1:
        return 0.0
    spans = ranks > devices.ranks_per_host
    slow = between if spans else in_host
    trained = 4.0 * work.trained
    if layout.strategy in ("ddp", "none"):
        size = 2 * (ranks - 1) / ranks * trained
        return size / slow + LATENCY_S * (1 + trained // BUCKET_BYTES)
    weights = work.weights * devices.compute_bytes
    gathers = work.micro_batches * 2
    latency = LATENCY_S * (gathers + work.micro_batches) * (work.model.layers + 1)
    group = shard_size or (devices.ranks_per_host if layout.strategy == "hsdp" else ranks)
    if layout.strategy == "hsdp":
        gathered = gathers * (group - 1) / group * weights
        scattered = work.micro_batches * (group - 1) / group * trained
        hosts = max(1, ranks // group)
        reduced = 2 * (hosts - 1) / hosts * trained / group
        within = in_host if group <= devices.ranks_per_host else slow
        return (gathered + scattered) / within + reduced / slow + latency
    share = (ranks - 1) / ranks
    size = gathers * share * weights + work.micro_batches * share * trained
    if layout.strategy == "zero3" and shard_size:
        inside = work.micro_batches * (shard_size - 1) / shard_size * weights
        rest = size - work.micro_batches * share * weights
        return inside / in_host + rest / slow + latency
    return size / slow + latency


def memory_of(work: Workload, devices: Devices, layout: Layout, *, shard_size: int = 0) -> Memory:
    """Return the bytes of one rank by formula."""
    each, model = devices.compute_bytes, work.model
    is_sharded = layout.strategy in SHARDED
    group = devices.ranks
    if layout.strategy == "hsdp":
        group = shard_size or devices.ranks_per_host
    frozen = (model.weights if work.is_frozen else 0) * each
    trained = 4 * work.trained
    activations = max(activation_peaks(work, devices, recomputes=layout.recomputes))
    if not is_sharded:
        # Gradients grow while activations shrink, unless an earlier pass or the NPU's fused optimizer keeps them.
        # With recomputation the first layer has its peak last, beside the gradients of all others.
        is_kept = work.micro_batches > 1 or devices.family == "npu"
        gradients = trained if is_kept else max(0, trained - activations)
        if layout.recomputes and not is_kept:
            stream = work.micro_rows * work.micro_length * model.hidden * (each if work.is_frozen else 4)
            of_layer = 4 * (work.trained // model.layers if work.is_frozen else model.layer_weights)
            gradients = max(gradients, (model.layers - 1) * (of_layer - stream))
        parts = {
            "weights": frozen + trained,
            "gradients": gradients,
            "optimizer": 4 * work.moments(devices.ranks),
            "activations": activations,
        }
        return Memory.of(parts, devices.family)
    weights = -(-(frozen + trained) // group)
    moments = -(-4 * work.moments() // group)
    gradients = -(-trained // group)
    layer, outside = model.layer_weights * each, model.outside * each
    buffers = outside + 2 * layer + 2 * min(trained // 2, 10**9)
    if not work.is_frozen:
        if layout.strategy == "zero3":  # with copies of weights and gradients in the compute precision
            gradients += -(-each * work.trained // group)
            copies = -(-each * work.trained // group)
            buffers = copies + outside + 2 * layer + 2 * each * min(ZERO_BUCKET_ELEMENTS, work.trained)
        else:
            # All weights outside layers are gathered, in the layers two of them; whole gradients in float32 of the head
            # and of a layer. Passes before the last keep the whole gradients of all. At the end there are those of the
            # weights outside layers and the shards of all.
            in_loss, in_layer = activation_peaks(work, devices, recomputes=layout.recomputes, is_sharded=True)
            of_layer = 2 * layer + 4 * (model.of_loss + model.layer_weights)
            activations, buffers = max((in_loss, outside), (in_layer, outside + of_layer), key=sum)
            end = gradients + outside + 4 * model.outside
            gradients = trained if work.micro_batches > 1 else max(0, end - activations - buffers)
        # An evaluation has a copy of all weights.
        buffers = max(buffers, trained - activations)
    if layout.offloads:
        parts = {"activations": activations, "buffers": buffers}
        return Memory.of(parts, devices.family, host=weights + moments + gradients)
    parts = {
        "weights": weights,
        "gradients": gradients,
        "optimizer": moments,
        "activations": activations,
        "buffers": buffers,
    }
    return Memory.of(parts, devices.family)


def activation_peaks(
    work: Workload, devices: Devices, *, recomputes: bool, is_sharded: bool = False
) -> tuple[int, int]:
    """Return the bytes of activations in the loss, and in the last layer where the backward pass begins.

    A layer keeps, in float32, the inputs of its norms, and if they are trained what they normalise; queries, keys,
    values and answers of the attention; gate, its activation, up and their product; and the inputs of its matrices.
    Those with the same input share it in float32; autocast and the dropout of adapters make a copy for each. Autocast
    keeps a copy of the trained matrices; with recomputation until the loss, then of one layer; sharded, none.

    The loss has probabilities and two gradients in float32. The feed-forward part of the last layer has the gradients
    of two of its inner states and of the stream. Those of an adapter on a cast input are in
    both precisions, and with dropout once more in float32.
    """
    model, each = work.model, devices.compute_bytes
    tokens = work.micro_rows * work.micro_length
    query, key = model.heads * model.head, model.kv_heads * model.head
    is_cast, is_dropped = each < 4, work.is_frozen and work.has_dropout
    layer = (1 if work.is_frozen else 2) * 8 * model.hidden
    layer += each * (2 * query + 2 * key + 4 * model.inner)
    layer += each * (5 if is_cast or is_dropped else 2) * model.hidden
    if work.is_frozen and (is_cast or is_dropped):
        layer += each * query
    if is_dropped:
        layer += (4 if devices.family == "cpu" else 1) * (5 * model.hidden + query + model.inner)
    learned = work.micro_rows * (work.micro_learned if work.is_frozen else 0) or work.micro_learned
    loss = 12 * learned * model.vocabulary
    backward = tokens * (2 * each * model.inner + 4 * model.hidden)
    if work.is_frozen and is_cast:
        backward = tokens * ((14 if is_dropped else 10) * model.inner + 6 * model.hidden)
    indexed = 0 if work.is_frozen else model.embedding
    copies = each * (work.trained - indexed) if is_cast and not is_sharded else 0
    if recomputes:
        stream = each if work.is_frozen else 4
        kept = tokens * model.layers * model.hidden * stream
        return kept + max(loss, loss * 2 // 3 + copies), kept + tokens * layer + backward + copies // model.layers
    kept = tokens * model.layers * layer + copies
    return kept + loss, kept + backward


SPREAD = 1.4
"""Factor between a run and its repetition: other load, clocks, first steps. Eight of ten repetitions are within it if
the speeds of runs differ by a standard deviation of 18 %; a range above twice its lower end says too little."""
EXTRAPOLATED = 0.35
"""Exponent of the ratio of sizes by which a range becomes wider where the recorded run had another size."""
USED = 5


@dataclass(frozen=True)
class RecordedRun:
    """One run of the same program on the same hosts and kind of device. Rates are of all ranks together. `args`: those
    of its job."""

    job: str
    ranks: int
    trained: float
    tokens_per_s: float
    tokens_per_step: float
    flops_per_token: float
    args: Mapping[str, Any] = field(default_factory=dict)


Estimate = Callable[[RecordedRun], Optional[Workload]]
"""The workload that a plan estimates for a recorded run. None: unknown."""


def with_history(
    work: Workload, devices: Devices, runs: Sequence[RecordedRun], estimate: Estimate = lambda run: None
) -> tuple[Workload, Devices]:
    """Return the same with the speed of the most similar runs, and with their tokens per step where the model and the
    batch are the same size.

    `estimate`: sizes that the plan assumes, as of a vocabulary that is not known yet, are compared with those that it
    assumes for the recorded run: an error of both sides does not make the same training another one.
    """
    if not runs or not work.trained:
        return work, devices
    estimates = {run.job: estimate(run) for run in runs}

    def trained(run: RecordedRun) -> float:
        estimated = estimates[run.job]
        return run.trained if estimated is None else estimated.trained

    def distance(run: RecordedRun) -> float:
        return _ratio(trained(run), work.trained) * _ratio(run.ranks, devices.ranks)

    nearest = min(map(distance, runs))
    similar = [run for run in runs if distance(run) <= nearest * 1.1][-USED:]
    last = similar[-1]
    known, is_same = estimates[last.job], _ratio(trained(last), work.trained) < 1.25
    tokens = last.tokens_per_step * (work.tokens_per_step / known.tokens_per_step if known else 1.0)
    speeds = [run.tokens_per_s / run.ranks * per_token(run, estimates[run.job], work, is_same) for run in similar]
    if is_same and tokens and _ratio(tokens, work.tokens_per_step) < 2.5:
        work = replace(work, tokens_per_step=tokens)
    middle = (min(speeds) * max(speeds)) ** 0.5
    wider = SPREAD * nearest**EXTRAPOLATED
    low, high = min(min(speeds) / 1.1, middle / wider), max(max(speeds) * 1.1, middle * wider)
    return work, replace(devices, recorded=Range(low, high))


def per_token(run: RecordedRun, estimated: Workload | None, work: Workload, is_same: bool) -> float:
    """Return the FLOPs of a token of a recorded run, counted as those of `work` are."""
    if estimated is not None:
        return estimated.flops_per_token
    return work.flops_per_token if is_same else run.flops_per_token


def _ratio(one: float, other: float) -> float:
    return max(one, other) / max(1e-9, min(one, other))
