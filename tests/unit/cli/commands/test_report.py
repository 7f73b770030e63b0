"""report: files, data and lines, from a state folder in which a job has ended."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ascendrun.cli.report import page
from ascendrun.core.events import Event
from ascendrun.core.jobs.job import State
from ascendrun.core.jobs.reasons import because
from ascendrun.head.state.store import Store
from ascendrun.health.report.data import make_report
from tests.lib.demo_jobs import store_job
from tests.lib.report_stories import hostile, month, short
from tests.lib.story_cluster import Run

Say = Callable[..., Run]
NAME = "</script><script>alert(1)</script>\x1b]0;title\x07"


def changed(state: str, at_s: float) -> Event:
    return Event("state-changed", {"state": state, "reason": because("rejected", why="x")}, attempt=1, at_s=at_s)


@pytest.fixture
def say(tmp_path: Path, say: Say) -> Say:
    """A command line in tmp_path over a store with one job that ran for 20 seconds."""
    store = Store.open(tmp_path / "state")
    values = {"name": NAME, "created_at_s": 1000.0, "ended_at_s": 1020.0, "state": State.SUCCEEDED, "world_size": 2}
    job = store_job(store, spec={"devices": {"type": "cpu"}}, now_s=1000.0, **values)
    store.jobs.save(
        job, [changed(state, 1005.0) for state in ("CHECKING", "STAGING", "STARTING", "RUNNING")], now_s=1005.0
    )
    store.jobs.save(job, [changed("SUCCEEDED", 1020.0)], now_s=1020.0)
    store.close()
    return say


def test_a_report_is_a_page_here_and_its_sum_on_the_screen(say: Say, tmp_path: Path) -> None:
    ran = say("report", "j-0001")
    assert ran.code == 0
    page = (tmp_path / "j-0001-report.html").read_text()
    assert "j-0001-report.html" in ran.err
    assert "queue" in ran.out and "25.0%" in ran.out and "running" in ran.out and "75.0%" in ran.out
    assert "<script>alert" not in page and "&lt;script&gt;alert(1)" in page and "\x1b" not in page + ran.out


def test_a_page_loads_nothing_from_anywhere(say: Say) -> None:
    import re

    page = say("report", "j-0001", "--output-file", "-").out
    assert page.startswith("<!doctype html>")
    assert re.findall(r"""<[^>]+\b(?:src|href|action|data|style)\s*=""", page.partition("<script>")[0]) == []
    assert """content="default-src 'none'; script-src 'sha256-""" in page
    assert "@import" not in page and "url(" not in page.partition("</style>")[0]


def test_the_same_as_data_writes_no_file(say: Say, tmp_path: Path) -> None:
    data = json.loads(say("report", "j-0001", "-o", "json").out)
    assert data["wall_s"] == 20.0 and data["effective_ratio"] is None
    assert {one["use"]: one["seconds"] for one in data["time"] if one["seconds"]} == {"queue": 5.0, "running": 15.0}
    assert not list(tmp_path.glob("*.html"))


def test_chinese_is_chinese_by_flag_or_locale(say: Say, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "时间分布" in say("report", "j-0001", "--lang", "zh", "--output-file", "zh.html").out
    page = (tmp_path / "zh.html").read_text()
    assert '<html lang="zh-CN">' in page and "有效训练时间占比" in page
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    assert "排队" in say("report", "j-0001", "--output-file", "-").out


def test_every_caveat_has_a_name() -> None:
    assert {
        caveat.code for report in (month(), short(), hostile()) for caveat in make_report(report, now_s=2e9).caveats
    } <= (page.CAVEATS.keys())


def test_a_file_that_cannot_be_written_is_named(say: Say) -> None:
    ran = say("report", "j-0001", "--output-file", "no/such/folder/x.html")
    assert ran.code == 2 and "no/such/folder/x.html" in ran.err


def test_the_flag_of_the_file_has_its_old_name_answered_and_writes_through_links(say: Say, tmp_path: Path) -> None:
    assert say("report", "j-0001", "--out", "x.html").code == 2
    link = tmp_path / "link.html"
    link.symlink_to(tmp_path / "target.html")
    assert say("report", "j-0001", "-O", "link.html").code == 0
    assert link.is_symlink() and (tmp_path / "target.html").read_text().startswith("<!doctype html>")


def test_the_report_of_a_failed_job_has_the_diagnosis_of_explain(say: Say, tmp_path: Path) -> None:
    store = Store.open(tmp_path / "state")
    store.jobs.save(replace(store.jobs.find("j-0001").job, state=State.FAILED), [], now_s=1021.0)
    store.close()
    explained = json.loads(say("explain", "j-0001", "-o", "json").out)
    report = json.loads(say("report", "j-0001", "-o", "json").out)
    assert report["diagnosis"]["code"] and report["diagnosis"]["code"] in json.dumps(explained)
    assert {"confidence", "ranks", "hosts"} <= report["diagnosis"].keys()
    shown = say("report", "j-0001", "-O", "-").out
    assert '<section class="diagnosis">' in shown


def test_the_report_of_a_job_that_did_not_fail_has_no_diagnosis(say: Say) -> None:
    assert json.loads(say("report", "j-0001", "-o", "json").out)["diagnosis"] is None


def test_without_matplotlib_the_way_out_is_said(say: Say, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ran = say("report", "j-0001", "--png", "p.png")
    assert ran.code == 2 and "matplotlib" in ran.err and "bin/setup-env plot" in ran.err
    assert not (tmp_path / "p.png").exists()


@pytest.mark.parametrize("name", ["uplot", "htmx"])
def test_the_library_that_pages_carry_is_the_one_that_was_published(name: str) -> None:
    import hashlib

    folder = Path(sys.modules["ascendrun"].__path__[0]) / "web" / "vendor" / name
    version = json.loads((folder / "VERSION.json").read_text())
    assert {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in version["sha256"]} == dict(
        version["sha256"]
    )
