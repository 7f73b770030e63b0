"""The deep check: small jobs measure hosts alone and in pairs, round by round, until the outlier is known."""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable

from ascendrun.core.dataclass import load_dataclass
from ascendrun.core.errors import ConflictError, NotFoundError
from ascendrun.core.findings import Finding, Severity
from ascendrun.core.hosts import Host
from ascendrun.core.jobfile.model import Checkpoint, Checks, Devices, JobSpec, Restart, Timeouts
from ascendrun.core.jobs.job import TERMINAL, State
from ascendrun.core.jobs.plan import Tree
from ascendrun.head.loop.daemon import is_running
from ascendrun.head.protocol.control_messages import Stop, Submit
from ascendrun.head.protocol.messages import Request
from ascendrun.head.state.state_dir import SPOOL_COMPLETE, spool_dir
from ascendrun.head.state.store import Store
from ascendrun.head.survey.submission import Submission
from ascendrun.health.deep import measurements
from ascendrun.health.deep.view import deep_findings, shares_of, slow_alone
from ascendrun.output_file import write_output
from ascendrun.query.packing import pack_trees
from ascendrun.text import Text, to_json

FOLDER = "deep"
POLL_S, WATCH_S = 0.1, 2.0
DRAIN_S, FAILED_DRAIN_S = 30.0, 3.0
OUTPUT_BYTES, OUTPUT_LENGTH = 4096, 200
SLACK_S = 60.0
"""Seconds that a job may take beyond its own limits: connecting, staging, stopping."""

HCCL_LIMITS: Mapping[str, str] = {"HCCL_CONNECT_TIMEOUT": "120", "HCCL_EXEC_TIMEOUT": "204"}
"""A training waits 20 minutes for a peer; a measurement of a bad link must fail sooner. (68 s is HCCL's step.)"""


@dataclass(frozen=True)
class DeepOptions:
    """`burn_s`: seconds of matrix products on every device. `sizes`: bytes of the all-reduces. `partners`: number of
    others each host is measured with; one less than all hosts is the full matrix. `meet_s`: how long a rank waits for
    its peers. `start_s`, `job_s`: limits of each small job's start and run."""

    burn_s: float = 10.0
    matmul_size: int = 0
    sizes: tuple[int, ...] = (1 << 20, 16 << 20, 128 << 20)
    repeats: int = 20
    budget_s: float = 3.0
    partners: int = measurements.PARTNERS
    meet_s: float = 120.0
    start_s: float = 120.0
    job_s: float = 240.0


def default_options(device_type: str) -> DeepOptions:
    """Return options for the device type: CPUs and their networks are slower and mostly needed by other work."""
    if device_type == "cpu":
        return DeepOptions(burn_s=1.0, sizes=(64 << 10, 1 << 20, 8 << 20), budget_s=1.0, meet_s=45.0)
    return DeepOptions()


@dataclass(frozen=True)
class Outcome:
    """One small job that has ended. `why`: the reason of its failure, None: it succeeded. `lines` by host."""

    job: str
    why: str | Text | None
    lines: Mapping[str, measurements.Lines]


@dataclass(frozen=True)
class DeepCheck:
    """A report, its evaluation (with the comparison with the previous report), and its file."""

    report: measurements.DeepReport
    findings: tuple[Finding, ...]
    file: Path

    @property
    def passed(self) -> tuple[str, ...]:
        """The measured hosts without a finding."""
        failed = {host for finding in self.findings if finding.severity is not Severity.NOTE for host in finding.hosts}
        return tuple(host for host, result in self.report.hosts.items() if not result.why and host not in failed)


