"""Fair share and backfill on a recorded trace: the scheduler of ascendrun, driven by a virtual clock.

    python -m benchmarks.fair_share TRACE ... [--jobs 2000] [--users 10] [--load 1.2] [--results FOLDER]

TRACE is a file of the Parallel Workloads Archive in its standard format (swf), such as NASA-iPSC-1993-3.1-cln.swf from
https://www.cs.huji.ac.il/labs/parallel/workload/. It is not part of this repository. Of its jobs of at least a minute,
the shortest beginning is taken in which the `--users` with the most processor-time have `--jobs` jobs: these jobs. The
cluster has 64 hosts with 8 devices; the sizes are scaled so that the largest job of the machine uses all of them.
Submissions are compressed in time until the work that arrives is `--load` times what the cluster can do. A job's limit
is its recorded request if the trace has one, else the next of 15 min, 1, 4, 12 and 24 h.

fifo         strictly in the order of submission, by the number of free devices
easy         the same with EASY backfill: a reservation for the first in line, by the number of free devices
ascendrun    `schedule()` without shares, with hosts
fair share   `schedule()` with equal shares, and a half-life of 7 days

A user is entitled to what max-min fairness gives of all that was delivered up to the last submission: an equal part, or
the whole demand if that is less. The error of the order alone is that of the same order by decayed use, in a cluster
where any part of a job can start and stop at no cost, and which delivers as much.
"""

from __future__ import annotations

import argparse
import heapq
import os
import statistics
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Callable

from ascendrun.core.jobs.fair_share import Account, FairShare, SharePolicy, Usage
from ascendrun.core.jobs.inputs import NodesFree
from ascendrun.core.jobs.job import Job, Request, State
from ascendrun.core.jobs.schedule import Claim, Contender, first_in_line, schedule
from benchmarks.results import RESULTS, Sheet, shown, table, write_page

HOSTS = tuple(f"h{number:02d}" for number in range(64))
EACH = 8
DEVICES = len(HOSTS) * EACH
SLOTS_S = (900.0, 3600.0, 4 * 3600.0, 12 * 3600.0, 24 * 3600.0)
STEP_S = 900.0
COLUMNS: tuple[str, ...] = ("trace", "policy", "users", "jobs", "utilisation", "median_wait_s", "longest_wait_s")
COLUMNS += ("share_error", "order_error", "cpu_s", "load")


@dataclass(frozen=True)
class Work:
    """One job of the trace. `at_s`: its submission."""

    name: str
    user: str
    at_s: float
    devices: int
    real_s: float
    limit_s: float


def read_trace(path: Path, *, jobs: int, users: int, load: float) -> list[Work]:
    header, rows = {}, []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith(";"):
            key, _, value = line[1:].partition(":")
            header[key.strip()] = value.strip()
        elif line.strip():
            rows.append([float(value) for value in line.split()])
    rows = [row for row in rows if row[3] >= 60 and row[4] > 0]
    chosen = _beginning(rows, jobs=jobs, users=users)
    scale = DEVICES / int(header["MaxProcs"])
    work = [_work(number, row, scale) for number, row in enumerate(chosen)]
    span_s = work[-1].at_s - work[0].at_s
    demand_s = sum(one.devices * one.real_s for one in work) / DEVICES
    factor = demand_s / load / span_s
    return [replace(one, at_s=(one.at_s - work[0].at_s) * factor) for one in work]


def _beginning(rows: Sequence[Sequence[float]], *, jobs: int, users: int) -> list[Sequence[float]]:
    used, count, most = Counter[float](), Counter[float](), set[float]()
    for row in rows:
        used[row[11]] += round(row[3] * row[4])
        count[row[11]] += 1
        most = {user for user, _ in used.most_common(users)}
        if sum(count[user] for user in most) >= jobs:
            break
    return [row for row in rows if row[11] in most][:jobs]


