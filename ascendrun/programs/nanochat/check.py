"""check_npu.py of guide 002: versions, device, operators, an optimizer step and a collective of this machine.

One line for each; exit code 1 if any failed. `--device=cpu` checks a machine without an NPU.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Callable

import torch
import torch.distributed as dist

from ascendrun.programs.devices.accelerator import Accelerator, choose_family, make_adamw, open_accelerator
from ascendrun.text import language_of, listed, use_language

VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_OPP_PATH", "LD_LIBRARY_PATH")
"""Set by set_env.sh of CANN."""
SIZE = 64
TOLERANCE = 1e-2
"""Largest relative error of a matrix product: NPUs may use HF32 (10 bits) for float32."""

Check = tuple[str, Callable[[], object]]


class CheckError(Exception):
    """A check found something else than it expects."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the checks; return the exit code."""
    use_language(language_of())
    wanted = [
        word.partition("=")[2] for word in (sys.argv[1:] if argv is None else argv) if word.startswith("--device=")
    ]
    failed = 0
    for name, check in checks(wanted[-1] if wanted else "npu"):
        try:
            print(f"{'ok':7}{name:18}{check()}", flush=True)
        except Exception as error:  # torch_npu raises many kinds; each is a result of this check
            failed += 1
            print(f"{'FAILED':7}{name:18}{error}", flush=True)
    if failed:
        print(listed("guide.check-failed", count=failed), file=sys.stderr)
    return int(failed > 0)


def checks(wanted: str) -> Iterator[Check]:
    """Yield checks; those of a device only if it could be opened. `wanted`: npu, cuda, cpu, or auto."""
    yield "python", platform.python_version
    yield "torch", lambda: torch.__version__
    family = choose_family(wanted, os.environ)
    if family == "npu":
        yield "torch_npu", torch_npu_version
        for variable in VARIABLES:
            yield variable, partial(of_environment, variable)
    opened: list[Accelerator] = []
    yield "device", lambda: open_device(family, opened)
    for device in opened:
        yield "memory", partial(memory, device)
        yield "operator", partial(product, device)
        yield "precision", partial(half_product, device)
        yield "training", partial(training, device)
        yield device.backend, partial(collective, device)


def torch_npu_version() -> str:
    import torch_npu

    return str(torch_npu.__version__)


def of_environment(variable: str) -> str:
    if not os.environ.get(variable):
        raise CheckError(listed("guide.variable-unset"))
    return os.environ[variable].partition(":")[0]


def open_device(family: str, opened: list[Accelerator]) -> str:
    device = open_accelerator(family, 0)
    opened.append(device)
    return f"{device.module.device_count() if device.module is not None else 1} x {device.name}"


def memory(device: Accelerator) -> str:
    total = device.memory_total_bytes()
    if total is None:
        raise CheckError(listed("guide.memory"))
    return f"{total / 2**30:.1f} GiB"


def product(device: Accelerator) -> str:
    a, b = torch.randn(2, SIZE, SIZE, generator=torch.Generator().manual_seed(7)).unbind()
    error = float(((a.to(device.device) @ b.to(device.device)).cpu() - a @ b).norm() / (a @ b).norm())
    if not error <= TOLERANCE:
        raise CheckError(listed("guide.product", error=f"{error:.1e}"))
    return f"{error:.1e}"


def half_product(device: Accelerator) -> str:
    dtype = torch.bfloat16 if device.has_bf16() else torch.float16
    with device.autocast(dtype):
        found = torch.ones(SIZE, SIZE, device=device.device) @ torch.ones(SIZE, SIZE, device=device.device)
    if found.dtype != dtype or float(found[0, 0]) != SIZE:
        raise CheckError(f"{found.dtype} {float(found[0, 0])}")
    return str(dtype).partition(".")[2]


def training(device: Accelerator) -> str:
    torch.manual_seed(7)
    layer = torch.nn.Linear(SIZE, 1).to(device.device)
    optimizer = make_adamw(list(layer.parameters()), device, lr=1e-2, betas=(0.9, 0.95), is_sharded=False)
    inputs, losses = torch.ones(SIZE, SIZE, device=device.device), []
    for _ in range(2):
        loss = (layer(inputs) - 3).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if not losses[1] < losses[0]:
        raise CheckError(listed("guide.loss", first=losses[0], second=losses[1]))
    return f"{losses[0]:.3f} -> {losses[1]:.3f}"


def collective(device: Accelerator) -> str:
    """Run a collective of one rank."""
    store = dist.TCPStore("127.0.0.1", 0, 1, True)  # type: ignore[attr-defined]
    dist.init_process_group(device.backend, store=store, rank=0, world_size=1)
    value = torch.ones(1, device=device.device)
    dist.all_reduce(value)
    found = float(value)
    dist.destroy_process_group()
    return f"all_reduce {found:g}"
