"""A model sharded over all ranks by DeepSpeed's ZeRO stage 3, with its own configuration and nothing compiled."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from ascendrun.planner.cost import ZERO_BUCKET_ELEMENTS
from ascendrun.planner.rules import muon_zero3
from ascendrun.programs.devices.accelerator import Precision
from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trainer.checkpoint import Piece, Read
from ascendrun.programs.trainer.optim import MakeOptimizer
from ascendrun.programs.trainer.optimizer import chunk_of
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.programs.trainer.schedule import value_at
from ascendrun.programs.trainer.strategies.engine import Sharded, State, size_of, skeleton_of

PERSISTED_ELEMENTS = 100_000
"""Smaller weights stay replicated on every rank: gathering them costs more than storing them."""
QUIET_OPS = ("deepspeed_shm_comm",)


def prepare(here: Runtime) -> Any:
    """Return the deepspeed module, with compilation disabled; DS_ACCELERATOR names its device.

    Its shared-memory operator for CPUs serves inference only, and costs 30 s of compiling at the first start.
    """
    os.environ.setdefault("LOCAL_RANK", str(here.local_rank))
    import deepspeed
    from deepspeed.ops import __compatible_ops__ as compatible

    if here.family == "cpu":
        for name in QUIET_OPS:
            compatible[name] = False
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_backend=here.accelerator.backend, dist_init_required=False, verbose=False)
    return deepspeed


def configuration(precision: Precision, *, trained: int, offload: bool, shard_size: int = 0) -> dict[str, Any]:
    """Return DeepSpeed's configuration: micro-batches of 1 without accumulation, because the loop makes the batches.
    `trained`: number of weights; a larger bucket wastes memory. `offload`: weights and optimizer to host memory.
    `shard_size`: ranks that hold a whole model together for the backward pass (hpZ); 0: all."""
    zero: dict[str, Any] = {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": max(1, min(ZERO_BUCKET_ELEMENTS, trained)),
        "stage3_prefetch_bucket_size": ZERO_BUCKET_ELEMENTS,
        "stage3_param_persistence_threshold": PERSISTED_ELEMENTS,
        "stage3_max_live_parameters": 10 * ZERO_BUCKET_ELEMENTS,
        "stage3_max_reuse_distance": 10 * ZERO_BUCKET_ELEMENTS,
    }
    if shard_size:
        zero["zero_hpz_partition_size"] = shard_size
    if offload:
        zero.update(offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"})
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": zero,
        "bf16": {"enabled": precision.compute == torch.bfloat16},
        "fp16": {"enabled": precision.scales, "initial_scale_power": round(math.log2(precision.loss_scale))},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
    }


HELD = {"model": None, "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
"""What a checkpoint has of a weight, and DeepSpeed's key for it; None: the weight."""