class StoreJobs:
    """The jobs of one state directory. `ask(request)`: sends one request to the controller, which may be repeated.
    `ensure_controller` starts a controller if none runs."""

    def __init__(
        self, state_dir: Path, ask: Callable[[Request[Any]], Any], ensure_controller: Callable[[], None]
    ) -> None:
        self._state_dir, self._request, self._ensure_controller = state_dir, ask, ensure_controller

    def submit_made(self, submission: Submission) -> str:
        """Store the job and return its id."""
        return str(self._request(Submit((submission.to_json(),))).job)

    def await_ended(self, jobs: Sequence[str], *, timeout_s: float) -> tuple[str, ...]:
        """Return when all have ended, or at the time limit; return those that have not ended."""
        until = time.monotonic() + timeout_s
        check_at = 0.0
        with Store.open_for_reading(self._state_dir) as store:
            while True:
                states = store.jobs.states()
                left = tuple(job for job in jobs if states[job] not in TERMINAL)
                now = time.monotonic()
                if not left or now > until:
                    return left
                if now > check_at:  # they need a new controller if the previous one died
                    check_at = now + WATCH_S
                    if not is_running(self._state_dir):
                        self._ensure_controller()
                time.sleep(POLL_S)

    def outcome(self, job: str) -> tuple[str | None, int]:
        """Return why the job did not succeed (None: it did) or why it has not ended, and its attempt."""
        with Store.open_for_reading(self._state_dir) as store:
            record = store.jobs.find(job).job
        if record.state is State.SUCCEEDED:
            return None, record.attempt
        reason = record.first_failure.reason if record.first_failure is not None else record.reason
        return str(reason), record.attempt

    def end(self, jobs: Sequence[str], *, timeout_s: float) -> None:
        """Stop the running jobs immediately and wait for their end."""
        left = self.await_ended(jobs, timeout_s=0.0) if jobs else ()
        for job in left:
            try:
                self._request(Stop(job, now=True))
            except (ConflictError, NotFoundError):
                continue  # it has just ended by itself
        if left:
            self.await_ended(left, timeout_s=timeout_s)


def run_deep_check(
    jobs: StoreJobs,
    base: JobSpec,
    hosts: Sequence[Host],
    options: DeepOptions,
    *,
    state_dir: Path,
    busy: Mapping[str, str],
    unfit: Sequence[str] = (),
    log: Callable[[str], None],
) -> measurements.DeepReport:
    """Measure every host that is neither in `busy` (by the job that it runs) nor `unfit`, alone and then in pairs.

    `base` gives python, setup, environment and devices (see `make_base`). Raises children of AscendrunError only if
    nothing can be measured at all; failures of hosts are in the report.
    """
    bench = Bench(jobs, base, {host.name: host for host in hosts}, options, state_dir, log)
    report = measurements.DeepReport(
        at_s=time.time(),
        device_type=base.devices.type,
        sizes=options.sizes,
        busy={host.name: busy[host.name] for host in hosts if host.name in busy},
        not_ready=tuple(unfit),
    )
    names = [host.name for host in hosts if host.name not in busy and host.name not in unfit]
    if not names:
        return report
    log(str(Text("deep.progress-hosts", "measuring {count:plural host hosts} separately", count=len(names))))
    report = replace(report, hosts=bench.measure_hosts(names))
    doubtful = sorted({host for finding in slow_alone(report) for host in finding.hosts})
    if doubtful:
        log(str(Text("deep.progress-again", "measuring {count:plural host hosts} again", count=len(doubtful))))
        again = bench.measure_hosts(doubtful)
        merged = {host: measurements.better_of(report.hosts[host], result) for host, result in again.items()}
        report = replace(report, hosts={**report.hosts, **merged})
    while True:
        shares = shares_of(report.device_type, report.exchanges)
        pairs = measurements.next_round(report.paired, report.exchanges, shares=shares, partners=options.partners)
        if not pairs:
            return report
        number = len(report.rounds) + 1
        values = {"number": number, "count": len(pairs)}
        log(str(Text("deep.progress-pairs", "round {number}: measuring {count:plural pair pairs}", **values)))
        report = replace(report, rounds=(*report.rounds, bench.measure_pairs(pairs)))


