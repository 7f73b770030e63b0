"""Contents of the support archive of a job: its records and files, and their names in the archive."""

from __future__ import annotations

import json
import os
import platform
import re
import sqlite3
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Union

from ascendrun import __version__
from ascendrun.core.errors import AscendrunError
from ascendrun.core.events import Event
from ascendrun.core.jobs.job import dump_job
from ascendrun.core.logs.redaction import SECRET_NAME, Redactor, redact_tree, secrets_in_tree
from ascendrun.core.notices import NoticeSettings
from ascendrun.head.notify.delivery import UnreadableCredentialsError, read_credentials
from ascendrun.head.state.job_table import StoredJob
from ascendrun.head.state.sample_store import SampleStore
from ascendrun.head.state.state_dir import spool_dir
from ascendrun.query.bundle.archive import Piece, file_piece, json_piece, text_piece
from ascendrun.text import Text

SAMPLE_ROWS = 20_000
"""Maximum number of samples of each kind; longer series are thinned."""
CRASHES = 3
SHORTEST_ENV_SECRET = 8
"""Shorter values of environment variables are not treated as secrets."""
_GENERATION = re.compile(r"^(.+)\.(\d+)$")

LeftOut = list[tuple[str, Union[str, Text]]]
"""(item, reason)"""


@dataclass(frozen=True)
class Subject:
    """The job of an archive, from the store."""

    stored: StoredJob
    events: tuple[Event, ...]
    state_dir: Path

    @property
    def attempts(self) -> Iterator[tuple[int, Path]]:
        """Yield the attempts with files on the head node."""
        for attempt in range(1, self.stored.job.attempt + 1):
            folder = spool_dir(self.state_dir, self.stored.job.id, attempt)
            if folder.is_dir():
                yield attempt, folder


def _event(event: Event) -> dict[str, Any]:
    return {**event.to_json(), "severity": event.severity.value, "message": event.message().render("en")}


def make_redactor(
    subject: Subject, environ: Mapping[str, str], notices: NoticeSettings | None, left_out: LeftOut
) -> Redactor:
    """Return a redactor for the secrets of the job's env_file files as they are now, of its env, of this process's
    variables, and of the settings for notifications."""
    known: dict[str, str] = {}
    for name, value in environ.items():
        if SECRET_NAME.search(name) and len(value) >= SHORTEST_ENV_SECRET:
            known[value] = "environment"
    known.update(secrets_in_tree(subject.stored.spec))
    for target in (notices or NoticeSettings()).targets:
        if target.type != "hook":
            try:
                url, secret = read_credentials(target)
            except UnreadableCredentialsError:
                continue
            known[url] = "notice"
            if secret:
                known[secret] = "notice"
    for source in subject.stored.spec.get("env_file") or ():
        for value in _values_of(str(source), left_out):
            known[value] = "env-file"
    return Redactor(known)


