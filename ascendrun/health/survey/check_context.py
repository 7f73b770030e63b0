"""What a check is given, what it is, and the words that checks share: majorities and outliers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Callable

from ascendrun.core.findings import Finding, Severity
from ascendrun.core.names import fold_names
from ascendrun.health.survey.facts import NodeFacts, Unreached

if TYPE_CHECKING:
    from ascendrun.core.jobfile.model import JobSpec
    from ascendrun.core.jobs.plan import LaunchPlan, RankPlan


@dataclass(frozen=True)
class World:
    """Everything that is judged at once. `facts`: by host name, in the hostfile's order; `unreached`: the others.

    `job`, `plan`: None when no job is concerned, or when there can be none for these hosts.
    `family`: npu, cuda or cpu; None: not known. `now_s`: UTC seconds.
    """

    facts: Mapping[str, NodeFacts]
    unreached: Mapping[str, Unreached] = field(default_factory=dict)
    job: JobSpec | None = None
    plan: LaunchPlan | None = None
    family: str | None = None
    now_s: float = 0.0

    @cached_property
    def first_ranks(self) -> Mapping[str, RankPlan]:
        """The first rank of each host of the plan; {} without a plan."""
        return {node.host: node.ranks[0] for node in (self.plan.nodes if self.plan is not None else ()) if node.ranks}


@dataclass(frozen=True)
class Check:
    """One function of checks/. `name`: kebab-case, for checks.skip and checks.require of a job file.

    `looks_at`: one sentence for people. `is_full`: doctor only; it does not gate a start unless required.
    `codes`: what it may find, each with its words in texts/.
    """

    name: str
    function: Callable[[World], Iterator[Finding]]
    looks_at: str
    codes: tuple[str, ...]
    is_full: bool = False


@dataclass(frozen=True)
class Sameness:
    """A value over hosts: what most have, and who has something else, the larger groups first."""

    majority: str
    majority_hosts: tuple[str, ...]
    others: tuple[tuple[str, tuple[str, ...]], ...]

    def evidence(self) -> tuple[str, ...]:
        groups = ((self.majority, self.majority_hosts), *self.others)
        return tuple(f"{fold_names(hosts)}: {value}" for value, hosts in groups)


def compare(values: Mapping[str, str | None]) -> Sameness | None:
    """Who differs from most; None: nobody could be asked. Of equally large groups the first host's is the majority."""
    known = {host: value for host, value in values.items() if value is not None}
    if not known:
        return None
    order: list[str] = [value for value, _ in Counter(known.values()).most_common()]
    groups = [(value, tuple(host for host, one in known.items() if one == value)) for value in order]
    return Sameness(groups[0][0], groups[0][1], tuple(groups[1:]))


def differing(
    world: World, code: str, severity: Severity, value_of: Callable[[NodeFacts], str | None]
) -> Iterator[Finding]:
    """One finding of `code` for each value that is not the majority's; placeholders {value}, {majority}."""
    same = compare({host: value_of(facts) for host, facts in world.facts.items()})
    for value, hosts in same.others if same else ():
        yield Finding(
            code,
            severity,
            hosts,
            {"value": value, "majority": same.majority if same else ""},
            same.evidence() if same else (),
        )
