"""Facts about the NPUs of a node; None means unknown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from ascendrun.ascend.hccn import Address, Fec, Link, LinkHistory, NetHealth, Optical, Ping, Tls
from ascendrun.ascend.install import CannVersion, Components, DriverInstall, DriverVersion, FirmwareVersion, HccnConf
from ascendrun.ascend.npu_smi import NpuChip, NpuSmiInfo
from ascendrun.ascend.npu_smi_views import Board, ChipEcc, ChipHealth
from ascendrun.ascend.reading import ToolError
from ascendrun.core.dataclass import dataclass
from ascendrun.facts.chips import Chip, chip_of


@dataclass(frozen=True)
class Owner:
    """The owner of a process on a device. `tag`: run id of its ascendrun job, None: not one."""

    user: str
    command: str
    tag: str | None = None


@dataclass(frozen=True)
class GpuProcess:
    """A process that computes on a GPU. `device`: index of nvidia-smi, None: unknown. `owner` None: not visible on the
    node, such as a process of a container."""

    pid: int
    device: int | None
    memory_mb: int | None = None
    owner: Owner | None = None

    @property
    def is_foreign(self) -> bool:
        """Whether it belongs to no attempt. The server of NVIDIA's MPS works for other processes."""
        owner = self.owner
        return owner is None or (owner.tag is None and "nvidia-cuda-mps" not in owner.command)


@dataclass(frozen=True)
class Table:
    """Output of `npu-smi info`. `info` None: npu-smi not found. `owners`: by pid, of visible processes.

    `hung`: it did not return.
    """

    info: NpuSmiInfo | None = None
    owners: Mapping[int, Owner] = field(default_factory=dict)
    hung: bool = False


@dataclass(frozen=True)
class DeviceNode:
    """A file in /dev; `is_open`: this user has read and write access."""

    is_open: bool
    mode: int = 0
    uid: int = 0
    gid: int = 0


@dataclass(frozen=True)
class CardViews:
    """Views of single NPUs by id, without those that were not queried or did not return."""

    ecc: Mapping[int, tuple[ChipEcc, ...]] = field(default_factory=dict)
    health: Mapping[int, tuple[ChipHealth, ...]] = field(default_factory=dict)
    boards: Mapping[int, Board] = field(default_factory=dict)


@dataclass(frozen=True)
class Port:
    """The network port of a device, from hccn_tool; None: unknown."""

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
        """Return the IPv4, else the IPv6 address; None: none, or unknown (see `has_no_address`)."""
        return next((one.address for one in (self.ip, self.ip6) if one is not None and one.address), None)

    @property
    def has_no_address(self) -> bool:
        return self.ip is not None and self.ip.is_set is False and (self.ip6 is None or self.ip6.is_set is False)


@dataclass(frozen=True)
class Ports:
    """By device number. `hung`: items that did not return, as `link of device 3`; `errors`: those of the tool."""

    ports: Mapping[int, Port]
    hung: tuple[str, ...] = ()
    errors: tuple[ToolError, ...] = ()


@dataclass(frozen=True)
class PortPing:
    """A ping from a device's port to an address; `ping` None: it did not return."""

    device: int
    address: str
    ping: Ping | None


@dataclass(frozen=True)
class InstallFiles:
    """Version files of the node. `canns`: every toolkit or nnae found; `set_env`: files to source."""

    install: DriverInstall | None = None
    driver: DriverVersion | None = None
    firmware: FirmwareVersion | None = None
    canns: tuple[CannVersion, ...] = ()
    set_env: tuple[str, ...] = ()
    hccn_conf: HccnConf | None = None


@dataclass(frozen=True)
class ShellCann:
    """The CANN in the variables of the job. `home` None: none; `is_gone`: the directory does not exist."""

    home: str | None = None
    is_gone: bool = False
    version: CannVersion | None = None
    components: Components | None = None


@dataclass(frozen=True)
class NpuFacts:
    """One node's devices, driver and CANN. `devices`: existing files in /dev by name."""

    table: Table | None = None
    devices: Mapping[str, DeviceNode] | None = None
    cards: CardViews | None = None
    ports: Ports | None = None
    files: InstallFiles | None = None
    shell_cann: ShellCann | None = None
    pings: tuple[PortPing, ...] | None = None

    @property
    def info(self) -> NpuSmiInfo | None:
        """Return the table; None if it lists no chips."""
        info = self.table.info if self.table is not None else None
        return info if info is not None and info.chips else None

    @property
    def has_any(self) -> bool | None:
        """Return whether this is an Ascend node, with the tool or a device; None: unknown."""
        if self.table is not None and (self.table.hung or self.table.info is not None):
            return True
        if self.davinci:
            return True
        return None if self.table is None or self.devices is None else False

    @property
    def davinci(self) -> tuple[int, ...]:
        """Return the numbers of the device files, ascending; () if none or unknown."""
        names = (name[len("davinci") :] for name in self.devices or () if name.startswith("davinci"))
        return tuple(sorted(int(number) for number in names if number.isdigit()))

    @property
    def driver_version(self) -> str | None:
        if self.files is not None and self.files.driver is not None and self.files.driver.version is not None:
            return self.files.driver.version
        return self.table.info.driver_version if self.table is not None and self.table.info is not None else None

    @property
    def cann(self) -> CannVersion | None:
        """Return the CANN of the job's shell; otherwise the only CANN on the disk."""
        if self.shell_cann is not None and self.shell_cann.version is not None:
            return self.shell_cann.version
        known = {one.version: one for one in (self.files.canns if self.files is not None else ())}
        return next(iter(known.values())) if len(known) == 1 else None


def chips_by_device(facts: NpuFacts) -> Mapping[int, NpuChip]:
    """Return the chips by logic id: from the tool, otherwise in the order of its table."""
    chips = facts.info.chips if facts.info is not None else ()
    return {place if chip.logic_id is None else chip.logic_id: chip for place, chip in enumerate(chips)}


def chip_of_node(facts: NpuFacts) -> Chip | None:
    """Return the chip model of the node; None: none, unknown, or several."""
    names = {chip.name for chip in (facts.info.chips if facts.info is not None else ())}
    name = names.pop() if len(names) == 1 else None
    return None if name is None else chip_of(name)


def read_npu(values: Mapping[str, Any]) -> NpuFacts:
    """Return facts from the values by probe name (missing or None: unknown)."""
    names = ("npu-smi", "npu-devices", "npu-cards", "hccn", "ascend-files", "cann", "hccn-pings")
    return NpuFacts(*map(values.get, names))
