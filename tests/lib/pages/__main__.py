"""Writes every generated page of docs/: `python -m tests.lib.pages`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Callable

from ascendrun.core.jobfile.model import job_json_schema
from tests.lib.pages import checks, cli, events, explain, failures, grafana, job_file, measurements, options, packages

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGES: Mapping[str, Callable[[], str]] = {
    "checks.md": checks.render_page,
    "checks.zh.md": lambda: checks.render_page("zh"),
    "cli.md": cli.render_page,
    "events.md": events.render_page,
    "explain.md": explain.render_page,
    "explain.zh.md": lambda: explain.render_page("zh"),
    "failures.md": failures.render_page,
    "job-file.md": job_file.render_page,
    "job-file.zh.md": lambda: job_file.render_page("zh"),
    "job.schema.json": lambda: json.dumps(job_json_schema(), indent=2, ensure_ascii=False) + "\n",
    "measurements.md": measurements.render_page,
    "packages.md": packages.render_page,
    "program-options.md": options.render_page,
    "../templates/grafana/cluster.json": grafana.render_cluster,
    "../templates/grafana/job.json": grafana.render_job,
    "../templates/grafana/node.json": grafana.render_node,
}

if __name__ == "__main__":
    for name, render in PAGES.items():
        (DOCS / name).write_text(render(), encoding="utf-8")
