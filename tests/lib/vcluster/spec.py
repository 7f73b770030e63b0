"""The description of a cluster, and the boot plans for it."""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.lib.vcluster import disk, network, provision
from tests.lib.vcluster.plan import Common, HeadPlan, HostPlan
from tests.lib.vcluster.requirements import find_shell

PACKAGE_HOME = Path(__file__).resolve().parents[3]
"""The directory that holds the package `ascendrun`: a checkout, or site-packages."""


@dataclass(frozen=True)
class KeyPair:
    """`private`: OpenSSH's file. `public`: one line, type and key, no comment."""

    private: str
    public: str


def make_key() -> KeyPair:
    """Ed25519, made in this process: a fork of ssh-keygen per host would cost more than its boot."""
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return KeyPair(private=private.decode(), public=public.decode())


@dataclass(frozen=True)
class ClusterSpec:
    """Everything needed to boot any host of the cluster, now or again.

    `disk`: size of each host's disk. `sshd_options`: lines that come first in every sshd_config. `shells`, `rc_noise`,
    `pythons`: by host name. `users`: shells by account name, on every host. `shares`: directories of the machine that
    all hosts see, read and write ("NFS"). `has_shared_home`: whether all hosts have one home. `is_trusted`: whether
    the head's known_hosts knows the hosts.
    """

    names: tuple[str, ...]
    disk: str
    sshd_options: tuple[str, ...]
    shells: Mapping[str, str]
    rc_noise: Mapping[str, str]
    pythons: Mapping[str, str]
    users: Mapping[str, str]
    shares: Mapping[str, str]
    has_shared_home: bool
    is_trusted: bool
    user_key: KeyPair
    host_keys: Mapping[str, KeyPair] = field(repr=False)

    def index(self, name: str) -> int:
        """Raises KeyError for a name that is no host of the cluster."""
        if name not in self.names:
            raise KeyError(f"no host {name}; there are {', '.join(self.names)}")
        return self.names.index(name) + 1

    def address(self, name: str) -> str:
        return network.HEAD_ADDRESS if name == "head" else network.host_address(self.index(name))


def make_spec(
    count: int,
    disk_size: str,
    *,
    sshd_options: Sequence[str] = (),
    shells: Mapping[str, str] = {},
    rc_noise: Mapping[str, str] = {},
    pythons: Mapping[str, str] = {},
    users: Mapping[str, str] = {},
    shares: Mapping[str, str] = {},
    shared_home: bool = False,
    is_trusted: bool = True,
) -> ClusterSpec:
    """Raises ValueError for a name that no host has, NotSupportedError for a shell that is not installed."""
    names = tuple(f"node{number}" for number in range(1, count + 1))
    for table in (shells, rc_noise, pythons):
        for name in set(table) - set(names):
            raise ValueError(f"{name}: unknown host; expected node1 to node{count}")
    return ClusterSpec(
        names=names,
        disk=disk_size,
        sshd_options=tuple(sshd_options),
        shells={name: find_shell(shell) for name, shell in shells.items()},
        rc_noise=dict(rc_noise),
        pythons=dict(pythons),
        users={name: find_shell(shell) for name, shell in users.items()},
        shares=dict(shares),
        has_shared_home=shared_home,
        is_trusted=is_trusted,
        user_key=make_key(),
        host_keys={name: make_key() for name in names},
    )


def load_spec(raw: Mapping[str, Any]) -> ClusterSpec:
    """The spec from its JSON form (`dataclasses.asdict`)."""
    values: dict[str, Any] = dict(raw)
    values["names"], values["sshd_options"] = tuple(raw["names"]), tuple(raw["sshd_options"])
    values["user_key"] = KeyPair(**raw["user_key"])
    values["host_keys"] = {name: KeyPair(**pair) for name, pair in raw["host_keys"].items()}
    return ClusterSpec(**values)


def known_hosts(spec: ClusterSpec) -> str:
    return "".join(f"{name},{spec.address(name)} {spec.host_keys[name].public}\n" for name in spec.names)


def etc_hosts(spec: ClusterSpec) -> str:
    lines = ["127.0.0.1 localhost", f"{network.HEAD_ADDRESS} head"]
    return "\n".join(lines + [f"{spec.address(name)} {name}" for name in spec.names]) + "\n"


def make_common(spec: ClusterSpec, folder: Path, mountinfo: str) -> Common:
    shared_home = folder / "shared-home" if spec.has_shared_home else None
    if shared_home is not None:
        for name in (*disk.SHARED_OF_HOME, "home"):
            (shared_home / name).mkdir(parents=True, exist_ok=True)
    return Common(
        home=root_home(),
        etc_hosts=etc_hosts(spec),
        known_hosts=known_hosts(spec),
        authorized_keys=f"{spec.user_key.public} vcluster\n",
        private_key=spec.user_key.private,
        users=tuple(spec.users.items()),
        shares=(*_needed_hidden_directories(), *spec.shares.items()),
        covers=tuple(disk.submounts(mountinfo)),
        shared_home=None if shared_home is None else str(shared_home),
    )


def _needed_hidden_directories() -> Sequence[tuple[str, str]]:
    """The code and its interpreter, where they are under a directory that each host has for itself."""
    needed = {str(PACKAGE_HOME), os.path.realpath(sys.prefix), os.path.realpath(sys.base_prefix)}
    return [(path, path) for path in sorted(needed) if path.startswith(("/tmp/", "/run/"))]


def make_host_plan(
    spec: ClusterSpec, name: str, *, folder: Path, groups: tuple[str, ...], kept_disk: int | None, boot_id: str | None
) -> HostPlan:
    return HostPlan(
        name=name,
        index=spec.index(name),
        address=spec.address(name),
        folder=str(folder),
        disk=spec.disk,
        groups=groups,
        host_key=spec.host_keys[name].private,
        sshd_config=provision.sshd_config(spec.sshd_options),
        shell=spec.shells.get(name),
        noise=spec.rc_noise.get(name),
        python=spec.pythons.get(name, os.path.realpath(sys.executable)),
        kept_disk=kept_disk,
        boot_id=boot_id,
    )


def make_head_plan(spec: ClusterSpec, *, folder: Path, groups: tuple[str, ...]) -> HeadPlan:
    files = {"id_ed25519": spec.user_key.private, "id_ed25519.pub": f"{spec.user_key.public} vcluster\n"}
    if spec.is_trusted:
        files["known_hosts"] = known_hosts(spec)
    return HeadPlan(folder=str(folder), home=root_home(), etc_hosts=etc_hosts(spec), ssh_files=files, groups=groups)


def root_home() -> str:
    """root's home as sshd sees it, whatever $HOME says."""
    home: str | None = pwd.getpwuid(0).pw_dir
    return home or "/root"
