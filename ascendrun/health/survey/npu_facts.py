"""What is known of a node's NPUs; None: could not look."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ascendrun.ascend.chips import Chip, chip_of
from ascendrun.ascend.hccn import Address, Fec, Link, NetHealth, Ping, Tls
from ascendrun.ascend.hccn_conf import HccnConf
from ascendrun.ascend.hccn_counters import Optical
from ascendrun.ascend.hccn_history import LinkHistory
from ascendrun.ascend.install import CannVersion, Components, DriverInstall, DriverVersion, FirmwareVersion
from ascendrun.ascend.npu_smi import NpuChip, NpuSmiInfo
from ascendrun.ascend.npu_smi_board import Board
from ascendrun.ascend.npu_smi_views import ChipEcc, ChipHealth
from ascendrun.ascend.tool_errors import ToolError


@dataclass(frozen=True)
class Owner:
    """Whose process holds a device. `tag`: of the ascendrun job it belongs to, None: of none."""

    user: str
    command: str
    tag: str | None = None


@dataclass(frozen=True)
class Table:
    """`npu-smi info`. `info` None: there is no npu-smi. `owners`: by pid; one that is missing is not to be seen.

    `hung`: it never came back.
    """

    info: NpuSmiInfo | None = None
    owners: Mapping[int, Owner] = field(default_factory=dict)
    hung: bool = False


@dataclass(frozen=True)
class DeviceNode:
    """A file in /dev; `is_open`: this user may read and write it."""

    is_open: bool
    mode: int = 0
    uid: int = 0
    gid: int = 0


@dataclass(frozen=True)
class CardViews:
    """The views of single cards, by NPU id; of what was not asked or not answered, nothing."""

    ecc: Mapping[int, tuple[ChipEcc, ...]] = field(default_factory=dict)
    health: Mapping[int, tuple[ChipHealth, ...]] = field(default_factory=dict)
    boards: Mapping[int, Board] = field(default_factory=dict)


@dataclass(frozen=True)
class Port:
    """One device's network port, as hccn_tool tells; None: not asked, or no answer."""

    link: Link | None = None
    ip: Address | None = None
    ip6: Address | None = None
    tls: Tls | None = None
    net_health: NetHealth | None = None
    fec: Fec | None = None
    optical: Optical | None = None
    history: LinkHistory | None = None

    @property
    def address(self) -> str | None:
        """IPv4 before IPv6; None: has none, or not known (see `has_no_address`)."""
        return next((one.address for one in (self.ip, self.ip6) if one is not None and one.address), None)

    @property
    def has_no_address(self) -> bool:
        return self.ip is not None and self.ip.is_set is False and (self.ip6 is None or self.ip6.is_set is False)


@dataclass(frozen=True)
class Ports:
    """By device number. `hung`: items that never came back, as `link of device 3`; `errors`: the tool's own."""

    ports: Mapping[int, Port]
    hung: tuple[str, ...] = ()
    errors: tuple[ToolError, ...] = ()


@dataclass(frozen=True)
class PortPing:
    """A ping from a device's port to an address; `ping` None: it never came back."""

    device: int
    address: str
    ping: Ping | None


@dataclass(frozen=True)
class InstallFiles:
    """Version files on the node's disk. `canns`: every toolkit or nnae found; `set_env`: files to source."""

    install: DriverInstall | None = None
    driver: DriverVersion | None = None
    firmware: FirmwareVersion | None = None
    canns: tuple[CannVersion, ...] = ()
    set_env: tuple[str, ...] = ()
    hccn_conf: HccnConf | None = None


@dataclass(frozen=True)
class ShellCann:
    """The CANN that the job's variables lead to. `home` None: they lead to none; `is_gone`: to no folder."""

    home: str | None = None
    is_gone: bool = False
    version: CannVersion | None = None
    components: Components | None = None


@dataclass(frozen=True)
class NpuFacts:
    """One node's devices, driver and CANN. `devices`: files in /dev by name, without those that are not there."""

    table: Table | None = None
    devices: Mapping[str, DeviceNode] | None = None
    cards: CardViews | None = None
    ports: Ports | None = None
    files: InstallFiles | None = None
    shell_cann: ShellCann | None = None
    pings: tuple[PortPing, ...] | None = None

    @property
    def info(self) -> NpuSmiInfo | None:
        """Only when it says something of chips."""
        info = self.table.info if self.table is not None else None
        return info if info is not None and info.chips else None

    @property
    def has_any(self) -> bool | None:
        """Whether this is an Ascend node: its tool is there, or a device; None: could not look."""
        if self.table is not None and (self.table.hung or self.table.info is not None):
            return True
        if self.davinci:
            return True
        return None if self.table is None or self.devices is None else False

    @property
    def davinci(self) -> tuple[int, ...]:
        """The numbers of the device files, ascending; () where there are none or nobody could look."""
        names = (name[len("davinci") :] for name in self.devices or () if name.startswith("davinci"))
        return tuple(sorted(int(number) for number in names if number.isdigit()))

    @property
    def driver_version(self) -> str | None:
        if self.files is not None and self.files.driver is not None and self.files.driver.version is not None:
            return self.files.driver.version
        return self.table.info.driver_version if self.table is not None and self.table.info is not None else None

    @property
    def cann(self) -> CannVersion | None:
        """Of the job's shell; else the only one on the disk."""
        if self.shell_cann is not None and self.shell_cann.version is not None:
            return self.shell_cann.version
        known = {one.version: one for one in (self.files.canns if self.files is not None else ())}
        return next(iter(known.values())) if len(known) == 1 else None


def chips_by_device(facts: NpuFacts) -> Mapping[int, NpuChip]:
    """The chips by logic id: as the tool says it, else in the order of its table."""
    chips = facts.info.chips if facts.info is not None else ()
    return {place if chip.logic_id is None else chip.logic_id: chip for place, chip in enumerate(chips)}


def chip_of_node(facts: NpuFacts) -> Chip | None:
    """The chip that the node's devices are; None: none, not known, or not all the same."""
    names = {chip.name for chip in (facts.info.chips if facts.info is not None else ())}
    name = names.pop() if len(names) == 1 else None
    return None if name is None else chip_of(name)


def read_npu(said: Mapping[str, Any]) -> NpuFacts:
    """From the read answers by probe name (missing or None: could not look)."""
    return NpuFacts(
        table=said.get("npu-smi"),
        devices=said.get("npu-devices"),
        cards=said.get("npu-cards"),
        ports=said.get("hccn"),
        files=said.get("ascend-files"),
        shell_cann=said.get("cann"),
        pings=said.get("hccn-pings"),
    )
