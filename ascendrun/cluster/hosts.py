"""Hosts: commands on them, their state, drains, leases, SSH host keys."""

from __future__ import annotations

import time
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from ascendrun.cluster.api import Part
from ascendrun.core.errors import AscendrunError, ConflictError, InvalidInputError, Problem, UnreachableError
from ascendrun.core.hosts import load_hosts, parse_hostfile, select_hosts
from ascendrun.core.names import expand_names, split_list
from ascendrun.head.state.user_files import read_hostfile
from ascendrun.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ascendrun.backends.ssh import HostKeyScan
    from ascendrun.core.hosts import Host
    from ascendrun.core.machines import Machine, MachineRecord, QueueDrain
    from ascendrun.head.protocol.control_messages import ChangeMachines
    from ascendrun.head.state.store import Store
    from ascendrun.query.host_views import DeviceUse, ExecResult, HostStatus, MachineView
    from ascendrun.query.views import JobView

HostSelection = Union["Sequence[Host]", str, None]
"""None: the hosts of the setting `hostfile`. A string names some of them: npu[01-04] or @group."""
LEASE_PROBES = ("leases", "npu-smi", "gpu-processes")
RELEASE_S = 60.0
IDENTIFY_S = 10.0
"""Seconds in which a host that is drained for all users is identified, so that its other addresses count too."""
WAITING = ("QUEUED", "BACKOFF")
"""States in which a job uses no host."""