class ZeroEngine(Sharded):
    """`module` may be sharded already, by `transformers` under its HfDeepSpeedConfig. Frozen weights stay in the
    compute precision; trained weights keep a float32 copy."""

    strategy = "zero3"

    def __init__(
        self,
        module: nn.Module,
        here: Runtime,
        *,
        make_optimizer: MakeOptimizer,
        precision: Precision,
        offload: bool = False,
        shard_size: int = 0,
    ) -> None:
        self.deepspeed = prepare(here)
        trained = sum(size_of(weight) for weight in module.parameters() if weight.requires_grad)
        self.config = configuration(precision, trained=trained, offload=offload, shard_size=shard_size)
        self.skeleton = skeleton_of(module)
        super().__init__(module, here, make_optimizer=make_optimizer, precision=precision)

    def open_optimizer(self) -> Any:
        if self.plan.has_muon:
            raise InvalidDataError.of([muon_zero3().text])
        groups = [{"params": list(group.params), "betas": group.betas, "eps": group.eps} for group in self.plan.groups]
        own = torch.optim.AdamW(groups, lr=0.0)
        buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        self.engine, _, _, _ = self.deepspeed.initialize(
            model=self.module, optimizer=own, config=self.config, dist_init_required=False
        )
        for name, buffer in self.module.named_buffers():  # it casts them: half precision makes positions unusable
            buffer.data = buffers[name].to(buffer.device)
        self.model = self.engine
        return self.engine.optimizer

    def begin(self, step: int) -> None:
        for group, told in zip(self.plan.groups, self.optimizer.param_groups):
            told["lr"], told["weight_decay"] = value_at(group.lr, step), value_at(group.weight_decay, step)

    @property
    def shards(self) -> tuple[int, int]:
        return self.here.world_size, self.here.rank

    def autocast(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def accumulate(self, *, last: bool) -> Any:
        self.engine.set_gradient_accumulation_boundary(last)
        yield

    def backward(self, loss: torch.Tensor) -> None:
        self.gradients_ready = None
        self.engine.backward(loss)

    def finish(self, clip: float) -> torch.Tensor:
        self.optimizer.clip_grad = clip
        self.engine.step()
        norm = self.engine.get_global_grad_norm()
        return torch.as_tensor(float("nan") if norm is None else norm, dtype=torch.float32)

    def drop_gradients(self) -> None:
        self.engine.zero_grad()

    def state(self) -> State:
        common = {
            f"model/{name}": self.piece(weight) for name, weight in self.trained_state().items() if is_whole(weight)
        }
        own = {f"{kind}/{name}": piece for kind, name, piece in self.parts()}
        step = max((int(state["step"]) for state in self.optimizer.optimizer.state.values()), default=0)
        scaler = vars(self.optimizer.loss_scaler).items()
        scale = {name: value for name, value in scaler if isinstance(value, (int, float, bool))}
        counts = {name: step for _, name, _ in self.parts()}
        return State(common, own, {"counts": counts, "scaler": {}, "loss_scaler": scale})

    def parts(self) -> Iterator[tuple[str, str, Piece]]:
        """Yield this rank's part of each trained weight and of its moments, without the padding at the end."""
        for name, weight in self.trained_state().items():
            if not is_whole(weight):
                first, last = chunk_of(size_of(weight), self.here.rank, self.here.world_size)
                for kind, key in HELD.items():
                    held = self.optimizer.get_local_fp32_param(weight, key)
                    yield kind, name, Piece(held[: last - first], first, tuple(weight.ds_shape))  # type: ignore[attr-defined]

    def load_state(self, read: Read, plain: Mapping[str, Any]) -> None:
        targets = self.trained_state()
        with torch.no_grad():
            for kind, name, piece in self.parts():
                found = read(f"{kind}/{name}", piece.offset, piece.data.numel())
                if found is None and kind == "model":
                    raise KeyError(name)
                values = torch.zeros_like(self.optimizer.get_local_fp32_param(targets[name], HELD[kind]))
                if found is not None:
                    values[: found.numel()] = found
                self.optimizer.set_local_hp_param(values, targets[name], HELD[kind])
            for name, weight in targets.items():
                if is_whole(weight):
                    self.load_piece(name, self.piece(weight), read)
        for state in self.optimizer.optimizer.state.values():
            state["step"] = torch.tensor(float(max(plain["counts"].values(), default=0)))
        vars(self.optimizer.loss_scaler).update(plain.get("loss_scaler", {}))
        everyone: Any = [self.optimizer.state_dict()] * self.here.world_size  # it uses only this rank's entry
        self.optimizer.load_state_dict(everyone, load_optimizer_states=True)  # the weights follow their float32 copies
        kept = getattr(self.optimizer, "persistent_parameters", [])
        if kept:
            kept[0].all_gather(kept)

    def gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        if is_whole(tensor):
            return tensor.detach().clone()
        with self.deepspeed.zero.GatheredParameters([tensor]):
            return tensor.detach().clone().float()

    def fill(self, target: torch.Tensor, values: torch.Tensor) -> None:
        with self.deepspeed.zero.GatheredParameters([target], modifier_rank=0):
            if self.here.is_first or is_whole(target):
                target.copy_(values)


def is_whole(tensor: torch.Tensor) -> bool:
    """Return whether all ranks have all of it, as of a buffer."""
    return not hasattr(tensor, "ds_id")
