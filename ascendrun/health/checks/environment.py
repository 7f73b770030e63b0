"""Checks of a rank's environment variables: those of the launcher, the job and the login."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from ipaddress import ip_address

from ascendrun.ascend.compatibility import minimum_for, too_old_for
from ascendrun.ascend.variables import check_environment
from ascendrun.core.findings import Finding, Severity
from ascendrun.health.env_view import AGENT_DIRECTORY, NOT_SET, is_secret
from ascendrun.health.survey.check_context import CheckContext, check, compare, finding, node_check
from ascendrun.health.survey.facts import NodeFacts
from ascendrun.text import Text

_SEVERITIES = {"error": Severity.FAIL, "warning": Severity.WARN, "note": Severity.NOTE}
_ALIKE = re.compile(r"(HCCL|ASCEND|NCCL|TORCH|PYTORCH|GLOO|OMP|MKL|CUDA|ATB|TASK|ACL)_|LD_LIBRARY_PATH\Z|PYTHONPATH\Z")
_MEETING = re.compile(r"(HCCL|NCCL)_")
_OWN_PER_NODE = re.compile(r"HCCL_IF_IP\Z|\w*_SOCKET_IFNAME\Z|OMP_NUM_THREADS\Z|\w*VISIBLE_DEVICES\Z")
_SLOW: Mapping[str, tuple[str, ...]] = {
    "CUDA_LAUNCH_BLOCKING": ("1",),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL",),
    "NCCL_DEBUG": ("TRACE",),
    "TORCH_CPP_LOG_LEVEL": ("INFO",),
    "TORCH_SHOW_CPP_STACKTRACES": (),
    "PYTHONFAULTHANDLER": (),
    "PYTHONDONTWRITEBYTECODE": (),
    "PYTHONPROFILEIMPORTTIME": ("1",),
}
"""Debugging settings: each slows every step or enlarges the log."""


def rank_variables(context: CheckContext, host: str) -> dict[str, str]:
    """Return the variables of a rank on the host as far as known; {} if unknown."""
    facts = context.facts[host]
    found = dict(facts.environ or {})
    if host in context.first_ranks:
        for name, value in context.first_ranks[host].env.items():
            found.setdefault(name, value)  # setup may have changed it
    return found


@check(
    "ascend-variables",
    "every HCCL, Ascend and torch_npu variable is valid and effective",
    "variable-wrong variable-conflict",
)
def check_ascend_variables(context: CheckContext) -> Iterator[Finding]:
    if context.device_type != "npu":
        return
    for host, facts in context.facts.items():
        for one in check_environment(rank_variables(context, host), facts.npu.chip):
            code = "variable-conflict" if one.code == "conflict" else "variable-wrong"
            severity = _SEVERITIES[one.severity]
            yield finding(code, severity, host, name=one.name, value=one.value[:80], problem=one.message, hint=one.hint)


@check("slow-settings", "no debugging setting is active", "variable-slows")
def check_slow_settings(context: CheckContext) -> Iterator[Finding]:
    for host in context.facts:
        variables = rank_variables(context, host)
        for name, bad in _SLOW.items():
            if variables.get(name, "").upper() in bad and name in variables:
                yield finding("variable-slows", Severity.WARN, host, name=name, value=variables[name][:80])


@node_check("threads", "OMP_NUM_THREADS does not exceed the CPUs", "threads-wrong threads-many")
def check_threads(context: CheckContext, host: str, facts: NodeFacts) -> Iterator[Finding]:
    text = rank_variables(context, host).get("OMP_NUM_THREADS")
    if text is None or facts.cpus is None:
        return
    first = text.partition(",")[0]
    if not first.isdigit() or int(first) < 1:
        yield finding("threads-wrong", Severity.WARN, host, value=text[:40])
    elif int(first) > facts.cpus:
        yield finding("threads-many", Severity.WARN, host, value=int(first), cpus=facts.cpus)


@node_check("interfaces", "interfaces named by variables exist", "interface-missing")
def check_interfaces(context: CheckContext, host: str, facts: NodeFacts) -> Iterator[Finding]:
    """Find variables that name an interface which the node does not have."""
    if not facts.addresses:
        return
    for name, value in rank_variables(context, host).items():
        if name.endswith("_SOCKET_IFNAME") and value and not _names_some(name, value, tuple(facts.addresses)):
            interfaces = tuple(sorted(facts.addresses))
            yield finding("interface-missing", Severity.FAIL, host, name=name, value=value, interfaces=interfaces)


def _names_some(name: str, value: str, interfaces: tuple[str, ...]) -> bool:
    """Return whether an interface matches: a prefix, "=eth0" (exact), "^eth0" (exclude); for gloo exact names."""
    if value.startswith("^"):
        return True
    words = [word.strip() for word in value.lstrip("=").split(",") if word.strip()]
    if value.startswith("=") or name.startswith(("GLOO_", "TP_")):
        return any(word in interfaces for word in words)
    return any(interface.startswith(word) for word in words for interface in interfaces)


@node_check("own-address", "HCCL_IF_IP is an address of its node that peers reach", "if-ip-foreign if-ip-elsewhere")
def check_own_address(context: CheckContext, host: str, facts: NodeFacts) -> Iterator[Finding]:
    """Check that HCCL_IF_IP is an address of the node on which the other nodes reach it: one value for all nodes is
    wrong, and the first address of `hostname -I` may be a bridge's."""
    value = rank_variables(context, host).get("HCCL_IF_IP")
    if not value or not facts.addresses:
        return
    at = [interface for interface, addresses in facts.addresses.items() if value in addresses]
    routes = {route.interface for peer, route in (facts.routes or {}).items() if peer in context.facts}
    if not at:
        yield finding("if-ip-foreign", Severity.FAIL, host, value=value)
    elif routes and not routes & set(at):
        severity = Severity.FAIL if ip_address(value).is_loopback else Severity.WARN
        yield finding("if-ip-elsewhere", severity, host, value=value, interface=at[0], routes=tuple(sorted(routes)))


