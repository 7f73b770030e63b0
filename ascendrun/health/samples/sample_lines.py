"""Conversion of the lines of a node's sampler (`node/sampler/sample.py`) to samples."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import zlib
from collections.abc import Mapping
from functools import cache
from typing import Any, Callable

from ascendrun.core.dataclass import dataclass
from ascendrun.core.measurement import metrics_of
from ascendrun.core.samples import DeviceDetail, DeviceSample, HostSample, RankSample, RawText, Sample
from ascendrun.health.samples.device_samples import EVERY_S, DeviceReader, ToolOutput

TEXT_BYTES = 4 << 20
"""No tool prints more; a text that decompresses to more is invalid."""


@dataclass(frozen=True)
class Read:
    """The values of a line; all empty for a line that is not of the sampler."""

    samples: tuple[Sample, ...] = ()
    raw: tuple[RawText, ...] = ()
    details: tuple[DeviceDetail, ...] = ()


class LineReader:
    """Reader of one host's lines, in order. The job can write the file, so every value is checked."""

    def __init__(self, host: str, *, job: str | None = None, attempt: int = 0, every_s: float = EVERY_S) -> None:
        """Create a reader; `job` None: the host has no job, thus no ranks."""
        self.host, self._job, self._attempt = host, job, attempt
        self._devices = DeviceReader(host, every_s=every_s)

    def read(self, line: Mapping[str, Any], *, ahead_s: float = 0.0) -> Read:
        """Read a line. `ahead_s`: host clock minus head node clock. Raises ValueError for impossible values."""
        at_ns = line.get("at_ns")
        if not isinstance(at_ns, int) or not 0 < at_ns < 2**63:
            return Read()
        at_s = round(at_ns / 1e9 - ahead_s, 3)
        if isinstance(line.get("tool"), str):
            devices, raw = self._devices.take(_tool_output(line, at_s))
            for device in devices:
                _check(device)
            return Read(devices, raw, self._devices.new_details())
        samples: list[Sample] = []
        if isinstance(line.get("host"), dict):
            samples.append(HostSample(at_s=at_s, host=self.host, **_fields(HostSample, line["host"])))
        for rank in _list(line.get("ranks")) if self._job is not None else ():
            number = rank.get("rank") if isinstance(rank, dict) else None
            if isinstance(number, int) and 0 <= number < 10**7:
                samples.append(
                    RankSample(
                        at_s=at_s,
                        host=self.host,
                        job=self._job or "",
                        attempt=self._attempt,
                        rank=number,
                        **_fields(RankSample, rank),
                    )
                )
        return Read(tuple(samples))


def _check(device: DeviceSample) -> None:
    for name, value in vars(device).items():
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError(f"device {device.device}: {name} has {len(str(value))} digits")


def _tool_output(line: Mapping[str, Any], at_s: float) -> ToolOutput:
    code = line.get("code")
    return ToolOutput(
        _sane(line["tool"])[:40],
        at_s,
        _text(line),
        code if isinstance(code, int) else None,
        timed_out=line.get("timed_out") is True,
    )


def _text(line: Mapping[str, Any]) -> str:
    packed = line.get("z")
    if not isinstance(packed, str):
        return _sane(str(line.get("text", "")))
    try:
        return zlib.decompressobj().decompress(base64.b64decode(packed), TEXT_BYTES).decode("utf-8", "replace")
    except (binascii.Error, zlib.error, ValueError):
        return ""


def _fields(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: read(values.get(name)) for name, read in _readers_of(kind).items()}  # type: ignore[arg-type]


@cache
def _readers_of(kind: type[Any]) -> Mapping[str, Callable[[Any], Any]]:
    """Return how each metric is read, by its type."""
    types = {one.name: str(one.type) for one in dataclasses.fields(kind)}
    return {name: _READERS[types[name]] for name in metrics_of(kind)}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_number(value: object, limit: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < limit


def _sane(text: str) -> str:
    """Replace lone surrogates, which databases reject."""
    return text.encode("utf-8", "replace").decode("utf-8")


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "int | None": lambda value: int(value) if _is_number(value, 2**63) else None,
    "float | None": lambda value: float(value) if _is_number(value, 1e18) else None,
    "str | None": lambda value: _sane(value[:20]) if isinstance(value, str) else None,
}
"""By the type of a metric."""
