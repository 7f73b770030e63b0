"""The web application of the dashboard: its pages, their live parts, the API, its errors."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Callable

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response, StreamingResponse

from ascendrun import __version__
from ascendrun.cli import output as out
from ascendrun.cli.dashboard.actions import add_actions, csrf_of, no_page
from ascendrun.cli.dashboard.api import API_VERSION, json_reply, make_router
from ascendrun.cli.dashboard.cells import cells_html
from ascendrun.cli.dashboard.comparepage import read_comparison
from ascendrun.cli.dashboard.jobpage import Kept, find_output, read_job
from ascendrun.cli.dashboard.labels import LABELS
from ascendrun.cli.dashboard.live import Feeds
from ascendrun.cli.dashboard.logpage import read_logs
from ascendrun.cli.dashboard.nodespage import read_check, read_node, read_nodes
from ascendrun.cli.dashboard.overview import SharedTop, read_overview
from ascendrun.cli.dashboard.usagepage import read_usage
from ascendrun.cli.report.page import html_environment, read_asset
from ascendrun.core.errors import AscendrunError
from ascendrun.core.records import as_record
from ascendrun.text import language
from ascendrun.text.format import label_ranks

if TYPE_CHECKING:
    from jinja2 import Environment, Template

    from ascendrun.cluster import Cluster
    from ascendrun.core.hosts import Host
    from ascendrun.health.top.view import TopView

ASSETS = {
    "style.css": ("text/css", ("vendor/uplot/uPlot.min.css", "report.css", "dashboard.css")),
    "charts.js": ("text/javascript", ("charts.js",)),
    "dashboard.js": ("text/javascript", ("dashboard.js",)),
    "editor.js": ("text/javascript", ("editor.js",)),
    "vendor/htmx/htmx.min.js": ("text/javascript", ("vendor/htmx/htmx.min.js",)),
    "vendor/uplot/uPlot.iife.min.js": ("text/javascript", ("vendor/uplot/uPlot.iife.min.js",)),
}
"""Type and files of each path under /static."""
STATUSES = {2: 400, 4: 404, 5: 503, 7: 409, 124: 504}
"""HTTP status by the exit code of an error; any other: 500."""
Read = Callable[[Request], Mapping[str, Any]]


def make_app(
    cluster: Cluster,
    hosts: Sequence[Host] = (),
    *,
    is_ending: Callable[[], bool] = lambda: False,
    actions_token: str | None = None,
) -> FastAPI:
    """Return the application, to be served behind a Gate. `hosts`: shown also if no job runs there. `is_ending`: live
    streams end then. `actions_token`: that of the gate, if pages may change something; None: they may not."""
    app = FastAPI(
        title="ascendrun", version=API_VERSION, docs_url=None, redoc_url=None, openapi_url="/api/openapi.json"
    )
    csrf = None if actions_token is None else csrf_of(actions_token)
    top = SharedTop(cluster, hosts, with_progress=False)
    feeds = Feeds(is_ending)
    add_errors(app)
    app.include_router(make_router(cluster, SharedTop(cluster, hosts, with_progress=True)))

    def add_page(path: str, template: str, read: Read) -> None:
        """Serve a page, and under /live the parts of it that change: the blocks named live_…"""

        def show(request: Request) -> Response:
            return HTMLResponse(render(template, request, {"actions": csrf, **read(request)}))

        async def stream(request: Request) -> Response:
            def parts() -> Mapping[str, str]:
                return render_live(template, request, {"actions": csrf, **read(request)})

            key = (f"{request.url.path}?{request.url.query}", language())
            return StreamingResponse(feeds.stream(key, parts), media_type="text/event-stream")

        app.add_api_route(path, show, include_in_schema=False)
        app.add_api_route(f"/live{path}", stream, include_in_schema=False)

    for path, (template, read) in pages_of(cluster, top, hosts).items():
        add_page(path, template, read)
    if csrf is not None:

        def show_file(request: Request, values: Mapping[str, Any]) -> Response:
            return HTMLResponse(render("submit.html", request, {"actions": csrf, **values}))

        add_actions(app, cluster, csrf, show_file)

    @app.get("/jobs/{job}/outputs/{path:path}", include_in_schema=False)
    def output(job: str, path: str) -> Response:
        found = find_output(cluster.jobs.detail(job), path)
        return FileResponse(found, media_type="application/octet-stream", filename=found.name)

    @app.get("/static/{name:path}", include_in_schema=False)
    def asset(name: str) -> Response:
        if name not in ASSETS:
            raise no_page(f"/static/{name}")
        media_type, files = ASSETS[name]
        return Response("\n".join(map(read_asset, files)), media_type=media_type)

    @app.get("/api/docs", include_in_schema=False)
    def docs(request: Request) -> Response:
        return HTMLResponse(render("api.html", request, {"actions": csrf, "paths": app.openapi()["paths"]}))

    return app


def pages_of(cluster: Cluster, top: SharedTop, hosts: Sequence[Host]) -> Mapping[str, tuple[str, Read]]:
    """Return the template of each page by its path, and what reads its data."""
    kept = Kept()

    def view() -> TopView:
        return top.refresh(now_s=time.time())

    def check(request: Request) -> Mapping[str, Any]:
        is_live = request.url.path.startswith("/live/")
        return read_check(cluster, kept, hosts, request.query_params.get("again", ""), is_live=is_live)

    return {
        "/": ("overview.html", lambda _: read_overview(cluster, view())),
        "/jobs/{job}": ("job.html", lambda request: read_job(cluster, kept, request.path_params["job"])),
        "/jobs/{job}/logs": (
            "logs.html",
            lambda request: read_logs(cluster, request.path_params["job"], request.query_params),
        ),
        "/nodes": ("nodes.html", lambda _: read_nodes(cluster, view())),
        "/nodes/{host}": ("node.html", lambda request: read_node(cluster, kept, view(), request.path_params["host"])),
        "/compare": (
            "compare.html",
            lambda request: read_comparison(cluster, kept, request.query_params.getlist("jobs")),
        ),
        "/check": ("check.html", check),
        "/usage": ("usage.html", lambda request: read_usage(cluster, kept, request.query_params)),
    }


def add_errors(app: FastAPI) -> None:
    """Show errors on a page, or to the API as JSON: message, hint and code."""

    async def show(request: Request, error: Exception) -> Response:
        assert isinstance(error, AscendrunError)
        status = STATUSES.get(error.exit_code, 500)
        if request.url.path.startswith("/api/"):
            found = {"code": error.code, "message": str(error.message), "hint": error.hint and str(error.hint)}
            return json_reply(out.format_record({"error": as_record(found)}, "json"), status)
        return HTMLResponse(render("error.html", request, {"actions": None, "error": error}), status)

    async def show_missing(request: Request, _: Exception) -> Response:
        return await show(request, no_page(request.url.path))

    app.add_exception_handler(AscendrunError, show)
    app.add_exception_handler(404, show_missing)


def render(template: str, request: Request, values: Mapping[str, Any]) -> str:
    return _template(template).render(_values(request, values))


def render_live(template: str, request: Request, values: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the blocks live_… of a page by their names."""
    page = _template(template)
    context = page.new_context(_values(request, values))
    return {name: "".join(block(context)) for name, block in page.blocks.items() if name.startswith("live_")}


def _values(request: Request, values: Mapping[str, Any]) -> dict[str, Any]:
    live = f"/live{request.url.path}" + (f"?{request.url.query}" if request.url.query else "")
    labels = {name: str(label) for name, label in LABELS.items()}
    shared = {"t": labels, "lang": "zh-CN" if language() == "zh" else "en", "version": __version__}
    return {**shared, "path": request.url.path, "live": live, **values}


@cache
def _environment() -> Environment:
    from jinja2 import FunctionLoader

    environment = html_environment(FunctionLoader(lambda name: read_asset(f"templates/{name}")))
    environment.filters.update(
        seconds=out.describe_seconds,
        short=out.short_number,
        bytes=out.describe_memory,
        headline=out.headline,
        hours=out.describe_hours,
        ranks=label_ranks,
        cells=cells_html,
    )
    environment.trim_blocks = environment.lstrip_blocks = True
    return environment


def _template(name: str) -> Template:
    return _environment().get_template(name)