@check("allocator", "driver and CANN support the settings of the allocator", "allocator-setting-new")
def check_allocator(context: CheckContext) -> Iterator[Finding]:
    """Find settings of torch_npu's allocator that the node's driver or CANN is too old for."""
    for host, facts in context.facts.items() if context.device_type == "npu" else ():
        cann = facts.npu.cann_version
        variables = rank_variables(context, host)
        for name in ("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            for setting in variables.get(name, "").replace(" ", "").split(","):
                feature = f"PYTORCH_NPU_ALLOC_CONF={setting}"
                needs = minimum_for(feature)
                if needs and too_old_for(feature, driver=facts.npu.driver_version, cann=cann):
                    required, found = _releases(needs.driver, needs.cann), _releases(facts.npu.driver_version, cann)
                    values = {"name": name, "setting": setting, "required": required, "found": found}
                    yield finding("allocator-setting-new", Severity.WARN, host, **values)


def _releases(driver: str | None, cann: str | None) -> tuple[Text | str, ...]:
    named = [] if driver is None else [Text("doctor.driver", "driver {version}", version=driver)]
    return (*named, *(() if cann is None else (f"CANN {cann}",)))


@check("variables-consistency", "the variables that matter are the same on all nodes", "variable-differs")
def check_variables_consistency(context: CheckContext) -> Iterator[Finding]:
    """Compare the variables that matter to a job, in its shell."""
    shells = {host: facts for host, facts in context.facts.items() if facts.environ is not None}
    names = sorted({name for facts in shells.values() for name in facts.environ or {} if _ALIKE.match(name)})
    for name in names:
        if _OWN_PER_NODE.match(name) or is_secret(name):
            continue
        same = compare({host: _value(facts, name) for host, facts in shells.items()})
        if same is None or not same.others:
            continue
        severity = Severity.WARN if _MEETING.match(name) else Severity.NOTE
        for _, hosts in same.others:
            yield finding("variable-differs", severity, hosts, evidence=same.evidence(), name=name)


def _value(facts: NodeFacts, name: str) -> str | Text:
    """Return a value without the path of ascendrun's directory, which differs by user and local host."""
    value = (facts.environ or {}).get(name)
    if value is None:
        return NOT_SET
    value = value[:200]
    return value.replace(facts.root, AGENT_DIRECTORY) if facts.root else value
