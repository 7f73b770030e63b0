"""Checks of the SSH connection and of the machine: login, clock, identity, operating system, limits, and logind."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Callable

from ascendrun.core.findings import Finding, Severity
from ascendrun.core.reports import shared_homes
from ascendrun.health.survey.check_context import CheckContext, check, differing, finding, node_check
from ascendrun.health.survey.facts import NodeFacts

LOGIN_SLOW_S, LOGIN_TOO_SLOW_S = 2.0, 10.0
"""2 s delay every command; 10 s are a large part of HCCL's connect timeout."""

_CODES = {
    "auth-failed": "auth-failed",
    "host-key-unknown": "host-key-unknown",
    "host-key-changed": "host-key-changed",
    "preflight-failed": "no-python",
}


@check(
    "ssh",
    "every host is reachable, accepts the login and runs the agent",
    "unreachable auth-failed host-key-unknown host-key-changed no-python",
)
def check_ssh(context: CheckContext) -> Iterator[Finding]:
    for host, why in context.unreached.items():
        hint = why.hint or f"ssh {host} true"
        yield finding(_CODES.get(why.code, "unreachable"), Severity.FAIL, host, why=why.message, hint=hint)


@node_check("login-time", "login startup files are fast", "login-slow")
def check_login_time(context: CheckContext, host: str, facts: NodeFacts) -> Iterator[Finding]:
    wait_s = facts.login_s
    if wait_s is None or wait_s < LOGIN_SLOW_S:
        return
    severity = Severity.WARN if wait_s >= LOGIN_TOO_SLOW_S else Severity.NOTE
    yield finding("login-slow", severity, host, seconds=round(wait_s, 1))


@node_check("login-noise", "login startup files print nothing into the connection", "login-noise")
def check_login_noise(context: CheckContext, host: str, facts: NodeFacts) -> Iterator[Finding]:
    if facts.login_noise:
        lines = facts.login_noise.splitlines()
        evidence = tuple(line[:200] for line in lines[:3])
        yield finding("login-noise", Severity.NOTE, host, evidence, line=lines[0][:120])


@node_check("probes", "every probe returns in time", "probe-timeout")
def check_probes(context: CheckContext, host: str, facts: NodeFacts) -> Iterator[Finding]:
    """Report probes that did not return in time."""
    if facts.late:
        yield finding("probe-timeout", Severity.WARN, host, probes=facts.late)


CLOCK_NOTE_S, CLOCK_WARN_S = 1.0, 10.0
"""ascendrun corrects its own records; TLS, Kerberos and make on shared disks fail from a few seconds on."""

FILES_FEW, FILES_GOOD = 1024, 8192
"""Open files: DataLoader workers share tensors through them; the usual 1024 is too few for 8 ranks."""
PROCESSES_FEW = 4096
LOCKED_BYTES_GOOD = 64 << 20
STARTUPS_FEW = 5
SESSIONS_FEW = 2


@check("identity", "no machine is listed under two names", "same-machine machine-id-shared")
def check_identity(context: CheckContext) -> Iterator[Finding]:
    """Find two names for one machine: its devices would count twice. Local hosts may share this machine."""
    by_boot = _groups(context, _machine)
    for hosts in by_boot.values():
        yield finding("same-machine", Severity.FAIL, hosts, names=hosts)
    joined = {host for hosts in by_boot.values() for host in hosts}
    by_id = _groups(context, lambda facts: None if facts.is_local else facts.machine_id)
    for hosts in by_id.values():
        if not set(hosts) <= joined:
            yield finding("machine-id-shared", Severity.NOTE, hosts)


def _machine(facts: NodeFacts) -> str | None:
    """Return a machine's identity. Containers share a boot id, so it alone is not enough. None: local, or unknown."""
    if facts.boot_id is None or facts.hostname is None or facts.is_local:
        return None
    return f"{facts.boot_id} {facts.hostname} {facts.machine_id}"


def _groups(context: CheckContext, value_of: Callable[[NodeFacts], str | None]) -> dict[str, tuple[str, ...]]:
    """Return values that several hosts share, with those hosts."""
    groups: dict[str, list[str]] = {}
    for host, facts in context.facts.items():
        value = value_of(facts)
        if value:
            groups.setdefault(value, []).append(host)
    return {value: tuple(hosts) for value, hosts in groups.items() if len(hosts) > 1}


