"""Whether torch_npu, torch, CANN, Python, driver and firmware of one node belong together.

judge_versions(Versions(...)) -> [VersionFact(pair, verdict: fits | misfit | unknown, says, hint, source)]
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ascendrun.ascend.install import DriverVersion, FirmwareVersion, driver_takes_firmware
from ascendrun.ascend.tables import load_table
from ascendrun.ascend.versions import parse_version, release_of

FITS, MISFIT, UNKNOWN = "fits", "misfit", "unknown"


@dataclass(frozen=True)
class Versions:
    """What one node has, each as its own source writes it (2.6.0+cpu, 8.0.RC3, 3.10.12); None: could not look.

    `arch` as uname -m says it.
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
    """One pair. `misfit` carries the way out in `hint`; `unknown` says in `says` what is not known."""

    pair: str
    verdict: str
    says: str
    hint: str | None
    source: str | None


@dataclass(frozen=True)
class Release:
    """One torch_npu release of the table; None where no source says."""

    torch_npu: str
    torch: str
    cann: str | None
    python: tuple[str, ...] | None
    wheels: tuple[str, ...] | None
    source: str
    doubt: str | None


def judge_versions(versions: Versions) -> tuple[VersionFact, ...]:
    """A fact for each pair of which both sides were seen, and one for torch_npu itself when the table lacks it."""
    facts: list[VersionFact] = []
    release = None
    if versions.torch_npu is not None:
        release = release_named(versions.torch_npu)
        if release is None:
            facts.append(_unlisted(versions.torch_npu))
        facts.extend(_with_torch(versions.torch_npu, versions.torch, release))
        facts.extend(_with_cann(versions.torch_npu, versions.cann, release))
        facts.extend(_with_python(versions.torch_npu, versions.python, release))
    if versions.torch is not None:
        facts.extend(_torch_build(versions.torch, versions.arch))
    if versions.driver is not None and versions.firmware is not None:
        facts.append(_driver_firmware(versions.driver, versions.firmware))
    if versions.driver is not None and versions.cann is not None:
        says = f"driver {versions.driver.version}, CANN {versions.cann}: no complete public table of which fits which"
        facts.append(VersionFact("driver/cann", UNKNOWN, says, "compare with Huawei's firmware and driver page", None))
    return tuple(facts)


def release_named(torch_npu: str) -> Release | None:
    """The table's row of a torch_npu version without its local part; None when it is not listed (a .dev build)."""
    return _releases().get(torch_npu.strip().partition("+")[0])


def releases_for(*, cann: str | None = None, torch: str | None = None) -> tuple[Release, ...]:
    """The releases made for a CANN or a torch, or both; newest first as Huawei lists them."""
    rows = _releases().values()
    release = release_of(torch) if torch else None
    return tuple(row for row in rows if (not cann or _same(row.cann, cann)) and (not torch or row.torch == release))


@dataclass(frozen=True)
class Minimum:
    """A feature and the oldest driver (HDK) and CANN that have it; None: no lower bound is stated."""

    feature: str
    driver: str | None
    cann: str | None
    source: str


def minimum_for(feature: str) -> Minimum | None:
    rows = [row for row in load_table("compatibility")["minima"] if row["feature"] == feature]
    return Minimum(**rows[0]) if rows else None


def too_old_for(feature: str, *, driver: str | None, cann: str | None) -> bool | None:
    """Whether driver or CANN is older than the feature needs; None when that cannot be told."""
    minimum = minimum_for(feature)
    if minimum is None:
        return None
    answers = [_older(driver, minimum.driver), _older(cann, minimum.cann)]
    if True in answers:
        return True
    return None if None in answers else False


def _older(version: str | None, bound: str | None) -> bool | None:
    if bound is None:
        return False
    one, low = parse_version(version or "?"), parse_version(bound)
    return None if one is None or low is None else one < low


def _unlisted(torch_npu: str) -> VersionFact:
    says = f"torch_npu {torch_npu} is not in the table of releases: which CANN it needs is not known"
    hint = "install a released version, or look at https://github.com/Ascend/pytorch"
    return VersionFact("torch_npu", UNKNOWN, says, hint, None)


def _with_torch(torch_npu: str, torch: str | None, release: Release | None) -> list[VersionFact]:
    if torch is None:
        return []
    needed = release.torch if release else release_of(torch_npu)
    seen = release_of(torch)
    pair, source = "torch_npu/torch", _source(release) or "torch_npu versions begin with their torch's"
    if needed is None or seen is None:
        return [VersionFact(pair, UNKNOWN, f"torch_npu {torch_npu}, torch {torch}: cannot be compared", None, None)]
    if needed == seen:
        return [VersionFact(pair, FITS, f"torch_npu {torch_npu} is made for torch {needed}", None, source)]
    says = f"torch_npu {torch_npu} needs torch {needed}, this is {torch}"
    others = [row.torch_npu for row in releases_for(torch=torch)]
    hint = f"pip install torch=={needed}" + (f", or torch_npu=={others[0]} for torch {seen}" if others else "")
    return [VersionFact(pair, MISFIT, says, hint, source)]