def make_base(spec: JobSpec | None, *, device_type: str = "cpu") -> JobSpec:
    """Return the common part of the small jobs: from the user's job or, without one, for the device type."""
    if spec is None:
        # CPU ranks of one host would only measure each other.
        devices = Devices.model_validate({"type": device_type, "per_node": 1 if device_type == "cpu" else None})
        spec = JobSpec(name="deep", program="meshtest", devices=devices)
    env = {**spec.env, **(HCCL_LIMITS if spec.devices.type == "npu" else {})}
    env.pop("MASTER_PORT", None)  # several jobs may be on one host for a moment
    small = {"checks": Checks(skip=spec.checks.skip), "checkpoint": Checkpoint(grace_period_s=5.0), "env": env}
    small["restart"] = Restart(max_restarts=0)
    unset = {"command": None, "nodes": None, "hostfile": None, "stages": ()}
    return spec.model_copy(update={"program": "meshtest", "launcher": "spawn", **unset, **small})


class Bench:
    """Runner of small jobs: starts several in parallel on different hosts and reads their output."""

    def __init__(
        self,
        jobs: StoreJobs,
        base: JobSpec,
        hosts: Mapping[str, Host],
        options: DeepOptions,
        state_dir: Path,
        log: Callable[[str], None],
    ) -> None:
        self._jobs, self._hosts, self.options, self._state_dir, self._log = jobs, hosts, options, state_dir, log
        self._key = secrets.token_hex(8)
        self._count = 0
        limits = Timeouts(start_s=options.start_s, run_s=options.job_s + options.burn_s)
        self._base = base.model_copy(update={"timeouts": limits})
        self._trees: tuple[Tree, ...] = pack_trees(self._base.model_dump(mode="json"), state_dir)

    def measure_hosts(self, names: Sequence[str]) -> dict[str, measurements.HostResult]:
        results = {}
        for name, outcome in zip(names, self.run([(name,) for name in names], burn_s=self.options.burn_s)):
            results[name] = measurements.read_host(outcome.lines[name])
            if outcome.why is not None:
                results[name] = replace(results[name], why=outcome.why)
            elif not outcome.lines[name]:
                why = Text(
                    "deep.job-without-result", "job {job} ended without a result (see its logs)", job=outcome.job
                )
                results[name] = measurements.HostResult(why=why)
        return results

    def measure_pairs(self, pairs: Sequence[tuple[str, str]]) -> tuple[measurements.Exchange, ...]:
        found = []
        for pair, outcome in zip(pairs, self.run(pairs, burn_s=0.0)):
            lines = [line for lines in outcome.lines.values() for line in lines]
            is_read = outcome.why is None
            found.append(
                measurements.read_exchange(*pair, lines)
                if is_read
                else measurements.Exchange(*pair, rates=None, why=outcome.why)
            )
        return tuple(found)

    def start(self, group: tuple[str, ...], *, burn_s: float) -> str:
        """Submit one job and return its id."""
        return self._jobs.submit_made(self._submission(group, burn_s))

    def stop(self, job: str) -> None:
        """Kill its ranks and wait for the end."""
        self._jobs.end([job], timeout_s=SLACK_S)

    def run(self, groups: Sequence[tuple[str, ...]], *, burn_s: float) -> list[Outcome]:
        """Run one job for each group, in parallel; return an outcome for each, also if the job never started."""
        started: list[str] = []
        try:
            for group in groups:
                started.append(self.start(group, burn_s=burn_s))
            limit_s = self.options.start_s + self.options.job_s + self.options.burn_s + SLACK_S
            late = self._jobs.await_ended(started, timeout_s=limit_s)
            return [
                self._outcome(job, group, is_late=job in late, limit_s=limit_s) for job, group in zip(started, groups)
            ]
        finally:
            self._jobs.end(started, timeout_s=SLACK_S)

    def _submission(self, group: tuple[str, ...], burn_s: float) -> Submission:
        self._count += 1
        options = self.options
        args: dict[str, Any] = {
            "message_sizes": tuple(str(size) for size in options.sizes),
            "max_iterations": options.repeats,
            "time_per_size_s": options.budget_s,
            "dist_timeout_s": options.meet_s,
            "matmul_s": burn_s,
            "matmul_size": options.matmul_size,
        }
        name = re.sub("[^A-Za-z0-9._-]", "_", "-".join(("deep", *group)))[:63]
        spec = self._base.model_copy(update={"name": name, "args": args})
        key, hosts = f"deep-{self._key}-{self._count}", tuple(self._hosts[name] for name in group)
        return Submission(key=key, spec=spec, trees=self._trees, file=None, hosts=hosts, examines=True)

    def _outcome(self, job: str, group: tuple[str, ...], *, is_late: bool, limit_s: float) -> Outcome:
        why: str | Text | None
        why, attempt = self._jobs.outcome(job)
        if is_late:
            why = Text("deep.late", "no result within {limit_s:g} s ({why})", limit_s=limit_s, why=why)
        folder = spool_dir(self._state_dir, job, attempt)
        _await_drained(folder, deadline_s=DRAIN_S if why is None else 0.0 if is_late else FAILED_DRAIN_S)
        if why is not None:
            line = next((line for line in (last_output(folder / name) for name in group) if line), None)
            why = Text("deep.with-output", "{why}: {line}", why=why, line=line) if line else why
            why = Text("deep.job-failed", "job {job} failed: {why}", job=job, why=why)
        return Outcome(job, why, {name: read_lines(folder / name) for name in group})


