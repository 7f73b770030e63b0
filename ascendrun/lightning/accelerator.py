"""NPUs as an accelerator of Lightning, and the precision plugin for a chip, by the names of Lightning 1.x and 2.x."""

from __future__ import annotations

import os
from typing import Any

import torch

from ascendrun.lightning.package import IS_OLD, part
from ascendrun.programs.devices.accelerator import Accelerator, Precision, choose_family, choose_precision, make_scaler
from ascendrun.programs.errors import InvalidDataError
from ascendrun.text import listed

Base: Any = part("accelerators.Accelerator")
NAME = "npu"


class NPUAccelerator(Base):  # type: ignore[misc]
    """Accelerator for Ascend NPUs. Devices are those that ASCEND_RT_VISIBLE_DEVICES leaves, counted from 0."""

    def setup_device(self, device: torch.device) -> None:
        """Make the device current. Raises InvalidDataError for a device of another type."""
        if device.type != NAME:
            raise InvalidDataError(listed("lightning.not-an-npu", device=str(device)))
        npu().set_device(device)

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """Return torch_npu's statistics of the memory of a device."""
        return dict(npu().memory_stats(device))

    def teardown(self) -> None:
        npu().empty_cache()

    @staticmethod
    def parse_devices(devices: int | str | list[int]) -> list[int]:
        """Return indices of devices: the first `devices`, -1 or "-1" for all of them, or those of a list or "0,2"."""
        count = NPUAccelerator.auto_device_count()
        if isinstance(devices, str):
            devices = [int(each) for each in devices.split(",") if each.strip()] if "," in devices else int(devices)
        if isinstance(devices, int):
            devices = list(range(count if devices == -1 else devices))
        missing = [index for index in devices if not 0 <= index < count]
        if missing or not devices:
            raise InvalidDataError(listed("lightning.no-such-npu", given=missing, count=count))
        return devices

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device(NAME, index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        return int(npu().device_count())

    @staticmethod
    def is_available() -> bool:
        """Return whether this machine has an NPU and torch_npu."""
        if choose_family("auto", os.environ) != NAME:
            return False
        try:
            return NPUAccelerator.auto_device_count() > 0
        except ImportError:
            return False

    @staticmethod
    def name() -> str:
        return NAME


def npu() -> Any:
    """Return torch.npu. Raises ImportError without torch_npu."""
    import torch_npu

    return torch_npu.npu


def register() -> None:
    """Make `Trainer(accelerator="npu")` known, once."""
    registry = part("accelerators.AcceleratorRegistry")
    if NAME not in registry:
        registry.register(NAME, NPUAccelerator, description="Ascend NPU")


NAMES = {
    "auto": "auto",
    "32": "float32",
    "32-true": "float32",
    "float32": "float32",
    "16": "float16",
    "16-mixed": "float16",
    "float16": "float16",
    "bf16": "bfloat16",
    "bf16-mixed": "bfloat16",
    "bfloat16": "bfloat16",
}
"""Names of a precision, each with its dtype. Weights are float32 in all of them."""
MIXED = {"float16": ("16-mixed", "16"), "bfloat16": ("bf16-mixed", "bf16")}
"""The plugin's own names, of 2.x and of 1.9."""


def choose(name: str | int, accelerator: Accelerator) -> Precision:
    """Choose the dtype of a device. auto: bfloat16 where the chip supports it, else float16 with loss scaling; float32
    on a CPU. Raises InvalidDataError for an unknown name, and for a dtype that the chip does not support."""
    if str(name) not in NAMES:
        raise InvalidDataError(listed("lightning.unknown-precision", name=str(name), names=list(NAMES)))
    return choose_precision(NAMES[str(name)], accelerator)


def make_precision(precision: Precision, accelerator: Accelerator) -> Any:
    """Return the plugin. float16 on an NPU has torch_npu's scaler: torch's does not see the overflow of a 910A."""
    compute = str(precision.compute).rpartition(".")[2]
    if compute == "float32":
        return part("plugins.precision.PrecisionPlugin" if IS_OLD else "plugins.precision.Precision")()
    scaler = make_scaler(accelerator, precision) if precision.scales else None
    kind = part("plugins.precision.MixedPrecisionPlugin" if IS_OLD else "plugins.precision.MixedPrecision")
    return kind(MIXED[compute][IS_OLD], accelerator.family, scaler)
