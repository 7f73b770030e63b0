"""Hosts without a sign of life that a restart waits for are switched off: a proof that their processes are gone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Optional

from ascendrun.core.errors import DeadlineExceededError, UnreachableError
from ascendrun.core.hosts import Host
from ascendrun.core.jobs.draft import can_restart_without
from ascendrun.core.jobs.endings import NodeLost, PowerOff
from ascendrun.core.jobs.inputs import JobInput
from ascendrun.core.jobs.job import Job, State
from ascendrun.core.machines import address_of
from ascendrun.head.agents.connections import ask
from ascendrun.head.loop.machine.machines import Machines
from ascendrun.head.loop.machine.power_agent import IS_OFF, IS_ON, find_status, switch_off, watch_agent
from ascendrun.head.protocol import agent_messages as agent
from ascendrun.head.protocol.remote import Reply, boot_s
from ascendrun.head.waiting import in_background
from ascendrun.node.layout import make_run
from ascendrun.node.procs import boot_id
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.head.loop.context import Context
    from ascendrun.head.loop.job.runner import JobRunner

    Take = Callable[[Mapping[str, str], Optional[int], Text], None]

LOOK_S = 60.0
"""Interval in which the leases of others are listed on hosts that may be switched off."""
SILENT_S = 15.0
MUTE = (type(None), UnreachableError, DeadlineExceededError)
"""Last errors of a host that does not respond. One that refuses a key, of a class below them, does."""


class PowerSwitch:
    """Use from the controller's thread."""

    def __init__(self, context: Context, machines: Machines) -> None:
        self._links, self._jobs, self._machines, self.find_agent = context.links, context.steps, machines, watch_agent()
        self._asked: dict[tuple[str, str], bool] = {}
        """By attempt and host, of the stored requests that this controller knows: whether the agent has one of them."""
        self._looked: dict[str, float] = {}
        self._others: dict[str, tuple[float, str | None]] = {}
        """By address, when leases were listed, and a user of another head who had one, None: there was none."""

    def hosts_of(self, runner: JobRunner) -> Mapping[str, Host]:
        """Return the hosts of an attempt that can be switched off."""
        names = set(runner.job.hosts) if runner.job.policy.max_restarts > 0 else set()
        hosts = {host.name: host for host in runner.hosts if host.bmc and host.name in names and not host.is_local}
        return hosts if hosts and self.find_agent() is not None else {}

    def tick(self, quiet_s: Mapping[str, float]) -> None:
        """Look at hosts, ask whether silent ones of running attempts have power, and switch off those that are due.
        `quiet_s`: for how long each has been silent."""
        for runner in self._jobs:
            hosts = self.hosts_of(runner)
            awaited = awaited_hosts(runner.job) if hosts else ()
            for name, host in hosts.items():
                link = runner.link(name)
                if link.is_up:
                    self._look(host)
                elif quiet_s.get(name, 0.0) < SILENT_S or type(link.last_error) not in MUTE:
                    continue
                elif name in awaited:
                    self._switch_off(runner, host, awaited, quiet_s[name])
                elif runner.job.state in (State.STARTING, State.RUNNING):
                    self._ask_status(runner, host)

    def _is_due(self, what: str) -> bool:
        """Return whether this was not done for LOOK_S; if so, it is done now."""
        now = boot_s()
        is_due = now - self._looked.get(what, float("-inf")) >= LOOK_S
        if is_due:
            self._looked[what] = now
        return is_due

    def _look(self, host: Host) -> None:
        """Note who else leases devices or ports there: a silent host cannot be asked."""
        address, now = address_of(host), boot_s()
        if not self._is_due(address):
            return

        def take(reply: Reply[agent.SurveyReply]) -> None:
            rows = (reply.message.results.get("leases") or {}).get("leases") if reply.error is None else None
            own = make_run(self._machines.reconciler.head_id, "")
            if rows is not None:
                others = [str(row.get("user")) for row in rows if not str(row.get("tag")).startswith(own)]
                self._others[address] = now, next(iter(others), None)

        ask(
            self._links,
            host,
            agent.Survey([{"name": "leases", "kind": "leases"}], SILENT_S),
            deadline_s=LOOK_S,
            then=take,
        )

    def _switch_off(self, runner: JobRunner, host: Host, awaited: tuple[str, ...], quiet_s: float) -> None:
        """Store that the agent is asked, then ask it, both once and each only if the host may be switched off now. A
        controller that finds the request of an earlier one asks for the status first."""
        job, key = runner.job, (runner.job.run_id, host.name)
        power, is_known = job.node(host.name).power, key in self._asked
        up = [one.name for one in runner.hosts if one.name in awaited or runner.link(one.name).is_up]
        is_open = power is None or (power.code == "power-off-asked" and not self._asked.get(key))
        if not is_open or not awaited_hosts(replace(job, pool=tuple(name for name in job.pool if name in up))):
            return  # too few others respond: it may be this machine that is cut off
        self._asked[key] = power is not None
        why = self._refusal(runner, host, quiet_s) if power is None or is_known else None
        if power is None or why is not None:
            self._jobs.feed(job.id, PowerOff(host.name, why))
            return
        self._ask(runner, host, partial(self._take, key, is_known), is_off=is_known)

    def _refusal(self, runner: JobRunner, host: Host, quiet_s: float) -> Text | None:
        """Return why a host must stay on, None: it need not."""
        for other, name in self._machines.runners_at(host):
            if not other.job.is_terminal and name not in awaited_hosts(other.job):
                return Text("power.used-by-job", "{job} may run there", job=other.job.id)
        if runner.job.node(host.name).boot_id == boot_id():
            return Text("power.own-machine", "the controller runs there")
        looked_at, user = self._others.get(address_of(host), (float("-inf"), None))
        if boot_s() - quiet_s - looked_at > LOOK_S + SILENT_S:
            return Text("power.not-looked", "it became unreachable before this controller could list who else uses it")
        return None if user is None else Text("power.used-by-other", "{user} leases devices or ports there", user=user)

    def _ask(self, runner: JobRunner, host: Host, take: Take, *, is_off: bool) -> None:
        """Switch the host off, or only ask for its status. `take` gets the attempts there with their names of it."""
        others = (one for one in runner.hosts if one.bmc and one.name != host.name and runner.link(one.name).is_up)
        work = switch_off if is_off else partial(find_status, witness=next(others, None))
        tags = {one.job.run_id: name for one, name in self._machines.runners_at(host)}

        def call() -> None:
            power = self.find_agent()
            unset = (None, Text("power.unset", "the settings have no block `power`"))
            self._links.post(partial(take, tags, *(unset if power is None else work(power, host))))

        in_background(call, f"power-{host.name}")

    def _take(
        self, key: tuple[str, str], is_switched: bool, tags: Mapping[str, str], code: int | None, why: Text
    ) -> None:
        if code == IS_ON and not is_switched:
            self._asked[key] = False  # it is switched off if that is still allowed
        else:
            change = partial(NodeLost, why="powered-off") if code == IS_OFF else partial(PowerOff, why=why)
            self._feed(tags, change)

    def _ask_status(self, runner: JobRunner, host: Host) -> None:
        """Ask for the status, at intervals. Without power the host runs nothing: the attempt ends at once."""
        if self._is_due(f"power of {address_of(host)}"):
            self._ask(runner, host, self._take_status, is_off=False)

    def _take_status(self, tags: Mapping[str, str], code: int | None, why: Text) -> None:
        if code == IS_OFF:
            self._feed(tags, partial(NodeLost, why="no-power"))

    def _feed(self, tags: Mapping[str, str], change: Callable[[str], JobInput]) -> None:
        for runner in self._jobs:
            name = tags.get(runner.job.run_id)
            if name is not None:
                self._jobs.feed(runner.job.id, change(name))


def awaited_hosts(job: Job) -> tuple[str, ...]:
    """Return the unreachable hosts that the next attempt waits for, although there are enough others."""
    silent = tuple(node.host for node in job.nodes if node.may_run_processes and node.host in job.unconfirmed)
    waits = job.state is State.BACKOFF and not can_restart_without(job, silent)
    return silent if waits and can_restart_without(job, silent, switchable=frozenset(silent)) else ()
