"""What a browser may change with --allow-actions: jobs, nodes, and the submission of a job file that it edits."""

from __future__ import annotations

import hashlib
import hmac
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, quote

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from ascendrun.cli.plans import exit_code, plan_text
from ascendrun.core.errors import AscendrunError, ConflictError, InvalidInputError, NotFoundError, Problem
from ascendrun.core.jobfile.keys import list_keys
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.cluster import Cluster

FILE_LIMIT = 1_000_000
"""Bytes of a form: job files are small."""

Form = Mapping[str, str]
Show = Callable[[Request, Mapping[str, Any]], Response]


def no_page(path: str) -> NotFoundError:
    return NotFoundError.of("dashboard.no-page", "{path}: page not found", path=path)


def csrf_of(token: str) -> str:
    """Return what the forms of a dashboard with this token carry: another site cannot know it."""
    return hmac.new(token.encode(), b"form", hashlib.sha256).hexdigest()


def add_actions(app: FastAPI, cluster: Cluster, csrf: str, show: Show) -> None:
    """Add the routes. `csrf`: of the forms; `show`: renders the page of a job file."""
    jobs = {
        "stop": cluster.jobs.stop,
        "retry": cluster.jobs.retry,
        "hold": cluster.jobs.hold,
        "unhold": cluster.jobs.unhold,
    }

    async def change_job(request: Request) -> Response:
        await read_form(request, csrf)
        job, action = request.path_params["job"], request.path_params["action"]
        if action not in jobs:
            raise no_page(request.url.path)
        await run_in_threadpool(jobs[action], job)
        return RedirectResponse(f"/jobs/{quote(job)}", 303)

    async def change_node(request: Request) -> Response:
        await read_form(request, csrf)
        host, action = request.path_params["host"], request.path_params["action"]
        if action not in ("drain", "undrain"):
            raise no_page(request.url.path)
        await run_in_threadpool(cluster.hosts.drain if action == "drain" else _open(cluster), host)
        return RedirectResponse(f"/nodes/{quote(host)}", 303)

    def edit(request: Request) -> Response:
        file = request.query_params.get("file", "").strip()
        return show(request, {"file": file, "text": _read(file) if file else "", **NOTHING_YET})

    async def handle(request: Request) -> Response:
        form = await read_form(request, csrf)
        return await run_in_threadpool(_edited, cluster, form, lambda values: show(request, values))

    def schema() -> Response:
        about = {key.path: str(key.meaning).replace("`", "") for key in list_keys()}  # in the reader's language
        return JSONResponse({**cluster.job_files.schema(), "about": about})

    app.add_api_route("/jobs/{job}/{action}", change_job, methods=["POST"], include_in_schema=False)
    app.add_api_route("/nodes/{host}/{action}", change_node, methods=["POST"], include_in_schema=False)
    app.add_api_route("/submit", edit, include_in_schema=False)
    app.add_api_route("/submit", handle, methods=["POST"], include_in_schema=False)
    app.add_api_route("/job.schema.json", schema, include_in_schema=False)


async def read_form(request: Request, csrf: str) -> Form:
    """Return the fields of a form. Raises InvalidInputError if it is not one of a page of this dashboard."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > FILE_LIMIT:
            raise _refusal("form", Text("dashboard.form-large", "more than {limit} bytes", limit=FILE_LIMIT))
    fields = {
        name: values[-1] for name, values in parse_qs(body.decode(errors="replace"), keep_blank_values=True).items()
    }
    if not hmac.compare_digest(fields.pop("csrf", "").encode(), csrf.encode()):
        raise ConflictError.of(
            "dashboard.form-old", "the form is not one of this dashboard", "open the page again, and repeat the action"
        )
    return fields


def _open(cluster: Cluster) -> Callable[[str], None]:
    def undrain(host: str) -> None:
        chosen = cluster.hosts.known(host)
        report, refused = cluster.checks.before_opening(chosen)
        if refused:
            told = [str(one.message) for one in report.findings if set(one.hosts) & refused]
            raise ConflictError.of(
                "dashboard.not-opened",
                "{hosts:hosts} not ready: {why}",
                "run `ascendrun undrain --no-check {hosts:hosts}`",
                hosts=sorted(refused),
                why="; ".join(told or map(str, report.unreached)),
            )
        cluster.hosts.undrain(chosen)

    return undrain


# ---------------------------------------------------------------- the job file

NOTHING_YET: Mapping[str, Any] = {"error": None, "plan": "", "is_valid": False}


def _edited(cluster: Cluster, form: Form, show: Callable[[Mapping[str, Any]], Response]) -> Response:
    """Check, plan or submit what the page has. What is wrong is shown on the page, with the text as it was edited."""
    file, text, step = form.get("file", "").strip(), form.get("text", "").replace("\r\n", "\n"), form.get("step", "")
    values = {**NOTHING_YET, "file": file, "text": text}
    try:
        path = _path_of(file)
        if step == "submit":
            with _kept_as(path, text) as edited:
                cluster.job_files.validate(edited)
            write_file(path, text)
            job = cluster.jobs.submit(path)
            if job.warnings:
                return show({**values, "warnings": job.warnings, "job": job.id})
            return RedirectResponse(f"/jobs/{job.id}", 303)
        with _kept_as(path, text) as edited:
            cluster.job_files.validate(edited)
            if step != "plan":
                return show({**values, "is_valid": True})
            plans, trainings = cluster.job_files.dry_run(edited)
            plan = plan_text(path.stem, plans, trainings)
            return show({**values, "plan": plan, "is_valid": not exit_code(trainings)})
    except OSError as error:
        return show({**values, "error": _refusal(file, error.strerror or str(error))})
    except AscendrunError as error:
        return show({**values, "error": error})


def _path_of(file: str) -> Path:
    path = Path(file)
    if not file or not path.is_absolute() or path.suffix not in (".yaml", ".yml"):
        raise _refusal(file, Text("dashboard.no-job-file", "not the absolute path of a .yaml file on this machine"))
    if not path.parent.is_dir():
        raise NotFoundError.of("dashboard.no-directory", "{path}: no such directory", path=str(path.parent))
    return path


def _read(file: str) -> str:
    path = _path_of(file)
    try:
        return path.read_text(encoding="utf-8") if path.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise _refusal(file, str(error)) from error


def _refusal(name: str, why: Text | str) -> InvalidInputError:
    return InvalidInputError([Problem(name or "file", None, None, why)])


@contextmanager
def _kept_as(path: Path, text: str) -> Iterator[Path]:
    """Keep the text in a file of the same directory, since a job file names others relative to its own."""
    handle, name = tempfile.mkstemp(prefix=f".{path.stem}.", suffix=".yaml", dir=path.parent)
    edited = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        yield edited
    finally:
        edited.unlink(missing_ok=True)


def write_file(path: Path, text: str) -> None:
    """Replace a file at once, with its permissions; a link stays one. Raises OSError."""
    path = path.resolve()
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o644
    with _kept_as(path, text) as edited:
        os.chmod(edited, mode)
        os.replace(edited, path)
