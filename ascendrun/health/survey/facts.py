"""Facts about one node and its NPUs; None means unknown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from functools import cached_property
from typing import Any

from ascendrun.ascend.hccn import Address, Fec, Link, LinkHistory, Mtu, NetHealth, Optical, Ping, Tls
from ascendrun.ascend.install import CannVersion, Components, DriverInstall, DriverVersion, FirmwareVersion, HccnConf
from ascendrun.ascend.npu_smi import NpuChip, NpuSmiInfo
from ascendrun.ascend.npu_smi_views import Board, ChipCommon, ChipEcc, ChipHealth
from ascendrun.ascend.reading import ToolError
from ascendrun.core.dataclass import dataclass
from ascendrun.core.reports import Route
from ascendrun.facts.chips import Chip, chip_of
from ascendrun.text import Text

NOT_INSTALLED = Text("doctor.not-installed", "not installed")


@dataclass(frozen=True)
class Disk:
    """A file system, queried by a path; `at`: the nearest existing directory. `kind`: its type, as in mount(8).

    `is_remote`: whether other machines may have it too; None: unknown. `device`: its number on the host.
    """

    at: str
    free_bytes: int | None = None
    total_bytes: int | None = None
    free_inodes: int | None = None
    total_inodes: int | None = None
    kind: str | None = None
    is_remote: bool | None = None
    device: int | None = None


@dataclass(frozen=True)
class WriteResult:
    """Result of write, rename, fsync in a directory. `error` None: success. `uid`: its owner."""

    at: str
    error: str | Text | None = None
    code: str | None = None
    uid: int | None = None
    wall_s: float | None = None
    is_late: bool = False


@dataclass(frozen=True)
class PortHolder:
    """The owner of a port; None if not visible to this user. `tag`: run id of its ascendrun job."""

    uid: int | None = None
    pid: int | None = None
    command: str | None = None
    tag: str | None = None


@dataclass(frozen=True)
class SshdFacts:
    """Settings of sshd. `max_startups`: as start:rate:full."""

    max_startups: str | None = None
    max_sessions: int | None = None


@dataclass(frozen=True)
class PathSize:
    """A path that a job reads. `truncated`: too many files to count; `size_bytes` is then partial."""

    kind: str | None = None
    size_bytes: int | None = None
    files: int | None = None
    truncated: bool = False
    missing: bool = False
    error: str | Text | None = None


@dataclass(frozen=True)
class PythonFacts:
    """The interpreter of the job in its shell. `setup`: fine, failed, no-command; None: the job has none.

    `modules`: versions by distribution name, None inside: not installed. `locks`: seconds since a build of a torch
    extension made its lock, by path, None inside: a process of this node holds it.
    """

    setup: str | None = None
    executable: str | None = None
    version: str | None = None
    modules: Mapping[str, str | None] | None = None
    locks: Mapping[str, float | None] = field(default_factory=dict)
    start_s: float | None = None
    error: str | Text | None = None
    is_missing: bool = False

    def version_of(self, name: str) -> str | Text | None:
        """Return the version of a package, or that it is not installed; None: unknown."""
        modules = self.modules or {}
        return (modules[name] or NOT_INSTALLED) if name in modules else None


@dataclass(frozen=True)
class ImageFacts:
    """The image of the job on a node. `id` None: not known. `problem`: code of the finding, None: it can be used;
    `detail`: what the runtime wrote."""

    runtime: str
    image: str
    id: str | None = None
    problem: str | None = None
    detail: str = ""


@dataclass(frozen=True)
class TorchFacts:
    """The result of importing torch in a child process. `error` at `step`; None: no error."""

    torch: str | None = None
    torch_npu: str | None = None
    import_s: float | None = None
    devices: int | None = None
    backend: str | None = None
    has_backend: bool | None = None
    step: str | None = None
    error: str | Text | None = None
    noise: str = ""


@dataclass(frozen=True)
class ConnectionTest:
    """One TCP connection to a port of a peer. `error` None: success. `code`: refused, silent, wrong-host, failed."""

    peer: str
    address: str
    port: int
    error: str | Text | None = None
    code: str | None = None
    wall_s: float | None = None


@dataclass(frozen=True)
class Lease:
    """A device or ports that a running attempt has for itself (node/agent/leases.py). `type`: npu, cuda, hccl or port;
    `key`: the number or bus id of the device, or the first port. `device`: its number on this node, None: no device, or
    unknown here. `tag`: run id of the attempt; it, `user` and `since_s` (UTC) are None if the owner is not stated."""

    type: str
    key: str
    device: int | None = None
    user: str | None = None
    since_s: float | None = None
    tag: str | None = None


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
    common: Mapping[int, tuple[ChipCommon, ...]] = field(default_factory=dict)


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
    mtu: Mtu | None = None

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
    def chips(self) -> Mapping[int, NpuChip]:
        """Return the chips by logic id: from the tool, otherwise in the order of its table."""
        chips = self.info.chips if self.info is not None else ()
        return {place if chip.logic_id is None else chip.logic_id: chip for place, chip in enumerate(chips)}

    @property
    def chip(self) -> Chip | None:
        """Return the chip model of the node; None: none, unknown, or several."""
        names = {chip.name for chip in self.chips.values()}
        name = names.pop() if len(names) == 1 else None
        return None if name is None else chip_of(name)

    @property
    def views(self) -> CardViews:
        return self.cards or CardViews()

    @property
    def firmware_version(self) -> str | None:
        return self.files.firmware.version if self.files is not None and self.files.firmware is not None else None

    @property
    def cann_version(self) -> str | None:
        return self.cann.version if self.cann is not None else None

    @property
    def hccl_build(self) -> str | None:
        """Return the build of HCCL in the CANN of the job's shell; None: unknown."""
        parts = self.shell_cann.components if self.shell_cann is not None else None
        return next((one.build for one in parts.components if one.name == "hccl"), None) if parts is not None else None

    @property
    def cann(self) -> CannVersion | None:
        """Return the CANN of the job's shell; otherwise the only CANN on the disk."""
        if self.shell_cann is not None and self.shell_cann.version is not None:
            return self.shell_cann.version
        known = {one.version: one for one in (self.files.canns if self.files is not None else ())}
        return next(iter(known.values())) if len(known) == 1 else None


