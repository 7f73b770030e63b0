"""The precision plugin for the chip of a device, by the names of Lightning 1.x and 2.x."""

from __future__ import annotations

from typing import Any

from ascendrun.lightning.package import IS_OLD, part
from ascendrun.programs.devices.accelerator import Accelerator, Precision, choose_precision, make_scaler
from ascendrun.programs.errors import InvalidDataError

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
        raise InvalidDataError(
            "lightning.unknown-precision",
            "unknown precision {name:quote}\nhint: known names: {names}",
            name=str(name),
            names=list(NAMES),
        )
    return choose_precision(NAMES[str(name)], accelerator)


def make_precision(precision: Precision, accelerator: Accelerator) -> Any:
    """Return the plugin. float16 on an NPU has torch_npu's scaler: torch's does not see the overflow of a 910A."""
    compute = str(precision.compute).rpartition(".")[2]
    if compute == "float32":
        return part("plugins.precision.PrecisionPlugin" if IS_OLD else "plugins.precision.Precision")()
    scaler = make_scaler(accelerator, precision) if precision.scales else None
    kind = part("plugins.precision.MixedPrecisionPlugin" if IS_OLD else "plugins.precision.MixedPrecision")
    return kind(MIXED[compute][IS_OLD], accelerator.family, scaler)
