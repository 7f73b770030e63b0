"""top, printed: from a real store and real samples to lines and records."""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ascendrun.cli.output import width_of
from ascendrun.cli.top.columns import JOB_COLUMNS
from ascendrun.cli.top.text import top_lines
from ascendrun.core.events import Event
from ascendrun.core.hosts import Host
from ascendrun.core.jobs.job import State
from ascendrun.core.samples import DeviceSample, Newest
from ascendrun.head.state.store import Store
from ascendrun.health.top.view import JobRow, TopView
from ascendrun.text import use_language
from tests.lib.story_cluster import Run
from tests.lib.top_world import TopWorld, controller_lock, make_source, make_usual_world, make_world

Say = Callable[..., Run]


@pytest.fixture
def say(tmp_path: Path, say: Say) -> Iterator[Say]:
    """A command line over tmp_path/state, in which a controller seems to run."""
    make_world(tmp_path / "state")
    with controller_lock(tmp_path / "state"):
        yield say
    use_language("en")


@pytest.fixture
def world(tmp_path: Path, say: Say) -> TopWorld:
    return make_usual_world(tmp_path / "state", busy=4, idle=5)


def look(
    state_dir: Path,
    *,
    hosts: tuple[Host, ...] = (),
    newest: Newest | None = None,
    refused: dict[str, str] | None = None,
) -> TopView:
    source = make_source(state_dir, hosts, query=lambda asked, limit_s: (newest or Newest(), refused or {}))
    return source.refresh(now_s=time.time(), wait_s=30.0)


# ---------------------------------------------------------------- once


def test_in_a_pipe_it_prints_once_every_device_with_its_rank(say: Say, world: TopWorld) -> None:
    run = say("top")
    assert run.code == 0 and "\x1b" not in run.out
    rows = [line.split() for line in run.out.splitlines() if line.startswith("npu0")]
    assert len(rows) == 4 * 8 + 1 - 1  # the idle hosts are one line, which starts with npu[
    assert [row[:2] for row in rows[:9]] == [["npu01", str(device)] for device in range(8)] + [["npu02", "0"]]
    assert "npu[05-09]" in run.out and "0-7" in run.out


def test_what_is_not_known_is_a_dash_and_what_is_wrong_is_said(say: Say, world: TopWorld) -> None:
    lines = say("top", "--once").out.splitlines()
    header = next(line for line in lines if line.startswith("HOST"))
    unknown = next(line for line in lines if line.split()[:2] == ["npu04", "0"])
    cells = {name: unknown[: header.index(name) + len(name)].split()[-1] for name in ("UTIL", "POWER")}
    assert cells == {"UTIL": "-", "POWER": "-"}
    assert any("DOWN" in line and line.startswith("npu03") for line in lines)
    assert any("Alarm" in line and line.startswith("npu02") for line in lines)
    assert any("external process 77123" in line and line.startswith("npu04") for line in lines)


def test_only_the_unhealthy(say: Say, world: TopWorld) -> None:
    run = say("top", "--once", "--problems")
    rows = [line.split()[:2] for line in run.out.splitlines() if line.startswith("npu")]
    assert {("npu02", "6"), ("npu03", "2"), ("npu04", "5")} <= {(row[0], row[1]) for row in rows}
    assert ["npu01", "0"] not in rows and "npu[05-09]" not in run.out


@pytest.mark.parametrize(
    ("argv", "shown", "left_out"),
    [
        (("--job", "qwen32b-lora"), ("npu01",), ("npu[05-09]", "waits")),
        (("npu0[12]*",), ("npu01", "npu02"), ("npu03",)),
        (("--lang", "zh"), ("利用率", "非本作业进程 77123", "Alarm", "qwen32b-lora"), ("UTIL",)),
    ],
)
def test_what_is_chosen_is_shown(
    say: Say, world: TopWorld, argv: tuple[str, ...], shown: tuple[str, ...], left_out: tuple[str, ...]
) -> None:
    out = say("top", "--once", *argv).out
    assert all(word in out for word in shown) and not any(word in out for word in left_out)


def test_of_a_job_that_has_ended_it_says_where_to_look(say: Say, tmp_path: Path) -> None:
    make_world(tmp_path / "state").add_job("over", ["n1"], state=State.SUCCEEDED)
    run = say("top", "--once", "--job", "over")
    assert run.code == 0 and "ascendrun report j-0001" in run.err and "n1 " not in run.out


