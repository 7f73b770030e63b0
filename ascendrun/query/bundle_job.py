"""One support archive: from the job's name to a file, and to Huawei's tool where that is installed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, Callable

from ascendrun.core.errors import AscendrunError
from ascendrun.head.state.notice_settings import NoticeSettings
from ascendrun.query.bundle_archive import Contents, make_archive, write_archive
from ascendrun.query.bundle_contents import LeftOut, Subject, collect, find_subject, make_redactor
from ascendrun.query.faultdiag import Parsed, collect_for_faultdiag, find_tool, run_parse


class CannotWriteError(AscendrunError):
    """The archive cannot be written where it was wanted."""

    code = "cannot-write"
    exit_code = 2


@dataclass(frozen=True)
class Wish:
    """What kind of archive. `path` None: <layout>-<job>.tar.gz in this folder. `layout`: ascendrun or ascend-fd."""

    path: Path | None
    layout: str
    with_logs: bool
    max_bytes: int
    is_dry: bool


@dataclass(frozen=True)
class Bundle:
    """A support archive. `path` None: it was not written. `parsed`: what `ascend-fd parse` made of each node's folder,
    () when that tool is not here; its results lie in `parsed_dir`."""

    contents: Contents
    path: Path | None = None
    archive_bytes: int = 0
    sha256: str | None = None
    parsed: tuple[Parsed, ...] = ()
    parsed_dir: Path | None = None


def bundle_job(
    state_dir: Path, ref: str, wish: Wish, *, notices: NoticeSettings | None, environ: Mapping[str, str]
) -> Bundle:
    """Raises NotFoundError, ConflictError, StoreUnusableError, CannotWriteError."""
    subject = find_subject(state_dir, ref)
    job = subject.stored.job
    left_out: LeftOut = []
    redactor = make_redactor(subject, environ, notices, left_out)
    if wish.layout == "ascend-fd":
        pieces = collect_for_faultdiag(subject, left_out)
    else:
        pieces = collect(
            subject, extras=_views(subject, left_out), with_logs=wish.with_logs, left_out=left_out, redactor=redactor
        )
    facts = {"job": job.id, "name": job.name, "state": job.state.value, "attempt": job.attempt, "layout": wish.layout}

    def write(out: IO[bytes] | None) -> Contents:
        return make_archive(
            pieces,
            redactor,
            root=f"ascendrun-{job.id}",
            facts=facts,
            max_bytes=wish.max_bytes,
            left_out=left_out,
            out=out,
            mtime_s=int(job.created_at_s),
        )

    if wish.is_dry:
        return Bundle(write(None))
    path = wish.path or Path(f"{wish.layout}-{job.id}.tar.gz")
    try:
        contents, sha256 = write_archive(path, write)
        done = Bundle(contents, path, path.stat().st_size, sha256)
        return _parse(done, job.hosts) if wish.layout == "ascend-fd" else done
    except OSError as error:
        raise CannotWriteError(
            f"{error.filename or path} cannot be written: {error.strerror or error}",
            hint="-o FILE.tar.gz names another place",
        ) from error


def _parse(done: Bundle, nodes: tuple[str, ...]) -> Bundle:
    tool = find_tool()
    if tool is None or done.path is None:
        return done
    out = done.path.with_name(f"{done.path.name.partition('.')[0]}-ascend-fd")
    return replace(done, parsed=tuple(run_parse(tool, done.path, out, nodes=nodes)), parsed_dir=out / "parsed")


def _views(subject: Subject, left_out: LeftOut) -> Mapping[str, str]:
    """What `explain` and `report` say of the job as of its last event, so that they say the same tomorrow."""
    from ascendrun.query.explain import explain_job
    from ascendrun.query.report_reader import find_report

    job_id, state_dir = subject.stored.job.id, subject.state_dir
    now_s = subject.events[-1].at_s if subject.events else subject.stored.job.created_at_s
    makers: list[tuple[str, Callable[[], Any]]] = [
        ("explain.json", lambda: explain_job(state_dir, job_id, now_s=now_s)),
        ("report.json", lambda: find_report(state_dir, job_id, now_s=now_s)),
    ]
    texts: dict[str, str] = {}
    for name, make in makers:
        try:
            texts[name] = json.dumps(_plain(asdict(make())), indent=1, default=str, ensure_ascii=False) + "\n"
        except AscendrunError as error:
            left_out.append((name, str(error.message)))
        except Exception as error:  # a fault in a view must not keep the facts at home; the archive names it
            left_out.append((name, f"could not be made: {type(error).__name__}: {error}"))
    return texts


def _plain(value: Any) -> Any:
    """Keys as texts, sets in order: JSON that is the same every time."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(entry) for entry in value), key=str)
    return [_plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value
