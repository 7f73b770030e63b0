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
MOMENTS = ("exp_avg", "exp_avg_sq")


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
        pieces = list(self.pieces())
        step = max((int(state["step"]) for state in self.optimizer.optimizer.state.values()), default=0)
        scaler, own = self.scaler.state_dict(), vars(self.optimizer.loss_scaler)
        plain = {
            "counts": {key.split("/", 1)[1]: step for key, _, _ in pieces if key.startswith("exp_avg/")},
            "scaler": {**scaler, "scale": own["cur_scale"]} if scaler else {},
            "loss_scaler": {name: value for name, value in own.items() if isinstance(value, (int, float, bool))},
        }
        common = {key: piece for key, piece, is_own in pieces if not is_own}
        return State(common, {key: piece for key, piece, is_own in pieces if is_own}, plain)

    def pieces(self) -> Iterator[tuple[str, Piece, bool]]:
        """Yield buffers, and this rank's part of each trained weight and of its moments, in DeepSpeed's own memory; and
        whether only this rank has it. Its padding behind the last element of a weight is not part of it."""
        zero, here = self.optimizer, self.here
        for name, tensor in self.trained_state().items():
            if not isinstance(tensor, nn.Parameter):
                yield f"model/{name}", self.piece(tensor), False
                continue
            group, start, _ = zero.grad_position[zero.get_param_id(tensor)]
            flat = zero.fp32_partitioned_groups_flat[group]
            first, last = chunk_of(size_of(tensor), here.rank, here.world_size)
            held = {"model": flat, **zero.optimizer.state.get(flat, {})}
            for kind in ("model", *MOMENTS):
                if kind in held:
                    data = held[kind].detach()[start : start + last - first]
                    yield f"{kind}/{name}", Piece(data, first, tuple(tensor.ds_shape)), True  # type: ignore[attr-defined]

    def load_state(self, read: Read, plain: Mapping[str, Any]) -> None:
        zero, step = self.optimizer, max(plain["counts"].values(), default=0)
        for flat in zero.fp32_partitioned_groups_flat if step else ():  # the first step would make it
            moments = {key: torch.zeros_like(flat) for key in MOMENTS}
            zero.optimizer.state[flat] = {"step": torch.tensor(float(step)), **moments}
        for key, piece, _ in self.pieces():
            found = read(key, piece.offset, piece.data.numel())
            if found is not None:
                piece.data.copy_(found)
            elif key.startswith("model/"):
                raise KeyError(key)
        scaler = plain["scaler"] and {"cur_scale": plain["scaler"]["scale"]}
        vars(zero.loss_scaler).update(plain.get("loss_scaler", scaler))
        everyone: Any = [zero.state_dict()] * self.here.world_size  # it uses only this rank's entry
        zero.load_state_dict(everyone, load_optimizer_states=False)  # weights become those of their float32 copies
        zero.checkpoint_event_epilogue()  # and so do what each rank has of small ones, and of those of hpZ

    def gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter):
            return tensor.clone()
        with self.deepspeed.zero.GatheredParameters([tensor]):
            return tensor.detach().clone().float()

    def fill(self, target: torch.Tensor, values: torch.Tensor) -> None:
        with self.deepspeed.zero.GatheredParameters([target], modifier_rank=0):
            if self.here.is_first or not isinstance(target, nn.Parameter):
                target.copy_(values)
