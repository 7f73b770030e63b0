"""What a report says of made stories, and that its numbers hold together."""

import json
import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from ascendrun.cli.commands.report import describe_report
from ascendrun.cli.report.page import make_page
from ascendrun.core.jobs.job import State
from ascendrun.core.jobs.restart import Failure, Kind, PastAttempt
from ascendrun.core.metrics import MetricsLine
from ascendrun.core.records import as_record
from ascendrun.health.report.charts import POINTS, Chart
from ascendrun.health.report.data import Material, Report, make_report
from tests.lib.report_stories import BEGAN_S, Story, hostile, month, short


def report_on(material: Material) -> Report:
    assert material.job.ended_at_s is not None
    return make_report(material, now_s=material.job.ended_at_s + 3600.0)


@pytest.fixture(scope="module")
def a_month() -> Report:
    return report_on(month())


def chart(report: Report, name: str) -> Chart:
    return next(one for one in report.charts if one.name == name)


@pytest.mark.parametrize("story", [month, short, hostile])
def test_the_parts_of_the_time_sum_to_the_whole_and_the_job_can_be_written_as_json(story: Callable[[], Story]) -> None:
    report = report_on(story())
    assert sum(round(1000 * one.seconds) for one in report.time) == round(1000 * report.wall_s)
    assert math.isclose(sum(one.ratio for one in report.time), 1.0)
    assert json.loads(json.dumps(as_record(report), allow_nan=False))["id"] == "j-0042"


def test_a_month_with_failures_tells_each_attempt_and_what_of_it_was_kept(a_month: Report) -> None:
    spent = {one.use: one.seconds for one in a_month.time}
    assert a_month.effective_ratio == pytest.approx(spent["training"] / a_month.wall_s)
    assert [(one.first_step, one.last_step, one.resumed) for one in a_month.attempts] == [
        (10, 11_300, None),
        (11_010, 36_480, 11_000),
        (36_010, 60_000, 36_000),
    ]
    assert sum(one.kept_s for one in a_month.attempts) == pytest.approx(spent["training"])
    assert [str(one.reason) for one in a_month.attempts][:2] == [
        "rank 13 on npu02 was killed by signal 9",
        "npu03 was rebooted: its ranks are gone",
    ]
    redone_s = 300 * 42.0 + 480 * 48.0
    assert spent["lost"] == pytest.approx(redone_s + 5 * 3600 + 1300 + 2 * 180, rel=0.06)
    assert spent["checkpoint"] == 40.0 * (22 + 50 + 48)  # those of steps that were kept
    assert a_month.metrics.steps == a_month.metrics.total_steps == 60_000


def test_each_attempt_has_its_nodes_its_cause_and_the_steps_that_it_lost() -> None:
    story = month()
    first = PastAttempt(1, ("npu01", "npu02"), 1.0, 2.0, Failure(Kind.OOM, "host-oom", ("npu02",), (13,), "certain"))
    second = PastAttempt(2, ("npu01", "npu03"), 3.0, 4.0, Failure(Kind.INFRA, "node-rebooted", ("npu03",)), 11_000)
    job = replace(story.job, past=(first, second))
    report = report_on(replace(story, job=job))
    assert [one.hosts for one in report.attempts] == [first.hosts, second.hosts, story.job.hosts]
    assert [one.failure for one in report.attempts] == [first.failure, second.failure, None]
    assert [one.lost_steps for one in report.attempts] == [300, 480, 0]
    assert all(one.ran_s > one.kept_s for one in report.attempts)
    text, page = describe_report(report), make_page(report)
    for words in ("oom: host-oom (npu02)", "infra: node-rebooted (npu03)", "npu[01-02]", "npu[01,03]"):
        assert words in text and words in page


def test_a_start_line_after_the_phases_before_it_has_the_input_of_the_throughput(a_month: Report) -> None:
    story = month()
    phase = MetricsLine(at_s=BEGAN_S + 1, event="phase", phase="data", begins=True)
    told = report_on(replace(story, lines={number: [phase, *found] for number, found in story.lines.items()}))
    assert told.metrics.tokens_per_s == a_month.metrics.tokens_per_s is not None


def test_nodes_of_an_attempt_that_the_record_has_no_longer_come_from_its_files() -> None:
    story = short()
    past = tuple(replace(event, attempt=1) for event in story.events)
    report = report_on(replace(story, job=replace(story.job, attempt=2), events=past, placements={1: ("old01",)}))
    assert [one.hosts for one in report.attempts] == [("old01",)]


@pytest.mark.parametrize(
    ("state", "saves", "lost"),
    [(State.FAILED, (20,), 5), (State.FAILED, (), 25), (State.STOPPED, (20,), 0), (State.SUCCEEDED, (), 0)],
)
def test_what_the_last_attempt_lost_is_what_its_last_checkpoint_lacks(
    state: State, saves: tuple[int, ...], lost: int
) -> None:
    story = short()
    lines = [MetricsLine(at_s=BEGAN_S + step, step=step) for step in range(1, 26)]
    lines += [MetricsLine(at_s=BEGAN_S + 30, event="checkpoint", step=step) for step in saves]
    report = report_on(replace(story, job=replace(story.job, state=state), lines={1: lines}))
    assert [one.lost_steps for one in report.attempts] == [lost]