def _values_of(path: str, left_out: LeftOut) -> list[str]:
    """Return the values of NAME=value lines. If the file is gone, its secrets are found by name and form only."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read(1 << 20).splitlines()
    except OSError as error:
        why = Text(
            "bundle.env-file-unreadable",
            "cannot read {path}: {error}; its secrets are found by name and pattern only, review the archive",
            path=path,
            error=error.strerror,
        )
        left_out.append(("values of env_file", why))
        return []
    values = [line.partition("=")[2] for line in lines if "=" in line and not line.lstrip().startswith("#")]
    return [form for value in values for form in {value, value.strip(), value.strip().strip("'\"")} if form]


def collect(
    subject: Subject, *, extras: Mapping[str, str], with_logs: bool, left_out: LeftOut, redactor: Redactor
) -> list[Piece]:
    """Return the files of layout ascendrun. `extras`: more texts by their names in the archive."""
    job = subject.stored.job
    pieces = [
        json_piece("job.json", redact_tree(dump_job(job), redactor)),
        json_piece("spec.json", redact_tree(subject.stored.spec, redactor)),
        json_piece("hosts.json", redact_tree(list(subject.stored.hosts), redactor)),
        json_piece("trees.json", redact_tree(list(subject.stored.trees), redactor)),
        text_piece(
            "events.jsonl", "".join(json.dumps(_event(event), ensure_ascii=False) + "\n" for event in subject.events)
        ),
        json_piece("versions.json", versions()),
        *(text_piece(name, text) for name, text in extras.items()),
    ]
    for attempt, folder in subject.attempts:
        pieces += _attempt_pieces(folder, f"attempt-{attempt}", with_logs=with_logs, left_out=left_out)
    pieces += sample_pieces(subject, left_out)
    return pieces + list(_head_pieces(subject.state_dir))


def versions() -> Mapping[str, Any]:
    packages: dict[str, str | None] = {}
    for name in ("click", "paramiko", "pydantic", "PyYAML", "ClusterShell", "psutil", "rich", "textual"):
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            packages[name] = None
    return {
        "ascendrun": __version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "sqlite": sqlite3.sqlite_version,
        "packages": packages,
    }


def _attempt_pieces(folder: Path, name: str, *, with_logs: bool, left_out: LeftOut) -> Iterator[Piece]:
    """Yield every file of the attempt's spool; the generations of a file are one piece."""
    groups: dict[str, list[tuple[int, Path]]] = {}
    arrival_times = logs = 0
    for path in _files_below(folder):
        relative = path.relative_to(folder).as_posix()
        found = None if "/gathered/" in relative else _GENERATION.match(relative)
        base, generation = (found.group(1), int(found.group(2))) if found else (relative, 0)
        if base.endswith(".times"):
            arrival_times += 1
        elif not with_logs and base.endswith((".out", ".err")):
            logs += 1
        else:
            groups.setdefault(base, []).append((generation, path))
    for base, parts in sorted(groups.items()):
        paths = [path for _, path in sorted(parts)]
        try:
            yield file_piece(f"{name}/{base}", paths)
        except OSError as error:
            left_out.append((f"{name}/{base}", Text("bundle.unreadable", "cannot read: {error}", error=str(error))))
    if arrival_times:
        left_out.append(
            (f"{name}/*.times ({arrival_times})", Text("bundle.times", "arrival times require complete logs"))
        )
    if logs:
        left_out.append((f"{name}/*.out, *.err ({logs})", "--no-logs"))


def _files_below(folder: Path) -> Iterator[Path]:
    """Yield regular files only: data sent by a node cannot point elsewhere."""
    for base, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = Path(base) / name
            if stat.S_ISREG(os.lstat(path).st_mode):
                yield path


def sample_pieces(subject: Subject, left_out: LeftOut) -> list[Piece]:
    """Return the measurements of the job's hosts while it used them, one JSON line for each sample."""
    series = read_samples(subject, left_out)
    pieces = []
    for name, samples in series.items():
        if samples:
            step = -(-len(samples) // SAMPLE_ROWS)  # every n-th, so that about SAMPLE_ROWS remain, including the last
            thinned = samples[(len(samples) - 1) % step :: step]
            lines = (json.dumps(asdict(sample), ensure_ascii=False) + "\n" for sample in thinned)
            pieces.append(text_piece(f"samples/{name}.jsonl", "".join(lines)))
    return pieces


def read_samples(subject: Subject, left_out: LeftOut) -> Mapping[str, Sequence[Any]]:
    """Return devices, hosts and ranks; {} if nothing was measured."""
    job = subject.stored.job
    if job.started_at_s is None:
        return {}
    last_s = job.ended_at_s or max([event.at_s for event in subject.events] or [job.started_at_s])
    window = {"since_s": job.started_at_s - 60.0, "until_s": last_s + 60.0}
    hosts = frozenset(job.used_hosts)
    try:
        with SampleStore.open_for_reading(subject.state_dir) as store:
            return {
                "devices": store.device_series(host=hosts, **window),
                "hosts": store.host_series(host=hosts, **window),
                "ranks": store.rank_series(job=job.id, **window),
            }
    except AscendrunError as error:
        left_out.append(("samples", error.message))
        return {}


def _head_pieces(state_dir: Path) -> Iterable[Piece]:
    """Yield the controller's log, the newest tracebacks of internal errors, and the last measurement kept by doctor."""
    crashes = sorted((state_dir / "crashes").glob("*.txt"))[-CRASHES:]
    deep = sorted((state_dir / "deep").glob("*.json"))[-1:]
    files = [("head/controller.log", state_dir / "controller.log")]
    files += [(f"head/crashes/{path.name}", path) for path in crashes]
    files += [(f"head/doctor-deep/{path.name}", path) for path in deep]
    for name, path in files:
        try:
            yield file_piece(name, [path])
        except OSError:
            continue
