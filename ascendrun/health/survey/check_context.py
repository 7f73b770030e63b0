"""The input of a check, the check itself, and common functions: majorities and outliers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Callable, TypeVar

from ascendrun.ascend.variables import effective_ids
from ascendrun.core.allocations import EngineFacts
from ascendrun.core.dataclass import dataclass
from ascendrun.core.findings import Finding, Severity
from ascendrun.core.jobs.roles import parts_of
from ascendrun.core.node_messages import Failure
from ascendrun.health.survey.facts import NodeFacts
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.core.jobfile.model import JobSpec
    from ascendrun.core.jobs.plan import LaunchPlan, RankPlan


@dataclass(frozen=True)
class CheckContext:
    """Input of all checks. `facts`: by host name, in the hostfile's order; `unreached`: the other hosts.

    `job`, `plan`: None without a job, or if no plan is possible for these hosts.
    `device_type`: npu, cuda or cpu; None: unknown. `now_s`: UTC seconds. `idle_memory`: MB that were in use on each
    device before earlier starts, by host and device. `has_peers`: jobs may use hosts beside these.
    `engine`: of the engine that granted the hosts, None: they are of a hostfile, or a job starts. `no_power`: hosts
    with a `bmc` whose power agent does not work, and why.
    """

    facts: Mapping[str, NodeFacts]
    unreached: Mapping[str, Failure] = field(default_factory=dict)
    job: JobSpec | None = None
    plan: LaunchPlan | None = None
    device_type: str | None = None
    now_s: float = 0.0
    idle_memory: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    has_peers: bool = False
    engine: EngineFacts | None = None
    no_power: Mapping[str, Text] = field(default_factory=dict)

    @cached_property
    def first_ranks(self) -> Mapping[str, RankPlan]:
        """Return the first rank of each host of the plan; {} without a plan."""
        return {node.host: node.ranks[0] for node in (self.plan.nodes if self.plan is not None else ()) if node.ranks}

    def by_role(self) -> tuple[CheckContext, ...]:
        """Return the input of the hosts of each role, which is the job that the role would be by itself."""
        if self.job is None or self.plan is None or not self.job.roles:
            return (self,)
        roles = {node.host: node.role for node in self.plan.nodes}
        facts = {
            role: {host: self.facts[host] for host in self.facts if roles.get(host) == role} for role in roles.values()
        }
        return tuple(replace(self, job=part.spec, facts=facts[part.role]) for part in parts_of(self.job))


T = TypeVar("T")
CheckFunction = Callable[[CheckContext], Iterator[Finding]]
NodeCheck = Callable[[CheckContext, str, T], Iterator[Finding]]


@dataclass(frozen=True)
class Check:
    """One function of checks/. `name`: kebab-case, for checks.skip and checks.require of a job file.

    `summary`: the checked fact, as on healthy nodes. `is_full`: doctor only, unless a job requires it.
    `codes`: possible findings, each with its message in text/en.json.
    """

    name: str
    function: CheckFunction
    summary: str
    codes: tuple[str, ...]
    is_full: bool = False


def check(name: str, summary: str, *codes: str, is_full: bool = False) -> Callable[[CheckFunction], Check]:
    """Make a function a check. `codes`: separated by spaces."""
    return lambda function: Check(name, function, summary, tuple(" ".join(codes).split()), is_full)


def check_each(
    nodes: Callable[[CheckContext], Iterable[tuple[str, T]]],
) -> Callable[..., Callable[[NodeCheck[T]], Check]]:
    """Return the decorator, as `check`, of functions that check one of the nodes, with what `nodes` yields for it."""

    def named(name: str, summary: str, *codes: str, is_full: bool = False) -> Callable[[NodeCheck[T]], Check]:
        def make(function: NodeCheck[T]) -> Check:
            def run(context: CheckContext) -> Iterator[Finding]:
                for host, found in nodes(context):
                    yield from function(context, host, found)

            return check(name, summary, *codes, is_full=is_full)(run)

        return make

    return named


node_check = check_each(lambda context: context.facts.items())


def finding(
    code: str, severity: Severity, where: str | tuple[str, ...], /, evidence: Iterable[str | Text] = (), **values: Any
) -> Finding:
    """Make a finding. `where`: one host or several."""
    return Finding(code, severity, (where,) if isinstance(where, str) else where, values, tuple(evidence))


@dataclass(frozen=True)
class Majority:
    """A value over hosts (or other places): the majority's, and the others, the larger groups first."""

    majority: Any
    majority_hosts: tuple[Any, ...]
    others: tuple[tuple[Any, tuple[Any, ...]], ...]

    def evidence(self) -> tuple[Text, ...]:
        groups = ((self.majority, self.majority_hosts), *self.others)
        return tuple(
            Text("doctor.value-on", "{value} on {hosts:hosts}", value=value, hosts=hosts) for value, hosts in groups
        )


