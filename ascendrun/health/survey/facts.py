"""Facts about one node; None means unknown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from functools import cached_property
from typing import Any

from ascendrun.core.dataclass import dataclass
from ascendrun.core.reports import Route
from ascendrun.health.survey.npu_facts import GpuProcess, NpuFacts
from ascendrun.text import Text

NOT_INSTALLED = Text("doctor.not-installed", "not installed")


@dataclass(frozen=True)
class Unreached:
    """A host that could not be surveyed: a code of core/errors, the message, the hint."""

    code: str
    message: str | Text
    hint: str | Text | None = None


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
class NodeFacts:
    """One node. `is_local`: it is the head node's machine, without SSH.

    `limits`: (soft, hard) by name without RLIMIT_, None inside: unlimited.
    `login_s`: from the command's start to its first output, with startup files; `login_noise`: their output.
    `clock_offset_s`: node clock minus head node clock. `kills_user_processes`: logind does so at logout.
    `disks`, `writes`, `paths`: by queried path. `taken_ports`: of the queried ports.
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
    agent_python: str | None = None
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
    environ: Mapping[str, str] | None = field(default=None, repr=False)
    routes: Mapping[str, Route] | None = None
    addresses: Mapping[str, tuple[str, ...]] | None = None
    taken_ports: Mapping[int, PortHolder] | None = None
    port_ranges: tuple[tuple[int, int], tuple[tuple[int, int], ...]] | None = None
    connection_tests: tuple[ConnectionTest, ...] | None = None
    training: Mapping[str, Mapping[str, Any]] | None = None
    leases: tuple[Lease, ...] | None = None
    gpu_processes: tuple[GpuProcess, ...] | None = None
    npu: NpuFacts = NpuFacts()
    late: tuple[str, ...] = ()

    @cached_property
    def route_kinds(self) -> tuple[Route, ...]:
        """Return the distinct routes without peers: a thousand hosts have a million pairs."""
        routes = list((self.routes or {}).values())
        if routes and routes.count(routes[0]) == len(routes):
            return (routes[0],)
        return tuple({id(route): route for route in routes}.values())
