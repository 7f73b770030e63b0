"""The restart policy: its rules alone, and a job that lives by it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascendrun.core.jobfile.model import JobSpec
from ascendrun.core.jobs import actions, endings, inputs
from ascendrun.core.jobs.checkpoints import Listed, ResumePoint
from ascendrun.core.jobs.checkpoints import choose as choose_checkpoint
from ascendrun.core.jobs.draft import JUDGE_S
from ascendrun.core.jobs.job import Cause, Job, State, dump_job, load_job
from ascendrun.core.jobs.lifecycle import resume
from ascendrun.core.jobs.restart import (
    WITHOUT_PROGRESS,
    Again,
    Enough,
    Failure,
    Kind,
    PastAttempt,
    RestartPolicy,
    avoided_hosts,
    decide,
    excluded_hosts,
    policy_of,
    set_aside,
)
from tests.lib.job_stories import HOSTS, Story, ended, make_job, to_running

KILLED = Failure(Kind.UNKNOWN, "killed", ("node2",), (2,), "likely")
REBOOTED = Failure(Kind.INFRA, "node-rebooted", ("node2",), (2, 3), "certain")


def attempts(*ended_by: Failure, **same: Any) -> list[PastAttempt]:
    """Attempts of one minute each, a minute apart."""
    made = []
    for number, failure in enumerate(ended_by, start=1):
        at_s = 120.0 * number
        made.append(replace(PastAttempt(number, HOSTS, at_s - 60.0, at_s, failure), **same))
    return made


def judge(policy: RestartPolicy, past: list[PastAttempt]) -> Again | Enough:
    assert past[-1].failure is not None
    return decide(policy, past, past[-1].failure, past[-1].ended_at_s, f"run.{past[-1].number}")


@pytest.mark.parametrize(
    ("policy", "past", "rule"),
    [
        (RestartPolicy(0), attempts(REBOOTED), "restarts-off"),
        (RestartPolicy(3), attempts(Failure(Kind.USER, "exception")), "cause"),
        (RestartPolicy(3, causes=tuple(Kind)), attempts(Failure(Kind.USER, "exception")), "again"),
        (RestartPolicy(3), attempts(Failure(Kind.STORAGE, "x", confidence="certain", retry="never")), "never"),
        (RestartPolicy(3), attempts(Failure(Kind.STORAGE, "x", confidence="likely", retry="never")), "again"),
        (RestartPolicy(1), attempts(REBOOTED, REBOOTED), "max-restarts"),
        (RestartPolicy(1, window_s=100.0), attempts(REBOOTED, REBOOTED), "again"),
        (RestartPolicy(9), attempts(REBOOTED, REBOOTED, REBOOTED), "again"),
        (RestartPolicy(9), attempts(REBOOTED, REBOOTED, REBOOTED, REBOOTED), "no-progress"),
        (RestartPolicy(9, max_restarts_without_progress=1), attempts(REBOOTED, REBOOTED), "no-progress"),
        (RestartPolicy(9), attempts(KILLED, KILLED), "no-progress"),
        (RestartPolicy(1), attempts(*[Failure(Kind.PREEMPTED, "preempted")] * 40, counted=False), "not-counted"),
    ],
)
def test_the_rule_that_decides(policy: RestartPolicy, past: list[PastAttempt], rule: str) -> None:
    assert judge(policy, past).rule == rule


def test_a_crash_loop_ends_after_the_tries_of_its_kind_whatever_the_budget() -> None:
    for kind, limit in WITHOUT_PROGRESS.items():
        past = attempts(Failure(kind, "x", confidence="likely"))
        while isinstance(judge(RestartPolicy(1000, causes=tuple(Kind)), past), Again) and len(past) < 20:
            past = attempts(*[one.failure for one in past if one.failure], Failure(kind, "x", confidence="likely"))
        assert len(past) == (20 if limit is None else limit + 1)


def test_steps_checkpoints_or_half_an_hour_are_progress() -> None:
    same = [replace(one, last_step=50) for one in attempts(KILLED, KILLED, KILLED)]
    assert judge(RestartPolicy(9), same).rule == "no-progress"
    risen = [replace(one, last_step=50 * one.number) for one in same]
    assert judge(RestartPolicy(9), risen).rule == "again"
    silent = [replace(one, started_at_s=one.ended_at_s - 1800.0) for one in attempts(KILLED, KILLED, KILLED)]
    assert judge(RestartPolicy(9), silent).rule == "repeated", "no step is known, and it fails in the same way"
    other = [*silent[:2], replace(silent[2], failure=REBOOTED)]
    assert judge(RestartPolicy(9), other).rule == "again"


@pytest.mark.parametrize(
    ("first", "second", "prints", "rule"),
    [
        (("node1",), ("node2",), "same", "repeated"),
        (HOSTS, HOSTS, "same", "repeated"),
        (("node1",), ("node1",), "same", "again"),
        (("node1",), ("node2",), "other", "again"),
        (("node1",), ("node2",), "none", "again"),
    ],
)
def test_an_exception_that_moves_with_the_program_ends_the_job(
    first: tuple[str, ...], second: tuple[str, ...], prints: str, rule: str
) -> None:
    marks = {"same": ("a|b", "a|b"), "other": ("a|b", "a|c"), "none": ("", "")}[prints]
    failures = [
        Failure(Kind.INFRA, "exception", hosts, (0,), "likely", fingerprint=mark)
        for hosts, mark in zip((first, second), marks)
    ]
    past = attempts(*failures, last_step=5)
    assert judge(RestartPolicy(9), past).rule == rule
    proven = attempts(*[replace(one, is_proven=True) for one in failures], last_step=5)
    assert judge(RestartPolicy(9), proven).rule == "again"
    further = [past[0], replace(past[1], last_step=80)]
    assert judge(RestartPolicy(9), further).rule == "again"


def test_progress_is_what_an_attempt_adds_to_the_checkpoint_that_it_resumed_from() -> None:
    first, *rest = attempts(KILLED, REBOOTED, REBOOTED, REBOOTED)
    idle = [replace(one, resumed_step=500, last_step=500) for one in rest]
    assert judge(RestartPolicy(9), [first, *idle]).rule == "no-progress", "steps of an earlier job"
    saved = [replace(one, resumed_step=10 * one.number) for one in attempts(REBOOTED, REBOOTED, REBOOTED, REBOOTED)]
    assert judge(RestartPolicy(9), saved).rule == "again", "no steps are reported, and each begins further"
    stuck = [replace(one, resumed_step=10) for one in saved]
    assert judge(RestartPolicy(9), stuck).rule == "no-progress"


def test_a_newer_complete_checkpoint_is_progress_whatever_the_steps_were() -> None:
    past = [replace(one, resumed_step=680, last_step=760) for one in attempts(REBOOTED, KILLED, KILLED)]
    assert judge(RestartPolicy(9), past).rule == "no-progress"
    saved = [*past[:2], replace(past[2], saved_step=720)]
    assert judge(RestartPolicy(9), saved).rule == "again", "nor is it the same failure at the same step"
    loaded = [*past[:2], replace(past[2], saved_step=680)]
    assert judge(RestartPolicy(9), loaded).rule == "no-progress", "it is the one that they resumed from"
    unknown = [replace(one, resumed_step=None, saved_step=720) for one in past]
    assert judge(RestartPolicy(9), unknown).rule == "no-progress", "it was there before"


def test_attempts_that_die_while_they_load_a_checkpoint_go_back_to_the_one_before() -> None:
    story = Story(restarting_job(policy=RestartPolicy(9, backoff_s=(0.0, 0.0))))
    steps = {"a": [Listed("deepspeed", f"/c/{step}", step) for step in (10, 5)]}

    def live(resumed: ResumePoint, last_step: int | None) -> None:
        free, *rest = to_running()
        failed(story.tell(free, inputs.ResumeChosen(resumed), *rest))
        story.tell(endings.Diagnosed(story.job.attempt, KILLED, last_step))

    live(ResumePoint(), 12)
    for expected in (10, 10, 5):
        point = choose_checkpoint(steps, ("a",), skip=set_aside(story.job.past))
        assert isinstance(point, ResumePoint) and point.step == expected
        live(point, None)
    aside = [event.values["steps"] for event in story.events if event.code == "checkpoint-set-aside"]
    assert aside == [[10]]
    assert story.job.state is State.FAILED and story.job.reason.values["rule"].code == "rule-no-progress"


def test_the_same_failure_at_the_same_step_twice_is_enough() -> None:
    twice = [replace(one, last_step=70) for one in attempts(REBOOTED, KILLED, KILLED)]
    twice[0] = replace(twice[0], last_step=60)
    assert judge(RestartPolicy(9), [twice[0], *twice[1:]]).rule == "no-progress"
    later = [replace(twice[0]), twice[1], replace(twice[2], last_step=71)]
    assert judge(RestartPolicy(9), later).rule == "again"


FAILURES = st.builds(
    Failure,
    st.sampled_from(Kind),
    st.sampled_from(["a", "b"]),
    st.sampled_from([(), ("node1",), HOSTS]),
    confidence=st.sampled_from(["certain", "likely", "unknown"]),
    retry=st.sampled_from(["same", "never"]),
    is_proven=st.booleans(),
)
POLICIES = st.builds(
    RestartPolicy,
    st.integers(0, 8),
    st.floats(1.0, 10_000.0),
    st.tuples(st.floats(0.0, 50.0), st.floats(50.0, 500.0)),
    st.just(tuple(Kind)) | st.just(RestartPolicy().causes),
    st.none() | st.integers(0, 5),
)


@given(POLICIES, st.lists(st.tuples(FAILURES, st.floats(0.0, 4000.0), st.none() | st.integers(0, 500)), max_size=30))
def test_no_budget_is_exceeded_and_no_pause_is_out_of_bounds(policy: RestartPolicy, life: Any) -> None:
    past: list[PastAttempt] = []
    restarts: list[float] = []
    now_s = 0.0
    for number, (failure, ran_s, step) in enumerate(life, start=1):
        started_s, now_s = now_s, now_s + ran_s
        present = PastAttempt(number, HOSTS, started_s, now_s, failure, last_step=step)
        decision = decide(policy, [*past, present], failure, now_s, f"run.{number}")
        assert decision == decide(policy, [*past, present], failure, now_s, f"run.{number}")
        if isinstance(decision, Enough):
            break
        low_s, high_s = policy.backoff_s
        assert low_s / 2 - 1e-6 <= decision.not_before_s - now_s <= high_s + 1e-6
        assert failure.kind in policy.causes
        assert set(decision.avoid) | set(decision.quarantine) <= set(failure.hosts)
        counted = decision.rule == "again"
        restarts += [now_s] if counted else []
        assert sum(at_s > now_s - policy.window_s for at_s in restarts) <= policy.max_restarts
        past.append(replace(present, counted=counted, avoid=decision.avoid))
        now_s = decision.not_before_s


@pytest.mark.parametrize(
    ("failures", "avoid"),
    [
        ((REBOOTED,), ("node2",)),
        ((replace(REBOOTED, confidence="unknown"),), ()),
        ((replace(REBOOTED, kind=Kind.HCCL),), ()),
        ((replace(REBOOTED, kind=Kind.HCCL, is_proven=True),), ("node2",)),
        ((replace(REBOOTED, kind=Kind.HCCL), replace(REBOOTED, kind=Kind.HCCL)), ("node2",)),
        ((replace(REBOOTED, kind=Kind.HANG), replace(REBOOTED, kind=Kind.HANG)), ("node2",)),
        ((replace(REBOOTED, kind=Kind.OOM),), ()),
        ((replace(REBOOTED, kind=Kind.STORAGE, hosts=HOSTS),), ()),
        ((replace(REBOOTED, kind=Kind.STORAGE),), ("node2",)),
    ],
)
def test_hosts_that_are_avoided(failures: tuple[Failure, ...], avoid: tuple[str, ...]) -> None:
    decision = judge(RestartPolicy(9), attempts(*failures))
    assert isinstance(decision, Again) and decision.avoid == avoid


def test_a_bad_device_quarantines_its_host_and_an_excluded_finding_is_for_good() -> None:
    past = attempts(Failure(Kind.DEVICE, "ACL-507054", ("node2",), confidence="likely"))
    decision = judge(RestartPolicy(9), past)
    assert isinstance(decision, Again) and decision.quarantine == ("node2",)
    kept = [replace(past[0], avoid=decision.avoid)]
    assert avoided_hosts(kept, 1000.0) == {"node2"} and not avoided_hosts(kept, 1e6)
    assert excluded_hosts(RestartPolicy(exclude_node_findings=("device",)), past) == {"node2"}
    assert excluded_hosts(RestartPolicy(exclude_node_findings=("ACL-507054",)), past) == {"node2"}
    assert not excluded_hosts(RestartPolicy(exclude_node_findings=("hccl",)), past)


def test_the_job_file_and_the_policy_have_the_same_defaults() -> None:
    spec = JobSpec(name="j", command=("x",))
    assert policy_of(json.loads(spec.model_dump_json())) == RestartPolicy()
    assert policy_of({"program": "trajectory", "restart": {}}).has_epochs
    assert policy_of({"command": ["x"], "restart": {}, "checkpoint": {"fenced": True}}).has_epochs


def test_programs_restart_three_times_by_default_and_other_jobs_never() -> None:
    assert policy_of({"program": "trajectory", "restart": {"max_restarts": None}}).max_restarts == 3
    assert policy_of({"command": ["x"], "restart": {"max_restarts": None}}).max_restarts == 0
    assert policy_of({"program": "trajectory"}).max_restarts == 0, "submitted to a release without restarts"
    policy = policy_of({"command": ["x"], "restart": {"max_restarts": 2, "causes": ["infra", "of-later"]}})
    assert (policy.max_restarts, policy.causes) == (2, (Kind.INFRA,))
    assert load_job(json.loads(json.dumps(dump_job(make_job(policy=policy))))).policy == policy


# ---------------------------------------------------------------- the life of a job


def restarting_job(**changes: Any) -> Job:
    return make_job(**{"policy": RestartPolicy(1, backoff_s=(10.0, 300.0)), **changes})


def failed(story: Story, rank: int = 2) -> Story:
    """The rank exits 3, and both nodes are empty."""
    return story.tell(ended(rank, 3), endings.NodeEnded("node1"), endings.NodeEnded("node2"))


def test_a_job_waits_for_its_diagnosis_then_for_its_pause_and_is_queued_again() -> None:
    story = failed(Story(restarting_job()).tell(*to_running()))
    assert story.job.state is State.STOPPING and actions.Judge(1) in story.actions
    story.tell(endings.Diagnosed(1, KILLED, last_step=40))
    assert story.job.state is State.BACKOFF and story.job.not_before_s is not None
    assert [event.code for event in story.events].count("restarting") == 1
    story.tell(inputs.Tick())
    assert story.job.state is State.BACKOFF
    story.now_s = story.job.not_before_s
    story.tell(inputs.Tick())
    assert (story.job.state, story.job.attempt, story.job.nodes) == (State.QUEUED, 2, ())
    assert story.job.failure is None and story.job.first_failure is None
    (past,) = load_job(json.loads(json.dumps(dump_job(story.job)))).past
    assert (past.number, past.failure, past.last_step, past.counted) == (1, KILLED, 40, True)


def test_a_used_budget_ends_the_job_with_the_rule_in_its_reason() -> None:
    story = failed(Story(restarting_job(past=tuple(attempts(REBOOTED)), attempt=2)).tell(*to_running()))
    story.tell(endings.Diagnosed(2, REBOOTED))
    assert story.job.state is State.FAILED
    assert story.job.reason.values["rule"].code == "rule-max-restarts"
    assert [event.values["rule"] for event in story.events if event.code == "gave-up"] == ["max-restarts"]
    assert story.events[-1].ranks == (2,), "the rank of the reason inside"


@pytest.mark.parametrize("moment", ["stopping", "backoff"])
def test_a_stop_by_the_user_is_not_undone_by_the_policy(moment: str) -> None:
    story = Story(restarting_job()).tell(*to_running(), ended(2, 3))
    if moment == "backoff":
        story.tell(endings.NodeEnded("node1"), endings.NodeEnded("node2"), endings.Diagnosed(1, KILLED))
        assert story.job.state is State.BACKOFF
    story.tell(inputs.StopRequested(now=False), endings.NodeEnded("node1"), endings.NodeEnded("node2"))
    assert (story.job.state, story.job.cause) == (State.STOPPED, Cause.USER)


def test_no_attempt_starts_while_the_end_on_a_host_is_unproven() -> None:
    story = Story(restarting_job()).tell(*to_running(), ended(2, 3), endings.NodeEnded("node2"))
    story.now_s += 1000.0
    story.tell(inputs.Tick(), endings.Diagnosed(1, KILLED))
    assert story.job.state is State.BACKOFF and story.job.unconfirmed == ("node1",)
    story.now_s += 1000.0
    story.tell(inputs.Tick(), inputs.Tick())
    assert story.job.state is State.BACKOFF and story.job.reason.code == "waiting-for-end"
    assert [event.code for event in story.events].count("restart-waits") == 1
    story.tell(ended(0, 1), endings.SupervisorLost("node1"))
    assert story.job.state is State.BACKOFF and len(story.job.past) == 1, "it was stopped and counted already"
    story.tell(endings.NodeLost("node1", "rebooted"), inputs.Tick())
    assert (story.job.state, story.job.attempt, story.job.unconfirmed) == (State.QUEUED, 2, ())


def test_a_diagnosis_that_does_not_come_is_replaced_by_the_records() -> None:
    story = failed(Story(restarting_job()).tell(*to_running()))
    story.now_s += JUDGE_S + 10.0
    story.tell(inputs.Tick())
    assert story.job.state is State.BACKOFF
    assert story.job.past[-1].failure == Failure(Kind.UNKNOWN, "rank-exited", ("node2",), (2,))


def test_a_new_controller_asks_for_the_diagnosis_again_and_keeps_the_pause() -> None:
    story = failed(Story(restarting_job()).tell(*to_running()))
    assert actions.Judge(1) in resume(story.job, now_s=50.0).actions
    story.tell(endings.Diagnosed(1, KILLED))
    assert resume(story.job, now_s=50.0).job == story.job


def test_a_refused_first_start_fails_and_a_refused_restart_is_tried_again() -> None:
    first = Story(restarting_job()).tell(*to_running()[:4], inputs.Refused("node2", "no python"))
    assert first.job.state is State.FAILED
    again = Story(restarting_job(attempt=2, policy=RestartPolicy(3)))
    again.tell(*to_running()[:4], inputs.Refused("node2", "device busy"))
    assert again.job.state is State.BACKOFF, "there is nothing to diagnose"


def documented(kind: Kind) -> tuple[bool, int | None]:
    """Of the table in docs/recovery.md: whether a failure restarts a job by default, and how often in a row without
    progress, None: no limit."""
    page = (Path(__file__).parents[4] / "docs" / "recovery.md").read_text()
    (row,) = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith(f"| `{kind.value}` | ")]
    return row[2].startswith("yes"), None if row[3] == "no limit" else int(row[3])


@pytest.mark.parametrize("makes_progress", [False, True])
@pytest.mark.parametrize("kind", Kind)
def test_by_default_a_program_gives_up_after_the_restarts_of_the_page(kind: Kind, makes_progress: bool) -> None:
    story = Story(restarting_job(policy=policy_of({"program": "trajectory", "restart": {}})))
    restarts_by_default, limit = documented(kind)
    in_all = 3 if limit is not None else None
    limits = [most for most in (in_all, None if makes_progress else limit) if most is not None]
    expected = min(limits, default=20) if restarts_by_default else 0
    for attempt in range(1, expected + 2):
        assert (story.job.state, story.job.attempt) == (State.QUEUED, attempt)
        failed(story.tell(*to_running()))
        step = 10 * attempt if makes_progress else None
        story.tell(endings.Diagnosed(attempt, Failure(kind, "x", ("node2",), confidence="likely"), step))
        if story.job.state is State.BACKOFF:
            assert story.job.not_before_s is not None
            story.now_s = story.job.not_before_s
            story.tell(inputs.Tick())
    assert story.job.state is (State.FAILED if limits or not restarts_by_default else State.QUEUED)


def test_a_retry_is_a_new_attempt_with_a_new_budget() -> None:
    job = restarting_job(past=tuple(attempts(REBOOTED)), attempt=2)
    story = failed(Story(job).tell(*to_running()))
    story.tell(endings.Diagnosed(2, REBOOTED), inputs.RetryRequested())
    assert (story.job.state, story.job.attempt, story.job.ended_at_s) == (State.QUEUED, 3, None)
    assert [(one.number, one.failure, one.counted) for one in story.job.past] == [
        (1, REBOOTED, False),
        (2, REBOOTED, False),
    ]
    failed(story.tell(*to_running())).tell(endings.Diagnosed(3, REBOOTED))
    assert story.job.state is State.BACKOFF
    over = Story(make_job(state=State.SUCCEEDED)).tell(inputs.RetryRequested())
    assert over.job.state is State.SUCCEEDED


def ends_for_node2(story: Story, failure: Failure) -> Story:
    return story.tell(endings.NodeEnded("node2"), endings.Diagnosed(1, failure))


def rebooted(story: Story) -> Story:
    lost = story.tell(endings.NodeLost("node1", "rebooted"))
    return ends_for_node2(lost, REBOOTED).tell(inputs.Tick(frozenset(HOSTS)), inputs.Tick(frozenset(HOSTS)))
