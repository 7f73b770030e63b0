"""Made stories of jobs, as a report is made from them: a month with failures, a hostile one, one of 20 seconds."""

import math
import random
from dataclasses import replace
from functools import lru_cache

from ascendrun.core.events import Event
from ascendrun.core.jobs.job import Job, State
from ascendrun.core.jobs.reasons import because
from ascendrun.core.metrics import MetricsLine
from ascendrun.core.samples import DeviceSample, HostSample
from ascendrun.health.report.data import Material
from tests.lib.demo_jobs import demo_job

BEGAN_S = 1_790_000_000.0
HOSTS = tuple(f"npu{number:02d}" for number in range(1, 5))
SPEC = {"devices": {"family": "npu", "per_node": 8}}


def make_job(name: str, state: State, *, ended_s: float, attempt: int = 1) -> Job:
    return demo_job(
        id="j-0042",
        name=name,
        run="h-j-0042",
        hosts=HOSTS,
        created_at_s=BEGAN_S,
        state=state,
        reason=because("rejected", why="all 32 ranks exited 0"),
        attempt=attempt,
        world_size=32,
        ended_at_s=ended_s,
    )


class Story:
    """Written as it happens: `now_s` goes on."""

    def __init__(self, seed: int = 1) -> None:
        self.now_s = BEGAN_S
        self.events = [Event("submitted", {"name": "qwen32b"}, ("npu01", "npu02", "npu03", "npu04"), at_s=BEGAN_S)]
        self.lines: dict[int, list[MetricsLine]] = {}
        self.devices: list[DeviceSample] = []
        self.hosts: list[HostSample] = []
        self.dice = random.Random(seed)
        self.attempt = 1

    def move(self, state: State, reason: str, *, after_s: float) -> None:
        self.now_s += after_s
        self.events.append(
            Event(
                "state-changed",
                {"state": state.value, "reason": because("rejected", why=reason)},
                attempt=self.attempt,
                at_s=self.now_s,
            )
        )

    def note(self, text: str, kind: str = "preflight-warning") -> None:
        self.events.append(Event(kind, {"warning": text}, attempt=self.attempt, at_s=self.now_s))

    def start(self, *, queue_s: float) -> None:
        self.move(State.CHECKING, "its nodes are free", after_s=queue_s)
        self.move(State.STAGING, "all nodes reported", after_s=9.0)
        self.move(State.STARTING, "all nodes hold the same code", after_s=24.0)
        self.move(State.RUNNING, "all 32 ranks are alive", after_s=3.0)

    def train(
        self, *, first: int, last: int, step_s: float, save_every: int, log_every: int, begin_s: float = 180.0
    ) -> None:
        """Steps `first` to `last`, a save of 40 s after every `save_every`."""
        lines = self.lines.setdefault(self.attempt, [])
        lines.append(
            MetricsLine(
                at_s=self.now_s + 60,
                event="start",
                total_steps=60_000,
                world_size=32,
                tokens_per_step=524_288.0,
                flops_per_step=3.2e16,
                peak_flops=3.2e14,
            )
        )
        if first > 1:
            lines.append(MetricsLine(at_s=self.now_s + 90, event="resume", step=first - 1, path="/ckpt"))
        self.now_s += begin_s
        for step in range(first, last + 1):
            took_s = step_s * (1 + abs(self.dice.gauss(0, 0.01))) * (3.0 if self.dice.random() < 0.002 else 1.0)
            self.now_s += took_s
            if step % log_every == 0:
                loss = 1.4 + 6.5 * math.exp(-step / 6000) + self.dice.gauss(0, 0.03)
                lines.append(
                    MetricsLine(
                        at_s=self.now_s,
                        step=step,
                        loss=loss,
                        lr=2e-4 * min(1, step / 2000),
                        grad_norm=abs(self.dice.gauss(0.9, 0.2)),
                        step_s=took_s,
                    )
                )
            if step % save_every == 0:
                self.now_s += 40.0
                lines.append(MetricsLine(at_s=self.now_s, event="checkpoint", step=step, seconds=40.0, path="/ckpt"))
                judged = {"eval_loss": 1.5 + 5 * math.exp(-step / 6000)}
                lines.append(MetricsLine(at_s=self.now_s, step=step, evals=judged))

    def sample(self, *, every_s: float, unmeasured: tuple[float, float] = (0.0, 0.0)) -> None:
        """Figures of all devices from the submission to now, but for one stretch (begin, end) of the time."""
        count = int((self.now_s - BEGAN_S) / every_s)
        running = [
            (event.at_s, event.values["state"] == "RUNNING") for event in self.events if event.code == "state-changed"
        ]
        for turn in range(count):
            at_s = BEGAN_S + turn * every_s
            if unmeasured[0] <= (at_s - BEGAN_S) / (self.now_s - BEGAN_S) < unmeasured[1]:
                continue
            busy = [runs for began_s, runs in running if began_s <= at_s][-1:] == [True]
            for host in HOSTS:
                for device in range(8):
                    self.devices.append(
                        DeviceSample(
                            at_s,
                            host,
                            device,
                            "npu",
                            name="910B3",
                            utilisation=(93.0 if busy else 0.0) + self.dice.uniform(0, 4),
                            power_w=(330.0 if busy else 95.0) + self.dice.gauss(0, 8),
                            temperature_c=(63.0 if busy else 38.0) + device + self.dice.gauss(0, 1),
                            frequency_mhz=1800.0,
                            memory_used_bytes=58 * 2**30,
                            memory_total_bytes=64 * 2**30,
                        )
                    )
                self.hosts.append(HostSample(at_s, host, cpu=22.0 + self.dice.gauss(0, 3)))

    def material(self, name: str, state: State) -> Material:
        job = make_job(name, state, ended_s=self.now_s, attempt=self.attempt)
        return Material(
            job, SPEC, "jobs/qwen32b.yaml", tuple(self.events), self.lines, tuple(self.devices), tuple(self.hosts)
        )


