"""Files on the hosts of jobs: fetch, copy; and shells next to ranks."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from ascendrun.cluster.api import Part
from ascendrun.core.errors import ConflictError, InvalidInputError, NotFoundError, Problem
from ascendrun.core.hosts import Host, load_hosts
from ascendrun.core.logs.log_view import LogView
from ascendrun.head.protocol.control_messages import Fetch, FetchReply, Put, RankProcess
from ascendrun.head.state.job_files import JOB_ID
from ascendrun.query.log_follow import check_choice
from ascendrun.query.views import JobDetail
from ascendrun.text import Text

FETCH_S = 3600.0
"""Seconds without progress: a node may hash a file of terabytes, or send the outputs of other jobs first."""


class Files(Part):
    """Operations on files of jobs and hosts. `target` in a signature: a job, for the host of its `rank` (None: 0), with
    paths relative to the working directory of its ranks; or hosts, with paths relative to the home directory.
    `hostfile`: where the hosts are found; None: the hostfiles of jobs, and the setting."""

    def fetch(self, ref: str, paths: Sequence[str] = (), *, into: str | Path | None = None) -> Iterator[FetchReply]:
        """Fetch files that a job, or the stages of a pipeline, left on its nodes. Yield the progress of each host; its
        last reply has `ended`.

        `paths`: files, directories or patterns, relative to the working directory of the ranks, or absolute; (): the
        `outputs` of the job file. `into`: directory on this machine, None: that of the job's outputs. What is there
        already is not sent again. Raises NotFoundError if nothing is declared, ConflictError.
        """
        target = None if into is None else str(Path(into).absolute())
        declaring = [] if paths else [stored for stored in self._cluster.jobs.stages(ref) if stored.spec.get("outputs")]
        started = [stored.job.id for stored in declaring if stored.job.go_sent_at_s is not None]
        for job_id in started or [self._cluster.jobs.detail(ref).job.id]:
            yield from self._transfer(Fetch(job_id, tuple(paths), target))

    def copy_from(
        self,
        target: str,
        path: str,
        into: str | Path = ".",
        *,
        rank: int | None = None,
        hostfile: str | Path | None = None,
    ) -> Iterator[FetchReply]:
        """Copy a file, a directory or the files of a pattern into a directory of this machine, under the last part of
        its name; of several hosts each into a directory of its name. Yield the progress as `fetch`.

        Raises NotFoundError; ConflictError if the job was not started.
        """
        job_id, hosts = self._place(target, rank, hostfile)
        path = posixpath.normpath(path)
        parts = path.split("/")
        named = next((at for at, part in enumerate(parts) if set(part) & set("*?[")), len(parts) - 1)
        strip = "/".join(parts[:named]) + "/" if named else ""
        return self._transfer(Fetch(job_id, (path,), str(Path(into).absolute()), hosts, strip))

    def copy_to(
        self,
        files: Sequence[str | Path],
        target: str,
        directory: str = ".",
        *,
        rank: int | None = None,
        hostfile: str | Path | None = None,
    ) -> Iterator[FetchReply]:
        """Copy files and directories of this machine into a directory of a job's host or of hosts, which is created.
        Yield the progress as `fetch`.

        Raises InvalidInputError with each file that does not exist; NotFoundError; ConflictError if the job was not
        started.
        """
        paths = [Path(file).resolve() if Path(file).name in ("", "..") else Path(file).absolute() for file in files]
        missing = [str(file) for file, path in zip(files, paths) if not path.exists()]
        if missing:
            raise InvalidInputError(
                [Problem(file, None, None, Text("cp.no-file", "file not found")) for file in missing]
            )
        job_id, hosts = self._place(target, rank, hostfile)
        return self._transfer(Put(hosts, tuple(map(str, paths)), directory, job_id))

    def shell(self, ref: str, rank: int, command: Sequence[str] = (), *, has_terminal: bool = True) -> tuple[str, ...]:
        """Return the command line, for this machine, that opens a shell next to a running rank: on its host, with its
        environment and in its directory. Run it at once: it is for the present process of the rank.

        `command`: run this instead of a shell. Raises NotFoundError for an unknown job or rank, ConflictError if the
        rank has ended, UnreachableError.
        """
        return self._next_to(ref, rank, list(command), has_terminal=has_terminal)

    def connection(self, ref: str, rank: int, port: int) -> tuple[str, ...]:
        """Return the command line, for this machine, whose stdin and stdout are a connection to a port of the host of
        a running rank, or of its container. Raises as `shell`."""
        return self._next_to(ref, rank, port, has_terminal=False)

    def _next_to(self, ref: str, rank: int, what: list[str] | int, *, has_terminal: bool) -> tuple[str, ...]:
        """Return the command line of `what` next to a rank: see node/stacks.py. []: a shell."""
        detail = self._with_rank(ref, rank)
        from ascendrun.backends import Backends

        found = self._head.request(RankProcess(detail.job.id, rank), repeat=True)
        host = self._host_of(detail.job.id, found.host)
        text = [json.dumps(what).encode().hex()] if what else []
        with closing(Backends(self._head.settings)) as backends:
            return tuple(backends.terminal_argv(host, [*found.argv, *text], has_terminal=has_terminal))

    def _transfer(self, request: Fetch | Put) -> Iterator[FetchReply]:
        for reply, _ in self._head.stream(request, timeout_s=FETCH_S):
            yield reply

    def _place(self, target: str, rank: int | None, hostfile: str | Path | None) -> tuple[str | None, tuple[Host, ...]]:
        """Return a job's id and the host of its rank; or None and hosts."""
        try:
            detail = self._cluster.jobs.detail(target) if rank is None else self._with_rank(target, rank)
        except NotFoundError:
            if rank is not None or JOB_ID.fullmatch(target):
                raise
            hosts = self._cluster.hosts
            return None, hosts.known(target) if hostfile is None else hosts.select(target, hostfile=hostfile)
        name = next((node.host for node in detail.nodes if (rank or 0) in node.ranks), None)
        if name is None:
            raise ConflictError.of("outputs.not-started", "{job} was not started on a host", job=detail.job.id)
        return detail.job.id, (self._host_of(detail.job.id, name),)

    def _with_rank(self, ref: str, rank: int) -> JobDetail:
        """Return the details of a job. Raises NotFoundError if it does not have the rank."""
        detail = self._cluster.jobs.detail(ref)
        check_choice(detail, LogView(ranks=[rank]))
        return detail

    def _host_of(self, job_id: str, name: str) -> Host:
        with self._head.store() as store:
            return next(host for host in load_hosts(store.jobs.find(job_id).hosts) if host.name == name)
