"""Views of hosts that `ascendrun.Cluster` returns: results of commands, and their state."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ascendrun.core.dataclass import dataclass
from ascendrun.core.hosts import Host, load_hosts
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.core.machines import Closure, Hold, Machine, MachineRecord, MachineState
    from ascendrun.head.protocol.control_messages import ExecReply, NodeReply
    from ascendrun.head.state.job_table import StoredJob
    from ascendrun.health.survey.check_context import CheckContext


@dataclass(frozen=True)
class ExecResult:
    """Reply of one host to `exec`. `exit_code` None with `error` set: it did not run or did not end in time.
    `error_host`: the host that the error names, None: none."""

    host: str
    exit_code: int | None
    stdout: bytes
    stderr: bytes
    error: Text | str | None
    wall_s: float
    error_host: str | None = None


@dataclass(frozen=True)
class HostStatus:
    """One host as `nodes` shows it: reachable or why not, and its report about itself (None: unreachable).

    `holds`, `closures`: why no job is placed there, () if one may be: what holds it, and who closed it. `spare_of`: the
    job that keeps it as a replacement. `used_bytes`: disk use of ascendrun for this user, with code that
    hosts of one home share; None: unknown, or not queried.
    """

    host: str
    reachable: bool
    error: Text | str | None
    hint: Text | str | None
    hostname: str | None = None
    python_version: str | None = None
    cpus: int | None = None
    memory_bytes: int | None = None
    free_bytes: int | None = None
    clock_offset_s: float | None = None
    job: str | None = None
    holds: tuple[Hold, ...] = ()
    closures: tuple[Closure, ...] = ()
    spare_of: str | None = None
    used_bytes: int | None = None


REPORTED = ("hostname", "python_version", "cpus", "memory_bytes", "free_bytes", "clock_offset_s")
"""Fields of a HostStatus that the host reports about itself."""


@dataclass(frozen=True)
class MachineView:
    """One machine that this head node knows, as `nodes --all` shows it. `names`: in hostfiles. `jobs`: that use it, or
    whose processes may live there. `reason`, `by`, `since_s`, `until_s`: of its state, or of a planned drain, None:
    there is neither.
    `heard_at_s`: when it last reported itself, 0: never. `examined_at_s`: newest check in the background, None: none;
    `finding`: what it found. Times are UTC seconds."""

    names: tuple[str, ...]
    address: str
    state: MachineState
    jobs: tuple[str, ...]
    reason: Text | None
    by: str | None
    since_s: float | None
    until_s: float | None
    heard_at_s: float
    examined_at_s: float | None = None
    finding: Text | None = None


def make_machine_views(
    records: Sequence[MachineRecord], held: Sequence[Machine], jobs: Sequence[StoredJob], *, now_s: float
) -> tuple[MachineView, ...]:
    """Make the views of all machines. `held`: those that no job may use; `jobs`: all, also
    those that have ended: their hosts are known."""
    from ascendrun.core.machines import MachineRecord, address_of

    users: dict[str, list[str]] = {}
    keepers: dict[str, list[str]] = {}
    for stored in jobs:
        for host in load_hosts(stored.hosts):
            if not stored.job.is_terminal and host.name in stored.job.hosts:
                users.setdefault(address_of(host), []).append(stored.job.id)
            elif not stored.job.is_terminal and stored.job.hosts and host.name in stored.job.spares:
                keepers.setdefault(address_of(host), []).append(stored.job.id)
    views = [_machine_view(record, held, users, keepers, now_s) for record in records]
    known = {address for record in records for address in record.addresses}
    views += [
        _machine_view(MachineRecord(address, (host,)), held, users, keepers, now_s)
        for address, host in {
            address_of(host): host
            for stored in jobs
            for host in load_hosts(stored.hosts)
            if stored.job.used_hosts and host.name in stored.job.used_hosts
        }.items()
        if address not in known
    ]
    return tuple(sorted(views, key=lambda view: view.names))


def _machine_view(
    record: MachineRecord,
    held: Sequence[Machine],
    users: Mapping[str, Sequence[str]],
    keepers: Mapping[str, Sequence[str]],
    now_s: float,
) -> MachineView:
    from ascendrun.core.machines import MachineState

    used = [job for address in record.addresses for job in users.get(address, ())]
    kept = [job for address in record.addresses for job in keepers.get(address, ())]
    holds = [hold for one in held if one.key == record.key or one.addresses & record.addresses for hold in one.holds]
    state, reason, closure = MachineState.FREE, None, next(iter(record.closures(now_s)), None)
    since_s = None
    if holds:
        state, reason, since_s = holds[0].state, holds[0].reason(), holds[0].since_s
    elif closure is not None:
        is_draining = bool(used) and closure.state is MachineState.DRAINED
        state = MachineState.DRAINING if is_draining else closure.state
        reason, since_s = closure.message(), closure.since_s
    elif used or kept:
        state = MachineState.HELD if used else MachineState.SPARE
    planned = record.planned(now_s)
    if reason is None and planned is not None:
        reason, since_s, closure = planned.message(now_s), planned.starts_at_s, planned
    return MachineView(
        names=tuple(dict.fromkeys(host.name for host in record.hosts)),
        address=min(record.addresses, default="-"),
        state=state,
        jobs=tuple(dict.fromkeys((*(hold.job for hold in holds), *used, *kept))),
        reason=reason,
        by=closure.by if closure is not None and not holds else None,
        since_s=since_s,
        until_s=closure.until_s if closure is not None and not holds else None,
        heard_at_s=record.heard_at_s,
        examined_at_s=record.examined_at_s,
        finding=record.finding,
    )


@dataclass(frozen=True)
class DeviceUse:
    """Use of a device or of ports on a host: a lease of an attempt, or a process outside ascendrun (`pid` is set).

    `type`: npu, cuda, hccl or port; `key`: number or bus id of the device, or first port. `device`: number on the host,
    None: ports, or unknown. `run_id`, `user`, `since_s` (UTC): of the owner, None: unknown.
    """

    host: str
    type: str
    key: str
    device: int | None = None
    user: str | None = None
    run_id: str | None = None
    since_s: float | None = None
    pid: int | None = None
    command: str | None = None


def make_device_uses(context: CheckContext) -> tuple[DeviceUse, ...]:
    """Return the leases of each host, and after them the processes on its NPUs and GPUs that belong to no attempt."""
    from ascendrun.health.checks.npu import foreign_processes

    rows: list[DeviceUse] = []
    for host, facts in context.facts.items():
        for one in facts.leases or ():
            rows.append(DeviceUse(host, one.type, one.key, one.device, one.user, one.tag, one.since_s))
        for pid, device, owner, name in foreign_processes(facts.npu):
            user, command = (None, name) if owner is None else (owner.user, owner.command or name)
            rows.append(DeviceUse(host, "npu", str(device), device, user, pid=pid, command=command))
        for process in facts.gpu_processes or ():
            if process.is_foreign:
                user, command = (process.owner.user, process.owner.command) if process.owner else (None, None)
                key = "?" if process.device is None else str(process.device)
                rows.append(DeviceUse(host, "cuda", key, process.device, user, pid=process.pid, command=command))
    return tuple(rows)


def make_exec_result(reply: ExecReply, body: bytes, timeout_s: float) -> ExecResult:
    """Make the result of one host's reply to `exec` from the controller."""
    if reply.failed is not None:
        return ExecResult(reply.host, None, b"", b"", reply.failed.line(), reply.wall_s, reply.failed.host)
    code, error = reply.code, None
    if reply.timed_out:
        code = None
        error = Text("exec.timed-out", "did not end within {limit_s:g} s and was killed", limit_s=timeout_s)
    elif reply.signal is not None:
        code = 128 + reply.signal
    return ExecResult(reply.host, code, body[: reply.out_bytes], body[reply.out_bytes :], error, reply.wall_s)


def make_host_status(
    reply: NodeReply,
    holders: Mapping[str, str],
    host: Host,
    machines: Sequence[Machine],
    records: Sequence[MachineRecord] = (),
) -> HostStatus:
    """Make the status of one host's reply to `nodes`. `holders`: the job that uses each host; `machines`: held;
    `records`: all that are known."""
    from ascendrun.core.machines import address_of, machine_id

    report, failure = reply.report, reply.refused
    key = report.machine_key if report else None
    holds = tuple(hold for machine in machines if machine.is_at(host, key) for hold in machine.holds)
    return HostStatus(
        host=reply.host,
        reachable=report is not None,
        error=failure.message if failure else None,
        hint=failure.hint if failure and failure.hint else None,
        **{name: getattr(report, name, None) for name in REPORTED},
        job=holders.get(reply.host),
        used_bytes=reply.used_bytes,
        holds=holds,
        closures=tuple(
            closure
            for record in records
            if address_of(host) in record.addresses or (key is not None and machine_id(host, key) == record.key)
            for closure in record.closures(time.time())
        ),
    )
