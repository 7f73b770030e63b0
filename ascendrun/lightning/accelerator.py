"""NPUs as an accelerator of Lightning."""

from __future__ import annotations

import os
from typing import Any

import torch

from ascendrun.lightning.package import part
from ascendrun.programs.devices.accelerator import choose_family
from ascendrun.programs.errors import InvalidDataError

Base: Any = part("accelerators.Accelerator")
NAME = "npu"


class NPUAccelerator(Base):  # type: ignore[misc]
    """Accelerator for Ascend NPUs. Devices are those that ASCEND_RT_VISIBLE_DEVICES leaves, counted from 0."""

    def setup_device(self, device: torch.device) -> None:
        """Make the device current. Raises InvalidDataError for a device of another type."""
        if device.type != NAME:
            raise InvalidDataError(
                "lightning.not-an-npu",
                "accelerator npu: expected a device npu:N, got {device}\n"
                "hint: pass strategy= of ascendrun.lightning.settings()",
                device=str(device),
            )
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
            raise InvalidDataError(
                "lightning.no-such-npu",
                "devices {given}: not found; this process sees {count:plural NPU NPUs}\n"
                "hint: lower devices, or run `ascendrun doctor`",
                given=missing,
                count=count,
            )
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

    @classmethod
    def register_accelerators(cls, accelerator_registry: Any) -> None:
        accelerator_registry.register(NAME, cls, description="Ascend NPU")


def npu() -> Any:
    """Return torch.npu. Raises ImportError without torch_npu."""
    import torch_npu

    return torch_npu.npu


def register() -> None:
    """Make `Trainer(accelerator="npu")` known, once."""
    registry = part("accelerators.AcceleratorRegistry")
    if NAME not in registry:
        NPUAccelerator.register_accelerators(registry)
