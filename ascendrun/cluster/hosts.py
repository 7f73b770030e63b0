"""Hosts: commands on them, their state, doctor, the environment of ranks, SSH host keys."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Union

from ascendrun.cluster.jobs import JobCalls
from ascendrun.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ascendrun.backends.trust import HostKeyScan
    from ascendrun.core.hosts import Host
    from ascendrun.health.comparison import DoctorReport
    from ascendrun.health.env_view import EnvReport
    from ascendrun.health.forecast import Forecast
    from ascendrun.health.survey.check_context import CheckContext
    from ascendrun.query.deep_check import DeepCheck, DeepOptions
    from ascendrun.query.host_views import ExecResult, HostStatus
    from ascendrun.query.memory_estimate import Estimate

Hosts = Union["Sequence[Host]", str, None]
"""None: the hosts of the setting `hostfile`. A string names some of them: npu[01-04] or @group."""
SURVEY_S = 180.0
"""Seconds, more than the sum of all deadlines of a survey: connect, probe, compare, connection tests."""
ENV_PROBES = ("environ", "limits", "python")


class HostCalls(JobCalls):
    """Operations on hosts. `Hosts` in a signature: hosts, names of hosts, or None for the setting."""

    def hosts(self, names: str | None = None, *, hostfile: str | Path | None = None) -> tuple[Host, ...]:
        """Return the hosts of a hostfile (None: the setting), limited to `names`. Without a file, the names are hosts.

        Raises NotFoundError; InvalidInputError, also without both a file and names.
        """
        from ascendrun.core.errors import InvalidInputError, Problem
        from ascendrun.core.hosts import parse_hostfile, select_hosts
        from ascendrun.query.submit import read_hostfile

        path = Path(hostfile) if hostfile else self.settings.hostfile
        if path is not None:
            hosts = read_hostfile(path)
            return hosts if names is None else select_hosts(hosts, names)
        if names is None:
            raise InvalidInputError([Problem("hosts", None, None, Text("cli.no-hosts", "no hosts given"))])
        return parse_hostfile(names.replace(" ", "\n"), "HOSTS")

    def execute(self, hosts: Hosts, argv: Sequence[str], *, timeout_s: float | None = None) -> Iterator[ExecResult]:
        """Run argv on every host in parallel; yield one result for every host, in order of arrival.

        `timeout_s`: of the command on a host, None: the setting.
        """
        from ascendrun.head.protocol.control_messages import Exec
        from ascendrun.query.host_views import make_exec_result

        timeout_s = self.settings.exec_timeout_s if timeout_s is None else timeout_s
        with self._client() as client:
            request = Exec(self._chosen(hosts), tuple(argv), timeout_s)
            for reply, body in client.stream(request, timeout_s=timeout_s + 60.0):
                yield make_exec_result(reply, body, timeout_s)

    def nodes(self, hosts: Hosts = None, *, timeout_s: float = 90.0) -> Iterator[HostStatus]:
        """Query the state of every host; yield one status for every host, in order of arrival."""
        from ascendrun.head.protocol.control_messages import Nodes
        from ascendrun.query.host_views import make_host_status

        holders = self._holders()
        with self._client() as client:
            for reply, _ in client.stream(Nodes(self._chosen(hosts)), timeout_s=timeout_s):
                yield make_host_status(reply, holders)

    def survey(
        self,
        hosts: Hosts = None,
        *,
        job_file: str | Path | None = None,
        overrides: Sequence[str] = (),
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
        from ascendrun.head.protocol.control_messages import Survey
        from ascendrun.query.survey_reader import read_world

        submission, hosts = None, self._chosen(hosts)
        if job_file is not None:
            from ascendrun.query.submit import make_submission

            submission = make_submission(
                Path(job_file),
                overrides=overrides,
                hostfile=None,
                hosts=hosts,
                state_dir=self.settings.state_dir,
                key="doctor",
            )
            hosts = submission.hosts
        request = Survey(
            hosts,
            None if submission is None else submission.to_json(),
            device_type=device_type,
            paths=tuple(paths),
            names=None if names is None else tuple(names),
            is_full=is_full,
            every_pair=every_pair,
        )
        with self._client() as client:
            replies = [reply for reply, _ in client.stream(request, timeout_s=SURVEY_S)]
        return read_world(replies, submission, device_type=device_type, now_s=time.time())

    def doctor(
        self,
        hosts: Hosts = None,
        *,
        job_file: str | Path | None = None,
        overrides: Sequence[str] = (),
        device_type: str | None = None,
        paths: Sequence[str] = (),
        is_full: bool = True,
        every_pair: bool = False,
    ) -> DoctorReport:
        """Check every node, compare them, and return findings with fixes. Nothing on the nodes is changed."""
        from ascendrun.health.checks import choose_checks, run_checks
        from ascendrun.health.comparison import make_report

        started = time.monotonic()
        hosts = self._chosen(hosts)
        context = self.survey(
            hosts,
            job_file=job_file,
            overrides=overrides,
            device_type=device_type,
            paths=paths,
            is_full=is_full,
            every_pair=every_pair,
        )
        checks = context.job.checks if context.job is not None else None
        skip, require = (checks.skip, checks.require) if checks is not None else ((), ())
        findings = run_checks(context, is_full=is_full, skip=skip, require=require)
        count = len(choose_checks(is_full=is_full, skip=skip, require=require))
        report = make_report(context, findings, checks=count, wall_s=time.monotonic() - started)
        return replace(report, forecast=self.forecast(len(hosts))) if hosts else report

    def forecast(self, nodes: int) -> Forecast:
        """Return the expected cost of failures on this many nodes, from published rates and this cluster's history."""
        from ascendrun.health.forecast import make_forecast
        from ascendrun.query.event_stream import read_history

        return make_forecast(nodes, read_history(self.settings.state_dir, now_s=time.time()))

    def deep(
        self,
        hosts: Hosts = None,
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
        from ascendrun.query.deep_check import StoreJobs, default_options, evaluate_and_save, make_base, run_deep_check
        from ascendrun.query.train_env import ensure_training_stack, print_line

        hosts = self._chosen(hosts)
        job = self.read_job(job_file, overrides=overrides) if job_file is not None else None
        base = make_base(job, device_type=device_type or "cpu")
        if base.python is None and any(host.is_local for host in hosts):
            ensure_training_stack(None, log)
        if job is None and base.devices.type != "cpu" and any(not (host.slots or host.devices) for host in hosts):
            note = Text(
                "doctor.one-device", "one device is measured on each host without slots= or devices= in the hostfile"
            )
            (log or print_line)(str(note))
        jobs = StoreJobs(
            self.settings.state_dir, lambda request: self._request(request, repeat=True), self.ensure_controller
        )
        report = run_deep_check(
            jobs,
            base,
            hosts,
            options or default_options(base.devices.type),
            state_dir=self.settings.state_dir,
            busy=self._holders(),
            unfit=not_ready,
            log=progress,
        )
        return evaluate_and_save(report, self.settings.state_dir)

    def env(
        self,
        hosts: Hosts = None,
        *,
        job_file: str | Path | None = None,
        overrides: Sequence[str] = (),
        only_differing: bool = False,
    ) -> EnvReport:
        """Return the variables, limits, interpreter and packages of a rank on each host; secrets are masked."""
        import secrets

        from ascendrun.health.env_view import make_env_report

        context = self.survey(hosts, job_file=job_file, overrides=overrides, names=ENV_PROBES, is_full=False)
        return make_env_report(context, salt=secrets.token_hex(8), only_differing=only_differing)

    def env_file(self, hosts: Hosts = None, *, job_file: str | Path, overrides: Sequence[str] = ()) -> tuple[str, str]:
        """Return the environment of a rank as a file to source in a shell, and the host it is from.

        Raises UnreachableError if a host does not respond, PreflightError if the job cannot start there.
        """
        from ascendrun.core.errors import PreflightError, UnreachableError
        from ascendrun.health.env_view import write_env_file
        from ascendrun.text.format import fold_hosts

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

    def estimate_memory(
        self,
        job_file: str | Path,
        plans: Sequence[Mapping[str, Any]],
        *,
        overrides: Sequence[str] = (),
        hostfile: str | Path | None = None,
    ) -> tuple[Estimate | None, ...]:
        """Return the memory estimate of each stage of a file (None: no training), for the `plans` of `plan`."""
        from ascendrun.query.memory_estimate import estimate_stages

        def chip_of(hosts: Sequence[Host]) -> str | None:
            """Return the common name of all NPUs of these hosts; None: they differ or are unknown."""
            from ascendrun.core.errors import AscendrunError

            try:
                world = self.survey(hosts, device_type="npu", names=("npu-smi",), is_full=False)
            except AscendrunError:
                return None  # the plan is complete without it
            infos = [facts.npu.info for facts in world.facts.values()]
            names = {chip.name for info in infos if info is not None for chip in info.chips}
            return names.pop() if len(names) == 1 else None

        stages = self.validate(job_file, overrides=overrides, hostfile=hostfile)
        return estimate_stages(stages, plans, chip_of=chip_of)

    # SSH host keys

    def scan_host_keys(self, hosts: Hosts = None) -> Iterator[HostKeyScan]:
        """Yield the SSH host key of each host in order of arrival; record nothing. Local hosts are skipped."""
        from ascendrun.backends.trust import scan_host_keys

        return scan_host_keys(self.settings, [host for host in self._chosen(hosts) if not host.is_local])

    def record_host_keys(self, scans: Iterable[HostKeyScan], *, replaces: bool = False) -> None:
        """Trust the scanned keys. `replaces`: also if another key is recorded."""
        from ascendrun.backends.trust import record_host_keys

        record_host_keys(self.settings, scans, replaces=replaces)

    def _chosen(self, hosts: Hosts) -> tuple[Host, ...]:
        return self.hosts(hosts) if hosts is None or isinstance(hosts, str) else tuple(hosts)
