"""A cluster of SSH hosts on one Linux machine: up, in use, down."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tests.lib.vcluster import containers, network, slurm
from tests.lib.vcluster import state as states
from tests.lib.vcluster.faults import Faults
from tests.lib.vcluster.groups import Groups
from tests.lib.vcluster.machines import HEAD
from tests.lib.vcluster.requirements import require_all
from tests.lib.vcluster.spec import known_hosts, make_spec

DISK = "64M"


class VirtualCluster(Faults):
    """Hosts node1, node2, … and a head, each in its own namespaces. The machine's own network is not changed, except
    for limits of the kernel that many hosts need.

    `VirtualCluster.up(2)` makes one (a context manager: it is down at the end), `VirtualCluster(folder)` finds it.
    """

    @classmethod
    def up(
        cls,
        count: int,
        *,
        disk: str = DISK,
        is_kept: bool = False,
        has_slurm: bool = False,
        has_containers: bool = False,
        **options: Any,
    ) -> VirtualCluster:
        """Boot `count` hosts; the other options are those of `make_spec`. `has_slurm`: with a Slurm of all hosts;
        `has_containers`: with a dockerd and podman in each host.

        `is_kept`: it outlives this process, until `down`. Raises NotSupportedError where the machine cannot carry it.
        """
        require_all()
        if has_slurm:
            slurm.require_slurm()
        if has_containers:
            containers.require_containers()
        base = states.base_folder(os.environ)
        sweep(base)
        network.admit_neighbours(count)
        spec = make_spec(count, disk, **options)
        cluster_id, folder = states.make_folder(base)
        if has_slurm:
            spec = replace(spec, shares={**spec.shares, **slurm.shares(folder)})
        owner = None if is_kept else states.name_process(os.getpid())
        states.save(folder, states.State(cluster_id=cluster_id, owner=owner, spec=asdict(spec)))
        Groups(cluster_id).make()
        cluster = cls(folder)
        try:
            cluster._boot(spec.names, with_head=True)
            if has_slurm:
                slurm.start(cluster)
            if has_containers:
                containers.start(cluster)
        except BaseException:
            cluster.down()
            raise
        return cluster

    def __enter__(self) -> VirtualCluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.down()

    def down(self) -> None:
        """Everything of the cluster ends, frozen hosts and commands on the head included; repeatable."""
        for name in list(self._state.relays):
            self._stop_relay(name)
        self._groups.kill_all()
        self._let_go_of_disks(self.hosts)
        self._power_off((*self.hosts, HEAD))
        self._groups.remove()
        slurm.remove_groups(self)
        states.forget(self.folder)

    def hostfile(self, *, slots: int | None = None, names: Sequence[str] | None = None, user: str | None = None) -> str:
        """The text of a hostfile of these hosts (None: all)."""
        extras = "".join((f" slots={slots}" if slots is not None else "", f" user={user}" if user else ""))
        return "".join(f"{name}{extras}\n" for name in (names if names is not None else self.hosts))

    def known_hosts(self) -> str:
        """The hosts' true keys, as lines of a known_hosts file."""
        return known_hosts(self._spec)


def clusters(base: Path) -> list[VirtualCluster]:
    """All clusters whose state is under `base` and can be read, the newest last."""
    found = []
    for folder in states.folders(base):
        try:
            found.append(VirtualCluster(folder))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # half written: its maker was killed in its first moment, before it started anything
    return found


def sweep(base: Path, *, everything: bool = False) -> list[str]:
    """Take down the clusters whose owner has died (`everything`: all of them); returns their ids."""
    gone = []
    for cluster in clusters(base):
        owner = cluster._state.owner
        if everything or (owner is not None and not owner.is_alive):
            cluster.down()
            gone.append(cluster.cluster_id)
    if everything:
        for folder in states.folders(base):
            states.forget(folder)
    return gone