def compare(values: Mapping[Any, Hashable | None]) -> Majority | None:
    """Return the value of most hosts and the other groups; None if no value is known.

    Of equally large groups, the first host's group is the majority.
    """
    known = {host: value for host, value in values.items() if value is not None}
    if not known:
        return None
    order = [value for value, _ in Counter(known.values()).most_common()]
    groups = [(value, tuple(host for host, one in known.items() if one == value)) for value in order]
    return Majority(groups[0][0], groups[0][1], tuple(groups[1:]))


@dataclass(frozen=True)
class Group:
    """Hosts with one value; None: unknown, or not present."""

    value: str | Text | None
    hosts: tuple[str, ...]


def group_hosts(values: Mapping[str, Any]) -> tuple[Group, ...]:
    """Return the hosts by value, that of most hosts first, those without one last; () if no value is known."""
    same = compare(values)
    if same is None:
        return ()
    groups = [(same.majority, same.majority_hosts), *same.others]
    unknown = tuple(host for host, value in values.items() if value is None)
    return tuple(Group(*group) for group in (*groups, *([(None, unknown)] if unknown else [])))


def outliers(code: str, severity: Severity, values: Mapping[str, Hashable | None], **more: Any) -> Iterator[Finding]:
    """Yield one finding of `code` for each value other than the majority's; values `value`, `majority` and `more`."""
    same = compare(values)
    for value, hosts in same.others if same else ():
        evidence = same.evidence() if same else ()
        yield finding(code, severity, hosts, evidence, **more, value=value, majority=same.majority if same else "")


def differing(
    context: CheckContext, code: str, severity: Severity, value_of: Callable[[NodeFacts], Hashable | None]
) -> Iterator[Finding]:
    """Yield the outliers of a value over nodes."""
    yield from outliers(code, severity, {host: value_of(facts) for host, facts in context.facts.items()})


# ---------------------------------------------------------------- NPUs


def npu_nodes(context: CheckContext) -> Iterator[tuple[str, NodeFacts]]:
    """Yield the nodes with relevant NPUs: all nodes of an npu job, or without a job those with NPUs."""
    if context.device_type not in (None, "npu"):
        return
    for host, facts in context.facts.items():
        if context.device_type == "npu" or facts.npu.has_any:
            yield host, facts


npu_check = check_each(npu_nodes)


def planned_devices(context: CheckContext, host: str) -> tuple[int, ...] | None:
    """Return the device ids of the job on the host; None: no plan, or none for this host."""
    plan = context.plan
    own = None if plan is None else next((node for node in plan.nodes if node.host == host), None)
    if own is not None and own.container is not None:
        return own.devices  # the variable has their numbers in the container
    first = context.first_ranks.get(host)
    value = first.env.get("ASCEND_RT_VISIBLE_DEVICES") if first is not None else None
    return effective_ids(value) if value is not None else None


def severity_at(
    context: CheckContext, host: str, devices: Iterable[int], *, otherwise: Severity = Severity.WARN
) -> Severity:
    """Return FAIL if the job uses one of the devices or its devices are unknown; else `otherwise`."""
    planned = planned_devices(context, host)
    return Severity.FAIL if planned is None or set(planned) & set(devices) else otherwise


def is_many(context: CheckContext) -> bool:
    """Return whether devices of several nodes communicate."""
    return context.has_peers or len(context.facts) + len(context.unreached) > 1
