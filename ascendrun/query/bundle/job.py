"""Support archive of a job, and its analysis by Huawei's tool if that is installed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Callable

from ascendrun.core.errors import AscendrunError
from ascendrun.core.notices import NoticeSettings
from ascendrun.core.records import as_record
from ascendrun.query.bundle.archive import Contents, make_archive, write_archive
from ascendrun.query.bundle.contents import LeftOut, Subject, collect, find_subject, make_redactor
from ascendrun.query.bundle.faultdiag import Parsed, collect_for_faultdiag, find_tool, run_parse
from ascendrun.text import Text


class CannotWriteError(AscendrunError):
    """The archive cannot be written."""

    code = "cannot-write"
    exit_code = 2


@dataclass(frozen=True)
class BundleRequest:
    """`path` None: <layout>-<job>.tar.gz in the current directory. `layout`: ascendrun or ascend-fd."""

    path: Path | None
    layout: str
    with_logs: bool
    max_bytes: int
    is_dry: bool


@dataclass(frozen=True)
class Bundle:
    """A support archive. `path` None: it was not written. `parsed`: the result of `ascend-fd parse` for each node's
    directory, () if that tool is not installed; its output is in `parsed_dir`."""

    contents: Contents
    path: Path | None = None
    archive_bytes: int = 0
    sha256: str | None = None
    parsed: tuple[Parsed, ...] = ()
    parsed_dir: Path | None = None


def bundle_job(
    state_dir: Path, ref: str, request: BundleRequest, *, notices: NoticeSettings | None, environ: Mapping[str, str]
) -> Bundle:
    """Make the archive. Raises NotFoundError, ConflictError, StoreUnusableError, CannotWriteError."""
    subject = find_subject(state_dir, ref)
    job = subject.stored.job
    left_out: LeftOut = []
    redactor = make_redactor(subject, environ, notices, left_out)
    if request.layout == "ascend-fd":
        pieces = collect_for_faultdiag(subject, left_out)
    else:
        pieces = collect(
            subject, extras=_views(subject, left_out), with_logs=request.with_logs, left_out=left_out, redactor=redactor
        )
    facts = {
        "job": job.id,
        "name": job.name,
        "state": job.state.value,
        "attempt": job.attempt,
        "layout": request.layout,
    }

    def write(out: IO[bytes] | None) -> Contents:
        return make_archive(
            pieces,
            redactor,
            root=f"ascendrun-{job.id}",
            facts=facts,
            max_bytes=request.max_bytes,
            left_out=left_out,
            out=out,
            mtime_s=int(job.created_at_s),
        )

    if request.is_dry:
        return Bundle(write(None))
    path = request.path or Path(f"{request.layout}-{job.id}.tar.gz")
    try:
        contents, sha256 = write_archive(path, write)
        done = Bundle(contents, path, path.stat().st_size, sha256)
        return _parse(done, job.used_hosts) if request.layout == "ascend-fd" else done
    except OSError as error:
        file, why = str(error.filename or path), error.strerror or str(error)
        raise CannotWriteError(
            Text("bundle.cannot-write", "cannot write {path}: {error}", path=file, error=why),
            hint=Text("bundle.cannot-write-hint", "set another file with -O FILE.tar.gz"),
        ) from error


def _parse(done: Bundle, nodes: tuple[str, ...]) -> Bundle:
    tool = find_tool()
    if tool is None or done.path is None:
        return done
    out = done.path.with_name(f"{done.path.name.partition('.')[0]}-ascend-fd")
    return replace(done, parsed=tuple(run_parse(tool, done.path, out, nodes=nodes)), parsed_dir=out / "parsed")


def _views(subject: Subject, left_out: LeftOut) -> Mapping[str, str]:
    """Return the output of `explain` and `report` as of the last event of the job, so that it is reproducible."""
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
            texts[name] = json.dumps(as_record(make()), indent=1, ensure_ascii=False) + "\n"
        except AscendrunError as error:
            left_out.append((name, error.message))
        except Exception as error:  # a broken view must not prevent the archive, which lists it
            why = f"{type(error).__name__}: {error}"
            left_out.append((name, Text("bundle.view-failed", "internal error: {error}", error=why)))
    return texts
