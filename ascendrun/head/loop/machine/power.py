"""Hosts without a sign of life that a restart waits for are switched off: a proof that their processes are gone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ascendrun.core.errors import DeadlineExceededError, UnreachableError
from ascendrun.core.hosts import Host
from ascendrun.core.jobs.draft import can_restart_without
from ascendrun.core.jobs.endings import NodeLost, PowerOff
from ascendrun.core.jobs.job import Job, State
from ascendrun.core.machines import address_of
from ascendrun.head.agents.connections import ask
from ascendrun.head.loop.machine.machines import Machines
from ascendrun.head.loop.machine.power_agent import IS_OFF, IS_ON, find_status, switch_off, watch_agent
from ascendrun.head.protocol import agent_messages as agent
from ascendrun.head.protocol.remote import Reply, boot_s
from ascendrun.node.layout import make_run
from ascendrun.node.procs import boot_id
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.core.power_settings import PowerAgent
    from ascendrun.head.loop.context import Context
    from ascendrun.head.loop.job.runner import JobRunner

    Work = Callable[[PowerAgent, Host], "tuple[int | None, Text]"]

LOOK_S = 60.0
"""Interval in which the leases of others are listed on hosts that may be switched off."""
SILENT_S = 15.0
MUTE = (UnreachableError, DeadlineExceededError)
"""Errors of a host that does not respond. One that refuses a key, of a class below them, does."""


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
        """Look at hosts, and switch off those that are due. `quiet_s`: for how long each has been silent."""
        for runner in self._jobs:
            hosts = self.hosts_of(runner)
            awaited = awaited_hosts(runner.job) if hosts else ()
            for name, host in hosts.items():
                link = runner.link(name)
                if link.is_up:
                    self._look(host)
                elif name in awaited and quiet_s.get(name, 0.0) >= SILENT_S:
                    if link.last_error is None or type(link.last_error) in MUTE:
                        self._switch_off(runner, host, awaited, quiet_s[name])

    def _look(self, host: Host) -> None:
        """Note who else leases devices or ports there: a silent host cannot be asked."""
        address, now = address_of(host), boot_s()
        if now - self._looked.get(address, -LOOK_S) < LOOK_S:
            return
        self._looked[address] = now

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
        witness = next((one for one in runner.hosts if one.bmc and one.name in up and one.name not in awaited), None)
        work = switch_off if is_known else partial(find_status, witness=witness)
        tags = {one.job.run_id: name for one, name in self._machines.runners_at(host)}
        self._run(host, work, partial(self._take, key, tags, is_known))

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

    def _run(self, host: Host, work: Work, take: Callable[[int | None, Text], None]) -> None:
        def call() -> None:
            power = self.find_agent()
            unset = (None, Text("power.unset", "the settings have no block `power`"))
            self._links.post(partial(take, *(unset if power is None else work(power, host))))

        threading.Thread(target=call, name=f"power-{host.name}", daemon=True).start()

    def _take(
        self, key: tuple[str, str], tags: Mapping[str, str], is_switched: bool, code: int | None, why: Text
    ) -> None:
        if code == IS_ON and not is_switched:
            self._asked[key] = False  # it is switched off if that is still allowed
            return
        for runner in self._jobs:
            name = tags.get(runner.job.run_id)
            if name is not None:
                change = NodeLost(name, "powered-off") if code == IS_OFF else PowerOff(name, why)
                self._jobs.feed(runner.job.id, change)


def awaited_hosts(job: Job) -> tuple[str, ...]:
    """Return the unreachable hosts that the next attempt waits for, although there are enough others."""
    silent = tuple(node.host for node in job.nodes if node.may_run_processes and node.host in job.unconfirmed)
    waits = job.state is State.BACKOFF and not can_restart_without(job, silent)
    return silent if waits and can_restart_without(job, silent, switchable=frozenset(silent)) else ()
