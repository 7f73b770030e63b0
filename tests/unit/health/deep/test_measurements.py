"""Pairing finds the bad hosts and links of made-up clusters, whatever their size, with few rounds."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascendrun.health.deep.measurements import Exchange, Pair, PairEvaluation, evaluate_pairs, next_round, pair_of

SHARES = {"bandwidth": 0.7, "promptness": 0.33}
NOISE = 0.1


class Fabric:
    """A cluster as numbers: a pair is as fast as the slower of its hosts and its link, give or take some noise."""

    def __init__(
        self, count: int, *, hosts: Mapping[int, float] = {}, links: Mapping[tuple[int, int], float] = {}, seed: int = 0
    ) -> None:
        self.hosts = [f"n{k:04d}" for k in range(count)]
        self.bad_hosts = {self.hosts[k]: share for k, share in hosts.items()}
        self.bad_links = {pair_of(self.hosts[a], self.hosts[b]): share for (a, b), share in links.items()}
        self.chance = random.Random(seed)
        self.rounds: list[tuple[Pair, ...]] = []

    def measure(self, pair: Pair) -> Exchange:
        share = min(self.bad_hosts.get(pair[0], 1.0), self.bad_hosts.get(pair[1], 1.0), self.bad_links.get(pair, 1.0))
        if not share:
            return Exchange(*pair, rates=None, why="silence")
        noisy = share * self.chance.uniform(1 - NOISE, 1 + NOISE)
        return Exchange(*pair, rates={"bandwidth": 20e9 * noisy, "promptness": 5e4 * self.chance.uniform(0.8, 1.2)})

    def run(self, partners: int = 2) -> tuple[PairEvaluation, list[Exchange]]:
        results: list[Exchange] = []
        while True:
            pairs = next_round(self.hosts, results, shares=SHARES, partners=partners)
            if not pairs:
                return evaluate_pairs(self.hosts, results, shares=SHARES), results
            self.rounds.append(pairs)
            results += [self.measure(pair) for pair in pairs]
            assert len(self.rounds) < 100, "the rounds do not end"


@st.composite
def clusters(draw: st.DrawFn) -> Fabric:
    """From 3 to 60 hosts, of which fewer than a quarter (of the small ones: one) are slow or silent.

    With more, sound hosts may by chance have met bad ones only, and the median no longer says what sound is.
    """
    count = draw(st.integers(3, 60))
    bad = draw(st.sets(st.integers(0, count - 1), max_size=max(1, (count - 1) // 4)))
    shares = {host: draw(st.sampled_from([0.0, 0.01, 0.3, 0.5])) for host in bad}
    return Fabric(count, hosts=shares, seed=draw(st.integers(0, 1000)))


@given(clusters())
def test_every_bad_host_is_named_and_no_sound_one(fabric: Fabric) -> None:
    evaluation, _ = fabric.run()
    assert set(evaluation.bad_hosts) == set(fabric.bad_hosts)
    assert evaluation.bad_links == ()


@given(clusters())
def test_the_pairs_of_a_round_are_disjoint_and_no_pair_is_measured_more_than_twice(fabric: Fabric) -> None:
    _, results = fabric.run()
    for pairs in fabric.rounds:
        names = [host for pair in pairs for host in pair]
        assert len(names) == len(set(names)) and all(one != other for one, other in pairs)
    measured = [result.pair for result in results]
    assert max(measured.count(pair) for pair in measured) <= 2


@given(st.integers(2, 70), st.integers(0, 1000))
def test_a_healthy_cluster_names_nobody_and_everyone_had_two_partners(count: int, seed: int) -> None:
    fabric = Fabric(count, seed=seed)
    evaluation, results = fabric.run()
    assert (evaluation.bad_hosts, evaluation.bad_links, evaluation.unclear) == ((), (), ())
    met: dict[str, set[str]] = {host: set() for host in fabric.hosts}
    for result in results:
        met[result.one].add(result.other)
        met[result.other].add(result.one)
    assert all(len(partners) >= min(2, count - 1) for partners in met.values())
    assert len(fabric.rounds) <= (2 if count % 2 == 0 else 4)


@given(st.integers(4, 60), st.data())
def test_a_bad_link_that_was_met_is_named_and_its_hosts_are_not(count: int, data: st.DataObject) -> None:
    measured = sorted({result.pair for result in Fabric(count).run()[1]})
    one, other = data.draw(st.sampled_from(measured))
    share = data.draw(st.sampled_from([0.0, 0.02, 0.5]))
    evaluation, _ = Fabric(count, links={(int(one[1:]), int(other[1:])): share}).run()
    assert evaluation.bad_links == ((one, other),)
    assert evaluation.bad_hosts == () and evaluation.unclear == ()


@settings(max_examples=20)
@given(st.sampled_from([255, 500, 999, 1000]), st.sets(st.integers(0, 254), max_size=20), st.integers(0, 9))
def test_a_large_cluster_needs_few_rounds(count: int, bad: frozenset[int], seed: int) -> None:
    fabric = Fabric(count, hosts=dict.fromkeys(bad, 0.4), seed=seed)
    evaluation, _ = fabric.run()
    assert set(evaluation.bad_hosts) == {fabric.hosts[host] for host in bad}
    assert len(fabric.rounds) <= 6


@given(
    st.sampled_from([(4, 2), (8, 4), (16, 4), (16, 8), (32, 8), (64, 16)]),
    st.integers(0, 7),
    st.sampled_from([0.0, 0.05, 0.5]),
)
def test_a_switch_with_a_bad_uplink_is_told_as_a_split_and_no_host_is_blamed(
    shape: tuple[int, int], which: int, share: float
) -> None:
    count, size = shape
    start = which % (count // size) * size
    behind = set(range(start, start + size))
    links = {(one, other): share for one in behind for other in range(count) if other not in behind}
    fabric = Fabric(count, links=links)
    evaluation, _ = fabric.run()
    assert evaluation.bad_hosts == () and evaluation.unclear == () and evaluation.lone_links == ()
    island = tuple(fabric.hosts[host] for host in sorted(behind))
    assert evaluation.splits and all(island in (split.one, split.other) for split in evaluation.splits)
    assert len(fabric.rounds) <= 3 * count.bit_length()


def test_two_lone_bad_links_are_no_split() -> None:
    evaluation, _ = Fabric(16, links={(0, 1): 0.1, (6, 7): 0.1}).run()
    assert evaluation.lone_links == (("n0000", "n0001"), ("n0006", "n0007")) and evaluation.splits == ()


def test_the_first_round_pairs_neighbours_and_the_second_the_far_side() -> None:
    fabric = Fabric(8)
    fabric.run()
    places = [[(int(a[1:]), int(b[1:])) for a, b in pairs] for pairs in fabric.rounds]
    assert places == [[(0, 1), (2, 3), (4, 5), (6, 7)], [(0, 4), (1, 5), (2, 6), (3, 7)]]


def test_a_full_matrix_measures_every_pair() -> None:
    for count in (2, 5, 8):
        _, results = Fabric(count).run(partners=count - 1)
        assert len({result.pair for result in results}) == count * (count - 1) // 2


def test_a_lone_slow_measurement_is_repeated_and_forgiven() -> None:
    hosts = ["a", "b", "c", "d"]
    fast, slow = {"bandwidth": 100.0}, {"bandwidth": 10.0}
    results = [Exchange("a", "b", slow), Exchange("c", "d", fast), Exchange("a", "c", fast), Exchange("b", "d", fast)]
    assert next_round(hosts, results, shares=SHARES) == (("a", "b"),)
    results.append(Exchange("b", "a", fast))
    assert next_round(hosts, results, shares=SHARES) == ()
    evaluation = evaluate_pairs(hosts, results, shares=SHARES)
    assert not evaluation.slow and not evaluation.bad_links


def test_a_link_that_answers_late_is_as_bad_as_a_narrow_one() -> None:
    hosts = ["a", "b", "c", "d"]
    sound = {"bandwidth": 100.0, "promptness": 1000.0}
    late = {"bandwidth": 95.0, "promptness": 100.0}
    pairs = [("a", "b"), ("c", "d"), ("a", "c"), ("b", "d"), ("b", "c")]
    evaluation = evaluate_pairs(
        hosts, [Exchange(a, b, late if "b" in (a, b) else sound) for a, b in pairs], shares=SHARES
    )
    assert evaluation.bad_hosts == ("b",)


@pytest.mark.parametrize("rates", [None, {"bandwidth": 1.0}])
def test_two_hosts_alone_are_never_blamed_one_by_one(rates: dict[str, float] | None) -> None:
    results = [Exchange("a", "b", rates, "silence")]
    assert next_round(["a", "b"], results, shares=SHARES) == ()
    evaluation = evaluate_pairs(["a", "b"], results, shares=SHARES)
    assert evaluation.bad_hosts == () and evaluation.bad_links == ()
    assert evaluation.unclear == ((("a", "b"),) if rates is None else ())


def test_where_nobody_reaches_anybody_the_rounds_end_and_nobody_is_blamed() -> None:
    fabric = Fabric(9, hosts=dict.fromkeys(range(9), 0.0))
    evaluation, results = fabric.run()
    assert evaluation.bad_hosts == () and evaluation.bad_links == ()
    assert set(evaluation.unclear) == {result.pair for result in results}


def test_one_host_has_nothing_to_be_paired_with() -> None:
    assert next_round(["a"], [], shares=SHARES) == ()
    assert next_round([], [], shares=SHARES) == ()
