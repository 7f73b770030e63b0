"""Hosts: commands on them, their state, doctor, the environment of ranks, SSH host keys."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Union

from ascendrun.cluster.jobs import RELEASE_S, JobCalls
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
    from ascendrun.query.host_views import DeviceUse, ExecResult, HostStatus, MachineView

Hosts = Union["Sequence[Host]", str, None]
"""None: the hosts of the setting `hostfile`. A string names some of them: npu[01-04] or @group."""
LEASE_PROBES = ("leases", "npu-smi", "gpu-processes")
ENV_PROBES = ("environ", "limits", "python")


class HostCalls(JobCalls):
    """Operations on hosts. `Hosts` in a signature: hosts, names of hosts, or None for the setting."""

    def hosts(self, names: str | None = None, *, hostfile: str | Path | None = None) -> tuple[Host, ...]:
        """Return the hosts of a hostfile (None: the setting), limited to `names`. Without a file, the names are hosts.

        Raises NotFoundError; InvalidInputError, also without both a file and names.
        """
        from ascendrun.core.errors import InvalidInputError, Problem
        from ascendrun.core.hosts import parse_hostfile, read_hostfile, select_hosts

        path = Path(hostfile) if hostfile else self.settings.hostfile
        if path is not None:
            hosts = read_hostfile(path)
            return hosts if names is None else select_hosts(hosts, names)
        if names is None:
            raise InvalidInputError([Problem("hosts", None, None, Text("cli.no-hosts", "no hosts given"))])
        if names.lstrip().startswith("@"):
            needs = Text("hosts.group-needs-file", "group {group} requires a hostfile", group=names.strip())
            raise InvalidInputError(
                [Problem("hosts", None, None, needs, Text("hosts.group-needs-file.hint", "add --hostfile FILE"))]
            )
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

    def nodes(self, hosts: Hosts = None, *, timeout_s: float = 90.0, with_usage: bool = False) -> Iterator[HostStatus]:
        """Query the state of every host; yield one status for every host, in order of arrival.

        `with_usage`: also the disk use of ascendrun, for which a host reads its directories.
        """
        from ascendrun.head.protocol.control_messages import Nodes
        from ascendrun.query.host_views import make_host_status

        holders, keepers, machines = self._holders(), self._keepers(), self.held_machines()
        with self._reading() as store:
            records = store.machines()
        chosen = {host.name: host for host in self._chosen(hosts)}
        with self._client() as client:
            for reply, _ in client.stream(Nodes(tuple(chosen.values()), with_usage), timeout_s=timeout_s):
                status = make_host_status(reply, holders, chosen[reply.host], machines, records)
                yield replace(status, spare_of=keepers.get(reply.host))

    def machines(self) -> tuple[MachineView, ...]:
        """Return every machine that this head node knows, with its state. Works without a controller."""
        from ascendrun.query.host_views import make_machine_views

        with self._reading() as store:
            return make_machine_views(store.machines(), store.held_machines(), store.live_jobs(), now_s=time.time())

    def drain(
        self, hosts: Hosts, *, reason: str = "", until_s: float | None = None, now: bool = False
    ) -> tuple[Host, ...]:
        """Close hosts to new jobs, until `until_s` (UTC) or `undrain`; return them. Running jobs continue.

        `now`: jobs that may restart are stopped after a checkpoint and placed elsewhere. Raises NotFoundError.
        """
        return self._change_machines("drain", hosts, reason=reason, until_s=until_s, now=now)

    def undrain(self, hosts: Hosts) -> tuple[Host, ...]:
        """Open hosts to new jobs again, also from quarantine, without a check; return them. Raises NotFoundError."""
        return self._change_machines("undrain", hosts)

    def lost(self, hosts: Hosts, *, reason: str = "") -> tuple[Host, ...]:
        """State that hosts are gone with all their processes; return them. They are drained until `undrain`.

        Raises NotFoundError, and ConflictError if one of them responds.
        """
        return self._change_machines("lost", hosts, reason=reason)

    def _change_machines(self, change: str, hosts: Hosts, **values: Any) -> tuple[Host, ...]:
        import getpass

        from ascendrun.head.protocol.control_messages import ChangeMachines

        chosen = self.known_hosts(hosts) if isinstance(hosts, str) else self._chosen(hosts)
        request = ChangeMachines(chosen, change, getpass.getuser(), **values)
        self._request(request, timeout_s=RELEASE_S, repeat=True)
        return chosen

    def known_hosts(self, names: str) -> tuple[Host, ...]:
        """Return hosts by their names in the hostfiles of jobs; others are those of the setting `hostfile`."""
        from ascendrun.core.hosts import load_hosts
        from ascendrun.core.names import expand_names, split_list

        known: dict[str, dict[str, Host]] = {}
        with self._reading() as store:
            rows = [load_hosts(stored.hosts) for stored in store.all_jobs()]
            rows += [record.hosts for record in store.machines()]
        for host in (host for row in rows for host in row):
            known.setdefault(host.name, {})[f"{host.addr or host.name}:{host.port or 22}"] = host
        pieces = [piece.strip() for piece in split_list(names)]
        if any(piece.startswith("@") for piece in pieces):
            return self._chosen(names)
        wanted = [name for piece in pieces for name in expand_names(piece)]
        if any(name not in known for name in wanted):
            return self._chosen(names)
        return tuple(host for name in wanted for host in known[name].values())

    def leases(self, hosts: Hosts = None) -> tuple[tuple[DeviceUse, ...], Mapping[str, Text | str]]:
        """Return what uses devices and ports of ascendrun on the hosts, and why hosts did not respond, by host."""
        from ascendrun.query.host_views import make_device_uses

        context = self.survey(hosts, names=LEASE_PROBES, is_full=False)
        return make_device_uses(context), {host: one.message for host, one in context.unreached.items()}

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
        return self._survey(
            hosts, submission, device_type=device_type, paths=paths, names=names, is_full=is_full, every_pair=every_pair
        )

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
            busy={**self._keepers(), **self._holders()},
            unfit=not_ready,
            log=progress,
        )
        check = evaluate_and_save(report, self.settings.state_dir)
        self._end_quarantine([host for host in hosts if host.name in check.passed])
        return check

    def _end_quarantine(self, hosts: Sequence[Host]) -> None:
        """Open hosts in quarantine that passed a deep examination."""
        from ascendrun.core.machines import address_of

        with self._reading() as store:
            closed = {address for one in store.machines() if one.quarantine is not None for address in one.addresses}
        passed = [host for host in hosts if address_of(host) in closed]
        if passed:
            self._change_machines("deep", passed)

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
