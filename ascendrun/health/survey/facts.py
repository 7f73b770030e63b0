"""What is known of one node; None means unknown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ascendrun.core.reports import Route
from ascendrun.health.survey.npu_facts import NpuFacts
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
    """A file system, asked for by a path; `at`: the nearest folder that exists."""

    at: str
    free_bytes: int | None = None
    total_bytes: int | None = None
    free_inodes: int | None = None
    total_inodes: int | None = None


@dataclass(frozen=True)
class WriteResult:
    """Write, rename, fsync in a folder. `error` None: it worked. `uid`: the folder's owner."""

    at: str
    error: str | Text | None = None
    code: str | None = None
    uid: int | None = None
    wall_s: float | None = None
    is_late: bool = False


@dataclass(frozen=True)
class PortHolder:
    """Who has a port; None where this user may not see it. `tag`: of the ascendrun job that it belongs to."""

    uid: int | None = None
    pid: int | None = None
    command: str | None = None
    tag: str | None = None


@dataclass(frozen=True)
class SshdFacts:
    """`max_startups` as sshd writes it: start:rate:full."""

    max_startups: str | None = None
    max_sessions: int | None = None


@dataclass(frozen=True)
class PathSize:
    """A path that a job reads. `truncated`: too many files to count; `size_bytes` is then of a part."""

    kind: str | None = None
    size_bytes: int | None = None
    files: int | None = None
    truncated: bool = False
    missing: bool = False
    error: str | Text | None = None


@dataclass(frozen=True)
class PythonFacts:
    """The interpreter of the job in its shell. `setup`: fine, failed, no-command; None: the job has none.

    `modules`: versions by distribution name, None inside: not installed.
    """

    setup: str | None = None
    executable: str | None = None
    version: str | None = None
    modules: Mapping[str, str | None] | None = None
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
class NodeFacts:
    """One node. `is_local`: it is the head's own machine, without SSH.

    `limits`: (soft, hard) by name without RLIMIT_, None inside: unlimited.
    `login_s`: from the command's start to its first word, startup files included; `login_noise`: what those wrote.
    `clock_offset_s`: node clock minus head clock. `kills_user_processes`: logind does so at logout.
    `disks`, `writes`, `paths`: by the path asked for. `taken_ports`: of those that were asked.
    `late`: names of probes that had no answer in time.
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
    npu: NpuFacts = NpuFacts()
    late: tuple[str, ...] = ()

    @cached_property
    def route_kinds(self) -> tuple[Route, ...]:
        """The routes without the peers, each once where peers share it: a thousand hosts have a million pairs."""
        routes = list((self.routes or {}).values())
        if routes and routes.count(routes[0]) == len(routes):
            return (routes[0],)
        return tuple({id(route): route for route in routes}.values())