@lru_cache(maxsize=1)
def month() -> Material:
    """Thirty days, three failures, a straggler, a stretch without samples."""
    story = Story()
    story.start(queue_s=2.5 * 3600)
    story.train(first=1, last=11_300, step_s=42.0, save_every=500, log_every=10)
    story.move(State.STOPPING, "rank 13 on npu02 was killed by signal 9", after_s=11.0)
    story.move(State.BACKOFF, "rank 13 on npu02 was killed by signal 9", after_s=4.0)
    story.move(State.QUEUED, "attempt 2 waits for its nodes", after_s=30.0)
    story.attempt = 2
    story.start(queue_s=60.0)
    story.train(first=11_001, last=30_750, step_s=42.0, save_every=500, log_every=10)
    story.note(
        "npu03 (ranks 16-23) is slow: 22 % more time than the others, 15 % of every step; likeliest sign: its "
        "device is hot · 98 °C, others 64",
        "straggler",
    )
    story.train(first=30_751, last=36_480, step_s=48.0, save_every=500, log_every=10, begin_s=0.0)
    story.move(State.STOPPING, "npu03 was rebooted: its ranks are gone", after_s=1300.0)
    story.move(State.BACKOFF, "npu03 was rebooted: its ranks are gone", after_s=62.0)
    story.move(State.QUEUED, "attempt 3 waits for its nodes", after_s=300.0)
    story.attempt = 3
    story.start(queue_s=5 * 3600.0)
    story.train(first=36_001, last=60_000, step_s=41.0, save_every=500, log_every=10)
    story.move(State.SUCCEEDED, "all 32 ranks exited 0", after_s=95.0)
    story.sample(every_s=3600.0, unmeasured=(0.4, 0.46))
    return story.material("qwen32b", State.SUCCEEDED)


def short() -> Material:
    """Twenty seconds on processors, of a program that writes nothing."""
    story = Story()
    story.start(queue_s=0.2)
    story.move(State.SUCCEEDED, "all 32 ranks exited 0", after_s=20.0)
    return replace(story.material("quick", State.SUCCEEDED), spec={"devices": {"family": "cpu", "per_node": 8}})


HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


def hostile() -> Material:
    """Every word that a user, a node or a program can choose tries to become markup."""
    story = Story()
    story.start(queue_s=5.0)
    story.train(first=1, last=60, step_s=2.0, save_every=30, log_every=1, begin_s=5.0)
    story.lines[1].append(MetricsLine(at_s=story.now_s, step=60, loss=float("nan"), evals={f"eval_{HOSTILE}": 1.0}))
    story.note(HOSTILE + "\u202e\x1b[31m", 'straggler"><script>')
    story.sample(every_s=5.0)
    story.move(State.STOPPING, HOSTILE, after_s=1.0)
    story.move(State.FAILED, HOSTILE, after_s=1.0)
    made = story.material(HOSTILE, State.FAILED)
    devices = tuple(replace(one, host=HOSTILE, name=HOSTILE) for one in made.devices)
    job = replace(made.job, reason=HOSTILE, hosts=(HOSTILE,))
    return replace(made, job=job, file=HOSTILE, devices=devices)
