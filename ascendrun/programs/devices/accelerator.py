"""The device of this rank, npu, cuda or cpu, behind one interface; the rest of the trainer does not check the type."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, Callable

import numpy as np
import torch

from ascendrun.facts.chips import Chip, chip_of
from ascendrun.programs.errors import InvalidDataError, ProgramError
from ascendrun.text import Text, listed

BACKENDS = {"npu": "hccl", "cuda": "nccl", "cpu": "gloo"}


class NoDeviceError(ProgramError):
    """The requested device was not found; the message has the missing item and a hint."""


@dataclass(frozen=True)
class Accelerator:
    """One device. `name`: the vendor's name. `module`: torch.npu, torch.cuda, None on the CPU."""

    family: str
    device: torch.device
    name: str
    module: Any

    @property
    def backend(self) -> str:
        return BACKENDS[self.family]

    @property
    def chip(self) -> Chip | None:
        return chip_of(self.name)

    def synchronize(self) -> None:
        """Wait until the device has finished its queued work."""
        if self.module is not None:
            self.module.synchronize()

    def empty_cache(self) -> None:
        if self.module is not None:
            self.module.empty_cache()

    def memory_bytes(self) -> int:
        """Return the peak memory of tensors; on the CPU the largest resident size of the process."""
        if self.module is not None:
            return int(self.module.max_memory_allocated())
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def memory_total_bytes(self) -> int | None:
        """Return the total memory of the device; None: unknown."""
        if self.module is not None:
            return int(self.module.mem_get_info()[1])
        try:
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError):
            return None

    def has_bf16(self) -> bool:
        """Return whether bfloat16 is native: not on 910A, the first 910B, 310P and V100, though torch may report it."""
        if self.module is None:
            return True
        if self.chip is not None and not self.chip.has_bf16:
            return False
        return bool(self.module.is_bf16_supported())

    def seed(self, seed: int) -> None:
        """Seed the generators of torch, on the CPU and on this device; not of others, as torch.manual_seed does: it
        writes the stack of its call for each that is not initialized."""
        torch.default_generator.manual_seed(seed)
        if self.module is not None:
            self.module.manual_seed_all(seed)

    def rng_state(self) -> dict[str, Any]:
        """Return the state of all random generators of this rank, as plain values for a checkpoint."""
        version, words, spare = random.getstate()
        kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
        words_of_numpy = torch.from_numpy(np.asarray(keys, dtype=np.int64))
        state = {
            "python": [version, list(words), spare],
            "torch": torch.get_rng_state(),
            "numpy": [str(kind), words_of_numpy, int(position), int(has_gauss), float(gauss)],
        }
        return state if self.module is None else {**state, "device": self.module.get_rng_state().cpu()}

    def set_rng_state(self, state: Mapping[str, Any]) -> None:
        version, words, spare = state["python"]
        random.setstate((version, tuple(words), spare))
        kind, keys, position, has_gauss, gauss = state["numpy"]
        np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
        torch.set_rng_state(state["torch"])
        if self.module is not None and "device" in state:
            self.module.set_rng_state(state["device"])

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[Any]:
        """Return a context of forward arithmetic in `dtype`; weights do not change. float32: no effect."""
        if dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.family, dtype=dtype)

    def stamp(self) -> Stamp:
        """Record a time stamp in this device's work queue."""
        if self.module is None:
            return Stamp(time.perf_counter(), None)
        event = self.module.Event(enable_timing=True)
        event.record()
        return Stamp(time.perf_counter(), event)

    def start_copy(self, tensor: torch.Tensor) -> Callable[[], list[float]]:
        """Start to copy a small tensor to host memory. Return the function that waits for it and returns its values."""
        if self.module is None:
            return tensor.tolist
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        event = self.module.Event()
        event.record()

        def read() -> list[float]:
            event.synchronize()
            return host.tolist()

        return read

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether memory ran out: torch's OutOfMemoryError; in older torch_npu RuntimeError "out of memory"."""
        if isinstance(error, (MemoryError, getattr(torch, "OutOfMemoryError", MemoryError))):
            return True
        text = str(error).lower()
        return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)


@dataclass(frozen=True)
class Stamp:
    """A time stamp. `event` None: the device has no queue, so the host's clock is used."""

    host_s: float
    event: Any

    def seconds_until(self, later: Stamp) -> float:
        """Return the seconds between two stamps. Requires a synchronization of the device after `later`."""
        if self.event is None:
            return later.host_s - self.host_s
        return float(self.event.elapsed_time(later.event)) / 1e3


@dataclass(frozen=True)
class Precision:
    """Numeric formats. `weights`: trained parameters and the optimizer; `compute`: the arithmetic of the forward pass,
    and frozen parameters, which gain nothing from more.

    `scales`: a GradScaler is required, because small gradients underflow in float16. `reason`: message for the log.
    `loss_scale`: the scale that it starts with.
    """

    weights: torch.dtype
    compute: torch.dtype
    scales: bool
    reason: Text | str
    loss_scale: float = 65536.0