@dataclass(frozen=True)
class NodeFacts:
    """One node. `is_local`: it is the head node's machine, without SSH.

    `limits`: (soft, hard) by name without RLIMIT_, None inside: unlimited.
    `login_s`: from the command's start to its first output, with startup files; `login_noise`: their output.
    `clock_offset_s`: node clock minus head node clock. `kills_user_processes`: logind does so at logout.
    `disks`, `writes`, `paths`: by queried path. `taken_ports`: of the queried ports.
    `mtus`: the largest packet in bytes by interface.
    `training`: what node/agent/training_files.py found at each queried path.
    `late`: names of probes that timed out. `machine_key`, `neighbours`: see NodeReport.
    """

    host: str
    is_local: bool | None = None
    root: str | None = None
    login_s: float | None = None
    login_noise: str | None = None
    user: str | None = None
    uid: int | None = None
    hostname: str | None = None
    boot_id: str | None = None
    machine_id: str | None = None
    machine_key: str | None = None
    neighbours: tuple[str, ...] | None = None
    kernel: str | None = None
    arch: str | None = None
    os_name: str | None = None
    cpus: int | None = None
    memory_bytes: int | None = None
    clock_offset_s: float | None = None
    limits: Mapping[str, tuple[int | None, int | None]] | None = None
    sshd: SshdFacts | None = None
    kills_user_processes: bool | None = None
    lingering_users: tuple[str, ...] | None = None
    null_device: str | None = None
    disks: Mapping[str, Disk] | None = None
    writes: Mapping[str, WriteResult] | None = None
    paths: Mapping[str, PathSize] | None = None
    python: PythonFacts | None = None
    torch: TorchFacts | None = None
    container: ImageFacts | None = None
    environ: Mapping[str, str] | None = field(default=None, repr=False)
    routes: Mapping[str, Route] | None = None
    addresses: Mapping[str, tuple[str, ...]] | None = None
    mtus: Mapping[str, int] | None = None
    taken_ports: Mapping[int, PortHolder] | None = None
    port_ranges: tuple[tuple[int, int], tuple[tuple[int, int], ...]] | None = None
    connection_tests: tuple[ConnectionTest, ...] | None = None
    leased_block: tuple[int, PortHolder] | None = None
    training: Mapping[str, Mapping[str, Any]] | None = None
    leases: tuple[Lease, ...] | None = None
    gpu_processes: tuple[GpuProcess, ...] | None = None
    npu: NpuFacts = NpuFacts()
    late: tuple[str, ...] = ()

    def outgoing_ports(self, ports: range) -> tuple[int, int] | None:
        """Return the range of outgoing connections if it has one of these ports, and it is not reserved from it."""
        (low, high), reserved = self.port_ranges or ((1, 0), ())
        used = range(max(low, ports.start), min(high, ports.stop - 1) + 1)
        return (low, high) if any(not any(a <= port <= b for a, b in reserved) for port in used) else None

    @cached_property
    def route_kinds(self) -> tuple[Route, ...]:
        """Return the distinct routes without peers: a thousand hosts have a million pairs."""
        routes = list((self.routes or {}).values())
        if routes and routes.count(routes[0]) == len(routes):
            return (routes[0],)
        return tuple({id(route): route for route in routes}.values())
