"""SSH host keys of many hosts: the key that each presents, whether it is recorded, and recording."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass

from ascendrun.backends import Backends
from ascendrun.backends.ssh import SshBackend, known_names
from ascendrun.core.errors import AscendrunError
from ascendrun.core.hosts import Host
from ascendrun.core.settings import Settings
from ascendrun.head.ssh.host_keys import HostKey
from ascendrun.head.ssh.transport import Deadlines

AT_ONCE = 32


@dataclass(frozen=True)
class HostKeyScan:
    """Host key of one host. `key` None: `error` has the reason. `state`: new, known, CHANGED or unreachable.
    `known_name`: the name under which the key is recorded."""

    host: Host
    known_name: str
    key: HostKey | None
    state: str
    error: AscendrunError | None


def scan_host_keys(settings: Settings, hosts: Sequence[Host]) -> Iterator[HostKeyScan]:
    """Yield one scan for each host, in order of arrival."""
    with closing(Backends(settings)) as backends, ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        backend = backends.ssh()
        for done in as_completed([pool.submit(_scan, backend, host) for host in hosts]):
            yield done.result()


def _scan(backend: SshBackend, host: Host) -> HostKeyScan:
    target = backend.resolve(host)
    name = known_names(target)[0]
    try:
        key = backend.scan_host_key(host, deadlines=Deadlines())
    except AscendrunError as error:
        return HostKeyScan(host, name, None, "unreachable", error)
    recorded = [entry.key for entry in backend.recorded(target).keys]
    return HostKeyScan(host, name, key, "new" if not recorded else "known" if key in recorded else "CHANGED", None)


def record_host_keys(settings: Settings, scans: Iterable[HostKeyScan], *, replaces: bool) -> None:
    """Record the keys of these scans; with `replaces`, replace other recorded keys."""
    with closing(Backends(settings)) as backends:
        for scan in scans:
            if scan.key is not None:
                backends.ssh().record_host_key(scan.host, scan.key, replace=replaces)