def test_without_readable_samples_jobs_and_ranks_are_still_shown(say: Say, world: TopWorld) -> None:
    (world.state_dir / "samples.db").write_bytes(b"this is no database" * 100)
    run = say("top", "--once")
    assert run.code == 0 and "1040/5000" in run.out and "npu01" in run.out
    assert "error: " in run.err and "samples.db" in run.err
    told = json.loads(say("top", "-o", "json").out)
    assert "samples.db" in told["samples_error"] and told["rows"][0]["utilisation"] is None


def test_sorted_by_temperature_the_hottest_is_first(say: Say, world: TopWorld) -> None:
    run = say("top", "--once", "--sort", "temp")
    rows = [line for line in run.out.splitlines() if line.startswith("npu0")]
    assert rows[0].startswith("npu02") and "91C" in rows[0]


def test_a_line_a_host_has_the_load_of_each_device(say: Say, world: TopWorld) -> None:
    run = say("top", "--once", "--by-host")
    assert " 88  89  90  99  92  93  94  95" in next(line for line in run.out.splitlines() if line.startswith("npu02"))
    assert "  -  89  90" in next(line for line in run.out.splitlines() if line.startswith("npu04"))


def test_nothing_anywhere_is_said_plainly(say: Say) -> None:
    run = say("top", "--once")
    assert run.code == 0 and "nothing to show" in run.out


def test_a_job_on_cpus_has_rows_without_the_columns_of_devices(say: Say, tmp_path: Path) -> None:
    world = make_world(tmp_path / "state")
    job = world.add_job("quick", ["local1"], per_node=2, device_type="cpu")
    world.add_samples(["local1"], job=job, per_node=2, device_type="cpu")
    out = say("top", "--once").out
    assert "CPU" in out and "104%" in out and "MEM GiB" not in out and "POWER" not in out


def test_a_live_job_without_samples_still_shows_where_its_ranks_are(say: Say, tmp_path: Path) -> None:
    make_world(tmp_path / "state").add_job("new", ["n1", "n2"], per_node=2, steps=0)
    run = say("top", "--once")
    rows = [line.split() for line in run.out.splitlines() if line.startswith("n1")]
    assert [row[0] for row in rows] == ["n1", "n1"]
    assert "n[1-2]  no samples yet" in run.out


def test_escapes_in_what_a_node_says_do_not_reach_the_terminal(say: Say, tmp_path: Path) -> None:
    world = make_world(tmp_path / "state")
    world.add_samples(["n1"], changes={("n1", 0): {"name": "x\x1b]0;evil\x07", "health": "OK\x1b[2J\n"}})
    for output in ("table", "wide", "json", "csv", "yaml"):
        assert b"\x1b" not in say("top", "--once", "-o", output).raw_out


# ---------------------------------------------------------------- records


def test_json_has_everything_under_its_name(say: Say, world: TopWorld) -> None:
    told = json.loads(say("top", "-o", "json").out)
    assert told["schema_version"] == 2 and told["at"].endswith("Z")
    assert {"totals", "jobs", "hosts", "rows"} <= set(told)
    row = next(row for row in told["rows"] if (row["host"], row["device"]) == ("npu04", 0))
    assert (row["utilisation"], row["power_w"], row["rank"], row["job"]) == (None, None, 24, "j-0001")
    assert len(told["rows"]) == 9 * 8  # nothing is folded for programs
    assert told["totals"]["devices"] == 72


def test_csv_and_jsonl_are_a_row_a_line(say: Say, world: TopWorld) -> None:
    rows = list(csv.DictReader(io.StringIO(say("top", "-o", "csv").out)))
    assert len(rows) == 72 and rows[0]["host"] == "npu01" and rows[24]["utilisation"] == ""
    lines = say("top", "-o", "jsonl", "--job", "qwen32b-lora").out.splitlines()
    assert len(lines) == 32 and all(json.loads(line)["job"] == "j-0001" for line in lines)


