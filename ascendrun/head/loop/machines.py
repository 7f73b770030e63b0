"""The machines of a head node: compared with the records of its jobs, held while processes of ours may live there."""

from __future__ import annotations

from collections.abc import Callable

from ascendrun.head.agents.connections import Connections
from ascendrun.head.loop.machine.closures import Closures
from ascendrun.head.loop.machine.contenders import Contenders
from ascendrun.head.loop.machine.holds import Holds
from ascendrun.head.loop.machine.job_access import JobAccess
from ascendrun.head.loop.machine.memory import IdleMemory
from ascendrun.head.loop.machine.reconcile import Reconciler
from ascendrun.head.loop.machine.records import MachineRecords
from ascendrun.head.state.store import Store


class Machines:
    """The machines by subject. Use from the controller's thread. `post` runs a call there."""

    def __init__(
        self, store: Store, links: Connections, jobs: JobAccess, *, post: Callable[[Callable[[], None]], None]
    ) -> None:
        self.records = MachineRecords(store.machines, links)
        self.reconciler = Reconciler(self.records, links, jobs, head_id=store.head_id, post=post)
        self.holds = Holds(self.records, jobs, links_in_use=self.reconciler.used_links, post=post)
        self.closures = Closures(self.records, links, jobs, self.holds)
        self.memory = IdleMemory(self.records, self.closures)
        self.contenders = Contenders(self.records, links, jobs, self.holds)

    def tick(self) -> None:
        """Query due nodes, and store what changed. May be called at any rate."""
        self.holds.tick()
        self.reconciler.tick()
        self.records.save()  # last: without space the nodes are compared all the same