def _work(number: int, row: Sequence[float], scale: float) -> Work:
    devices = max(1, round(row[4] * scale))
    devices = devices if devices <= EACH else -(-devices // EACH) * EACH
    limit_s = row[8] if row[8] >= row[3] else next((slot for slot in SLOTS_S if slot >= row[3]), row[3])
    return Work(f"j-{number:05d}", f"u{int(row[11])}", row[1], devices, row[3], limit_s)


class Plain:
    """FIFO, or EASY: by the number of free devices only, which no real cluster can do better."""

    def __init__(self, *, backfills: bool) -> None:
        self.backfills = backfills
        self.running: dict[str, tuple[Work, float]] = {}

    def choose(self, waiting: Sequence[Work], now_s: float) -> list[Work]:
        free = DEVICES - sum(one.devices for one, _ in self.running.values())
        chosen: list[Work] = []
        line = list(waiting)
        while line and line[0].devices <= free:
            free -= line[0].devices
            chosen.append(line.pop(0))
        if self.backfills and line:
            ends = [(max(now_s, start_s + one.limit_s), one.devices) for one, start_s in self.running.values()]
            ends += [(now_s + one.limit_s, one.devices) for one in chosen]
            spare, due_s = free - line[0].devices, now_s
            for end_s, devices in sorted(ends):
                if spare < 0 or end_s == due_s:
                    spare, due_s = spare + devices, end_s
            for one in line[1:]:
                ends_before = now_s + one.limit_s <= due_s
                if one.devices <= free and (ends_before or one.devices <= spare):
                    chosen.append(one)
                    free -= one.devices
                    spare -= 0 if ends_before else one.devices
        return chosen

    def start(self, one: Work, now_s: float) -> None:
        self.running[one.name] = (one, now_s)

    def end(self, one: Work, now_s: float) -> None:
        del self.running[one.name]


class Ours:
    """`schedule()` over hosts. `is_shared`: with equal shares."""

    def __init__(self, *, is_shared: bool) -> None:
        self.is_shared = is_shared
        self.ended = Usage()
        self.running: dict[str, Contender] = {}
        self.jobs: dict[str, Contender] = {}
        self.hosts: Mapping[str, tuple[str, ...]] = {}
        self.first: frozenset[str] = frozenset()

    def contender(self, one: Work) -> Contender:
        if one.name not in self.jobs:
            job = Job(one.name, one.name, one.name, (), 0.0, 0.0, one.at_s, since_s=one.at_s, pool=HOSTS)
            job = replace(job, request=Request(-(-one.devices // EACH)))
            claim = min(one.devices, EACH)
            claims = {host: Claim(host, claim, capacity=EACH) for host in HOSTS}
            self.jobs[one.name] = Contender(job, claims, account=Account(one.user), limit_s=one.limit_s)
        return self.jobs[one.name]

    def choose(self, waiting: Sequence[Work], now_s: float) -> list[Work]:
        line = [self.contender(one) for one in waiting]
        share = None
        if self.is_shared:
            usage = self.ended.copy()
            for one in self.running.values():
                usage.add_span(one.account, one.devices(one.job.hosts), one.started_s or 0.0, now_s)
            share = FairShare(SharePolicy(), usage)
        every = [*self.running.values(), *line]
        decisions = schedule(every, lambda name: None, now_s=now_s, share=share, first=self.first)
        self.first = first_in_line(decisions)
        self.hosts = {name: one.hosts for name, one in decisions.items() if isinstance(one, NodesFree)}
        return [one for one in waiting if one.name in self.hosts]

    def start(self, one: Work, now_s: float) -> None:
        made = self.contender(one)
        job = replace(made.job, state=State.RUNNING, hosts=self.hosts[one.name])
        self.running[one.name] = replace(made, job=job, started_s=now_s)

    def end(self, one: Work, now_s: float) -> None:
        made = self.running.pop(one.name)
        self.ended.add_span(made.account, one.devices, made.started_s or 0.0, now_s)


def simulate(work: Sequence[Work], policy: Plain | Ours) -> Iterator[tuple[Work, float]]:
    """Yield each job with its start, in the order of the starts."""
    arrivals, ends = list(work), list[tuple[float, str]]()
    waiting: dict[str, Work] = {}
    by_name = {one.name: one for one in work}
    while arrivals or ends or waiting:
        now_s = min([one.at_s for one in arrivals[:1]] + [at_s for at_s, _ in ends[:1]])
        while ends and ends[0][0] <= now_s:
            policy.end(by_name[heapq.heappop(ends)[1]], now_s)
        while arrivals and arrivals[0].at_s <= now_s:
            arrived = arrivals.pop(0)
            waiting[arrived.name] = arrived
        for one in policy.choose(list(waiting.values()), now_s):
            policy.start(one, now_s)
            del waiting[one.name]
            heapq.heappush(ends, (now_s + one.real_s, one.name))
            yield one, now_s


def entitled(demand: Mapping[str, float], total: float) -> dict[str, float]:
    """Return what each user gets of `total` by max-min fairness with equal shares."""
    left, open_, given = total, dict(demand), dict[str, float]()
    while open_:
        part = left / len(open_)
        small = {user: wanted for user, wanted in open_.items() if wanted <= part}
        if not small:
            return {**given, **dict.fromkeys(open_, part)}
        given.update(small)
        left -= sum(small.values())
        open_ = {user: wanted for user, wanted in open_.items() if user not in small}
    return given


def share_error(delivered: Mapping[str, float], demand: Mapping[str, float]) -> float:
    """Return the largest difference of a user from what he is entitled to, as a part of all that was delivered."""
    total = sum(delivered.values())
    return max(abs(delivered.get(user, 0.0) - fair) / total for user, fair in entitled(demand, total).items())


def divided(work: Sequence[Work], devices: float) -> dict[str, float]:
    """Return what each user gets up to the last submission if any part of a job can start and stop at no cost, and the
    user with the least decayed use is always first."""
    usage, arrivals = Usage(), deque(work)
    left, given = dict[str, float](), dict[str, float]()
    for step in range(int(work[-1].at_s / STEP_S)):
        now_s, free = step * STEP_S, devices * STEP_S
        while arrivals and arrivals[0].at_s <= now_s:
            one = arrivals.popleft()
            left[one.user] = left.get(one.user, 0.0) + one.devices * one.real_s
        used = {account.user or "": seconds for account, seconds in usage.at(now_s).items()}
        while free > 0 and left:
            user = min(left, key=lambda user: used.get(user, 0.0))
            part = min(free, left[user], devices * STEP_S / 20)
            used[user] = used.get(user, 0.0) + part
            given[user] = given.get(user, 0.0) + part
            usage.add(Account(user), part, now_s)
            free, left[user] = free - part, left[user] - part
            if left[user] <= 0:
                del left[user]
    return given


def order_error(work: Sequence[Work], total: float, demand: Mapping[str, float]) -> float:
    """Return the share error of divided(), with as many devices as deliver a total."""
    low, high = 0.0, 2.0 * DEVICES
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(divided(work, middle).values()) < total else (low, middle)
    return share_error(divided(work, high), demand)


def within(one: Work, start_s: float, until_s: float) -> float:
    return one.devices * max(0.0, min(start_s + one.real_s, until_s) - start_s)


def demand_by_user(work: Sequence[Work]) -> Mapping[str, float]:
    demand: Counter[str] = Counter()
    for one in work:
        demand[one.user] += round(one.devices * one.real_s)
    return demand


def delivered_by_user(work: Sequence[Work], starts: Sequence[tuple[Work, float]]) -> Mapping[str, float]:
    """Return what each user has got up to the last submission."""
    delivered: Counter[str] = Counter()
    for one, start_s in starts:
        delivered[one.user] += round(within(one, start_s, work[-1].at_s))
    return delivered


def outcome(work: Sequence[Work], starts: Sequence[tuple[Work, float]]) -> dict[str, float]:
    """Return utilisation and shares up to the last submission, and the waits in seconds. `starts`: as of simulate()."""
    delivered = delivered_by_user(work, starts)
    waits = [start_s - one.at_s for one, start_s in starts]
    return {
        "utilisation": sum(delivered.values()) / (DEVICES * work[-1].at_s),
        "median_wait_s": statistics.median(waits),
        "longest_wait_s": max(waits),
        "share_error": share_error(delivered, demand_by_user(work)),
    }


def cells(values: Mapping[str, float]) -> list[str]:
    """Return the cells of outcome() in a table: %, hours, hours, %."""
    waited = [f"{values[key] / 3600:.1f}" for key in ("median_wait_s", "longest_wait_s")]
    return [shown(values["utilisation"], "%"), *waited, shown(values["share_error"], "%")]


POLICIES: Mapping[str, Callable[[], Plain | Ours]] = {
    "fifo": partial(Plain, backfills=False),
    "easy": partial(Plain, backfills=True),
    "ascendrun": partial(Ours, is_shared=False),
    "fair share": partial(Ours, is_shared=True),
}


def measure(name: str, work: Sequence[Work]) -> dict[str, Any]:
    """Return the row of a policy in the sheet; called in a process of its own."""
    began = time.process_time()
    policy = POLICIES[name]()
    starts = list(simulate(work, policy))
    values: dict[str, Any] = {**outcome(work, starts), "cpu_s": time.process_time() - began}
    if isinstance(policy, Ours) and policy.is_shared:
        total = sum(delivered_by_user(work, starts).values())
        values["order_error"] = order_error(work, total, demand_by_user(work))
    users = len({one.user for one in work})
    return {"policy": name, "users": users, "jobs": len(starts), **values, "load": os.getloadavg()[0]}


SAYS = (
    "Work that was submitted on the virtual clock to 64 hosts with 8 devices. Utilisation and shares: up to the last "
    "submission. The share error is the largest of a user, as a part of all that was delivered; the order error is "
    "what it would be in the same order by decayed use if any part of a job could start and stop at no cost. FIFO and "
    "EASY count devices only, without hosts."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="+", metavar="TRACE")
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--users", type=int, default=10)
    parser.add_argument("--load", type=float, default=1.2)
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    sizes = {"jobs": given.jobs, "users": given.users, "load": given.load}
    found = {path.name: read_trace(path, **sizes) for path in given.traces}
    header = ["policy", "utilisation, %", "median wait, h", "longest wait, h", "share error, %", "order error, %"]
    parts = []
    with Sheet(given.results, "fair_share", COLUMNS) as sheet, ProcessPoolExecutor() as pool:
        every = {name: [pool.submit(measure, policy, work) for policy in POLICIES] for name, work in found.items()}
        for name, work in found.items():
            rows = []
            for values in (future.result() for future in every[name]):
                sheet.add(trace=name, **values)
                rows.append([values["policy"], *cells(values), shown(values.get("order_error"), "%")])
            users, days = len({one.user for one in work}), work[-1].at_s / 86_400
            parts.append(f"{name}: {len(work)} jobs of {users} users in {days:.1f} days.\n\n{table(header, rows)}")
        command = f"python -m benchmarks.fair_share {' '.join(found)}"
        write_page(sheet, title="Fair share on recorded traces", says=SAYS, body="\n".join(parts), command=command)


if __name__ == "__main__":
    main()