# ---------------------------------------------------------------- widths


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_no_line_is_wider_than_the_terminal(world: TopWorld, lang: str, width: int) -> None:
    use_language(lang)
    view = look(world.state_dir, hosts=(Host("npu77"),), refused={"npu77": "connection timed out " * 20})
    lines = top_lines(view, width=width)
    assert max(width_of(line) for line in lines) <= width


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_columns_stand_under_their_titles_whatever_the_letters_are_wide(world: TopWorld, lang: str) -> None:
    use_language(lang)
    lines = top_lines(look(world.state_dir), width=200)
    begin = next(index for index, line in enumerate(lines) if line.startswith(("HOST", "主机")))
    edge = width_of(lines[begin][: lines[begin].index("RANK") + 4])
    for line in lines[begin + 1 : begin + 33]:
        cells = "".join(character + "\0" * (width_of(character) - 1) for character in line)
        assert cells[edge - 1].isdigit() and cells[edge : edge + 2] == "  "


def test_with_80_columns_the_main_things_are_there(world: TopWorld) -> None:
    lines = top_lines(look(world.state_dir), width=80)
    header = next(line for line in lines if line.startswith("HOST"))
    assert header.split() == ["HOST", "DEV", "UTIL", "MEM", "GiB", "TEMP", "HEALTH", "JOB", "RANK", "REL", "NOTE"]


def test_with_room_there_is_more(world: TopWorld) -> None:
    lines = top_lines(look(world.state_dir), width=200)
    header = next(line for line in lines if line.startswith("HOST"))
    assert {"POWER", "LINK", "S/STEP", "LOSS", "TOK/S", "MFU", "CPU", "RSS", "AGE"} <= set(header.split())


def test_a_running_job_has_the_time_that_its_steps_will_take(world: TopWorld) -> None:
    view = look(world.state_dir)
    (job, *_) = view.jobs
    assert job.progress.step is not None and job.progress.step_s is not None
    left = replace(job, progress=replace(job.progress, step=100, total_steps=140, step_s=90.0))

    def cell(row: JobRow) -> str:
        return next(column.cell(row) for column in JOB_COLUMNS if column.key == "left")

    assert cell(left) == "1h00m"
    assert cell(replace(left, job=replace(left.job, state="STOPPING"))) == "-"
    assert cell(replace(left, progress=replace(left.progress, total_steps=None))) == "-"


# ---------------------------------------------------------------- asking


def test_hosts_that_nobody_samples_are_asked_and_those_that_are_sampled_are_not(world: TopWorld) -> None:
    asked: list[str] = []

    def ask(hosts: Sequence[Host], timeout_s: float) -> tuple[Newest, dict[str, str]]:
        asked.extend(host.name for host in hosts)
        fresh = DeviceSample(world.now_s, "far1", 0, "npu", health="OK", utilisation=1.0)
        return Newest(devices=(fresh,)), {"far2": "connection refused"}

    world.add_samples(["npu01"], age_s=0.0)
    hosts = tuple(Host(name) for name in ("npu01", "far1", "far2"))
    source = make_source(world.state_dir, hosts, query=ask)
    view = source.refresh(now_s=world.now_s, wait_s=30.0)
    assert asked == ["far1", "far2"]
    by_name = {host.host: host for host in view.hosts}
    assert by_name["far1"].why is None
    assert (by_name["far2"].why, by_name["far2"].detail) == ("no-reply", "connection refused")
    assert [row.metrics.utilisation for row in view.rows if row.host == "far1"] == [1.0]


def test_who_looks_once_waits_for_no_host_of_which_figures_are_kept_and_has_it_asked(world: TopWorld) -> None:
    def ask(hosts: Sequence[Host], timeout_s: float) -> tuple[Newest, dict[str, str]]:
        raise AssertionError("nobody waits")

    wished: list[str] = []
    hosts = tuple(Host(name) for name in ("kept1", "kept2", "fresh1"))
    world.add_samples(["kept1", "kept2"], age_s=20.0)
    world.add_samples(["fresh1"], age_s=0.0)
    source = make_source(
        world.state_dir, hosts, query=ask, request=lambda asked: wished.extend(host.name for host in asked)
    )
    assert not source.needs_query(now_s=world.now_s)
    view = source.refresh(now_s=world.now_s, wait_s=30.0)
    assert wished == ["kept1", "kept2"]
    ages = {row.host: row.age_s for row in view.rows if row.host in ("kept1", "fresh1")}
    assert ages["kept1"] is not None and ages["kept1"] >= 20.0  # and it is said how old they are


