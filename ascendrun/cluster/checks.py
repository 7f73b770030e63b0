"""Checks of hosts: survey, doctor, measurements, verification, the environment of ranks."""

from __future__ import annotations

import secrets
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable

from ascendrun.cluster.api import Part
from ascendrun.cluster.hosts import HostSelection, users_of
from ascendrun.core.errors import PreflightError, UnreachableError
from ascendrun.core.findings import Severity
from ascendrun.core.hosts import queue_of
from ascendrun.head.protocol.control_messages import Survey
from ascendrun.health.checks import choose_checks, run_checks
from ascendrun.health.comparison import make_report
from ascendrun.health.env_view import make_env_report, write_env_file
from ascendrun.text import Text
from ascendrun.text.format import fold_hosts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ascendrun.core.hosts import Host
    from ascendrun.core.jobfile.model import JobSpec
    from ascendrun.health.comparison import DoctorReport
    from ascendrun.health.env_view import EnvReport
    from ascendrun.health.forecast import Forecast
    from ascendrun.health.survey.check_context import CheckContext
    from ascendrun.health.verify import Claim, VerifyReport
    from ascendrun.query.deep_check import DeepCheck, DeepOptions, StoreJobs

ENV_PROBES = ("environ", "limits", "python")
DEVICE_PROBES = ("npu-smi", "leases")


