"""Input of the boot process: plain values, sent as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Common:
    """What all hosts share.

    `home`: root's home. `users`: (name, shell) of further accounts. `shares`: (machine directory, directory in the
    host).
    `shared_home`: a machine directory that holds what all hosts share of their homes; None: each has its own.
    `covers`: submounts of the machine's "/" that hosts see too, each as an overlay.
    """

    home: str
    etc_hosts: str
    known_hosts: str
    authorized_keys: str
    private_key: str
    users: tuple[tuple[str, str], ...]
    shares: tuple[tuple[str, str], ...]
    covers: tuple[str, ...]
    shared_home: str | None


@dataclass(frozen=True)
class HostPlan:
    """One host. `disk`: size as mount knows it ("64M"). `groups`: cgroup.procs files that its init joins.

    `shell`: root's login shell, None: the machine's. `noise`: what its rc file prints. `python`: what its
    /usr/local/bin/python3 is, None: nothing is put there. `kept_disk`: an inherited descriptor of the mount namespace
    of its last boot, whose files it continues with; None: an empty disk. `boot_id`: None: a new one.
    """

    name: str
    index: int
    address: str
    folder: str
    disk: str
    groups: tuple[str, ...]
    host_key: str
    sshd_config: str
    shell: str | None
    noise: str | None
    python: str | None
    kept_disk: int | None
    boot_id: str | None


@dataclass(frozen=True)
class HeadPlan:
    """The head. `ssh_files`: what its ~/.ssh holds, text by name."""

    folder: str
    home: str
    etc_hosts: str
    ssh_files: Mapping[str, str]
    groups: tuple[str, ...]


@dataclass(frozen=True)
class BootPlan:
    """What to boot: a head (None: the one whose init is `head_pid`) and hosts."""

    common: Common
    hosts: tuple[HostPlan, ...]
    head: HeadPlan | None
    head_pid: int | None


def dump_plan(plan: BootPlan) -> str:
    return json.dumps(asdict(plan))


def load_plan(text: str) -> BootPlan:
    raw: Mapping[str, Any] = json.loads(text)
    common = {key: _tuples(value) for key, value in raw["common"].items()}
    hosts = tuple(HostPlan(**{key: _tuples(value) for key, value in host.items()}) for host in raw["hosts"])
    head = HeadPlan(**{key: _tuples(value) for key, value in raw["head"].items()}) if raw["head"] else None
    return BootPlan(common=Common(**common), hosts=hosts, head=head, head_pid=raw["head_pid"])


def _tuples(value: Any) -> Any:
    return tuple(_tuples(part) for part in value) if isinstance(value, list) else value