def test_hosts_whose_answer_does_not_come_in_time_are_said_to_have_given_none(world: TopWorld) -> None:
    import threading

    may_answer = threading.Event()

    def ask(hosts: Sequence[Host], timeout_s: float) -> tuple[Newest, dict[str, str]]:
        may_answer.wait(60)
        return Newest(), {}

    source = make_source(world.state_dir, (Host("far1"),), query=ask)
    try:
        (host,) = (host for host in source.refresh(now_s=world.now_s, wait_s=0.05).hosts if host.host == "far1")
        assert host.why == "no-reply" and getattr(host.detail, "key", None) == "top.no-response"
    finally:
        may_answer.set()


def test_a_look_that_does_not_wait_is_not_held_up_by_hosts(world: TopWorld) -> None:
    import threading

    answered, may_answer = threading.Event(), threading.Event()

    def ask(hosts: Sequence[Host], timeout_s: float) -> tuple[Newest, dict[str, str]]:
        may_answer.wait(60)
        answered.set()
        return Newest(), {"far1": "too late"}

    source = make_source(world.state_dir, (Host("far1"),), query=ask)
    try:
        view = source.refresh(now_s=world.now_s)
        assert not answered.is_set() and any(host.host == "far1" for host in view.hosts)
    finally:
        may_answer.set()
    assert answered.wait(60)


# ---------------------------------------------------------------- stragglers, growth


def test_a_straggler_that_the_story_tells_of_is_marked(say: Say, tmp_path: Path) -> None:
    world = make_world(tmp_path / "state")
    hosts = [f"n{number:02d}" for number in range(1, 10)]
    job = world.add_job("large", hosts, steps=12)  # 72 ranks: not looked at by a quick look
    store = Store.open(tmp_path / "state")
    record = store.jobs.find(job).job
    store.jobs.save(
        record, [Event("straggler", {"slower_by": 0.18}, ("n02",), (13,), record.attempt)], now_s=time.time()
    )
    store.close()
    told = json.loads(say("top", "-o", "json").out)
    assert [row["rank"] for row in told["rows"] if "slow" in row["problems"]] == [13]


def test_a_look_after_the_metrics_grew_sees_the_new_step(world: TopWorld) -> None:
    source = make_source(world.state_dir)
    before = source.refresh(now_s=world.now_s).jobs[0].progress.step
    world.write_metrics("j-0001", "npu01", 0, steps=60, step_s=1.5, own=1.0)
    assert (before, source.refresh(now_s=world.now_s).jobs[0].progress.step) == (1040, 1060)


@pytest.mark.slow
def test_64_hosts_of_8_cost_little_more_than_starting(tmp_path: Path, say: Say) -> None:
    """Both halves in one process and on one machine: 512 devices against what one device costs."""
    few, many = make_world(tmp_path / "few"), make_world(tmp_path / "many")
    hosts = [f"npu{number:02d}" for number in range(1, 65)]
    few.add_samples(["npu01"], job=few.add_job("small", ["npu01"], per_node=1), per_node=1)
    many.add_samples(hosts, job=many.add_job("large", hosts))

    def cost(state: Path) -> float:
        begin = time.process_time()
        with controller_lock(state):
            assert top_lines(look(state), width=200)
        return time.process_time() - begin

    cost(few.state_dir)
    one, all_of_them = min(cost(few.state_dir) for _ in range(3)), min(cost(many.state_dir) for _ in range(3))
    assert all_of_them < 512 * one, (one, all_of_them)


def test_waiting_jobs_are_listed_with_their_reason(say: Say, tmp_path: Path) -> None:
    world = make_world(tmp_path / "state")
    world.add_job("waits", ["n1"], state=State.QUEUED, steps=0)
    run = say("top", "--once")
    assert "waits" in run.out and "QUEUED" in run.out


def test_processes_of_a_finished_job_are_not_external(tmp_path: Path) -> None:
    world = make_world(tmp_path / "state")
    hosts = ["npu01", "npu02", "npu03", "npu04"]
    job = world.add_job("trained", hosts, state=State.SUCCEEDED, ended_s=5.0)
    world.add_samples(hosts, job=job, age_s=8.0)
    seen = make_source(world.state_dir).refresh(now_s=world.now_s)
    assert (len(seen.rows), seen.totals.busy, len(seen.jobs)) == (32, 0, 0)
    assert [row.problems for row in seen.rows] == [()] * 32
