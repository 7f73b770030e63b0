"""Every case of the corpus: the right first rank and reason, and nothing wrong that is called certain."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from corpus import Case, case_files, case_of
from variations import mutate

from ascendrun.health.diagnosis import Confidence, Diagnosis, diagnose, render

CASES = case_files()
MUTATIONS = min(int(os.environ.get("MUTATIONS", "4")), 200)
RIGHT_SHARE = 0.95


def faults_of(case: Case, found: Diagnosis) -> list[str]:
    """In words, what the diagnosis has wrong; [] nothing."""
    expected = case.expected
    faults = []
    if expected.first is not None and found.ranks != expected.first:
        faults.append(f"first ranks {found.ranks}, not {expected.first}")
    if expected.hosts is not None and set(found.hosts) != set(expected.hosts):
        faults.append(f"hosts {found.hosts}, not {expected.hosts}")
    if found.code not in expected.codes:
        faults.append(f"code {found.code}, not {expected.codes}")
    if expected.where is not None and found.values.get("where") != expected.where:
        faults.append(f"at {found.values.get('where')}, not {expected.where}")
    if expected.text is not None and expected.text not in render(found).message:
        faults.append(f"{expected.text!r} is not in {render(found).message!r}")
    roles = {rank: link.role.value for link in found.chain for rank in link.ranks}
    faults += [
        f"rank {rank} is {roles.get(int(rank))}, not {role}"
        for rank, role in expected.roles
        if roles.get(int(rank)) != role
    ]
    return faults


def is_wrong(case: Case, found: Diagnosis) -> bool:
    """Another rank or another reason than the right one; the place in the code is not asked for."""
    expected = case.expected
    if found.code not in expected.codes:
        return True
    return expected.first is not None and not (
        set(found.ranks) <= set(expected.first) and (bool(found.ranks) or not expected.first)
    )


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_the_first_rank_and_its_reason_are_named(path: Path) -> None:
    case, found = case_of(path)
    assert not faults_of(case, found), f"{found.code} {found.confidence.value}: {render(found).message} {found.caveats}"
    assert found.confidence.value in case.expected.sure, (
        f"{found.confidence.value}, {found.caveats}, {found.alternatives}"
    )


def test_the_corpus_is_as_large_and_as_good_as_promised() -> None:
    told = [case_of(path) for path in CASES]
    wrong = [case.name for case, found in told if faults_of(case, found)]
    assert len(told) >= 60
    assert len(wrong) <= (1 - RIGHT_SHARE) * len(told), wrong


def sure_and_wrong(path: Path, seed: int) -> str | None:
    case = mutate(case_of(path)[0], seed)
    found = diagnose(case.evidence)
    is_one_reason = len(case_of(path)[0].expected.codes) == 1
    is_other = is_one_reason and bool(case.expected.domain) and found.domain != case.expected.domain
    wrong_reason = found.reason_grade is Confidence.CERTAIN and is_other
    if not wrong_reason and (found.confidence is not Confidence.CERTAIN or not is_wrong(case, found)):
        return None
    given, expected = (found.ranks, found.code, found.domain), case.expected
    return f"{case.name}: {given}, not {expected.first} {expected.codes} {expected.domain}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(MUTATIONS))
def test_a_wrong_reason_is_never_called_certain_whatever_is_lost_or_added(seed: int) -> None:
    wrong = list(filter(None, (sure_and_wrong(path, seed) for path in CASES)))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("stem", "seed"),
    [
        ("the_stream_synchronisation_timed_out_on_all_but_one_node", 17),
        ("an_optional_package_is_missing_and_then_no_such_key", 12),
        ("a_process_of_a_pool_was_killed_for_memory", 9),
        ("a_handler_says_in_its_own_words_that_a_file_is_missing", 26),
        ("a_writer_thread_met_a_full_disk_ten_minutes_before", 18),
        ("an_optional_package_is_missing_and_then_no_such_key", 40),
        ("the_compiler_of_a_graph_is_missing_on_one_rank", 62),
        ("the_masters_name_is_localhost_on_one_node", 70),
        ("a_writer_thread_met_a_full_disk_ten_minutes_before", 81),
        ("a_handler_says_in_its_own_words_that_a_file_is_missing", 82),
        ("a_handler_says_in_its_own_words_that_a_file_is_missing", 29),
        ("a_handler_says_in_its_own_words_that_a_file_is_missing", 162),
        ("a_handler_says_in_its_own_words_that_a_file_is_missing", 191),
        ("a_cache_miss_was_handled_and_then_memory_ran_out", 179),
        ("memory_ran_out_and_the_emergency_save_failed", 125),
        ("a_refused_lock_was_handled_and_then_no_number", 5),
        ("a_python_of_another_version_on_one_node", 18),
        ("agents_of_one_node_do_not_reach_the_root", 13),
        ("agents_of_one_node_do_not_reach_the_root", 28),
    ],
)
def test_variations_that_were_wrong_and_certain(stem: str, seed: int) -> None:
    (path,) = (path for path in CASES if path.stem == stem)
    assert sure_and_wrong(path, seed) is None


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_every_diagnosis_has_its_words(lang: str) -> None:
    for path in CASES:
        told = render(case_of(path)[1], lang)
        assert told.message and "{" not in told.message and told.message != told.code, (path.stem, told.message)
        assert all(link.message for link in told.chain), (path.stem, told.chain)
