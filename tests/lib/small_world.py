"""A small world of nodes without processes or connections, over the real store and the real live jobs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable

from ascendrun.core.errors import AscendrunError
from ascendrun.core.hosts import Host
from ascendrun.core.jobfile.model import JobSpec
from ascendrun.core.jobs.job import Job, Leftover, NodeProgress, Phase, State
from ascendrun.core.jobs.plan import Tree
from ascendrun.core.node_messages import Failure
from ascendrun.core.retention import Retention
from ascendrun.head.agents.connections import dialled
from ascendrun.head.loop.context import Context
from ascendrun.head.loop.live_jobs import LiveJobs
from ascendrun.head.loop.steps import Guard
from ascendrun.head.protocol import agent_messages as agent
from ascendrun.head.protocol.agent_bootstrap import Login
from ascendrun.head.protocol.agent_messages import AgentInfo
from ascendrun.head.protocol.control_messages import ChangeMachines
from ascendrun.head.protocol.file_messages import FileData, Files, FilesReply, PutFileReply, PutTree
from ascendrun.head.protocol.lease_messages import RenewHead, Vote
from ascendrun.head.protocol.messages import Done
from ascendrun.head.protocol.remote import Reply
from ascendrun.head.state.store import Store
from ascendrun.head.survey.submission import Submission, make_job
from tests.unit.head.agents.test_connections import Deaf

STUCK = Leftover(50, 9, "python", "D", "fuse_wait_answer", 7)
PROCESS = agent.Process(50, 9, "python", "D", "fuse_wait_answer")


N1, N2 = Host("n1"), Host("n2")
OTHER_NAME = Host("npu-2", addr="10.0.0.2")


class Node:
    """One machine as its agent reports it. `survey`: its results, None: it answers no survey and no probe. `records`:
    the events of its attempts. `supervised`: whether their supervisors live. `is_silent`: no
    answer to a ping comes in time. `checkpoints`: that it lists.
    `asked`: the requests that it got. `slow`: answers to stop requests, which wait to be called; None: it answers at
    once. `votes`: whether it grants the lease of a head."""

    def __init__(self, key: str) -> None:
        self.key, self.boot_id, self.incarnation = key, "b", "i"
        self.live: set[str] | None = set()
        self.processes: dict[str, tuple[agent.Process, ...]] = {}
        self.phases: dict[str, str] = {}
        self.records: dict[str, bytes] = {}
        self.supervised = self.is_silent = False
        self.copies: dict[str, Any] = {}
        self.checkpoints: tuple[dict[str, Any], ...] = ()
        self.survey: dict[str, Any] | None = None
        self.asked: list[Any] = []
        self.slow: list[Callable[[], None]] | None = None
        self.votes = False

    def answer(self, request: Any) -> Any:
        self.asked.append(request)
        if isinstance(request, agent.Ping):
            return None if self.is_silent else agent.Pong(time.time_ns())
        if isinstance(request, (agent.Survey, agent.Probe)) and self.survey is not None:
            is_probe = isinstance(request, agent.Probe)
            return agent.ProbeReply(time.time_ns(), 1 << 40) if is_probe else agent.SurveyReply(self.survey)
        if isinstance(request, RenewHead):
            return Vote(True, request.term) if self.votes else None
        if isinstance(request, PutTree):
            return PutFileReply(0, True)
        if isinstance(request, agent.Copy):
            return agent.CopyReply(self.copies.get(request.tag))
        if isinstance(request, agent.Checkpoints):
            return agent.CheckpointsReply(self.checkpoints)
        if isinstance(request, agent.Live):
            return agent.LiveReply(self.boot_id, self.incarnation, None if self.live is None else tuple(self.live))
        if isinstance(request, agent.Processes):
            phase, events = self.phases.get(request.tag), {"0": len(self.records.get(request.tag, b""))}
            return agent.ProcessesReply(self.processes.get(request.tag, ()), self.supervised, phase, events)
        if isinstance(request, agent.Stop):
            self.processes.pop(request.tag, None)
            self.phases[request.tag] = "ended"
            if self.live is not None:
                self.live.discard(request.tag)
            return Done()
        if isinstance(request, Files):
            return FilesReply({}, self.phases.get(request.tag))
        return None

    def stopped(self) -> list[str]:
        return [one.tag for one in self.asked if isinstance(one, agent.Stop)]


class Link:
    def __init__(self, host: Host, node: Node) -> None:
        self.host, self.node, self.is_up, self.failures = host, node, False, 0
        self.last_error: AscendrunError | None = None
        self.login, self.peer_address = Login(), host.name
        self.heard_boot_s: float | None = None

    @property
    def info(self) -> AgentInfo:
        live = None if self.node.live is None else tuple(self.node.live)
        names = dict.fromkeys(("root", "hostname", "user", "python", "python_version", "kernel", "arch"), "x")
        key, kind = self.node.key, self.node.incarnation
        return AgentInfo(**names, boot_id=self.node.boot_id, cpus=1, machine_key=key, incarnation=kind, live=live)

    def connect(self) -> None:
        pass

    def call(self, request: Any, body: bytes = b"", *, deadline_s: float, done: Any) -> None:
        """What is not of interest here is never answered."""
        if self.is_up and isinstance(request, agent.Stop) and self.node.slow is not None:
            self.node.slow.append(lambda: done(Reply(self.node.answer(request))))
            return
        answer = self.node.answer(request) if self.is_up else None
        if answer is not None:
            done(Reply(answer))
        elif not self.is_up or self.node.is_silent:
            done(Reply(None, error=Failure("deadline" if self.is_up else "connection-lost", "lost")))


class NoSamples:
    resets = 0

    def offsets(self, source: Any) -> Any:
        return {}

    def window(self, source: Any, hosts: int) -> Any:
        return 1 << 16, 0, 0

    def passed(self, source: Any) -> Any:
        return 0, 0

    def lacks(self, source: Any, sizes: Any) -> bool:
        return False

    def finish(self, source: Any) -> None:
        pass


class Alone(Context):
    """What the parts of a controller share, where there are no files and samples to collect."""

    artifacts: Any = Deaf()
    outputs: Any = Deaf()
    samples: Any = NoSamples()

    def __init__(self, store: Store, links: Any) -> None:
        super().__init__(store, links, Retention(), Guard())


class World:
    """Nodes by address; links to them; live jobs over a real store."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: dict[str, Node] = {}
        self.links: dict[str, Link] = {}
        self.start()

    def start(self) -> None:
        """Start a controller: nothing but the store survives."""
        self.links.clear()
        self.store = Store.open(self.folder)
        self.context = Alone(self.store, self)
        self.jobs = LiveJobs(self.context)
        for stored in self.store.jobs.live():
            self.jobs.adopt(stored)

    def restart(self) -> None:
        self.store.close()
        self.start()

    def get(self, host: Host) -> Link:
        node = self.nodes.setdefault(host.addr or host.name, Node(f"key-{host.addr or host.name}"))
        return self.links.setdefault(dialled(host), Link(host, node))

    def find(self, host: Host) -> Link | None:
        return self.links.get(dialled(host))

    def __iter__(self) -> Iterator[Any]:
        return iter(tuple(self.links.values()))

    def post(self, call: Callable[[], None]) -> None:
        call()

    def start_agents(self) -> None:
        pass

    def same(self, one: Host, other: Host) -> bool:
        return dialled(one) == dialled(other)

    def job(self, *hosts: Host, spec: JobSpec | None = None, trees: tuple[Tree, ...] = (), **changes: Any) -> Job:
        """A job in the queue; with `nodes` a job of which they are the nodes."""
        key = f"k{time.monotonic_ns()}"
        submission = Submission(key, spec or JobSpec(name="demo", command=("true",)), hosts, trees, None)
        job = self.store.jobs.add(
            **submission.values, make_job=lambda i, h: replace(make_job(submission, i, h, 1.0), **changes), now_s=1.0
        )
        self.jobs.add(job, submission)
        return job

    def running(self, *hosts: Host, others: Sequence[Host] = (), state: State = State.RUNNING, **changes: Any) -> Job:
        """A job that runs on hosts and may use others."""
        nodes = tuple(
            NodeProgress(
                host.name, rank, Phase.STARTED, (rank,), "b", machine_key=self.get(host).node.key, incarnation="i"
            )
            for rank, host in enumerate(hosts)
        )
        names = tuple(host.name for host in hosts)
        job = self.job(
            *hosts,
            *others,
            hosts=names,
            state=state,
            nodes=nodes,
            world_size=len(hosts),
            go_sent_at_s=time.time(),
            **changes,
        )
        for host in hosts:
            node = self.get(host).node
            assert node.live is not None
            node.live.add(job.run_id)
            node.phases[job.run_id] = "running"
            node.processes[job.run_id] = (PROCESS,)
        return job

    def up(self, *hosts: Host) -> None:
        for host in hosts:
            link: Any = self.get(host)
            link.is_up = True
            self.jobs.on_up(link)
        self.turn()

    def look(self) -> None:
        """The look of each minute."""
        self.jobs.machines.reconciler._due_mono = 0.0
        self.turn()

    def turn(self) -> None:
        self.jobs.steps.work_off()
        self.jobs.tick(was_away=False)
        self.jobs.steps.work_off()

    def send_records(self, job: Job, host: Host) -> None:
        """The records of the host's attempt arrive as far as they are written."""
        body = self.get(host).node.records[job.run_id]
        [runner] = [one for one in self.jobs if one.job.id == job.id]
        runner.copies.take_data(host.name, FileData(job.run_id, "events", 0, 0), body)
        self.turn()

    def confirm_ends(self, job: Job) -> None:
        """The time has come to ask again whether attempts have ended."""
        [runner] = [one for one in self.jobs if one.job.id == job.id]
        runner.ending._end_due = dict.fromkeys(runner.ending._end_due, 0.0)
        self.turn()

    def now(self, job: Job) -> Job:
        return self.store.jobs.find(job.id).job


def change(world: World, what: str, *hosts: Host, by: str = "wang", **more: Any) -> None:
    """Raises the error of the answer."""
    answers: list[AscendrunError | None] = []
    world.jobs.machines.change(ChangeMachines(hosts, what, by, **more), answers.append)
    for error in answers:
        if error is not None:
            raise error
    world.turn()
