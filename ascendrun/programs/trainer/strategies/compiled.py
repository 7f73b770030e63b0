"""Compilation of a model's repeated layers: by torch's inductor on CUDA and CPUs, by torchair on NPUs.

All layers have one code, so that it is compiled once; shapes may differ between steps. Attention has kernels of its
own and stays as it is. Evaluation and generation run uncompiled: they have other shapes.
"""

from __future__ import annotations

import contextlib
import importlib
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from ascendrun.programs.devices import attention
from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trainer.strategies.layers import repeated_layers

WAYS = ("none", "torch", "torchair")


def compile_layers(module: nn.Module, way: str, *, family: str) -> None:
    """Have each repeated layer compiled when it first runs. Raises InvalidDataError where that cannot work."""
    if way == "none":
        return
    if family == "cpu" and not has_compiler():
        raise InvalidDataError(
            "program.compile-no-compiler",
            "--compile={way} requires a C++ compiler on each host, and none was found\n"
            "hint: install g++ or set CXX, or set --compile=none",
            way=way,
        )
    backend = {"backend": torchair_backend()} if way == "torchair" else {}
    layers = repeated_layers(module)
    if not layers:
        raise InvalidDataError(
            "program.compile-no-layers",
            "--compile={way} requires a model with repeated layers in an nn.ModuleList\nhint: set --compile=none",
            way=way,
        )
    attention.OPAQUE[:] = [torch.compiler.disable(attention.attention)]  # type: ignore[no-untyped-call]
    for layer in layers:
        layer.compile(dynamic=True, **backend)


def has_compiler() -> bool:
    from torch._inductor import exc
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        return bool(get_cpp_compiler())
    except exc.InvalidCxxCompiler:
        return False


def torchair_backend() -> Any:
    """Return the backend that compiles for NPUs; torch_npu offers its torchair by this name. Not run on a real NPU."""
    try:
        torchair = importlib.import_module("torchair")
    except ImportError:
        raise InvalidDataError(
            "program.compile-no-torchair",
            "--compile=torchair: torchair is not installed\n"
            "hint: install the torch_npu of this CANN, or set --compile=none",
        ) from None
    return torchair.get_npu_backend(compiler_config=torchair.CompilerConfig())


def eager() -> AbstractContextManager[Any]:
    """Run what is compiled as it is written, where torch has a switch for it (2.6)."""
    stance = getattr(torch.compiler, "set_stance", None)
    return contextlib.nullcontext() if stance is None else stance("force_eager")
