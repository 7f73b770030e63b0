"""A small world for `top`: a state folder with live jobs, their metrics and samples, as a head would have it."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ascendrun.cluster import Cluster
from ascendrun.core.hosts import Host
from ascendrun.core.jobs.job import TERMINAL, Job, NodeProgress, Phase, State
from ascendrun.core.jobs.reasons import because
from ascendrun.core.pulse import Pulse
from ascendrun.core.samples import PORT_COUNTERS, DeviceDetail, DeviceSample, HostSample, RankSample
from ascendrun.core.settings import Settings
from ascendrun.head.loop.guard import LOCK_NAME
from ascendrun.head.state.sample_store import SampleStore
from ascendrun.head.state.state_dir import PULSE_NAME, clock_now, spool_dir
from ascendrun.head.state.store import Store
from ascendrun.query.top_source import TopSource
from tests.lib.demo_jobs import add_job, demo_job

GIB = 1024**3
PER_NODE = 8


@dataclass
class TopWorld:
    """`device`, `rank`: what differs from the usual at (host, device) or at a rank."""

    state_dir: Path
    now_s: float

    def add_job(
        self,
        name: str,
        hosts: Sequence[str],
        *,
        per_node: int = PER_NODE,
        state: State = State.RUNNING,
        device_type: str = "npu",
        steps: int = 40,
        slow: Mapping[int, float] = {},
        step_s: float = 1.5,
        ended_s: float = 5.0,
    ) -> str:
        """A job on whole hosts; every rank has metrics, `slow` ranks take so many times as long a step."""
        nodes = tuple(
            NodeProgress(
                host,
                i,
                Phase.STARTED,
                tuple(range(i * per_node, (i + 1) * per_node)),
                "boot",
                0.0,
                {rank: 1000 + rank for rank in range(i * per_node, (i + 1) * per_node)},
            )
            for i, host in enumerate(hosts)
        )

        def make(job_id: str, head_id: str) -> Job:
            return demo_job(
                id=job_id,
                name=name,
                run=f"{head_id}-{job_id}",
                hosts=tuple(hosts),
                created_at_s=self.now_s - 900,
                state=state,
                reason=because("new"),
                started_at_s=self.now_s - 800,
                ended_at_s=self.now_s - ended_s if state in TERMINAL else None,
                nodes=nodes,
                world_size=len(hosts) * per_node,
            )

        spec = {"name": name, "devices": {"type": device_type, "per_node": per_node}}
        rows = [{"name": host, "slots": per_node} for host in hosts]
        with Store.open(self.state_dir) as store:
            job = add_job(store, name, make, spec=spec, hosts=rows, now_s=self.now_s - 900)
        for node in nodes if steps else ():
            for rank in node.ranks:
                self.write_metrics(job.id, node.host, rank, steps=steps, step_s=step_s, own=slow.get(rank, 1.0))
        return job.id

    def add_past(self, count: int) -> None:
        """Copies of one ended job, until there are `count` jobs."""
        self.add_job("past", ["npu01"], state=State.SUCCEEDED, ended_s=100_000.0)
        columns = "name, state, record, spec, hosts, trees, file, created_at_s, is_drained"
        with Store.open(self.state_dir) as store, store.writing() as db:
            db.execute("UPDATE jobs SET is_drained = 1 WHERE state = 'SUCCEEDED'")  # all of its logs are here
            first = db.execute("SELECT max(number) FROM jobs").fetchone()[0]
            db.executemany(
                f"INSERT INTO jobs (number, id, key, {columns}) SELECT ?, ?, ?, {columns} FROM jobs WHERE number = ?",
                [(number, f"j-{number}", str(number), first) for number in range(first + 1, count + 1)],
            )

    def write_metrics(self, job: str, host: str, rank: int, *, steps: int, step_s: float, own: float) -> None:
        folder = spool_dir(self.state_dir, job, 1) / host
        folder.mkdir(parents=True, exist_ok=True)
        lines: list[dict[str, Any]] = [{"event": "start", "total_steps": 5000, "world_size": 32}]
        for step in range(1, steps + 1):
            lines.append(
                {
                    "step": 1000 + step,
                    "at_s": self.now_s - (steps - step) * step_s,
                    "loss": 2.5 - step / 100,
                    "step_s": step_s,
                    "comm_s": step_s * (1 - 0.7 * min(1.4, own)),
                    "tokens_per_s": 15300.0,
                    "mfu": 0.41,
                }
            )
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"rank-{rank}.metrics.0").write_text(text)

    def add_samples(
        self,
        hosts: Sequence[str],
        *,
        job: str | None = None,
        age_s: float = 3.0,
        first_rank: int = 0,
        changes: Mapping[tuple[str, int], Mapping[str, Any]] = {},
        per_node: int = PER_NODE,
        device_type: str = "npu",
    ) -> None:
        """What a sampler says of hosts with 8 devices, busy where there is a job."""
        found: list[Any] = []
        for i, host in enumerate(hosts):
            at_s = self.now_s - age_s
            found.append(
                HostSample(
                    at_s,
                    host,
                    cpu=31.0,
                    load1=12.5,
                    memory_used_bytes=210 * GIB,
                    memory_total_bytes=1512 * GIB,
                    disk_free_bytes=800 * GIB,
                    net_rx_bytes_s=1.5e6,
                    net_tx_bytes_s=2.5e6,
                )
            )
            for device in range(per_node):
                rank = first_rank + i * per_node + device
                pid = 1000 + rank
                if device_type != "cpu":
                    sample = DeviceSample(
                        at_s,
                        host,
                        device,
                        device_type,
                        name="910B3",
                        utilisation=88.0 + device if job else 0.0,
                        memory_used_bytes=int((55 + device / 4) * GIB) if job else 3 * GIB + device * 2**20,
                        memory_total_bytes=64 * GIB,
                        power_w=310.0 + device if job else 92.0 + device,
                        temperature_c=52.0 + device if job else 37.0 + device % 3,
                        frequency_mhz=1800.0,
                        health="OK",
                        link_up=True,
                        link_downs=0,
                        pids=(pid,) if job else (),
                        source="npu-smi",
                    )
                    found.append(replace(sample, **changes.get((host, device), {})))
                if job:
                    found.append(
                        RankSample(
                            at_s,
                            host,
                            job,
                            1,
                            rank,
                            pid=pid,
                            cpu=104.0,
                            rss_bytes=9 * GIB,
                            device=None if device_type == "cpu" else device,
                            threads=80,
                            state="R",
                        )
                    )
        with SampleStore.open(self.state_dir) as store:
            store.add(
                found,
                details=[
                    DeviceDetail(
                        one.at_s,
                        one.host,
                        one.device,
                        one.device_type,
                        "0000:C1:00.0",
                        {"hbm_single_bit": 3, "link_ups": 2, **dict.fromkeys(PORT_COUNTERS, 7), "hbm_percent": 85},
                        tuple((pid, 3105) for pid in one.pids or ()),
                    )
                    for one in found
                    if isinstance(one, DeviceSample) and one.device_type == "npu"
                ],
            )

    def add_history(self, host: str, device: int) -> None:
        """A device that was busy, and is again after a pause."""
        with SampleStore.open(self.state_dir) as store:
            store.add(
                DeviceSample(
                    self.now_s - 10 - 30 * i,
                    host,
                    device,
                    "npu",
                    name="910B3",
                    utilisation=0.0 if 40 < i < 60 else 80.0 + i % 15,
                    power_w=90.0 if 40 < i < 60 else 310.0,
                    memory_used_bytes=(3 if 40 < i < 60 else 55) * GIB,
                    memory_total_bytes=64 * GIB,
                    temperature_c=50.0 + i % 7,
                    frequency_mhz=1800.0,
                    health="OK",
                    source="npu-smi",
                )
                for i in range(120)
            )


def write_pulse(state_dir: Path, *, age_s: float = 0.0, pulse: Pulse | None = None) -> None:
    """Writes what a controller knew `age_s` ago; by default that it runs, and nothing of hosts."""
    now = clock_now()
    made = pulse or Pulse(now.at_s - age_s, now.boot_s - age_s, now.boot_id, os.getpid())
    (state_dir / PULSE_NAME).write_text(json.dumps(made.to_json()))


@contextmanager
def controller_lock(state_dir: Path) -> Iterator[None]:
    """As if a controller ran that wrote its pulse just now, so that looking starts none."""
    write_pulse(state_dir)
    fd = os.open(state_dir / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)  # else no pulse is of this controller, and each look waits for one
    try:
        yield
    finally:
        os.ftruncate(fd, 0)
        os.close(fd)


def make_world(state_dir: Path, *, now_s: float | None = None) -> TopWorld:
    state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    return TopWorld(state_dir, time.time() if now_s is None else now_s)


def sample_usual_hosts(world: TopWorld, job: str, *, busy: int = 4, idle: int = 5) -> None:
    """The newest samples of the usual world, again as of its `now_s`."""
    hosts = [f"npu{number:02d}" for number in range(1, busy + 1)]
    world.add_samples(
        hosts,
        job=job,
        changes={
            (hosts[1], 3): {"temperature_c": 91.0, "frequency_mhz": 1100.0, "utilisation": 99.0},
            (hosts[1], 6): {"health": "Alarm"},
            (hosts[2], 2): {"link_up": False, "link_downs": 4},
            (hosts[3], 0): {"power_w": None, "utilisation": None, "health": None},
            (hosts[3], 5): {"pids": (1000 + 3 * PER_NODE + 5, 77123)},
        },
    )
    world.add_samples([f"npu{number:02d}" for number in range(busy + 1, busy + idle + 1)])


def make_usual_world(state_dir: Path, *, busy: int = 4, idle: int = 5, now_s: float | None = None) -> TopWorld:
    """A job on npu01.., with a hot slow rank, a port down, an alarm and a stranger; idle hosts; one without figures."""
    world = make_world(state_dir, now_s=now_s)
    hosts = [f"npu{number:02d}" for number in range(1, busy + 1)]
    job = world.add_job("qwen32b-lora", hosts, slow={PER_NODE + 3: 1.18})
    sample_usual_hosts(world, job, busy=busy, idle=idle)
    world.add_history(hosts[1], 3)
    world.add_job("waits", ["npu90"], state=State.QUEUED, steps=0)
    return world


def make_source(state_dir: Path, hosts: Sequence[Host] = (), *, query: Any = None, request: Any = None) -> TopSource:
    """The source of `top` over a state folder. None: as the cluster would ask the hosts."""
    samples = Cluster(Settings(state_dir=state_dir)).samples
    return TopSource(
        state_dir, hosts, sight=samples._sight, query=query or samples.take, request=request or samples.request
    )
