"""What is known of one node; None everywhere means: could not look."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Mapping, Optional, Tuple

from ascendrun.core.reports import Route
from ascendrun.health.npu_facts import NpuFacts


@dataclass(frozen=True)
class Unreached:
    """A host without an answer: an error code of core/errors, the fact, the way out."""

    code: str
    message: str
    hint: Optional[str] = None


@dataclass(frozen=True)
class Disk:
    """A file system, asked for by a path; `at`: the nearest folder that exists."""

    at: str
    free_bytes: Optional[int] = None
    total_bytes: Optional[int] = None
    free_inodes: Optional[int] = None
    total_inodes: Optional[int] = None


@dataclass(frozen=True)
class WriteResult:
    """Write, rename, fsync in a folder. `error` None: it worked. `uid`: the folder's owner."""

    at: str
    error: Optional[str] = None
    code: Optional[str] = None
    uid: Optional[int] = None
    wall_s: Optional[float] = None
    is_late: bool = False


@dataclass(frozen=True)
class PortHolder:
    """Who has a port; None where this user may not see it. `tag`: of the ascendrun job that it belongs to."""

    uid: Optional[int] = None
    pid: Optional[int] = None
    command: Optional[str] = None
    tag: Optional[str] = None


@dataclass(frozen=True)
class SshdFacts:
    """`max_startups` as sshd writes it: start:rate:full."""

    max_startups: Optional[str] = None
    max_sessions: Optional[int] = None


@dataclass(frozen=True)
class PathSize:
    """A path that a job reads. `truncated`: too many files to count; `size_bytes` is then of a part."""

    kind: Optional[str] = None
    size_bytes: Optional[int] = None
    files: Optional[int] = None
    truncated: bool = False
    missing: bool = False
    error: Optional[str] = None


@dataclass(frozen=True)
class PythonFacts:
    """The job's interpreter in the job's shell. `setup`: fine, failed, no-command; None: the job has none.

    `modules`: versions by distribution name, None inside: not installed.
    """

    setup: Optional[str] = None
    executable: Optional[str] = None
    version: Optional[str] = None
    modules: Optional[Mapping[str, Optional[str]]] = None
    start_s: Optional[float] = None
    error: Optional[str] = None


@dataclass(frozen=True)
class TorchFacts:
    """What importing torch gave, in a child process. `error` at `step`, None: all went well."""

    torch: Optional[str] = None
    torch_npu: Optional[str] = None
    import_s: Optional[float] = None
    devices: Optional[int] = None
    backend: Optional[str] = None
    has_backend: Optional[bool] = None
    step: Optional[str] = None
    error: Optional[str] = None
    noise: str = ""


@dataclass(frozen=True)
class Touch:
    """One try to reach a peer's port; `error` None: it was reached. `code`: refused, silent, wrong-host, failed."""

    peer: str
    address: str
    port: int
    error: Optional[str] = None
    code: Optional[str] = None
    wall_s: Optional[float] = None


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
    is_local: Optional[bool] = None
    root: Optional[str] = None
    login_s: Optional[float] = None
    login_noise: Optional[str] = None
    user: Optional[str] = None
    uid: Optional[int] = None
    hostname: Optional[str] = None
    boot_id: Optional[str] = None
    machine_id: Optional[str] = None
    kernel: Optional[str] = None
    arch: Optional[str] = None
    os_name: Optional[str] = None
    cpus: Optional[int] = None
    memory_bytes: Optional[int] = None
    agent_python: Optional[str] = None
    clock_offset_s: Optional[float] = None
    limits: Optional[Mapping[str, Tuple[Optional[int], Optional[int]]]] = None
    sshd: Optional[SshdFacts] = None
    kills_user_processes: Optional[bool] = None
    lingering_users: Optional[Tuple[str, ...]] = None
    disks: Optional[Mapping[str, Disk]] = None
    writes: Optional[Mapping[str, WriteResult]] = None
    paths: Optional[Mapping[str, PathSize]] = None
    python: Optional[PythonFacts] = None
    torch: Optional[TorchFacts] = None
    environ: Optional[Mapping[str, str]] = field(default=None, repr=False)
    routes: Optional[Mapping[str, Route]] = None
    addresses: Optional[Mapping[str, Tuple[str, ...]]] = None
    taken_ports: Optional[Mapping[int, PortHolder]] = None
    port_ranges: Optional[Tuple[Tuple[int, int], Tuple[Tuple[int, int], ...]]] = None
    touched: Optional[Tuple[Touch, ...]] = None
    runtime: Optional[Tuple[Optional[str], Optional[str]]] = None
    npu: NpuFacts = NpuFacts()
    late: Tuple[str, ...] = ()

    @cached_property
    def route_kinds(self) -> Tuple[Route, ...]:
        """The routes without the peers, each once where peers share it: a thousand hosts have a million pairs."""
        routes = list((self.routes or {}).values())
        if routes and routes.count(routes[0]) == len(routes):
            return (routes[0],)
        return tuple({id(route): route for route in routes}.values())
