"""What top makes of samples, jobs and metrics: nothing is invented, nothing is lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from ascendrun.core.metrics import MetricsLine
from ascendrun.core.samples import DeviceSample, HostSample, RankSample
from ascendrun.health.top import view as model
from ascendrun.health.top.join import make_view, progress_of

NOW_S = 1000.0


def device(host: str = "a", number: int = 0, **changes: Any) -> DeviceSample:
    memory: dict[str, Any] = {"memory_used_bytes": 3 << 30, "memory_total_bytes": 64 << 30}
    sound = DeviceSample(NOW_S - 2, host, number, "npu", "910B3", utilisation=0.0, health="OK", pids=(), **memory)
    return replace(sound, **changes)


def job(places: Mapping[int, tuple[str, int | None]] = {0: ("a", 0), 1: ("a", 1)}, **changes: Any) -> model.TopJob:
    ranks = tuple(model.RankPlace(rank, host, number, pid=100 + rank) for rank, (host, number) in places.items())
    hosts = tuple(dict.fromkeys(host for host, _ in places.values()))
    return replace(model.TopJob("j-1", "train", "RUNNING", "", 1, hosts, len(ranks), places=ranks), **changes)


def rows_of(**world: Any) -> dict[tuple[str, int | None, int | None], model.TopRow]:
    return {(row.host, row.device, row.rank): row for row in make_view(now_s=NOW_S, **world).rows}


# ---------------------------------------------------------------- joining


def test_what_was_not_measured_is_none_and_not_zero() -> None:
    row = rows_of(devices=[DeviceSample(NOW_S, "a", 0, "npu")])[("a", 0, None)]
    now = row.metrics
    assert (now.utilisation, now.memory_used_bytes, now.power_w, now.health, now.link_up) == (None,) * 5
    totals = make_view(now_s=NOW_S, devices=[DeviceSample(NOW_S, "a", 0, "npu")]).totals
    assert (totals.power_w, totals.memory_used_bytes, totals.unknown, totals.unhealthy) == (None, None, 1, 0)


def test_a_rank_stands_on_the_device_that_it_was_given() -> None:
    rows = rows_of(devices=[device(number=0), device(number=1)], jobs=[job()])
    assert rows[("a", 1, 1)].job == "j-1" and rows[("a", 1, 1)].metrics.name == "910B3"


def test_what_the_rank_s_own_sample_says_of_its_device_counts_more_than_the_plan() -> None:
    moved = RankSample(NOW_S, "a", "j-1", 1, 1, pid=101, device=5)
    rows = rows_of(devices=[device(number=5)], ranks=[moved], jobs=[job()])
    assert ("a", 5, 1) in rows and ("a", 1, 1) not in rows


def test_a_sample_of_an_earlier_attempt_says_nothing_of_this_one() -> None:
    old = RankSample(NOW_S, "a", "j-1", 1, 0, pid=77, cpu=50.0, device=3)
    row = rows_of(ranks=[old], jobs=[job(attempt=2)])[("a", 0, 0)]
    assert (row.pid, row.rank_metrics.cpu) == (100, None)


def test_a_rank_that_has_ended_is_on_no_device() -> None:
    ended = job(places={0: ("a", 0)})
    ended = replace(ended, places=(replace(ended.places[0], is_over=True),))
    row = rows_of(devices=[device()], jobs=[ended])[("a", 0, None)]
    assert row.job is None


def test_two_ranks_on_one_device_are_two_rows_and_one_device_in_the_totals() -> None:
    shared = job(places={0: ("a", 0), 1: ("a", 0)})
    view = make_view(now_s=NOW_S, devices=[device(power_w=300.0)], jobs=[shared])
    assert [(row.device, row.rank) for row in view.rows] == [(0, 0), (0, 1)]
    assert (view.totals.devices, view.totals.power_w, view.totals.busy) == (1, 300.0, 1)


def test_ranks_without_a_device_have_rows_of_their_own() -> None:
    cpu = job(places={0: ("a", None), 1: ("b", None)})
    sample = RankSample(NOW_S, "b", "j-1", 1, 1, pid=9, cpu=98.0, rss_bytes=5)
    rows = rows_of(ranks=[sample], jobs=[cpu])
    assert rows[("b", None, 1)].rank_metrics.cpu == 98.0 and rows[("a", None, 0)].rank_metrics.cpu is None


@pytest.mark.parametrize(
    "pids, on_it, foreign",
    [
        (None, True, None),  # the tool does not tell
        ((), True, ()),
        ((100,), True, ()),
        ((100, 555), True, (555,)),
        ((4711,), True, None),  # perhaps a child of the rank's: cannot be told
        ((4711,), False, (4711,)),  # no rank there: somebody else's for sure
    ],
)
def test_processes_of_others_are_named_only_when_that_is_certain(
    pids: tuple[int, ...] | None, on_it: bool, foreign: tuple[int, ...] | None
) -> None:
    jobs = [job(places={0: ("a", 0)})] if on_it else []
    row = next(iter(rows_of(devices=[device(pids=pids)], jobs=jobs).values()))
    assert row.external_pids == foreign
    assert ("external" in row.problems) == bool(foreign)


def test_processes_of_a_job_that_just_ended_are_not_external() -> None:
    ended = job(places={0: ("a", 0), 1: ("a", 1)}, ended_at_s=NOW_S - 1, state="SUCCEEDED")
    devices = [device(number=0, pids=(100,)), device(number=1, pids=(4711,)), device(number=2, pids=(555,))]
    rows = rows_of(devices=devices, ended=[ended])
    assert [rows[("a", number, None)].external_pids for number in range(3)] == [(), None, (555,)]
    assert all(row.job is None for row in rows.values())


def test_a_process_that_is_still_there_long_after_the_end_of_its_job_is_external() -> None:
    ended = job(places={0: ("a", 0)}, ended_at_s=NOW_S - 40)
    [row] = rows_of(devices=[device(pids=(100,))], ended=[ended]).values()
    assert row.external_pids == (100,)
    unconfirmed = replace(ended, ended_at_s=None)  # its host did not confirm that the ranks are gone
    [row] = rows_of(devices=[device(pids=(100,))], ended=[unconfirmed]).values()
    assert row.external_pids == ()


def test_processes_of_an_ended_rank_or_attempt_are_not_external() -> None:
    over = job(places={0: ("a", 0)})
    over = replace(over, places=(replace(over.places[0], is_over=True),))
    assert rows_of(devices=[device(pids=(100,))], jobs=[over])[("a", 0, None)].external_pids == ()
    earlier = RankSample(NOW_S - 3, "a", "j-1", 1, 0, pid=77, device=0)
    waits = job(places={}, hosts=("a",), state="BACKOFF", attempt=1)
    [row] = rows_of(devices=[device(pids=(77,))], ranks=[earlier], jobs=[waits]).values()
    assert row.external_pids == ()


def test_what_is_not_well_is_named() -> None:
    world = [device(number=0, health="Alarm"), device(number=1, link_up=False), device(number=2, at_s=NOW_S - 300)]
    rows = rows_of(devices=world, names=["a"])
    assert [rows[("a", number, None)].problems for number in range(3)] == [("health",), ("link",), ("stale",)]


def test_a_silent_host_marks_all_its_rows() -> None:
    rows = rows_of(devices=[device(number=0)], jobs=[job(liveness={"a": "UNREACHABLE"})])
    assert all("unreachable" in row.problems for row in rows.values())


def test_an_age_is_never_negative_where_clocks_differ() -> None:
    assert rows_of(devices=[device(at_s=NOW_S + 5)])[("a", 0, None)].age_s == 0.0


# ---------------------------------------------------------------- hosts without figures


@pytest.mark.parametrize(
    "world, why",
    [
        ({"names": ["x"]}, "not-queried"),
        ({"names": ["x"], "was_queried": True}, "no-samples"),
        ({"names": ["x"], "refused": {"x": "refused"}}, "no-reply"),
        ({"jobs": [job(places={0: ("x", 0)})]}, "no-samples"),
        ({"jobs": [job(places={0: ("x", 0)}, state="STARTING")]}, "starting"),
        ({"jobs": [job(places={0: ("x", 0)}, liveness={"x": "SUSPECT"})]}, "unreachable"),
    ],
)
def test_a_host_without_figures_is_listed_with_the_reason(world: dict[str, Any], why: str) -> None:
    (host,) = make_view(now_s=NOW_S, **world).hosts
    assert (host.host, host.why, host.age_s) == ("x", why, None)


def test_a_host_with_any_figures_has_no_reason() -> None:
    worlds: list[dict[str, Any]] = [{"devices": [device()]}, {"hosts": [HostSample(NOW_S, "a", cpu=1.0)]}]
    for world in worlds:
        (host,) = make_view(now_s=NOW_S, refused={"a": "late"}, **world).hosts
        assert host.why is None


def test_a_job_that_waits_does_not_claim_its_hosts() -> None:
    view = make_view(now_s=NOW_S, jobs=[job(places={}, state="QUEUED", hosts=("x",))])
    assert view.hosts == () and [one.job.id for one in view.jobs] == ["j-1"]


def test_a_host_with_neither_device_nor_rank_has_a_row_of_its_own() -> None:
    (row,) = make_view(now_s=NOW_S, hosts=[HostSample(NOW_S - 3, "a", cpu=5.0)]).rows
    assert (row.host, row.device, row.rank, row.age_s) == ("a", None, None, 3.0)


def test_old_figures_of_a_host_that_nobody_named_and_no_job_holds_are_gone() -> None:
    old: dict[str, Any] = {"devices": [device("a", at_s=NOW_S - 300)], "hosts": [HostSample(NOW_S - 300, "a", cpu=5.0)]}
    assert make_view(now_s=NOW_S, **old).hosts == ()
    (row,) = make_view(now_s=NOW_S, names=["a"], **old).rows
    assert row.problems == ("stale",)


# ---------------------------------------------------------------- step times


def lines(times: list[float], **more: Any) -> list[MetricsLine]:
    return [MetricsLine(step=step, step_s=time_s, **more) for step, time_s in enumerate(times)]


def test_the_step_time_is_the_median_of_the_newest_steps() -> None:
    assert progress_of(lines([9.0] * 30 + [1.0] * 20 + [50.0])).step_s == 1.0


def test_without_said_times_the_steps_are_timed_from_line_to_line() -> None:
    told = [MetricsLine(step=step, at_s=NOW_S + 2.0 * step) for step in range(0, 40, 10)]
    assert progress_of(told).step_s == 2.0


def test_a_resumed_program_that_goes_back_does_not_make_negative_times() -> None:
    told = [MetricsLine(step=10, at_s=1.0), MetricsLine(step=4, at_s=60.0), MetricsLine(step=5, at_s=62.0)]
    assert progress_of(told).step_s == 2.0


def test_the_newest_figure_that_was_said_counts_each_by_itself() -> None:
    told = [MetricsLine(step=1, loss=3.0, mfu=0.4), MetricsLine(step=2, loss=2.0), MetricsLine(event="checkpoint")]
    found = progress_of(told)
    assert (found.step, found.loss, found.mfu) == (2, 2.0, 0.4)


def test_the_phase_is_the_one_that_began_after_the_last_step_and_has_not_ended() -> None:
    def phase(name: str, *, begins: bool) -> MetricsLine:
        return MetricsLine(event="phase", phase=name, begins=begins)

    evaluates = [MetricsLine(step=4), phase("data", begins=True), phase("data", begins=False)]
    evaluates.append(phase("evaluation", begins=True))
    assert progress_of(evaluates).phase == "evaluation"
    assert progress_of([*evaluates, phase("evaluation", begins=False)]).phase is None
    assert progress_of([*evaluates, MetricsLine(step=5)]).phase is None
    [row] = make_view(jobs=[job(progress={0: progress_of(evaluates), 1: model.Progress(step=4)})], now_s=NOW_S).jobs
    assert row.progress.phase == "evaluation"


def test_no_lines_say_nothing() -> None:
    assert progress_of([]) == model.Progress()


def test_a_rank_is_compared_with_the_others_not_with_itself() -> None:
    progress = {0: model.Progress(step_s=2.0), 1: model.Progress(step_s=1.0)}
    rows = rows_of(jobs=[job(progress=progress)])
    assert (rows[("a", 0, 0)].slower_by, rows[("a", 1, 1)].slower_by) == (2.0, 0.5)


def test_what_ranks_wait_for_each_other_is_taken_off_where_all_tell_it() -> None:
    progress = {rank: model.Progress(step_s=2.0, own_s=1.5 if rank == 1 else 1.0) for rank in range(4)}
    places: dict[int, tuple[str, int | None]] = {rank: ("a", rank) for rank in range(4)}
    found = rows_of(jobs=[job(places=places, progress=progress)])
    assert found[("a", 1, 1)].slower_by == 1.5
    progress[2] = model.Progress(step_s=2.0)  # one that does not: then whole steps are compared
    assert rows_of(jobs=[job(places=places, progress=progress)])[("a", 1, 1)].slower_by == 1.0


def test_one_rank_alone_is_not_compared() -> None:
    assert rows_of(jobs=[job(progress={0: model.Progress(step_s=1.0)})])[("a", 0, 0)].slower_by is None


def test_a_straggler_is_a_problem_with_its_sign() -> None:
    seen = job(
        progress={0: model.Progress(step_s=1.0), 1: model.Progress(step_s=1.0)},
        slow={1: model.Slow(1.3, "temperature")},
    )
    row = rows_of(jobs=[seen])[("a", 1, 1)]
    assert (row.slower_by, row.slow_cause, row.problems) == (1.3, "temperature", ("slow",))
    (told,) = make_view(now_s=NOW_S, jobs=[seen]).jobs
    assert (told.slowest, told.slower_by, told.stragglers) == (1, 1.3, (1,))


def test_a_straggler_of_which_only_the_story_tells_keeps_its_own_figure() -> None:
    seen = job(progress={0: model.Progress(step_s=1.0), 1: model.Progress(step_s=1.2)}, slow={1: model.Slow()})
    assert rows_of(jobs=[seen])[("a", 1, 1)].slower_by == 1.2


# ---------------------------------------------------------------- order, choice, folding


def test_hosts_stand_as_people_count() -> None:
    view = make_view(now_s=NOW_S, devices=[device(f"npu{number}") for number in (10, 9, 1, 100)])
    assert [row.host for row in view.rows] == ["npu1", "npu9", "npu10", "npu100"]
    assert sorted(["b", "1b", "b2", "b10", "10.0.0.2"], key=model.natural_key)[0] == "1b"


def test_the_greatest_first_and_unknown_last_in_both_directions() -> None:
    rows = [model.TopRow("a", number, device(temperature_c=value)) for number, value in enumerate((50.0, None, 70.0))]
    assert [row.metrics.temperature_c for row in model.sort_rows(rows, "temp")] == [70.0, 50.0, None]
    assert [row.metrics.temperature_c for row in model.sort_rows(rows, "temp", reverse=True)] == [50.0, 70.0, None]


def test_rows_of_a_job_stand_in_rank_order() -> None:
    rows = [
        model.TopRow("a", 0, job="j-2", rank=1),
        model.TopRow("b", 0),
        model.TopRow("c", 0, job="j-10", rank=0),
        model.TopRow("d", 0, job="j-2", rank=0),
    ]
    assert [row.host for row in model.sort_rows(rows, "job")] == ["d", "a", "c", "b"]


@pytest.mark.parametrize(
    "choice, hosts",
    [
        (model.Choice(job="train"), "ab"),
        (model.Choice(hosts=("a", "d*")), "ad"),
        (model.Choice(only_problems=True), "c"),
        (model.Choice(only_busy=True), "ab"),
        (model.Choice(text="ALARM"), "c"),
        (model.Choice(text="rank1"), "b"),
        (model.Choice(text="?"), "abcd"),
        (model.Choice(text="[ab]"), "ab"),
        (model.Choice(text="nothing"), ""),
    ],
)
def test_rows_are_chosen(choice: model.Choice, hosts: str) -> None:
    world = make_view(
        now_s=NOW_S, jobs=[job(places={0: ("a", 0), 1: ("b", 0)})], devices=[device("c", health="Alarm"), device("d")]
    )
    assert "".join(row.host for row in model.choose_rows(world.rows, choice)) == hosts


def test_a_host_that_does_not_answer_is_shown_among_what_is_not_well_and_the_unasked_is_not() -> None:
    view = make_view(now_s=NOW_S, names=["x", "y"], refused={"x": "timed out"}, devices=[device("d")])
    assert [host.host for host in model.choose_view(view, model.Choice(only_problems=True)).hosts] == ["x"]
    assert [host.host for host in model.choose_view(view, model.Choice(job="j-1")).hosts] == []


def test_hosts_that_idle_alike_become_one_line_and_none_is_lost() -> None:
    idle = [device(f"n{host}", number, temperature_c=30.0 + host) for host in range(5) for number in (0, 1)]
    busy = device("n9", 0)
    view = make_view(now_s=NOW_S, devices=[*idle, busy], jobs=[job(places={0: ("n9", 0)})])
    lines_ = model.fold_idle(view.rows)
    (folded,) = [line for line in lines_ if isinstance(line, model.IdleHosts)]
    assert folded.hosts == ("n0", "n1", "n2", "n3", "n4") and folded.devices == (0, 1)
    assert {sample.temperature_c for sample in folded.samples} == {30.0, 31.0, 32.0, 33.0, 34.0} and len(lines_) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"health": "Warning"},
        {"link_up": False},
        {"pids": (5,)},
        {"utilisation": 50.0},
        {"utilisation": None},
        {"health": None},
        {"name": "910B2"},
    ],
)
def test_a_host_that_differs_stands_for_itself(change: dict[str, Any]) -> None:
    world = [device(f"n{host}") for host in range(4)] + [device("odd", **change)]
    rows = make_view(now_s=NOW_S, devices=world).rows
    assert [line.host for line in model.fold_idle(rows) if isinstance(line, model.TopRow)] == ["odd"]


def test_two_idle_hosts_are_not_folded() -> None:
    rows = make_view(now_s=NOW_S, devices=[device("a"), device("b")]).rows
    assert model.fold_idle(rows) == rows