class Hosts(Part):
    """Operations on hosts. `HostSelection` in a signature: hosts, names of hosts, or None for the setting."""

    def select(self, hosts: HostSelection = None, *, hostfile: str | Path | None = None) -> tuple[Host, ...]:
        """Return the hosts of a hostfile (None: the setting), limited to names. Without a file, the names are hosts.

        Raises NotFoundError; InvalidInputError, also without both a file and names.
        """
        if hosts is not None and not isinstance(hosts, str):
            return tuple(hosts)
        path = Path(hostfile) if hostfile else self._head.settings.hostfile
        if path is not None:
            listed = read_hostfile(path)
            return listed if hosts is None else select_hosts(listed, hosts)
        if hosts is None:
            raise InvalidInputError([Problem("hosts", None, None, Text("cli.no-hosts", "no hosts given"))])
        if hosts.lstrip().startswith("@"):
            needs = Text("hosts.group-needs-file", "group {group} requires a hostfile", group=hosts.strip())
            raise InvalidInputError(
                [Problem("hosts", None, None, needs, Text("hosts.group-needs-file.hint", "add --hostfile FILE"))]
            )
        return parse_hostfile(hosts.replace(" ", "\n"), "HOSTS")

    def known(self, names: str) -> tuple[Host, ...]:
        """Return hosts by their names in the hostfiles of jobs; others are those of the setting `hostfile`."""
        known: dict[str, dict[str, Host]] = {}
        for host in self.every():
            known.setdefault(host.name, {})[f"{host.addr or host.name}:{host.port or 22}"] = host
        pieces = [piece.strip() for piece in split_list(names)]
        if any(piece.startswith("@") for piece in pieces):
            return self.select(names)
        wanted = [name for piece in pieces for name in expand_names(piece)]
        if any(name not in known for name in wanted):
            return self.select(names)
        return tuple(host for name in wanted for host in known[name].values())

    def every(self) -> tuple[Host, ...]:
        """Return the hosts of all jobs and machine records, the newest of a name and address last."""
        with self._head.store() as store:
            rows = [load_hosts(stored.hosts) for stored in store.jobs.all()]
            rows += [record.hosts for record in store.machines.all()]
        return tuple(host for row in rows for host in row)

    def execute(
        self, hosts: HostSelection, argv: Sequence[str], *, timeout_s: float | None = None
    ) -> Iterator[ExecResult]:
        """Run argv on every host in parallel; yield one result for every host, in order of arrival.

        `timeout_s`: of the command on a host, None: the setting.
        """
        from ascendrun.head.protocol.control_messages import Exec
        from ascendrun.query.host_views import make_exec_result

        timeout_s = self._head.settings.exec_timeout_s if timeout_s is None else timeout_s
        request = Exec(self.select(hosts), tuple(argv), timeout_s)
        for reply, body in self._head.stream(request, timeout_s=timeout_s + 60.0):
            yield make_exec_result(reply, body, timeout_s)

    def nodes(
        self, hosts: HostSelection = None, *, timeout_s: float = 90.0, with_usage: bool = False
    ) -> Iterator[HostStatus]:
        """Query the state of every host; yield one status for every host, in order of arrival.

        `with_usage`: also the disk use of ascendrun, for which a host reads its directories.
        """
        from ascendrun.head.protocol.control_messages import Nodes
        from ascendrun.query.host_views import make_host_status

        holders, keepers = users_of(self._cluster.jobs.list())
        machines = self.held()
        with self._head.store() as store:
            records = self._records(store)
        chosen = {host.name: host for host in self.select(hosts)}
        for reply, _ in self._head.stream(Nodes(tuple(chosen.values()), with_usage), timeout_s=timeout_s):
            status = make_host_status(reply, holders, chosen[reply.host], machines, records)
            yield replace(status, spare_of=keepers.get(reply.host))

    def machines(self) -> tuple[MachineView, ...]:
        """Return every machine that this head node knows, with its state. Works without a controller."""
        from ascendrun.query.host_views import make_machine_views

        with self._head.store() as store:
            return make_machine_views(self._records(store), store.machines.held(), store.jobs.all(), now_s=time.time())

    def drain(
        self,
        hosts: HostSelection,
        *,
        reason: str = "",
        until_s: float | None = None,
        now: bool = False,
        at_s: float | None = None,
    ) -> tuple[Host, ...]:
        """Close hosts to new jobs, until `until_s` (UTC) or `undrain`; return them. Running jobs continue. If this user
        is an administrator of a shared queue: to jobs of all its users.

        `at_s`: when (UTC); until then only jobs start there that end before by their limit. `now`: jobs that may
        restart are stopped after a checkpoint and placed elsewhere. Raises NotFoundError.
        """
        return self._change_machines("drain", hosts, reason=reason, until_s=until_s, now=now, at_s=at_s)

    def undrain(self, hosts: HostSelection) -> tuple[Host, ...]:
        """Open hosts to new jobs again, also from quarantine, without a check; return them. Raises NotFoundError,
        and ConflictError for hosts that an administrator of a shared queue has drained, if this user is none."""
        return self._change_machines("undrain", hosts)

    def lost(self, hosts: HostSelection, *, reason: str = "", force: bool = False) -> tuple[Host, ...]:
        """State that hosts are gone with all their processes; return them. They are drained until `undrain`. Only jobs
        of this user end or restart by that.

        Raises NotFoundError, and ConflictError if one of them answers now; with `force` they are not asked. Without the
        server of a shared queue, they are drained for this user only.
        """
        return self._change_machines("lost", hosts, reason=reason, force=force)

    def end_quarantine(self, hosts: Sequence[Host]) -> None:
        """Open hosts in quarantine that passed a deep examination."""
        from ascendrun.core.machines import address_of

        with self._head.store() as store:
            closed = {
                address for one in store.machines.all() if one.quarantine is not None for address in one.addresses
            }
        passed = [host for host in hosts if address_of(host) in closed]
        if passed:
            self._change_machines("deep", passed)

    def leases(self, hosts: HostSelection = None) -> tuple[tuple[DeviceUse, ...], Mapping[str, Text | str]]:
        """Return what uses devices and ports of ascendrun on the hosts, and why hosts did not respond, by host."""
        from ascendrun.query.host_views import make_device_uses

        context = self._cluster.checks.survey(hosts, names=LEASE_PROBES, is_full=False)
        return make_device_uses(context), {host: one.message for host, one in context.unreached.items()}

    def held(self) -> tuple[Machine, ...]:
        """Return the machines that no job may use, with what holds them. Works without a controller."""
        with self._head.store() as store:
            return store.machines.held()

    def release(self, host: str) -> None:
        """State that no process of a job is left on a host that is held.

        Raises NotFoundError if it is not held, ConflictError while it responds and shows processes.
        """
        from ascendrun.head.protocol.control_messages import Release

        self._head.request(Release(host, self._head.user), timeout_s=RELEASE_S, repeat=True)

    def scan_keys(self, hosts: HostSelection = None) -> Iterator[HostKeyScan]:
        """Yield the SSH host key of each host in order of arrival; record nothing. Local hosts are skipped."""
        from ascendrun.backends.ssh import scan_host_keys

        return scan_host_keys(self._head.settings, [host for host in self.select(hosts) if not host.is_local])

    def record_keys(self, scans: Iterable[HostKeyScan], *, replaces: bool = False) -> None:
        """Trust the scanned keys. `replaces`: also if another key is recorded."""
        from ascendrun.backends.ssh import record_scans

        record_scans(self._head.settings, scans, replaces=replaces)

    def _change_machines(self, change: str, hosts: HostSelection, **values: Any) -> tuple[Host, ...]:
        from ascendrun.head.protocol.control_messages import ChangeMachines

        chosen = self.known(hosts) if isinstance(hosts, str) else self.select(hosts)
        request = ChangeMachines(chosen, change, self._head.user, **values)
        is_admin = False
        with suppress(UnreachableError) if change == "lost" else nullcontext():  # own jobs there end all the same
            is_admin = change != "deep" and self._cluster.queue.is_admin()
        if change == "undrain" and not is_admin:
            self._require_own_drain(chosen)
        if change != "drain" or not is_admin:  # else one fact, which the queue has
            self._head.request(request, timeout_s=RELEASE_S, repeat=True)
        if is_admin:
            self._drain_for_all(request)
        return chosen

    def _identify(self, hosts: Sequence[Host]) -> Iterator[MachineRecord]:
        """Yield the machines of hosts that respond in time."""
        from ascendrun.core.machines import MachineRecord, machine_id
        from ascendrun.head.protocol.control_messages import Nodes

        chosen = {host.name: host for host in hosts}
        with suppress(AscendrunError):  # the others are known by their addresses
            for reply, _ in self._head.stream(Nodes(tuple(hosts), False), timeout_s=IDENTIFY_S) if hosts else ():
                key = machine_id(chosen[reply.host], reply.report.machine_key if reply.report else None)
                if key is not None:
                    yield MachineRecord(key, (chosen[reply.host],))

    def _records(self, store: Store) -> tuple[MachineRecord, ...]:
        """Return the known machines, with the drains of a shared queue that responds."""
        from ascendrun.core.machines import with_drains

        drains: Sequence[QueueDrain] = ()
        if self._head.settings.queue is not None:
            with suppress(AscendrunError):
                drains = self._cluster.queue.drain(())
        return with_drains(store.machines.all(), drains, time.time())

    def _require_own_drain(self, hosts: Sequence[Host]) -> None:
        from ascendrun.core.machines import address_of

        if self._head.settings.queue is None:
            return
        addresses, now_s = set(map(address_of, hosts)), time.time()
        with self._head.store() as store:
            drained = [one for one in self._records(store) if one.addresses & addresses and one.queue_drain is not None]
        for one in drained:
            if one.queue_drain is not None and not one.queue_drain.is_open(now_s):
                raise ConflictError.of(
                    "queue.drained-for-all",
                    "{host} is drained for all users of the shared queue by {admin}",
                    "ask {admin} to run: ascendrun undrain {host}",
                    host=one.hosts[0].name,
                    admin=one.queue_drain.by,
                )

    def _drain_for_all(self, request: ChangeMachines) -> None:
        from ascendrun.core.machines import Closure, MachineState, QueueDrain, address_of

        until_s = 0.0 if request.change == "undrain" else request.until_s
        reason = request.reason or (Text("machine.lost", "reported as lost") if request.change == "lost" else "")
        closure = Closure(
            MachineState.DRAINED, reason, request.by, 0.0, until_s, starts_at_s=request.at_s, moves=request.now
        )
        with self._head.store() as store:
            records = store.machines.all()
        known = {address for record in records if record.is_identified for address in record.addresses}
        records += tuple(self._identify([host for host in request.hosts if address_of(host) not in known]))
        self._cluster.queue.drain([QueueDrain.of(host, records, closure) for host in request.hosts])


def users_of(jobs: Iterable[JobView]) -> tuple[dict[str, str], dict[str, str]]:
    """Return {host: the live job that uses it} and {host: the live job of which it is a spare}."""
    placed = [job for job in jobs if job.last_state not in WAITING]
    return (
        {host: job.id for job in placed for host in job.hosts},
        {host: job.id for job in placed for host in job.spares},
    )
