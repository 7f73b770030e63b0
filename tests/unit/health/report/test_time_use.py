"""Where a job's time went: made stories, and any story whatever sums to the wall time."""

from hypothesis import given
from hypothesis import strategies as st

from ascendrun.core.jobs.draft import TRANSITIONS
from ascendrun.core.jobs.job import State
from ascendrun.health.report.time_use import USES, Accounting, AttemptSteps, account, find_stays

S = State
START = [(10.0, S.CHECKING), (13.0, S.STAGING), (18.0, S.STARTING), (20.0, S.RUNNING)]


def steps(begin_s: float, count: int, *, first: int = 1, each_s: float = 1.0) -> tuple[tuple[float, int], ...]:
    return tuple((begin_s + each_s * (k + 1), first + k) for k in range(count))


def spend(
    moves: list[tuple[float, State]], attempts: dict[int, AttemptSteps], *, until_s: float = 1e9
) -> dict[str, float]:
    end_s = min(until_s, moves[-1][0]) if moves[-1][1] in (S.SUCCEEDED, S.FAILED, S.STOPPED) else until_s
    found = account(find_stays(moves, created_s=0.0, until_s=end_s), attempts)
    check(found, end_s)
    return {use: ms / 1000 for use, ms in found.spent_ms.items() if ms}


def check(found: Accounting, wall_s: float) -> None:
    assert tuple(found.spent_ms) == tuple(USES)
    assert sum(found.spent_ms.values()) == found.wall_ms == round(wall_s * 1000)
    assert all(ms >= 0 for ms in found.spent_ms.values())
    for one, next_one in zip(found.pieces, found.pieces[1:]):
        assert one.start_ms < one.end_ms == next_one.start_ms


def test_a_run_that_went_well() -> None:
    told = AttemptSteps(steps(50.0, 100), started_s=50.0, saves=[(90.0, 95.0, 40), (155.0, 158.0, 100)])
    assert spend([*START, (160.0, S.SUCCEEDED)], {1: told}) == {
        "queue": 10.0,
        "checks": 3.0,
        "staging": 5.0,
        "start-up": 2.0 + 30.0,
        "training": 95.0,
        "checkpoint": 8.0,
        "ending": 7.0,
    }


RETRY = [
    *START,
    (100.0, S.STOPPING),
    (102.0, S.BACKOFF),
    (112.0, S.QUEUED),
    (113.0, S.CHECKING),
    (114.0, S.STAGING),
    (115.0, S.STARTING),
    (116.0, S.RUNNING),
    (200.0, S.SUCCEEDED),
]


def test_after_a_failure_what_was_done_again_is_lost_and_all_that_it_took_to_come_back() -> None:
    first = AttemptSteps(steps(30.0, 60), started_s=30.0, saves=[(59.0, 60.0, 30), (80.0, 82.0, 51)])
    again = AttemptSteps(steps(130.0, 70, first=31), started_s=130.0, resumed=30)
    assert spend(RETRY, {1: first, 2: again}) == {
        "queue": 10.0,
        "checks": 3.0,
        "staging": 5.0,
        "start-up": 2.0 + 10.0,
        "training": 29.0 + 70.0,
        "checkpoint": 1.0,
        "lost": 40.0 + 2.0 + 10.0 + 4.0 + 14.0,
    }


def test_where_an_attempt_does_not_tell_what_it_resumed_its_first_step_does() -> None:
    first = AttemptSteps(steps(30.0, 60), started_s=30.0)
    again = AttemptSteps(steps(130.0, 70, first=31), started_s=130.0)
    assert spend(RETRY, {1: first, 2: again})["training"] == 30.0 + 70.0


def test_work_of_all_attempts_is_lost_when_the_last_begins_from_nothing() -> None:
    first = AttemptSteps(steps(30.0, 60), started_s=30.0, saves=[(59.0, 60.0, 30)])
    again = AttemptSteps(steps(130.0, 70), started_s=130.0)
    assert spend(RETRY, {1: first, 2: again})["training"] == 70.0


def test_a_job_that_failed_for_good_keeps_what_its_last_checkpoint_has() -> None:
    told = AttemptSteps(steps(30.0, 60), started_s=30.0, saves=[(59.0, 60.0, 30)])
    found = spend([*START, (100.0, S.STOPPING), (102.0, S.FAILED)], {1: told})
    assert (found["training"], found["checkpoint"], found["lost"]) == (29.0, 1.0, 42.0)


def test_a_failed_job_without_a_checkpoint_keeps_nothing_and_that_is_told() -> None:
    told = AttemptSteps(steps(30.0, 60), started_s=30.0)
    stays = find_stays([*START, (100.0, S.STOPPING), (102.0, S.FAILED)], created_s=0.0, until_s=102.0)
    found = account(stays, {1: told})
    check(found, 102.0)
    assert found.spent_ms["training"] == 0 and found.caveats == ("no-checkpoint",)


