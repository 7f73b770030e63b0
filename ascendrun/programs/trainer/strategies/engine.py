"""A model on one rank or replicated on all: backward pass, optimizer step, state and weights."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ascendrun.programs.trainer.devices.accelerator import Precision, Stamp, make_adamw, make_scaler
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.text import Text

STRATEGIES = ("none", "ddp", "fsdp2", "zero3")


@dataclass(frozen=True)
class Adam:
    """AdamW's settings. Weight decay applies to matrices, not to biases and norms."""

    lr: float = 1e-3
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.98)


class Engine:
    """A model on one rank, or replicated on all (DDP). The sharded engines are subclasses.

    A step is: for each piece `with accumulate(last=…): loss = model(…); backward(loss)`, then `finish(clip)`.
    Gradients of all ranks are averaged.
    """

    strategy = "none"
    is_sharded = False
    """Sharded: each rank holds its own part of the state, and every rank must save it."""

    def __init__(self, module: nn.Module, here: Runtime, *, adam: Adam, precision: Precision) -> None:
        self.here, self.precision = here, precision
        self.module = self.place(module)
        self.model: nn.Module = self.module
        self.gradients_ready: Stamp | None = None
        """Time at which this rank's own gradients of the last pass were ready; None: unknown."""
        self.scaler = make_scaler(here.accelerator, precision)
        self.optimizer = self.make_optimizer(adam)

    def place(self, module: nn.Module) -> nn.Module:
        return cast(module, self.precision).to(device=self.here.device)

    def make_optimizer(self, adam: Adam) -> torch.optim.Optimizer:
        return make_adamw(
            parameter_groups(self.module, adam),
            self.here.accelerator,
            lr=adam.lr,
            betas=adam.betas,
            is_sharded=self.is_sharded,
        )

    # --- a step ---

    def accumulate(self, *, last: bool) -> AbstractContextManager[Any]:
        """Return the context of one piece's forward and backward pass; `last`: its end sums gradients over ranks."""
        return contextlib.nullcontext()

    def autocast(self) -> AbstractContextManager[Any]:
        return self.here.accelerator.autocast(self.precision.compute)

    def backward(self, loss: torch.Tensor) -> None:
        self.gradients_ready = None
        self.scaler.scale(loss).backward()

    def set_lr(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def finish(self, clip: float) -> float:
        """Clip to the norm `clip` (0: no limit), run the optimizer step, drop the gradients. Return the original norm.

        Not finite: the step was skipped. Under float16 that is the scaler's normal search for a scale.
        """
        self.scaler.unscale_(self.optimizer)
        norm = float(whole(self.clip(clip or float("inf"))))
        finite = norm == norm and norm != float("inf")
        if finite or self.precision.scales:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.drop_gradients()
        return norm

    def clip(self, limit: float) -> torch.Tensor:
        trained = [weight for weight in self.module.parameters() if weight.requires_grad]
        return nn.utils.clip_grad_norm_(trained, limit)

    def drop_gradients(self) -> None:
        self.optimizer.zero_grad()

    # --- state ---

    def common_state(self) -> dict[str, Any]:
        """Return the state that is equal on every rank, so that one rank saves it for all; tensors are not copied."""
        return {
            "model": self.trained_state(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def own_state(self) -> dict[str, Any]:
        """Return this rank's part of the state; empty if nothing is sharded."""
        return {}

    def load_state(self, common: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        self.load_weights(common["model"])
        self.optimizer.load_state_dict(common["optimizer"])
        if common["scaler"]:
            self.scaler.load_state_dict(common["scaler"])

    def trained_state(self) -> dict[str, torch.Tensor]:
        """Return weights that training changes, and buffers; a frozen base is not saved with every checkpoint."""
        frozen = {name for name, weight in self.module.named_parameters() if not weight.requires_grad}
        return {name: tensor for name, tensor in self.module.state_dict().items() if name not in frozen}

    def full_weights(self) -> dict[str, torch.Tensor]:
        """Return a full copy of `trained_state` on the CPU of rank 0; {} elsewhere. All ranks call it together."""
        if not self.here.is_first:
            return {}
        return {name: tensor.detach().cpu().clone() for name, tensor in self.trained_state().items()}

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Load unsharded weights, the same on every rank. Raises RuntimeError when names or shapes differ."""
        answer = self.module.load_state_dict(dict(weights), strict=False)
        missing = [name for name in answer.missing_keys if name in self.trained_state()]
        if missing or answer.unexpected_keys:
            raise RuntimeError(
                Text(
                    "program.weights-differ",
                    "weights do not match the model: missing {missing}, unknown {unknown}",
                    missing=missing[:3],
                    unknown=answer.unexpected_keys[:3],
                )
            )


class Replicated(Engine):
    """DDP: every rank holds everything, gradients are summed while the backward pass runs."""

    strategy = "ddp"

    def __init__(self, module: nn.Module, here: Runtime, *, adam: Adam, precision: Precision) -> None:
        super().__init__(module, here, adam=adam, precision=precision)
        ids = [here.device.index] if here.device.index is not None else None
        # Buffers are constant tables (positions), so they are not sent in every pass. Gradients that
        # are views of the buckets need no copy; the NPU's fused optimizer requires its own buffer.
        known = inspect.signature(DistributedDataParallel).parameters
        sending = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        details: dict[str, Any] = {sending: False, "gradient_as_bucket_view": here.family != "npu"}
        self.ddp = DistributedDataParallel(self.module, device_ids=ids, **details)
        # torch reads the annotations of a hook, and rejects annotations that are strings.
        self.ddp.register_comm_hook(None, lambda state, bucket: self._sum_bucket(bucket))
        self.model = self.ddp

    def accumulate(self, *, last: bool) -> AbstractContextManager[Any]:
        return contextlib.nullcontext() if last else self.ddp.no_sync()

    def _sum_bucket(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket as DDP does by default, and record when this rank's last gradients were ready."""
        if bucket.is_last():
            self.gradients_ready = self.here.accelerator.stamp()
        tensor = bucket.buffer().div_(self.here.world_size)
        work = dist.all_reduce(tensor, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])  # type: ignore[no-any-return]


def cast(module: nn.Module, precision: Precision) -> nn.Module:
    """Cast trained weights to the weights' precision, frozen weights to the compute precision. Buffers do not change:
    half precision makes positions unusable."""
    for weight in module.parameters():
        if weight.is_floating_point():
            weight.data = weight.data.to(precision.weights if weight.requires_grad else precision.compute)
    return module


def parameter_groups(module: nn.Module, adam: Adam) -> list[dict[str, Any]]:
    """Return groups of trained weights only: matrices, which decay, then vectors."""
    trained = [weight for weight in module.parameters() if weight.requires_grad]
    matrices = [weight for weight in trained if weight.ndim >= 2]
    vectors = [weight for weight in trained if weight.ndim < 2]
    groups = [{"params": matrices, "weight_decay": adam.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the complete value of a tensor that may be sharded."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def size_of(weight: torch.Tensor) -> int:
    """Return the number of elements of a weight over all ranks; for a weight sharded by ZeRO-3 it is in ds_numel."""
    return int(getattr(weight, "ds_numel", weight.numel()))