def _with_cann(torch_npu: str, cann: str | None, release: Release | None) -> list[VersionFact]:
    if cann is None or release is None:
        return []
    pair, source = "torch_npu/cann", _source(release)
    if release.cann is None:
        says = f"torch_npu {torch_npu} is newer than the table: which CANN it needs is not known (this is {cann})"
        return [VersionFact(pair, UNKNOWN, says, None, source)]
    if _same(release.cann, cann):
        return [VersionFact(pair, FITS, f"torch_npu {torch_npu} is made for CANN {release.cann}", None, source)]
    one, needed = parse_version(cann), parse_version(release.cann)
    fitting = [row.torch_npu for row in releases_for(cann=cann, torch=release.torch)]
    choice = f"; for CANN {cann} take torch_npu=={fitting[0]}" if fitting else ""
    if one is None or needed is None or one > needed:
        says = f"torch_npu {torch_npu} is made for CANN {release.cann}; whether it works with {cann} is not stated"
        return [VersionFact(pair, UNKNOWN, says, f"install CANN {release.cann}{choice}", source)]
    says = f"torch_npu {torch_npu} is made for CANN {release.cann}, this is the older {cann}"
    return [VersionFact(pair, MISFIT, says, f"install CANN {release.cann}{choice}", source)]


def _with_python(torch_npu: str, python: str | None, release: Release | None) -> list[VersionFact]:
    found = re.match(r"\s*([0-9]{1,2}\.[0-9]{1,3})(?![0-9])", python or "")
    if python is None or release is None or (release.python is None and release.wheels is None):
        return []
    pair, source = "torch_npu/python", _source(release)
    if found is None:
        return [VersionFact(pair, UNKNOWN, f"Python {python!r}: not a version", None, None)]
    known: Sequence[str] = (*(release.python or ()), *(release.wheels or ()))
    if found[1] in known:
        return [VersionFact(pair, FITS, f"torch_npu {torch_npu} is made for Python {found[1]}", None, source)]
    listed = ", ".join(sorted(set(known), key=lambda one: [int(part) for part in one.split(".")]))
    says = f"torch_npu {torch_npu} is made for Python {listed}, this is {python}"
    return [VersionFact(pair, MISFIT, says, f"use one of Python {listed}", source)]


def _torch_build(torch: str, arch: str | None) -> list[VersionFact]:
    local = torch.partition("+")[2]
    if local.startswith(("cu", "rocm")):
        says = f"torch {torch} is a build for another accelerator; torch_npu refuses two at once"
        hint = "pip install torch=={} --index-url https://download.pytorch.org/whl/cpu".format(torch.partition("+")[0])
        return [VersionFact("torch/build", MISFIT, says, hint, "torch_npu/__init__.py")]
    if arch == "x86_64" and local == "":
        says = f"torch {torch} on x86_64 does not say which build it is; torch_npu needs the CPU build"
        return [VersionFact("torch/build", UNKNOWN, says, None, "torch_npu wheel metadata")]
    return [VersionFact("torch/build", FITS, f"torch {torch} is no build for another accelerator", None, None)]


def _driver_firmware(driver: DriverVersion, firmware: FirmwareVersion) -> VersionFact:
    both = f"driver {driver.version}, firmware {firmware.version}"
    source = "compatible_version_fw and compatible_version_drv of the version.info files"
    fits = driver_takes_firmware(driver, firmware)
    if fits is None:
        return VersionFact("driver/firmware", UNKNOWN, f"{both}: neither names the other", None, source)
    if fits:
        return VersionFact("driver/firmware", FITS, f"{both}: each takes the other", None, source)
    wanted = ", ".join(f"{one.low} to {one.high}" for one in driver.firmware_intervals)
    says = f"{both}: the driver takes firmware {wanted}" if wanted else f"{both}: the firmware takes other drivers"
    return VersionFact("driver/firmware", MISFIT, says, "install both from one HDK release, driver first", source)


def _same(one: str | None, other: str) -> bool:
    return one is not None and (one.lower() == other.lower() or parse_version(one) == parse_version(other) is not None)


def _source(release: Release | None) -> str | None:
    sources: Mapping[str, str] = load_table("compatibility")["sources"]
    return sources[release.source] if release else None


@lru_cache(maxsize=1)
def _releases() -> Mapping[str, Release]:
    rows: Sequence[Mapping[str, Any]] = load_table("compatibility")["rows"]
    return {row["torch_npu"]: _release(row) for row in rows}


def _release(row: Mapping[str, Any]) -> Release:
    python, wheels = (None if row[key] is None else tuple(row[key]) for key in ("python", "wheels"))
    source, doubt = row["source"], row.get("doubt")
    return Release(row["torch_npu"], row["torch"], row["cann"], python, wheels, source, doubt)