def test_a_job_that_was_stopped_by_its_user_has_lost_nothing() -> None:
    told = AttemptSteps(steps(30.0, 60), started_s=30.0, saves=[(100.0, 101.0, 60)])
    found = spend([*START, (95.0, S.STOPPING), (102.0, S.STOPPED)], {1: told})
    assert (found["training"], found["ending"], found["checkpoint"]) == (60.0, 5.0 + 6.0, 1.0)
    assert "lost" not in found


def test_a_program_without_steps_ran_but_is_never_called_effective() -> None:
    stays = find_stays([*START, (100.0, S.SUCCEEDED)], created_s=0.0, until_s=100.0)
    found = account(stays, {})
    check(found, 100.0)
    assert (found.spent_ms["running"], found.spent_ms["training"], found.effective) == (80_000, 0, None)
    assert found.caveats == ("no-steps",)


def test_steps_without_times_trained_while_the_program_ran_as_far_as_one_knows() -> None:
    stays = find_stays([*START, (100.0, S.SUCCEEDED)], created_s=0.0, until_s=100.0)
    found = account(stays, {1: AttemptSteps(((None, 1), (None, 2)))})
    check(found, 100.0)
    assert (found.spent_ms["training"], found.caveats) == (80_000, ("no-times",))


def test_of_a_job_that_lives_the_time_so_far_is_told() -> None:
    assert spend([(10.0, S.CHECKING)], {}, until_s=25.0) == {"queue": 10.0, "checks": 15.0}
    told = AttemptSteps(steps(30.0, 20), started_s=30.0)
    assert spend(START, {1: told}, until_s=80.0)["training"] == 50.0


def test_a_job_that_just_came_has_waited_only() -> None:
    found = account(find_stays([], created_s=5.0, until_s=5.0), {})
    assert (found.wall_ms, found.effective) == (0, None)


def test_clocks_that_were_set_back_or_are_wrong_never_make_time_out_of_nothing() -> None:
    told = AttemptSteps(((-500.0, 1), (99999.0, 2), (3.0, 3)), started_s=-1e6, saves=[(-50.0, 5e5, 2)])
    stays = find_stays(
        [(10.0, S.CHECKING), (5.0, S.STAGING), (4.0, S.STARTING), (20.0, S.RUNNING), (19.0, S.SUCCEEDED)],
        created_s=0.0,
        until_s=30.0,
    )
    check(account(stays, {1: told}), 30.0)


def test_an_attempt_whose_first_step_has_no_time_starts_with_its_first_known_one() -> None:
    moves = [(0.0, state) for state in (S.CHECKING, S.STAGING, S.STARTING, S.RUNNING, S.STOPPING, S.BACKOFF)]
    moves += [(0.0, state) for state in (S.QUEUED, S.CHECKING, S.STAGING, S.STARTING, S.RUNNING)]
    second = AttemptSteps(((None, 0), (0.0, 0)))
    check(account(find_stays(moves, created_s=0.0, until_s=0.0), {2: second}), 0.0)
    late = AttemptSteps(((None, 1), (40.0, 2), (50.0, 3)))
    assert spend([*START, (60.0, S.SUCCEEDED)], {1: late})["start-up"] == 2.0 + 20.0


@st.composite
def stories(draw: st.DrawFn) -> tuple[list[tuple[float, State]], dict[int, AttemptSteps], float]:
    """Any walk through the table of moves, at any times, with any metrics beside it."""
    at, state, moves = 0.0, S.QUEUED, []
    times = st.floats(-5, 50, allow_nan=False)
    for _ in range(draw(st.integers(0, 40))):
        if not TRANSITIONS[state]:
            break
        state = draw(st.sampled_from(sorted(TRANSITIONS[state], key=str)))
        at += draw(times)
        moves.append((at, state))
    attempts = {}
    for number in draw(st.sets(st.integers(1, 5))):
        when = st.none() | st.floats(-10, 1000, allow_nan=False)
        told = draw(st.lists(st.tuples(when, st.integers(0, 100)), max_size=5))
        span = st.tuples(st.floats(-10, 1000), st.floats(-10, 1000), st.none() | st.integers(0, 100))
        saves = draw(st.lists(span, max_size=4))
        attempts[number] = AttemptSteps(tuple(told), draw(when), draw(st.none() | st.integers(0, 100)), tuple(saves))
    return moves, attempts, draw(st.floats(0, 1000))


@given(stories())
def test_whatever_happened_the_parts_sum_to_the_whole(
    story: tuple[list[tuple[float, State]], dict[int, AttemptSteps], float],
) -> None:
    moves, attempts, until_s = story
    check(account(find_stays(moves, created_s=0.0, until_s=until_s), attempts), until_s)


def test_a_month_with_a_checkpoint_every_ten_minutes_is_accounted_for_at_once() -> None:
    end_s = 30 * 86400.0
    saves = [(at - 20.0, at, int(at)) for at in range(600, int(end_s), 600)]
    told = AttemptSteps(((30.0, 1), (end_s, 2)), started_s=30.0, saves=saves)
    found = spend([*START, (end_s, S.SUCCEEDED)], {1: told})
    assert found["checkpoint"] == 20.0 * len(saves)