def read_lines(folder: Path) -> measurements.Lines:
    """Return the complete lines of all metrics files of a host's spool; lines that are not objects are skipped."""
    lines: list[Mapping[str, Any]] = []
    for path in sorted(folder.glob("rank-*.metrics.0")):
        for line in path.read_bytes().split(b"\n")[:-1]:
            try:
                values = json.loads(line)
            except ValueError:
                continue
            if isinstance(values, dict):
                lines.append(values)
    return lines


def last_output(folder: Path) -> str | None:
    """Return the last line on standard error of the first rank of a host that printed one; None: none printed."""
    for path in sorted(folder.glob("rank-*.err.0")):
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - OUTPUT_BYTES))
            lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
        if lines:
            return lines[-1][:OUTPUT_LENGTH]
    return None


def save_report(report: measurements.DeepReport, state_dir: Path) -> Path:
    """Write the report next to the earlier ones, private, complete or not at all; return its path."""
    folder = state_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(report.at_s))
    path = folder / f"{stamp}.{int(report.at_s * 1000) % 1000:03d}Z.json"
    write_output(path, lambda file: file.write(json.dumps(to_json(report), indent=1).encode()), mode=0o600)
    return path


def earlier_reports(state_dir: Path) -> Iterable[measurements.DeepReport]:
    """Return every readable stored report, the newest first; those of other releases or damaged ones are skipped."""
    for path in sorted((state_dir / FOLDER).glob("*.json"), reverse=True):
        try:
            yield load_dataclass(measurements.DeepReport, json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue


def evaluate_and_save(report: measurements.DeepReport, state_dir: Path) -> DeepCheck:
    """Compare the report with the newest earlier one of its kind, then store it as the newest."""
    findings = deep_findings(report, measurements.newest_like(report, earlier_reports(state_dir)))
    return DeepCheck(report, findings, save_report(report, state_dir))


def _await_drained(folder: Path, *, deadline_s: float) -> None:
    """Wait for the last bytes, which arrive after the end of the job. If they do not arrive, use the existing bytes."""
    until = time.monotonic() + deadline_s
    while not (folder / SPOOL_COMPLETE).exists() and time.monotonic() < until:
        time.sleep(0.05)