@check("home", "no node shares ascendrun's directory with another", "home-shared")
def check_home(context: CheckContext) -> Iterator[Finding]:
    """Find nodes that share a home directory. This is safe: each machine has its own state there."""
    groups: dict[str, list[str]] = {}
    for host, home in shared_homes(context.facts).items():
        groups.setdefault(home, []).append(host)
    for home, hosts in groups.items():
        if len(hosts) > 1:
            yield finding("home-shared", Severity.NOTE, tuple(sorted(hosts)), path=context.facts[home].root)


@check("power", "the power agent reports the state of hosts with a `bmc`", "power-agent", is_full=True)
def check_power(context: CheckContext) -> Iterator[Finding]:
    """Find hosts that could not be switched off."""
    for host, why in context.no_power.items():
        yield finding("power-agent", Severity.WARN, host, why=why)


@check("clock", "the nodes' clocks agree", "clock-skew")
def check_clock(context: CheckContext) -> Iterator[Finding]:
    """Compare clocks with the nodes' median: the clock of the head node (a laptop) may be wrong."""
    known = sorted(facts.clock_offset_s for facts in context.facts.values() if facts.clock_offset_s is not None)
    if not known:
        return
    # Two nodes have no majority: the clock of the head node decides.
    middle = known[(len(known) - 1) // 2] if len(known) > 2 else 0.0
    for host, facts in context.facts.items():
        off_s = 0.0 if facts.clock_offset_s is None else facts.clock_offset_s - middle
        if abs(off_s) >= CLOCK_NOTE_S:
            severity = Severity.WARN if abs(off_s) >= CLOCK_WARN_S else Severity.NOTE
            yield finding("clock-skew", severity, host, seconds=round(off_s, 1))


@check(
    "system",
    "all nodes have the same architecture, kernel and operating system",
    "arch-differs kernel-differs os-differs",
)
def check_system(context: CheckContext) -> Iterator[Finding]:
    yield from differing(context, "arch-differs", Severity.WARN, lambda facts: facts.arch)
    yield from differing(context, "kernel-differs", Severity.NOTE, lambda facts: facts.kernel)
    yield from differing(context, "os-differs", Severity.NOTE, lambda facts: facts.os_name)


@check("hardware", "all nodes have the same CPUs and memory", "cpus-differ memory-differs")
def check_hardware(context: CheckContext) -> Iterator[Finding]:
    yield from differing(context, "cpus-differ", Severity.NOTE, lambda facts: facts.cpus)
    yield from differing(context, "memory-differs", Severity.WARN, _memory_class)


def _memory_class(facts: NodeFacts) -> float | None:
    """Return memory in GiB, in steps of about 9%: the firmware's reservation differs by a few megabytes."""
    if not facts.memory_bytes or facts.memory_bytes <= 0:
        return None
    return float(f"{2 ** (round(math.log2(facts.memory_bytes) * 8) / 8) / (1 << 30):.3g}")


@check("user", "the login user is the same on all nodes, by name and uid", "user-differs uid-differs")
def check_user(context: CheckContext) -> Iterator[Finding]:
    yield from differing(context, "user-differs", Severity.NOTE, lambda facts: facts.user)
    same_user = len({facts.user for facts in context.facts.values()}) == 1
    if same_user:
        yield from differing(context, "uid-differs", Severity.WARN, lambda facts: facts.uid)


@node_check(
    "limits",
    "the limits of open files, processes and memory are sufficient",
    "limit-files limit-processes limit-locked limit-address-space",
)
def check_limits(context: CheckContext, host: str, facts: NodeFacts) -> Iterator[Finding]:
    """Check the non-interactive shell: /etc/security/limits.conf may apply to interactive logins only."""
    files = _soft(facts, "NOFILE")
    if files is not None and files < FILES_GOOD:
        severity = Severity.WARN if files < FILES_FEW else Severity.NOTE
        yield finding("limit-files", severity, host, limit=files, good=FILES_GOOD)
    processes = _soft(facts, "NPROC")
    if processes is not None and processes < PROCESSES_FEW:
        yield finding("limit-processes", Severity.WARN, host, limit=processes)
    locked = _soft(facts, "MEMLOCK")
    if context.device_type == "cuda" and locked is not None and locked < LOCKED_BYTES_GOOD:
        yield finding("limit-locked", Severity.NOTE, host, limit=locked)
    space = _soft(facts, "AS")
    if space is not None:
        yield finding("limit-address-space", Severity.WARN, host, limit=space)


@check("limits-consistency", "the limits are the same on all nodes", "limits-differ")
def check_limits_consistency(context: CheckContext) -> Iterator[Finding]:
    yield from differing(context, "limits-differ", Severity.NOTE, _limits_text)


def _limits_text(facts: NodeFacts) -> str | None:
    if facts.limits is None:
        return None
    return " ".join(
        f"{name.lower()}={'unlimited' if soft is None else soft}"
        for name, (soft, _) in sorted(facts.limits.items())
        if name in ("NOFILE", "MEMLOCK", "STACK")
    )


def _soft(facts: NodeFacts, name: str) -> int | None:
    """Return a soft limit; None: unlimited, or unknown."""
    return (facts.limits or {}).get(name, (None, None))[0]


@node_check("sshd", "sshd accepts the connections of several users in parallel", "sshd-startups sshd-sessions")
def check_sshd(context: CheckContext, host: str, facts: NodeFacts) -> Iterator[Finding]:
    if facts.sshd is None:
        return
    first = (facts.sshd.max_startups or "").partition(":")[0]
    if first.isdigit() and 0 < int(first) < STARTUPS_FEW:
        yield finding("sshd-startups", Severity.WARN, host, limit=facts.sshd.max_startups or "")
    sessions = facts.sshd.max_sessions
    if sessions is not None and sessions < SESSIONS_FEW:
        yield finding("sshd-sessions", Severity.WARN, host, limit=sessions)


@check("device-lease", "no other run has leased the devices of the job", "device-leased")
def check_device_leases(context: CheckContext) -> Iterator[Finding]:
    """Find leases of other runs on the devices that the job would use."""
    for node in context.plan.nodes if context.plan is not None else ():
        facts = context.facts.get(node.host)
        for lease in (facts.leases or ()) if facts is not None else ():
            if lease.type == context.device_type and lease.device in (node.devices or ()) and lease.tag is not None:
                values: dict[str, Any] = {name: getattr(lease, name) for name in ("type", "device", "user", "since_s")}
                yield finding("device-leased", Severity.FAIL, node.host, **values, run=lease.tag)


@check("gpu-processes", "no process outside ascendrun uses the GPUs", "gpu-busy")
def check_gpu_processes(context: CheckContext) -> Iterator[Finding]:
    """Find processes on GPUs that the job would use; on other GPUs it is a note. GPUs may be shared: none prevents a
    start."""
    planned = {node.host: node.devices or () for node in (context.plan.nodes if context.plan is not None else ())}
    for host, facts in context.facts.items():
        for process in facts.gpu_processes or ():
            if not process.is_foreign:
                continue
            is_own = host not in planned or process.device is None or process.device in planned[host]
            user, command = ("?", "?") if process.owner is None else (process.owner.user, process.owner.command[:120])
            values = {"gpu": process.device, "pid": process.pid, "memory_mb": process.memory_mb}
            known: dict[str, Any] = {name: "?" if value is None else value for name, value in values.items()}
            severity = Severity.WARN if is_own else Severity.NOTE
            yield finding("gpu-busy", severity, host, user=user, command=command, **known)


@node_check("logind", "logind does not kill a job when its SSH connection closes", "kill-user-processes")
def check_logind(context: CheckContext, host: str, facts: NodeFacts) -> Iterator[Finding]:
    """Check logind, which exempts root and users with lingering enabled."""
    if not facts.kills_user_processes or not facts.user or facts.uid in (None, 0):
        return
    if facts.user not in (facts.lingering_users or ()):
        yield finding("kill-user-processes", Severity.WARN, host, user=facts.user)
