"""The choice of a checkpoint: never one that is not complete on a host that needs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ascendrun.core.dataclass import load_dataclass
from ascendrun.core.jobs.checkpoints import BUNDLED, Listed, OnlyCopy, ResumePoint, choose, incomplete
from ascendrun.core.jobs.restart import Failure, Kind, PastAttempt, may_try_older, set_aside

HOSTS = ("a", "b", "c")
FORMATS = (BUNDLED, "deepspeed", "transformers", "torch-dcp", "megatron")
SHARDS = ("0", "1", "2")


def ours(step: int, parts: tuple[str, ...] = SHARDS, **more: object) -> Listed:
    return Listed(BUNDLED, f"/ckpt/step-{step}", step, parts=parts, of=SHARDS, **more)  # type: ignore[arg-type]


def foreign(step: int, form: str = "transformers", **more: object) -> Listed:
    return Listed(form, f"/ckpt/checkpoint-{step}", step, **more)  # type: ignore[arg-type]


@st.composite
def copies(draw: st.DrawFn) -> tuple[Listed, ...]:
    found = {}
    for step in draw(st.lists(st.integers(1, 5), max_size=5)):
        form = draw(st.sampled_from(FORMATS))
        is_divided = form in (BUNDLED, "deepspeed")
        parts = tuple(draw(st.sets(st.sampled_from(SHARDS)))) if is_divided else ()
        found[step, form] = Listed(
            form,
            f"/x/{step}",
            step,
            epoch=draw(st.integers(0, 1)),
            parts=parts,
            of=SHARDS if is_divided else (),
            whole=draw(st.booleans()),
        )
    return tuple(found.values())


WORLDS = st.fixed_dictionaries({host: copies() for host in HOSTS})


@given(WORLDS, st.sets(st.integers(1, 5)), st.booleans(), st.integers(0, 5))
def test_what_is_chosen_is_complete_on_every_host_that_needs_it(
    listings: Mapping[str, tuple[Listed, ...]], skip: set[int], is_absent: bool, known: int
) -> None:
    answer = choose(listings, HOSTS, skip=sorted(skip), absent=("d",) if is_absent else (), known_step=known)
    if isinstance(answer, OnlyCopy):
        assert is_absent and answer.hosts == ("d",)
        return
    if not answer.step:
        assert not answer.paths
        return
    copies = {
        host: [one for one in listings[host] if one.whole and (one.step, one.format) == (answer.step, answer.format)]
        for host in HOSTS
    }
    having = {host for host, found in copies.items() if found}
    assert having and set(answer.paths) == set(HOSTS)
    assert answer.step not in answer.skip
    if answer.format in (BUNDLED, "deepspeed"):
        assert {part for found in copies.values() for one in found for part in one.parts} >= set(SHARDS)
    if answer.format in ("deepspeed", "torch-dcp", "megatron"):
        assert having == set(HOSTS)
    if answer.format == "transformers":
        assert "a" in having
        assert all(host in having for host in HOSTS if any(one.format == "transformers" for one in listings[host]))


@given(WORLDS)
def test_a_newer_checkpoint_that_all_hosts_have_whole_is_never_missed(
    listings: Mapping[str, tuple[Listed, ...]],
) -> None:
    everywhere = {host: (*found, foreign(9, "torch-dcp")) for host, found in listings.items()}
    answer = choose(everywhere, HOSTS)
    assert isinstance(answer, ResumePoint) and (answer.step, answer.format) == (9, "torch-dcp")


def test_a_torn_newest_checkpoint_on_one_host_leaves_the_older_common_one() -> None:
    torn = foreign(20, whole=False, why="size", file="optimizer.pt")
    listings = {"a": (foreign(20), foreign(10)), "b": (torn, foreign(10)), "c": (foreign(20), foreign(10))}
    answer = choose(listings, HOSTS)
    assert isinstance(answer, ResumePoint) and answer.step == 10
    assert incomplete(listings, 10) == [("b", torn)]
    assert answer.environment("b") == {
        "ASCENDRUN_RESUME_STEP": "10",
        "ASCENDRUN_RESUME_PATH": "/ckpt/checkpoint-10",
        "ASCENDRUN_RESUME_FORMAT": "transformers",
    }


def test_parts_on_different_disks_are_one_checkpoint_of_a_bundled_program() -> None:
    listings = {"a": (ours(8, ("0",)), ours(4)), "b": (ours(8, ("1", "2")), ours(4))}
    assert choose(listings, HOSTS[:2]).step == 8
    other_save = {**listings, "b": (ours(8, ("1", "2"), save="other"),)}
    assert choose(other_save, HOSTS[:2]).step == 4


def test_of_one_step_the_later_epoch_counts() -> None:
    listings = {"a": (ours(8, epoch=0), Listed(BUNDLED, "/new", 8, 2, parts=SHARDS, of=SHARDS))}
    answer = choose(listings, ("a",))
    assert isinstance(answer, ResumePoint) and answer.paths == {"a": "/new"}


def test_a_replaced_host_that_has_the_only_copy_is_waited_for() -> None:
    parts = {"a": (ours(12, ("0", "1")), ours(8))}
    assert choose(parts, ("a", "n"), absent=("b",)) == OnlyCopy(12, ("b",))
    assert choose(parts, ("a", "n")).step == 8, "given up: the next older one"
    assert choose({"n": ()}, ("n",), absent=("b",), known_step=12) == OnlyCopy(12, ("b",))
    assert choose({"n": (ours(14),)}, ("n",), absent=("b",), known_step=12).step == 14, "a shared disk has it"


def attempt(number: int, resumed: int, last: int | None = None, kind: Kind = Kind.UNKNOWN) -> PastAttempt:
    return PastAttempt(number, HOSTS, 1.0, 2.0, Failure(kind, "code"), resumed, last)


def test_a_step_is_set_aside_after_two_attempts_from_it_without_progress() -> None:
    assert set_aside([attempt(1, 0, 12), attempt(2, 10)]) == ()
    past = [attempt(1, 0, 12), attempt(2, 10), attempt(3, 10, 10)]
    assert set_aside(past) == (10,)
    listings = {"a": (foreign(10), foreign(5))}
    answer = choose(listings, ("a",), skip=set_aside(past))
    assert isinstance(answer, ResumePoint) and (answer.step, answer.skip) == (5, (10,))
    assert set_aside([*past, attempt(4, 5), attempt(5, 5)]) == (5, 10)
    assert set_aside([*past, attempt(4, 5, 8)]) == (), "it got further: a new checkpoint of step 10 is another one"


def test_other_causes_and_starts_that_never_came_do_not_blame_a_checkpoint() -> None:
    assert set_aside([attempt(1, 10, kind=Kind.INFRA), attempt(2, 10, kind=Kind.INFRA)]) == ()
    never = PastAttempt(2, HOSTS, None, 2.0, None, 10, counted=False)
    assert set_aside([attempt(1, 10), never, attempt(3, 10)]) == (10,)


def test_the_only_checkpoint_is_tried_again_rather_than_none() -> None:
    assert choose({"a": (foreign(10),)}, ("a",), skip=(10,)) == ResumePoint(
        10, "transformers", {"a": "/ckpt/checkpoint-10"}, older=0
    )


def test_the_step_that_is_left_if_the_chosen_one_fails_is_known() -> None:
    answer = choose({"a": (foreign(10), foreign(8, whole=False), foreign(6), foreign(4))}, ("a",), skip=(6,))
    assert isinstance(answer, ResumePoint) and (answer.step, answer.older) == (10, 4)


def test_older_checkpoints_are_tried_at_most_six_times() -> None:
    past = [attempt(1, 0, 30)]
    assert not may_try_older(past)
    for number, step in enumerate((20, 20, 15, 15, 10), start=2):
        past.append(attempt(number, step))
        assert may_try_older(past)
    assert not may_try_older([*past, attempt(7, 10)])


def test_without_an_older_checkpoint_or_after_a_long_run_there_is_nothing_to_go_back_to() -> None:
    assert not may_try_older([attempt(1, 0, 30), replace(attempt(2, 20), older_step=0)])
    assert may_try_older([attempt(1, 0, 30), replace(attempt(2, 20), older_step=15)])
    silent = replace(attempt(2, 20), ended_at_s=2000.0)
    assert set_aside([silent, silent]) == () and not may_try_older([silent])


def test_a_list_of_another_release_is_read() -> None:
    row = {"format": "new", "path": "/x", "step": 3, "parts": ["a"], "of": [], "later": 1}
    assert load_dataclass(Listed, row) == Listed("new", "/x", 3, parts=("a",))