def test_cost_is_what_was_held_and_energy_only_what_was_measured(a_month: Report) -> None:
    cost = a_month.cost
    held_s = a_month.wall_s - 2.5 * 3600 - 5 * 3600 - 60 - 300 - 30
    assert (cost.devices, cost.device_type) == (32, "npu")
    assert cost.held_s == pytest.approx(held_s, rel=1e-4)
    assert cost.device_hours == pytest.approx(32 * held_s / 3600, rel=1e-4)
    assert cost.energy_known == pytest.approx(0.94, abs=0.01)
    assert cost.energy_kwh == pytest.approx(0.33 * 32 * held_s / 3600 * 0.94, rel=0.02)
    assert [caveat.code for caveat in a_month.caveats] == ["energy-partly"]


def test_series_of_a_month_are_short_enough_to_draw_and_keep_their_spikes(a_month: Report) -> None:
    material = month()
    longest_s = max(line.step_s for lines in material.lines.values() for line in lines if line.step_s is not None)
    step_s = chart(a_month, "step_s")
    assert max(y for y in step_s.lines[0].ys if y is not None) == longest_s
    for one in a_month.charts:
        assert len(one.xs) <= POINTS + 2 and all(len(line.ys) == len(one.xs) for line in one.lines)
        assert list(one.xs) == sorted(one.xs)
    power = chart(a_month, "power_w")
    assert [line.name for line in power.lines] == ["mean", "minimum", "maximum"]
    mean, least, greatest = (line.ys for line in power.lines)
    assert all(low <= middle <= high for middle, low, high in zip(mean, least, greatest) if middle is not None)
    assert None in mean  # the stretch that nothing was measured in


def test_throughput_and_mfu_follow_from_what_the_start_tells(a_month: Report) -> None:
    metrics = a_month.metrics
    assert metrics.step_s is not None and metrics.tokens_per_s is not None and metrics.mfu is not None
    assert metrics.tokens_per_s == pytest.approx(524_288 / metrics.step_s, rel=0.01)
    assert metrics.mfu == pytest.approx(3.2e16 / metrics.step_s / (32 * 3.2e14), rel=0.01)


def test_of_a_step_that_was_done_twice_the_later_attempt_is_drawn() -> None:
    story = Story()
    story.start(queue_s=1.0)
    story.lines = {
        1: [MetricsLine(at_s=story.now_s + step, step=step, loss=9.0) for step in range(1, 11)],
        2: [MetricsLine(at_s=story.now_s + 50 + step, step=step, loss=1.0) for step in range(6, 9)],
    }
    story.attempt = 2
    made = story.material("twice", State.RUNNING)
    found = chart(make_report(replace(made, job=replace(made.job, ended_at_s=None)), now_s=story.now_s + 100), "loss")
    assert list(zip(found.xs, found.lines[0].ys)) == [
        (1, 9.0),
        (2, 9.0),
        (3, 9.0),
        (4, 9.0),
        (5, 9.0),
        (6, 1.0),
        (7, 1.0),
        (8, 1.0),
    ]


def test_a_job_that_lives_is_reported_up_to_now() -> None:
    story = Story()
    story.start(queue_s=10.0)
    story.train(first=1, last=20, step_s=2.0, save_every=100, log_every=1)
    made = story.material("alive", State.RUNNING)
    report = make_report(replace(made, job=replace(made.job, ended_at_s=None)), now_s=story.now_s + 7.0)
    assert report.wall_s == pytest.approx(story.now_s + 7.0 - BEGAN_S, abs=0.002)
    assert report.ended_at_s is None and report.attempts[0].ended_at_s is None


def test_twenty_seconds_of_a_program_that_writes_nothing_are_a_report_too() -> None:
    report = report_on(short())
    assert {one.use: one.seconds for one in report.time if one.seconds}["running"] == 20.0
    assert report.effective_ratio is None
    assert report.charts == () and [caveat.code for caveat in report.caveats] == ["no-steps"]
    assert (report.cost.device_type, report.cost.energy_kwh) == ("cpu", None)


def test_a_loss_that_is_no_number_is_said_and_drawn_as_a_gap() -> None:
    report = report_on(hostile())
    assert ("diverged", {"lines": 1, "step": 60}) in [(caveat.code, dict(caveat.values)) for caveat in report.caveats]
    assert chart(report, "loss").lines[0].ys[-1] is None


def test_a_job_that_was_refused_before_it_began_has_a_report() -> None:
    story = Story()
    story.move(State.CHECKING, "its nodes are free", after_s=1.0)
    story.move(State.STOPPING, "nothing was started: npu01: no space", after_s=2.0)
    story.move(State.FAILED, "nothing was started: npu01: no space", after_s=0.0)
    report = report_on(story.material("refused", State.FAILED))
    assert {one.use: one.seconds for one in report.time if one.seconds} == {"queue": 1.0, "checks": 2.0}
    assert report.effective_ratio == 0.0
