"""Compatibility of torch_npu, torch, CANN, Python, driver and firmware of one node.

compare_versions(Versions(...)) -> [VersionFact(pair, outcome: compatible | incompatible | unknown, …)]
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from ascendrun.ascend.install import DriverVersion, FirmwareVersion, driver_takes_firmware, parse_version, release_of
from ascendrun.ascend.tables import load_table
from ascendrun.core.dataclass import dataclass, load_dataclass
from ascendrun.text import Text

COMPATIBLE, INCOMPATIBLE, UNKNOWN = "compatible", "incompatible", "unknown"

HDK_HINT = Text("version.hdk.hint", "install driver and firmware of one HDK release, driver first")


@dataclass(frozen=True)
class Versions:
    """Versions on one node, as their sources write them (2.6.0+cpu, 8.0.RC3, 3.10.12); None: unknown.

    `arch`: as `uname -m` prints it.
    """

    torch_npu: str | None = None
    torch: str | None = None
    cann: str | None = None
    python: str | None = None
    driver: DriverVersion | None = None
    firmware: FirmwareVersion | None = None
    arch: str | None = None


@dataclass(frozen=True)
class VersionFact:
    """One pair. Only pairs that doctor shows have a message: incompatible ones, with a hint, and some unknown."""

    pair: str
    outcome: str
    message: Text | None = None
    hint: Text | str | None = None
    source: str | None = None


@dataclass(frozen=True)
class Release:
    """One torch_npu release of the table; None where no source states it."""

    torch_npu: str
    torch: str
    cann: str | None
    python: tuple[str, ...] | None
    wheels: tuple[str, ...] | None
    source: str
    doubt: str | None = None


def compare_versions(versions: Versions) -> tuple[VersionFact, ...]:
    """Return a fact for each pair with two known versions, and one for torch_npu if the table lacks it."""
    facts: list[VersionFact] = []
    if versions.torch_npu is not None:
        release = release_named(versions.torch_npu)
        if release is None:
            message = Text(
                "version.unlisted",
                "torch_npu {torch_npu} is not a known release; the CANN that it requires is unknown",
                torch_npu=versions.torch_npu,
            )
            hint = Text("version.unlisted.hint", "install a released version, or see https://github.com/Ascend/pytorch")
            facts.append(VersionFact("torch_npu", UNKNOWN, message, hint))
        if versions.torch is not None:
            facts.append(_with_torch(versions.torch_npu, versions.torch, release))
        if release is not None and versions.cann is not None:
            facts.append(_with_cann(versions.torch_npu, versions.cann, release))
        if release is not None and versions.python is not None and (release.python or release.wheels):
            facts.append(_with_python(versions.torch_npu, versions.python, release))
    if versions.torch is not None:
        facts.append(_torch_build(versions.torch, versions.arch))
    if versions.driver is not None and versions.firmware is not None:
        facts.append(_driver_firmware(versions.driver, versions.firmware))
    return tuple(facts)


def misfits_in(recorded: Mapping[str, Any]) -> tuple[VersionFact, ...]:
    """Return the incompatible pairs by the facts of a node at a start (recorded_facts); () without torch_npu."""
    packages = recorded.get("packages", {})
    if not packages.get("torch-npu"):
        return ()
    known = Versions(packages["torch-npu"], packages.get("torch"), recorded.get("cann"), recorded.get("python"))
    return tuple(one for one in compare_versions(known) if one.outcome == INCOMPATIBLE)


def release_named(torch_npu: str) -> Release | None:
    """Return the row of a torch_npu version, ignoring its local part; None if not listed (a .dev build)."""
    return _releases().get(torch_npu.strip().partition("+")[0])


def releases_for(*, cann: str | None = None, torch: str | None = None) -> tuple[Release, ...]:
    """Return the releases for a CANN or a torch, or both; newest first as Huawei lists them."""
    rows = _releases().values()
    release = release_of(torch) if torch else None
    return tuple(row for row in rows if (not cann or _same(row.cann, cann)) and (not torch or row.torch == release))


@dataclass(frozen=True)
class Minimum:
    """A feature and the oldest driver (HDK) and CANN that have it; None: no source states one."""

    feature: str
    driver: str | None
    cann: str | None
    source: str


def minimum_for(feature: str) -> Minimum | None:
    rows = [row for row in load_table("compatibility")["minima"] if row["feature"] == feature]
    return Minimum(**rows[0]) if rows else None


def too_old_for(feature: str, *, driver: str | None, cann: str | None) -> bool | None:
    """Return whether driver or CANN is too old for the feature; None if unknown."""
    minimum = minimum_for(feature)
    if minimum is None:
        return None
    results = [_older(driver, minimum.driver), _older(cann, minimum.cann)]
    if True in results:
        return True
    return None if None in results else False


def _older(version: str | None, bound: str | None) -> bool | None:
    if bound is None:
        return False
    one, low = parse_version(version or "?"), parse_version(bound)
    return None if one is None or low is None else one < low


def _with_torch(torch_npu: str, torch: str, release: Release | None) -> VersionFact:
    required = release.torch if release else release_of(torch_npu)
    found = release_of(torch)
    pair, source = "torch_npu/torch", _source(release) if release else "torch_npu versions begin with their torch's"
    if required is None or found is None or required == found:
        return VersionFact(pair, COMPATIBLE if required == found is not None else UNKNOWN)
    others = [row.torch_npu for row in releases_for(torch=torch)]
    values = {"torch_npu": torch_npu, "required": required, "torch": torch}
    message = Text("version.torch", "torch_npu {torch_npu} requires torch {required}, found {torch}", **values)
    hint: Text | str = f"pip install torch=={required}"
    if others:
        hint = Text(
            "version.torch.hint",
            "pip install torch=={required}, or torch_npu=={other} for torch {torch}",
            required=required,
            other=others[0],
            torch=found,
        )
    return VersionFact(pair, INCOMPATIBLE, message, hint, source)


def _with_cann(torch_npu: str, cann: str, release: Release) -> VersionFact:
    pair, source = "torch_npu/cann", _source(release)
    values = {"torch_npu": torch_npu, "required": release.cann, "cann": cann}
    if release.cann is None:
        message = Text(
            "version.cann-unknown",
            "torch_npu {torch_npu} is newer than the compatibility table; its CANN is unknown (found {cann})",
            **values,
        )
        return VersionFact(pair, UNKNOWN, message, None, source)
    if _same(release.cann, cann):
        return VersionFact(pair, COMPATIBLE)
    fitting = [row.torch_npu for row in releases_for(cann=cann, torch=release.torch)]
    hint = Text("version.cann.hint", "install CANN {required}", required=release.cann)
    if fitting:
        hint = Text(
            "version.cann-or.hint",
            "install CANN {required}, or torch_npu=={other} for CANN {cann}",
            required=release.cann,
            other=fitting[0],
            cann=cann,
        )
    found, required = parse_version(cann), parse_version(release.cann)
    if found is None or required is None or found > required:
        message = Text(
            "version.cann-not-stated",
            "torch_npu {torch_npu} is built for CANN {required}; no source states whether it works with {cann}",
            **values,
        )
        return VersionFact(pair, UNKNOWN, message, hint, source)
    message = Text(
        "version.cann-older", "torch_npu {torch_npu} is built for CANN {required}, found the older {cann}", **values
    )
    return VersionFact(pair, INCOMPATIBLE, message, hint, source)


def _with_python(torch_npu: str, python: str, release: Release) -> VersionFact:
    found = re.match(r"\s*([0-9]{1,2}\.[0-9]{1,3})(?![0-9])", python)
    known = (*(release.python or ()), *(release.wheels or ()))
    if found is None or found[1] in known:
        return VersionFact("torch_npu/python", UNKNOWN if found is None else COMPATIBLE)
    listed = sorted(set(known), key=lambda version: [int(part) for part in version.split(".")])
    values = {"torch_npu": torch_npu, "required": listed, "python": python}
    message = Text("version.python", "torch_npu {torch_npu} is built for Python {required}, found {python}", **values)
    hint = Text("version.python.hint", "use Python {required}", required=listed)
    return VersionFact("torch_npu/python", INCOMPATIBLE, message, hint, _source(release))


def _torch_build(torch: str, arch: str | None) -> VersionFact:
    release, _, local = torch.partition("+")
    if not local.startswith(("cu", "rocm")):
        return VersionFact("torch/build", UNKNOWN if arch == "x86_64" and not local else COMPATIBLE)
    message = Text(
        "version.other-build",
        "torch {torch} is built for another accelerator; torch_npu rejects such builds",
        torch=torch,
    )
    hint = f"pip install torch=={release} --index-url https://download.pytorch.org/whl/cpu"
    return VersionFact("torch/build", INCOMPATIBLE, message, hint, "torch_npu/__init__.py")


def _driver_firmware(driver: DriverVersion, firmware: FirmwareVersion) -> VersionFact:
    fits = driver_takes_firmware(driver, firmware)
    if fits is not False:
        return VersionFact("driver/firmware", COMPATIBLE if fits else UNKNOWN)
    values = {"driver": driver.version, "firmware": firmware.version}
    required = [f"{interval.low}-{interval.high}" for interval in driver.firmware_intervals]
    message = Text("version.driver-interval", "firmware {firmware} requires other drivers, found {driver}", **values)
    if required:
        message = Text(
            "version.firmware-interval",
            "driver {driver} requires firmware {required}, found {firmware}",
            required=required,
            **values,
        )
    source = "compatible_version_fw and compatible_version_drv of the version.info files"
    return VersionFact("driver/firmware", INCOMPATIBLE, message, HDK_HINT, source)


def _same(one: str | None, other: str) -> bool:
    return one is not None and (one.lower() == other.lower() or parse_version(one) == parse_version(other) is not None)


def _source(release: Release) -> str:
    sources: Mapping[str, str] = load_table("compatibility")["sources"]
    return sources[release.source]


@lru_cache(maxsize=1)
def _releases() -> Mapping[str, Release]:
    rows: Sequence[Mapping[str, Any]] = load_table("compatibility")["rows"]
    return {row["torch_npu"]: load_dataclass(Release, row) for row in rows}
