"""Stories as people read them: hosts folded, and nothing lost by it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ascendrun.core.event_lines import StoryLine, fold_lines, fold_text
from ascendrun.core.names import expand_names

HOSTS = {"j-0001": tuple(f"npu{number:02d}" for number in range(1, 65)), "j-0002": ("a", "b")}


def lines(*texts: str, kind: str = "note", job: str = "j-0001", step_s: float = 0.01) -> list[StoryLine]:
    return [StoryLine(number, number * step_s, job, kind, text) for number, text in enumerate(texts, start=1)]


def test_a_list_of_hosts_is_folded_where_it_stands() -> None:
    assert fold_text("demo submitted for npu01, npu02, npu03", HOSTS["j-0001"]) == "demo submitted for npu[01-03]"
    assert fold_text("one, two, three", HOSTS["j-0001"]) == "one, two, three"


def test_what_64_hosts_say_at_once_is_one_line() -> None:
    folded = fold_lines(lines(*(f"{host}: disk is 93 % full" for host in HOSTS["j-0001"])), HOSTS)
    assert [line.text for line in folded] == ["npu[01-64]: disk is 93 % full"]


def test_lines_that_differ_in_more_than_the_host_stay_apart() -> None:
    folded = fold_lines(lines("npu01: 3 of 8", "npu02: 4 of 8", "npu03: 3 of 8"), HOSTS)
    assert [line.text for line in folded] == ["npu[01,03]: 3 of 8", "npu02: 4 of 8"]


def test_the_same_said_later_is_a_line_of_its_own() -> None:
    assert len(fold_lines(lines("npu01: x", "npu02: x", step_s=5.0), HOSTS)) == 2


def test_jobs_and_kinds_are_not_mixed() -> None:
    mixed = [*lines("npu01: x"), *lines("npu02: x", kind="state"), *lines("a: x", job="j-0002")]
    assert len(fold_lines(mixed, HOSTS)) == 3


def test_a_host_whose_name_begins_another_word_is_not_found_in_it() -> None:
    hosts = {"j-0001": ("gw", "gw2")}
    folded = fold_lines(lines("gw: gw-config is odd", "gw2: gw-config is odd"), hosts)
    assert [line.text for line in folded] == ["gw,gw2: gw-config is odd"] or len(folded) == 1


@given(st.lists(st.sampled_from(HOSTS["j-0001"]), min_size=1, max_size=30))
def test_folding_loses_no_host(hosts: list[str]) -> None:
    folded = fold_lines(lines(*(f"{host}: x" for host in hosts)), HOSTS)
    assert {name for line in folded for name in expand_names(line.text.split(":")[0])} == set(hosts)