class Checks(Part):
    """What hosts report about themselves, and how it compares."""

    def survey(
        self,
        hosts: HostSelection = None,
        *,
        job_file: str | Path | None = None,
        overrides: Sequence[str] = (),
        engine: str | None = None,
        device_type: str | None = None,
        paths: Sequence[str] = (),
        names: Sequence[str] | None = None,
        is_full: bool = True,
        every_pair: bool = False,
    ) -> CheckContext:
        """Return what every host reports about itself, in the shell that a job would get there.

        `job_file`: use the environment of this job, and only those hosts that it would use. `names`: only these probes.
        `every_pair`: ping all pairs of NPU ports instead of a sample; on many hosts this takes minutes.
        """
        submission, hosts = None, self._cluster.hosts.select(hosts)
        if job_file is not None:
            from ascendrun.query.submit import make_submission  # with pydantic: only a job file needs it

            submission = make_submission(
                Path(job_file), self._head.settings, overrides=overrides, engine=engine, hosts=hosts, key="doctor"
            )
            hosts = submission.hosts
        return self._head.survey(
            hosts, submission, device_type=device_type, paths=paths, names=names, is_full=is_full, every_pair=every_pair
        )

    def doctor(
        self,
        hosts: HostSelection = None,
        *,
        job_file: str | Path | None = None,
        overrides: Sequence[str] = (),
        engine: str | None = None,
        device_type: str | None = None,
        paths: Sequence[str] = (),
        is_full: bool = True,
        every_pair: bool = False,
    ) -> DoctorReport:
        """Check every node, compare them, and return findings with fixes. Nothing on the nodes is changed.

        Without `hosts` the engine of the job, or the one that is named, lends its free hosts. Raises PreflightError if
        it does not."""
        from ascendrun.head.loop.machine.power_agent import examine

        started = time.monotonic()
        on = (None if hosts else self.engine(job_file, overrides=overrides, name=engine)) or {}
        is_lent = queue_of({"engine": on or None}) is not None
        lent = None
        if is_lent:
            from ascendrun.cluster.borrowing import lent_hosts

            lent = lent_hosts(self._head.settings, on, nodes=on.get("nodes"))
        with lent or nullcontext((hosts, None)) as (hosts, facts):
            hosts = self._cluster.hosts.select(hosts)
            context = self.survey(
                hosts,
                job_file=job_file,
                overrides=overrides,
                engine=engine,
                device_type=device_type,
                paths=paths,
                is_full=is_full,
                every_pair=every_pair,
            )
        context = replace(context, engine=facts, no_power=examine(self._head.settings, hosts, context.facts))
        checks = context.job.checks if context.job is not None else None
        skip, require = (checks.skip, checks.require) if checks is not None else ((), ())
        findings = run_checks(context, is_full=is_full, skip=skip, require=require)
        count = len(choose_checks(is_full=is_full, skip=skip, require=require))
        return make_report(context, findings, checks=count, wall_s=time.monotonic() - started)

    def before_opening(self, hosts: Sequence[Host]) -> tuple[DoctorReport, set[str]]:
        """Return the quick checks of closed hosts, and the hosts that stay closed: a check failed, or no reply came."""
        report = self.doctor(hosts, is_full=False)
        failed = {host for one in report.findings if one.severity is Severity.FAIL for host in one.hosts}
        return report, {*failed, *report.unreached} & {host.name for host in hosts}

    def engine(
        self, job_file: str | Path | None, *, overrides: Sequence[str] = (), name: str | None = None
    ) -> Mapping[str, Any] | None:
        """Return the engine of a job, with the job's `nodes`, or the one that is named, in full; None: no engine."""
        if job_file is None:
            if name is None:
                return None
            from ascendrun.core.engines import find_engine

            return find_engine(self._head.settings, name)
        from ascendrun.head.survey.job_reading import read_job

        spec = read_job(Path(job_file), self._head.settings, overrides=overrides, engine=name)
        return {**spec.engine, "nodes": spec.nodes} if isinstance(spec.engine, dict) else None

    def forecast(self, nodes: int) -> Forecast:
        """Return the expected cost of failures on this many nodes, from published rates and this cluster's history."""
        from ascendrun.health.forecast import make_forecast
        from ascendrun.query.history import read_losses

        with self._head.store() as store:
            return make_forecast(nodes, read_losses(store, now_s=time.time()))

    def deep(
        self,
        hosts: HostSelection = None,
        *,
        job_file: str | Path | None = None,
        overrides: Sequence[str] = (),
        device_type: str | None = None,
        options: DeepOptions | None = None,
        not_ready: Sequence[str] = (),
        progress: Callable[[str], None] = lambda text: None,
        log: Callable[[str], None] | None = None,
    ) -> DeepCheck:
        """Measure devices and links with small jobs in the Python of the job, alone and in pairs; keep the report.

        Hosts that run a job, and the `not_ready`, are skipped. `device_type`: of a check without a job, None: cpu.
        `progress` gets each step, `log` (None: stderr) the lines that should remain on the screen.
        """
        from ascendrun.query.deep_check import default_options, evaluate_and_save, make_base, run_deep_check
        from ascendrun.query.train_env import ensure_training_stack, print_line

        hosts = self._cluster.hosts.select(hosts)
        job = self._cluster.job_files.read(job_file, overrides=overrides) if job_file is not None else None
        base = make_base(job, device_type=device_type or "cpu")
        if base.python is None and any(host.is_local for host in hosts):
            ensure_training_stack(log)
        if job is None and base.devices.type != "cpu" and any(not (host.slots or host.devices) for host in hosts):
            note = Text(
                "doctor.one-device", "one device is measured on each host without slots= or devices= in the hostfile"
            )
            (log or print_line)(str(note))
        jobs = self._store_jobs()
        holders, keepers = users_of(self._cluster.jobs.list())
        report = run_deep_check(
            jobs,
            base,
            hosts,
            options or default_options(base.devices.type),
            state_dir=self._head.state_dir,
            busy={**keepers, **holders},
            unfit=not_ready,
            log=progress,
        )
        check = evaluate_and_save(report, self._head.state_dir)
        self._cluster.hosts.end_quarantine([host for host in hosts if host.name in check.passed])
        return check

    def verify(
        self,
        hosts: HostSelection = None,
        *,
        job_file: str | Path | None = None,
        overrides: Sequence[str] = (),
        device_type: str = "npu",
        uses_devices: bool = False,
        archive: Path | None = None,
        progress: Callable[[str], None] = lambda text: None,
    ) -> VerifyReport:
        """Return what ascendrun reads of every tool, file and probe of the hosts, and which claims hold there.

        `uses_devices`: measure the claims with small jobs in the Python of `job_file`; otherwise nothing is changed.
        `archive`: write the outputs and the report there, without credentials. Raises CannotWriteError.
        """
        from ascendrun.health.survey import scripts
        from ascendrun.health.verify import make_verify_report, read_host, read_text, unmeasured
        from ascendrun.query.verify import write_outputs

        hosts, submission = self._cluster.hosts.select(hosts), None
        job = self._cluster.job_files.read(job_file, overrides=overrides) if job_file is not None else None
        if job_file is not None:
            from ascendrun.query.submit import make_submission

            submission = make_submission(
                Path(job_file), self._head.settings, overrides=overrides, hosts=hosts, key="verify"
            )
        content = None if submission is None else submission.to_json()
        replies = self._head.answers(Survey(tuple(hosts), content, device_type=device_type, is_full=True))
        reached = {reply.host: reply.results for reply in replies if reply.refused is None}
        outputs = [output for host, results in reached.items() for output in read_host(host, results)]
        present = [host for host in hosts if host.name in reached]
        for result in self._cluster.hosts.execute(present, ["sh", "-c", scripts.PORTS, "ascendrun", "stat"]):
            outputs += read_text(result.host, result.stdout.decode("utf-8", "replace"))
        claims = unmeasured(Text("verify.not-used", "no device was used"))
        if uses_devices and present:
            claims = self._measure_claims(present, job, device_type, progress)
        unreached = {reply.host: reply.refused for reply in replies if reply.refused is not None}
        report = make_verify_report((one for one, _ in outputs), claims, [host.name for host in hosts], unreached)
        if archive is not None:
            report = replace(report, archive=str(archive))
            write_outputs(archive, report, outputs, reached)
        return report

    def _measure_claims(
        self, hosts: Sequence[Host], job: JobSpec | None, device_type: str, progress: Callable[[str], None]
    ) -> tuple[Claim, ...]:
        from ascendrun.query.deep_check import Bench, DeepOptions, make_base
        from ascendrun.query.verify import measure_claims

        tiny = DeepOptions(burn_s=3.0, sizes=(1 << 20,), repeats=5, budget_s=1.0)
        by_name, base = {host.name: host for host in hosts}, make_base(job, device_type=device_type)
        bench = Bench(self._store_jobs(), base, by_name, tiny, self._head.state_dir, progress)
        survey = partial(self.survey, hosts, device_type=device_type, names=DEVICE_PROBES, is_full=False)
        return measure_claims(bench, hosts, lambda: survey().facts, progress)

    def _store_jobs(self) -> StoreJobs:
        from ascendrun.query.deep_check import StoreJobs

        ensure = self._cluster.controller.ensure
        return StoreJobs(self._head.state_dir, lambda request: self._head.request(request, repeat=True), ensure)

    def env(
        self,
        hosts: HostSelection = None,
        *,
        job_file: str | Path | None = None,
        overrides: Sequence[str] = (),
        only_differing: bool = False,
    ) -> EnvReport:
        """Return the variables, limits, interpreter and packages of a rank on each host; secrets are masked."""
        context = self.survey(hosts, job_file=job_file, overrides=overrides, names=ENV_PROBES, is_full=False)
        return make_env_report(context, salt=secrets.token_hex(8), only_differing=only_differing)

    def env_file(
        self, hosts: HostSelection = None, *, job_file: str | Path, overrides: Sequence[str] = ()
    ) -> tuple[str, str]:
        """Return the environment of a rank as a file to source in a shell, and the host it is from.

        Raises UnreachableError if a host does not respond, PreflightError if the job cannot start there.
        """
        context = self.survey(hosts, job_file=job_file, overrides=overrides, names=ENV_PROBES, is_full=False)
        if context.unreached:
            raise UnreachableError(
                Text(
                    "env.unreachable",
                    "{hosts:hosts} unreachable; --write requires all hosts",
                    hosts=tuple(context.unreached),
                ),
                hint=f"ascendrun nodes --hosts {fold_hosts(context.unreached)}",
            )
        host = next(iter(context.facts))
        try:
            return write_env_file(context, host), host
        except LookupError:
            raise PreflightError(
                Text("env.no-plan", "the job cannot start on these hosts, so its ranks have no environment"),
                hint="ascendrun submit --dry-run FILE",
            ) from None
