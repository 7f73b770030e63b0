"""Ten users with their real uids, one shared queue, and real hosts on which each has a login with a key of his own.

    python -m tests.crashes.ten_users --hosts 8 --jobs 20 --seed 1

Every user submits jobs of one to eight hosts for some seconds. All must succeed, each as the login of its user, and no
host may have ranks of two jobs at a time. One JSON line has what was measured.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ascendrun.core.jobs.job import TERMINAL, Job, State
from ascendrun.head.state.store import Store
from tests.crashes.hosts import CampaignError
from tests.lib.real_users import User, user_on
from tests.lib.vcluster.cluster import VirtualCluster
from tests.lib.vcluster.processes import await_true

ACCOUNTS = ("daemon", "bin", "sys", "games", "man", "lp", "mail", "news", "uucp", "proxy")
WIDTH, SECONDS = 8, 10
LIMIT_S = 3600.0
JOB = """name: {name}-{number}
command: [sh, -c, 'echo "$(hostname) $(id -un) $(date +%s.%N)"; sleep {seconds}; date +%s.%N']
hostfile: l.hosts
nodes: {nodes}
launcher: none
devices: {{type: cpu, per_node: 1}}
"""
CLIENT = """import sys; from ascendrun import Cluster
for line in sys.stdin: print(Cluster().jobs.submit(line.strip()).id, flush=True)"""


def submit_all(users: Sequence[User], count: int, lot: random.Random) -> None:
    """Let all users submit at once, from a process of each."""
    clients = [subprocess.Popen(**user.python("-c", CLIENT), stdin=-1, stdout=-1, text=True) for user in users]
    for number in range(count):
        user, client = users[number % len(users)], clients[number % len(users)]
        path = user.folder / f"job-{number}.yaml"
        values = {"nodes": lot.randint(1, WIDTH), "seconds": lot.randint(1, SECONDS)}
        path.write_text(JOB.format(name=user.name, number=number, **values))
        assert client.stdin is not None
        client.stdin.write(f"{path}\n")
    for user, client in zip(users, clients):
        ids, _ = client.communicate(timeout=LIMIT_S)
        if client.returncode or len(ids.split()) != len([*user.folder.glob("job-*.yaml")]):
            raise CampaignError(f"{user.name} could not submit: {ids}")


def jobs_of(user: User) -> list[Job]:
    with Store.open_for_reading(user.folder / "state") as store:
        return [store.jobs.find(job).job for job in store.jobs.names()]


def check(users: Sequence[User]) -> dict[str, Any]:
    """Return what was measured. Raises CampaignError."""
    everything = [(user, job) for user in users for job in jobs_of(user)]
    bad = [f"{user.name}/{job.id} {job.state}" for user, job in everything if job.state is not State.SUCCEEDED]
    if bad:
        raise CampaignError("\n".join(bad))
    spans: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    used: Counter[str] = Counter()
    waits: list[float] = []
    for user, job in everything:
        starts = []
        for path in (user.folder / "state" / "jobs" / job.id).glob("attempt-*/*/*.out.0"):
            host, login, start, end = path.read_text().split()
            if login != f"u-{user.name}":
                raise CampaignError(f"{user.name}/{job.id} ran as {login} on {host}")
            spans[host].append((float(start), float(end), f"{user.name}/{job.id}"))
            used[user.name] += round(float(end) - float(start))
            starts.append(float(start))
        waits.append(min(starts) - job.created_at_s)
    for host, found in spans.items():
        for before, after in zip(sorted(found), sorted(found)[1:]):
            if after[0] < before[1]:
                raise CampaignError(f"{host} had ranks of {before[2]} and {after[2]}")
    return {
        "more_attempts": sum(job.attempt - 1 for _, job in everything),
        "ranks": sum(map(len, spans.values())),
        "hosts_used": len(spans),
        "median_wait_s": round(statistics.median(waits), 1),
        "longest_wait_s": round(max(waits), 1),
        "host_seconds": dict(used),
    }


def run(hosts: int, count: int, seed: int) -> dict[str, Any]:
    """Raises CampaignError."""
    logins = {account: f"u-{account}" for account in ACCOUNTS}
    with VirtualCluster.up(hosts, users=dict.fromkeys(logins.values(), "sh")) as cluster:
        with tempfile.TemporaryDirectory(prefix="ascendrun-ten-") as name:
            folder = Path(name)
            folder.chmod(0o755)
            root = user_on(cluster, "root", "root", folder, slots=1)
            users = [user_on(cluster, account, login, folder, slots=1) for account, login in logins.items()]
            with subprocess.Popen(**root.argv("controller", "run", "--shared", folder / "queue")) as server:
                try:
                    for user in users:
                        user.submit(1, JOB, number="first", nodes=1)  # starts the controller
                    start_s = time.monotonic()
                    submit_all(users, count, random.Random(seed))
                    submitted_s = time.monotonic() - start_s

                    def is_over() -> bool:
                        return all(job.state in TERMINAL for user in users for job in jobs_of(user))

                    await_true(is_over, deadline_s=LIMIT_S)
                    took_s = time.monotonic() - start_s
                    processes = sum(map(len, cluster.all_processes(cluster.hosts).values()))
                    return {
                        "hosts": hosts,
                        "jobs": count,
                        "submitted_s": round(submitted_s, 1),
                        "all_s": round(took_s, 1),
                        "processes_on_hosts": processes,
                        **check(users),
                    }
                finally:
                    for user in users:
                        user.run(user.argv("controller", "stop"))
                    server.terminate()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m tests.crashes.ten_users", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(json.dumps(run(options.hosts, options.jobs, options.seed)), flush=True)