def choose_family(wanted: str, environ: Mapping[str, str], devices: Path = Path("/dev")) -> str:
    """Return npu, cuda or cpu: the option, else the launcher's type, else that of this machine's devices.

    `devices`: the directory with the driver's davinci0, davinci1, …; a container has only its assigned devices.
    """
    for choice in (wanted, environ.get("ASCENDRUN_DEVICE_TYPE", "auto")):
        if choice != "auto":
            return choice
    if environ.get("ASCEND_RT_VISIBLE_DEVICES") or any(devices.glob("davinci[0-9]*")):
        return "npu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def open_accelerator(family: str, local_rank: int) -> Accelerator:
    """Open this rank's device and make it current. Raises NoDeviceError."""
    if family == "cpu":
        threads = os.environ.get("OMP_NUM_THREADS", "")
        if threads.isdigit() and int(threads) > 0:
            torch.set_num_threads(int(threads))
        return Accelerator("cpu", torch.device("cpu"), "cpu", None)
    if family == "npu":
        try:
            import torch_npu
        except ImportError as error:
            raise NoDeviceError(listed("program.no-torch-npu", error=error)) from error
        module: Any = torch_npu.npu
        # Run-time compilation of operators takes minutes for every new shape, and training never needs it.
        module.set_compile_mode(jit_compile=False)
    else:
        module = torch.cuda
    count = module.device_count()
    if local_rank >= count:
        raise NoDeviceError(listed("program.no-device", rank=local_rank, family=family, index=local_rank, count=count))
    device = torch.device(family, local_rank)
    module.set_device(device)
    return Accelerator(family, device, str(module.get_device_name(local_rank)), module)


def precision_of(options: Mapping[str, Any], accelerator: Accelerator) -> Precision:
    """Choose by the options dtype and loss_scale. Raises InvalidDataError."""
    found = choose_precision(options["dtype"], accelerator)
    return replace(found, loss_scale=options["loss_scale"]) if options["loss_scale"] else found


def precision_to_use(options: Mapping[str, Any], accelerator: Accelerator) -> Precision:
    """Choose by the option dtype, for a model that is not trained. Raises InvalidDataError."""
    found = choose_precision(options["dtype"], accelerator)
    return replace(found, weights=found.compute, scales=False)


def choose_precision(wanted: str, accelerator: Accelerator) -> Precision:
    """Choose auto, float32, bfloat16, float16, pure-bfloat16 (weights too: half memory). Raises InvalidDataError."""
    name, family = accelerator.name, accelerator.family
    if wanted in ("bfloat16", "pure-bfloat16") and not accelerator.has_bf16():
        raise InvalidDataError(listed("program.no-bfloat16", dtype=wanted, name=name))
    if wanted == "float16" and family == "cpu":
        raise InvalidDataError(listed("program.float16-cpu"))
    chosen, reason = wanted, listed("program.dtype-requested", dtype=wanted)
    if wanted == "float16":
        reason = listed("program.float16-requested")
    elif wanted == "auto" and family == "cpu":
        chosen, reason = "float32", listed("program.float32-cpu")
    elif wanted == "auto" and accelerator.has_bf16():
        chosen = "bfloat16"
        reason = listed("program.bfloat16", name=name)
    elif wanted == "auto":
        chosen = "float16"
        reason = listed("program.float16", name=name)
    compute: torch.dtype = getattr(torch, chosen.removeprefix("pure-"))
    return Precision(
        torch.bfloat16 if chosen == "pure-bfloat16" else torch.float32, compute, chosen == "float16", reason
    )


def make_scaler(accelerator: Accelerator, precision: Precision) -> Any:
    """Return a GradScaler that does nothing unless `precision` requires scaling.

    On NPUs it must be torch_npu's own: a 910A saturates instead of returning inf, so only the chip's overflow
    flag, which that scaler reads, indicates it.
    """
    how: dict[str, Any] = {"init_scale": precision.loss_scale, "enabled": precision.scales}
    if accelerator.family == "npu":
        import torch_npu

        return torch_npu.npu.amp.GradScaler(**how)
    if hasattr(torch.amp, "GradScaler"):
        return torch.amp.GradScaler(accelerator.family, **how)
    return torch.cuda.amp.GradScaler(**how)  # torch before 2.3


def make_adamw(
    groups: list[Any], accelerator: Accelerator, *, lr: float, betas: Any, is_sharded: bool
) -> torch.optim.Optimizer:
    """Return AdamW, fused where the device supports it: NPU's kernel for unsharded parameters, torch's on CUDA, CPU.

    The NPU's kernel joins all parameters in one flat buffer, which is impossible for sharded parameters (FSDP).
    """
    if accelerator.family == "npu":
        if not is_sharded:
            import torch_npu

            fused: torch.optim.Optimizer = torch_npu.optim.NpuFusedAdamW(groups, lr=lr, betas=betas)
            return fused
        return torch.optim.AdamW(groups, lr=lr, betas=betas, foreach=True)
    try:
        return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True)
    except RuntimeError:  # torch before 2.4 has no fused kernel for CPUs
        return torch.optim.AdamW(groups, lr=lr, betas=betas)


def worker_context(family: str) -> BaseContext | None:
    """Return how data workers start: torch_npu rejects a forked child of a process that uses an NPU, so they spawn."""
    return multiprocessing.get_context("spawn") if family == "npu" else None
