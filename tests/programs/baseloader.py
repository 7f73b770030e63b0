"""Holds a base on some ranks, by one of the LoRA program's ways or plainly, and tells what that took: the most host
memory beside what the process had before, and what was read of the files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import safetensors
import torch

from ascendrun.planner.cost import Layout
from ascendrun.programs.devices import accelerator
from ascendrun.programs.qwen_lora import base, modes
from ascendrun.programs.trainer import runtime
from tests.programs.conftest import options_of

PLAIN = "plain"
"""As the guide did it: transformers' from_pretrained on every rank."""


def main(argv: Sequence[str]) -> None:
    asked: dict[str, Any] = json.loads(argv[0])
    runtime.run(lambda here: measure(asked, here), timeout_s=60)


class Counted:
    """safetensors' safe_open, and every byte of a tensor that was asked of it."""

    read_bytes = 0

    def __init__(self, file: str, **strategy: Any) -> None:
        self.opened = safetensors_open(file, **strategy)

    def __enter__(self) -> Counted:
        self.opened.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.opened.__exit__(*error)

    def keys(self) -> list[str]:
        return list(self.opened.keys())

    def get_tensor(self, name: str) -> torch.Tensor:
        return counted(self.opened.get_tensor(name))

    def get_slice(self, name: str) -> CountedRows:
        return CountedRows(self.opened.get_slice(name))


class CountedRows:
    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def get_shape(self) -> list[int]:
        return list(self.rows.get_shape())

    def __getitem__(self, which: Any) -> torch.Tensor:
        return counted(self.rows[which])


def counted(tensor: torch.Tensor) -> torch.Tensor:
    Counted.read_bytes += tensor.numel() * tensor.element_size()
    return tensor


safetensors_open = safetensors.safe_open


def measure(asked: dict[str, Any], here: runtime.Runtime) -> None:
    hold(asked["strategy"], Path(asked["tiny"]), here)  # what is imported or made once is there by now
    here.gather("here")
    safetensors.safe_open = Counted  # type: ignore[misc,assignment]
    forget_peak()
    before = memory_of("VmRSS")
    held = hold(asked["strategy"], Path(asked["home"]), here)
    found = {"peak": memory_of("VmHWM") - before, "read": Counted.read_bytes, "held": held is not None}
    here.gather("here")
    Path(f"found-{here.rank}.json").write_text(json.dumps(found))


def hold(strategy: str, home: Path, here: runtime.Runtime) -> Any:
    if strategy == PLAIN:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(home, torch_dtype=torch.float32)
        sum(float(weight.sum()) for weight in model.parameters())  # what is only mapped is not there yet
        return model
    options = options_of("qwen_lora", "--lora_r=2")
    precision = accelerator.choose_precision("float32", here.accelerator)
    layout, make_optimizer = Layout(strategy, False, False), modes.optimizer_of(options, 10)
    return modes.make_engine(base.folder_config(home), options, home, here, precision, layout, make_optimizer)


def forget_peak() -> None:
    """VmHWM begins anew at what the process has now."""
    Path("/proc/self/clear_refs").write_text("5")


def memory_of(name: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM the most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
