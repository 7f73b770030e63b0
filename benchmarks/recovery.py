"""A rank or a host lost, and the next attempt runs: what the controller itself needs, without the pause before it.

python -m benchmarks.recovery [--repeat 5] [--results FOLDER]

Two ranks on each of two hosts, a third host is the job's spare. About two minutes a repetition.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import yaml

from benchmarks.bed import Bed
from benchmarks.ours import Ours
from benchmarks.results import Row, Sheet, median, repeated, shown, table
from tests.lib.vcluster.processes import await_true

COLUMNS = ("event", "repeat", "judged_s", "running_s", "pause_s", "head_cpu_share", "load")
RANK_KILLED, HOST_LOST = "rank killed", "host reported as lost"
EVENTS = (RANK_KILLED, HOST_LOST)
NOTHING = "nothing happens"
REST_S, GOAL_SHARE = 60.0, 0.005
GOALS_S = {RANK_KILLED: 12, HOST_LOST: 30}
JOB = "recovers"
HOSTS, RANKS_PER_HOST = 2, 2
VICTIM = str(HOSTS * RANKS_PER_HOST - 1)
STEPS = "import time\nwhile True:\n    print('step', flush=True)\n    time.sleep(0.2)\n"
WAITS = "import time\nprint('step', flush=True)\nwhile True:\n    time.sleep(60)\n"
PATIENCE_S = 300.0


class Job:
    """One job of the bed, by its events."""

    def __init__(self, bed: Bed, ours: Ours, script: str = STEPS) -> None:
        self._bed, self._ours = bed, ours
        self.file = bed.folder / f"{JOB}.yaml"
        hosts = bed.cluster.hosts
        job: dict[str, object] = {
            "name": JOB,
            "command": ["python3", "-c", script],
            "nodes": HOSTS,
            "spare_nodes": len(hosts) - HOSTS,
            "devices": {"type": "cpu", "per_node": RANKS_PER_HOST},
            "hostfile": str(ours.hostfile(hosts)),
            "restart": {"max_restarts": 3, "backoff_s": [1, 2], "on_unreachable_node": "fence"},
        }
        self.file.write_text(yaml.safe_dump(job))

    def start(self) -> None:
        submitted = self._ours.run("submit", "--detach", str(self.file))
        assert submitted.status == 0, submitted.tail
        self.await_event("spare-ready")
        self.await_event("state-changed", state="RUNNING")

    def stop(self) -> None:
        self._ours.run("stop", "--now", JOB)

    def events(self) -> list[dict[str, Any]]:
        out = self._bed.folder / "events.json"
        script = [
            "sh",
            "-c",
            'out=$1; shift; "$@" >"$out"',
            "sh",
            str(out),
            *self._ours.argv("show", JOB, "-o", "json"),
        ]
        cost = self._bed.run(script, env=self._ours.environ())
        return list(json.loads(out.read_text())["events"]) if cost.status == 0 else []

    def await_event(self, code: str, *, attempt: int = 1, **values: object) -> dict[str, Any]:
        """The event of the attempt with these values, within PATIENCE_S."""
        found: list[dict[str, Any]] = []

        def is_there() -> bool:
            time.sleep(1.0)
            matching = (one for one in self.events() if (one["code"], one["attempt"]) == (code, attempt))
            found.extend(one for one in matching if values.items() <= one["values"].items())
            return bool(found)

        assert await_true(is_there, deadline_s=PATIENCE_S), f"{code} {values} did not come"
        return found[0]


def run(repeats: int, sheet: Sheet) -> None:
    with Bed(HOSTS + 1) as bed:
        ours = Ours(bed)
        for repeat in range(repeats):
            for event in EVENTS:
                play(bed, ours, event, repeat, sheet)
            rest(bed, ours, repeat, sheet)
        ours.stop_controller()


def rest(bed: Bed, ours: Ours, repeat: int, sheet: Sheet) -> None:
    """What guard, controller and leases need while the ranks print nothing."""
    job = Job(bed, ours, WAITS)
    job.start()
    load = f"{os.getloadavg()[0]:.1f}"
    cost = bed.rest(REST_S)
    sheet.add(event=NOTHING, repeat=repeat, head_cpu_share=(cost.head_cpu_s or 0.0) / REST_S, load=load)
    job.stop()


def play(bed: Bed, ours: Ours, event: str, repeat: int, sheet: Sheet) -> None:
    job, host = Job(bed, ours), bed.cluster.hosts[HOSTS - 1]
    job.start()
    load = f"{os.getloadavg()[0]:.1f}"
    if event == RANK_KILLED:
        ranks = [one for one in bed.cluster.processes(host) if one.environ.get("RANK") == VICTIM and STEPS in one.argv]
        since_s = time.time()
        for one in ranks:
            os.kill(one.pid, signal.SIGKILL)
    else:
        bed.cluster.crash(host)
        job.await_event("unreachable")
        ours.run("lost", host)
        since_s = at_s(job.await_event("node-lost"))
    judged = job.await_event("restarting")
    running_s = at_s(job.await_event("state-changed", attempt=2, state="RUNNING")) - since_s
    pause_s = float(judged["values"]["pause_s"])
    sheet.add(
        event=event,
        repeat=repeat,
        judged_s=at_s(judged) - since_s,
        running_s=running_s - pause_s,
        pause_s=pause_s,
        load=load,
    )
    job.stop()
    if event == HOST_LOST:
        bed.cluster.reboot(host)
        assert await_true(lambda: ours.run("undrain", "--no-check", host).status == 0, deadline_s=PATIENCE_S)
        hosts = str(
            ours.hostfile(bed.cluster.hosts)
        )  # else the next job is placed before the host responds, without a spare
        assert await_true(lambda: ours.run("exec", "-H", hosts, "--", "true").status == 0, deadline_s=PATIENCE_S)


def at_s(event: dict[str, Any]) -> float:
    return datetime.fromisoformat(event["at"].replace("Z", "+00:00")).timestamp()


def render(rows: Sequence[Row]) -> str:
    lines = []
    for event in EVENTS:
        mine = [row for row in rows if row["event"] == event]
        running = [shown(median(mine, "judged_s")), shown(median(mine, "running_s")), str(GOALS_S[event])]
        lines.append([event, *running, str(len(mine))])
    resting = [row for row in rows if row["event"] == NOTHING]
    share = f"{shown(median(resting, 'head_cpu_share'), '%')} % of a core (goal {GOAL_SHARE:.1%})"
    return (
        table(["", "judged, s", "next attempt RUNNING, s", "goal, s", "repetitions"], lines)
        + f"\nThe head while the ranks run and print nothing, {REST_S:g} s: {share}.\n"
    )


SAYS = (
    "Two ranks on each of two hosts (CPU; a script that prints), a third host is the spare. Medians in seconds, by the "
    "times of the job's events; the pause before the restart is not counted. Nothing of this ran on an NPU.\n\n"
    "*rank killed*: from SIGKILL to the last rank. *host reported as lost*: from the event `node-lost`, after the host "
    "has lost its power and `ascendrun lost` was run."
)


def main() -> None:
    repeated(
        __doc__, "recovery", COLUMNS, run, render, title="recovery: until the next attempt runs", says=SAYS, repeat=5
    )


if __name__ == "__main__":
    main()
