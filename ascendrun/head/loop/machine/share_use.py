"""What the accounts have used, from the attempts of the jobs, and the policy of the settings."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ascendrun.core.errors import AscendrunError
from ascendrun.core.hosts import load_hosts
from ascendrun.core.jobs.fair_share import Account, FairShare, SharePolicy, Usage
from ascendrun.core.jobs.job import Job
from ascendrun.core.machines import queue_drains
from ascendrun.core.settings import settings_files
from ascendrun.head.state.job_table import JobTable
from ascendrun.head.state.settings_watch import SettingsWatch
from ascendrun.head.state.store import Store
from ascendrun.head.state.user_files import load_settings
from ascendrun.health.report.cost import count_devices

if TYPE_CHECKING:
    from ascendrun.head.loop.job.runner import JobRunner


class ShareUse:
    """Use from the controller's thread. The jobs of the store are read once; those that have ended since are added."""

    def __init__(self, jobs: JobTable) -> None:
        self._jobs, self._files = jobs, settings_files(os.environ)
        self._watch = SettingsWatch(_read_policy, self._files, log=partial(print, file=sys.stderr, flush=True))
        self._ended: Usage | None = None
        self._counted: set[str] = set()
        self._specs: dict[str, Mapping[str, Any]] = {}

    def share(self, runners: Iterable[JobRunner], now_s: float) -> FairShare | None:
        """Return the shares and what has been used, None: the settings have none."""
        policy = self._watch.get() if any(map(os.path.exists, self._files)) else None
        if policy is None:
            self._ended = None
            return None
        live = {runner.job.id: runner for runner in runners}
        if self._ended is None or self._ended.half_life_s != policy.half_life_s or self._counted & set(live):
            self._ended, self._counted = Usage(policy.half_life_s), set()
            for one in self._jobs.all():
                if one.job.id not in live:
                    self._count(one.job, one.spec, now_s)
        usage = self._ended.copy()
        for runner in live.values():
            _add(usage, runner.job, self._spec(runner), now_s)
        return FairShare(policy, usage)

    def end(self, runner: JobRunner) -> None:
        """Note that a job has no runner any more."""
        if self._ended is not None:
            self._count(runner.job, self._spec(runner), runner.job.ended_at_s or 0.0)
        self._specs.pop(runner.job.id, None)

    def _count(self, job: Job, spec: Mapping[str, Any], now_s: float) -> None:
        assert self._ended is not None
        self._counted.add(job.id)
        _add(self._ended, job, spec, now_s)

    def _spec(self, runner: JobRunner) -> Mapping[str, Any]:
        if runner.job.id not in self._specs:
            self._specs[runner.job.id] = runner.submission.values["spec"]
        return self._specs[runner.job.id]


def known_here(state_dir: Path, half_life_s: float) -> Mapping[str, Any]:
    """Return what a new server of the shared queue gets from a store: decayed device-seconds of all jobs by project,
    and the drains of administrators. Jobs of engines do not count: those have a queue. {}: the store is unreadable."""
    usage, sums, now_s = Usage(half_life_s), dict[str, float](), time.time()
    try:
        with Store.open_for_reading(state_dir) as store:
            jobs, records = store.jobs.all(), store.machines.all()
    except AscendrunError:
        return {}
    for one in jobs:
        if one.job.engine is None:
            slots = {host.name: host.slots or 1 for host in load_hosts(one.hosts)}
            _add(usage, one.job, one.spec, now_s, slots)
    for account, seconds in usage.at(now_s).items():
        sums[account.project or ""] = sums.get(account.project or "", 0.0) + seconds
    return {"used": sums, "drains": tuple(queue_drains(records))}


def _add(usage: Usage, job: Job, spec: Mapping[str, Any], now_s: float, slots: Mapping[str, int] | None = None) -> None:
    """Add the attempts of a job, from the start of their ranks to the end. `slots`: of its hosts, for those of which it
    names no devices, as a claim has them; None: its ranks count."""
    account = Account(job.user, (spec.get("labels") or {}).get("project"))
    spans = [(one.number, one.started_at_s, one.ended_at_s) for one in job.past]
    spans.append((job.attempt, job.started_at_s, now_s if job.ended_at_s is None else job.ended_at_s))
    for attempt, start_s, end_s in spans:
        if start_s is not None:
            devices = count_devices(spec, job, attempt) or len(job.hosts_of(attempt))
            named = spec.get("devices") or {}
            if slots is not None and not (named.get("per_node") or named.get("ids")):
                devices = sum(slots.get(host, 1) for host in job.hosts_of(attempt))
            usage.add_span(account, devices, start_s, end_s)


def _read_policy() -> SharePolicy | None:
    from ascendrun.core.share_settings import read_share

    return read_share(load_settings(os.environ))
