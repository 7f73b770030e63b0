"""Terms on a machine: one lease at a time among voters, whatever is late, lost, damaged or rebooted."""

from __future__ import annotations

import json
import multiprocessing
import os
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascendrun.core.hosts import Host
from ascendrun.core.standby_settings import Standby
from ascendrun.head.agents import lease
from ascendrun.head.agents.lease import HeadLease, Votes
from ascendrun.head.protocol.lease_messages import ClaimHead, RenewHead, Vote
from ascendrun.head.protocol.remote import Reply
from ascendrun.head.state.store_file import HeadFile
from ascendrun.node import layout
from ascendrun.node.agent import terms
from ascendrun.node.agent.terms import Terms
from ascendrun.node.op_errors import OperationError

HEAD, LEASE_S = "0123abcd", 20.0
OWN = {"head_id": HEAD, "host": "head1", "lease_s": LEASE_S}


class Voter:
    """A machine with a clock since its boot, which may be faster or slower than the others."""

    def __init__(self, root: Path, rate: float = 1.0) -> None:
        self.root, self.rate, self.now_s, self.boots = root, rate, 1000.0, 0
        self.terms = Terms(str(root), lambda: self.now_s, lambda: f"boot-{self.boots}")

    @property
    def file(self) -> Path:
        return Path(layout.term_file(str(self.root), HEAD, is_local=True))

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds * self.rate

    def reboot(self) -> None:
        self.boots, self.now_s = self.boots + 1, 5.0

    def renew(self, term: int, instance: str, number: int = 1, in_sync: bool | None = None) -> dict[str, Any]:
        order = [1, number]
        return self.terms.renew({**OWN, "term": term, "instance": instance, "order": order, "in_sync": in_sync})

    def claim(self, term: int, instance: str, **more: Any) -> dict[str, Any]:
        return self.terms.claim({**OWN, "term": term, "instance": instance, **more})


@pytest.fixture
def voter(tmp_path: Path) -> Voter:
    return Voter(tmp_path)


def test_a_lease_keeps_others_away_until_it_ends(voter: Voter) -> None:
    assert voter.claim(1, "a")["granted"] and voter.claim(1, "a")["granted"]  # repeated after a lost reply
    assert voter.claim(1, "b")["why"] == "superseded"
    assert voter.renew(1, "a", 1, in_sync=True)["granted"]
    voter.pass_time(LEASE_S - 1)
    assert voter.claim(2, "b")["why"] == "held" and voter.claim(2, "b")["wait_s"] == pytest.approx(1)
    voter.pass_time(2)
    assert voter.claim(2, "b", asks=True)["granted"] and voter.renew(1, "a", 2)["granted"]  # only asked
    voter.pass_time(LEASE_S + 1)
    assert voter.claim(2, "b")["granted"]
    late = voter.renew(1, "a", 3)
    assert (late["why"], late["term"], late["in_sync"]) == ("superseded", 2, False)


def test_without_a_complete_copy_only_a_person_may_take_over_and_never_a_live_lease(voter: Voter) -> None:
    voter.renew(1, "a", 1, in_sync=True)
    voter.renew(1, "a", 2, in_sync=False)
    assert voter.renew(1, "a", 1, in_sync=True)["why"] == "overtaken"  # it was on its way for long
    voter.pass_time(LEASE_S + 1)
    assert voter.claim(2, "b")["why"] == "out-of-sync"
    assert voter.claim(2, "b", may_lose=True)["granted"]
    assert voter.claim(3, "c", may_lose=True)["why"] == "held"


def test_a_reboot_voids_no_lease(voter: Voter) -> None:
    voter.renew(1, "a", 1, in_sync=True)
    voter.reboot()
    assert voter.claim(2, "b", asks=True)["why"] == "held"
    voter.pass_time(LEASE_S + 1)
    assert voter.claim(2, "b")["granted"]


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"term": null}', '{"term": 1, "order": 3}'])
def test_a_damaged_file_is_an_unknown_lease_and_never_a_free_one(voter: Voter, content: str) -> None:
    voter.renew(3, "a", 1, in_sync=True)
    voter.file.write_text(content)
    assert voter.claim(4, "b")["why"] == "unknown"
    voter.pass_time(terms.LONGEST_S + 1)
    assert voter.claim(4, "b")["why"] == "out-of-sync" and voter.claim(4, "b", may_lose=True, asks=True)["granted"]
    assert voter.renew(3, "a", 2, in_sync=True)["granted"]  # the head that acts is known again
    voter.pass_time(LEASE_S + 1)
    assert voter.claim(4, "b")["granted"]


def test_a_missing_file_grants_the_first_term_only(voter: Voter) -> None:
    assert voter.claim(2, "b")["why"] == "unknown"
    voter.file.unlink()
    assert voter.claim(1, "a", asks=True)["granted"] and not voter.file.exists()
    assert voter.claim(1, "a")["granted"]


def test_a_full_disk_grants_nothing_and_forgets_nothing(voter: Voter, monkeypatch: pytest.MonkeyPatch) -> None:
    voter.renew(1, "a", 1, in_sync=True)
    before = voter.file.read_bytes()

    def full(path: str, value: object) -> None:
        raise OSError(28, os.strerror(28))

    voter.pass_time(LEASE_S + 1)
    with monkeypatch.context() as patch:
        patch.setattr(terms, "write_json", full)
        for ask in (partial(voter.claim, 2, "b"), partial(voter.renew, 1, "a", 2)):
            with pytest.raises(OSError):
                ask()
    assert voter.file.read_bytes() == before and voter.claim(2, "b")["granted"]


def test_a_lower_term_is_refused_after_a_higher_one(voter: Voter) -> None:
    voter.terms.admit(HEAD, 1)
    voter.terms.admit(HEAD, 2)
    with pytest.raises(OperationError) as refused:
        voter.terms.admit(HEAD, 1)
    assert refused.value.code == "superseded"
    voter.terms.admit("89abcdef", 1)  # another head
    voter.file.write_text("damaged")
    voter.terms.admit(HEAD, 2)
    assert json.loads(voter.file.read_text())["term"] == 2
    with pytest.raises(ValueError):
        voter.terms.admit("../../etc", 1)


def _claim_once(root: str, number: int) -> bool:
    return bool(Terms(root).claim({**OWN, "term": 1, "instance": f"i{number}"})["granted"])


def test_of_two_processes_one_gets_a_term(tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        granted = pool.starmap(_claim_once, [(str(tmp_path), number) for number in range(40)], chunksize=1)
    assert sum(granted) == 1


# A world of three voters and two machines of one head: messages are late, lost and overtaken


class Wire:
    """What is on its way between a machine and a voter."""

    def __init__(self, world: World, host: Host) -> None:
        self._world, self._host = world, host

    def call(self, request: Any, *, deadline_s: float, done: Callable[[Reply[Vote]], None]) -> None:
        self._world.sent.append((self._host.name, request, done))


class Machine:
    """One machine of the head. `links`, as Links: its messages are delivered when the world does so."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name, self.lease = world, name, None
        self.term, self.asked_term, self.votes = 0, 0, Votes(2)
        self.is_over, self.is_out, self.may_act_alone = True, False, False

    def get(self, host: Host) -> Any:
        return Wire(self.world, host)

    def post(self, call: Callable[[], None]) -> None:
        call()

    def claim(self) -> None:
        """Ask for the term after the highest known; the last claim is repeated while it may be granted."""
        if not self.is_over:
            return
        self.asked_term, self.votes = max(self.votes.term, self.term) + 1, Votes(2)
        request = ClaimHead(HEAD, self.asked_term, self.name, self.name, LEASE_S)
        for host in self.world.standby.voters:
            done = partial(self._voted, self.asked_term, host.name)
            Wire(self.world, host).call(request, deadline_s=8, done=done)

    def _voted(self, term: int, name: str, reply: Reply[Vote]) -> None:
        if reply.error is not None or term != self.asked_term or not self.is_over:
            return
        self.votes = Votes(2, {**self.votes.votes, name: reply.message})
        if self.votes.is_granted:
            assert not self.world.may_not_lose(self), "a claim was granted without a complete copy"
            self.term, self.is_over, self.may_act_alone = term, False, False
            self.restart()

    def restart(self) -> None:
        """Start a controller: what the one before had sent is still on its way."""
        if not self.is_over:
            self.may_act_alone = False
            head = HeadFile(HEAD, 1, term=self.term, instance=self.name)
            self.lease = HeadLease(self.world.standby, head, self.name, lambda vote: self._end())
            self.lease.begin(self)

    def cut(self) -> None:
        """Lose power; `restart` starts a controller in the same state directory."""
        self.lease = None

    def set_in_sync(self, in_sync: bool) -> None:
        if self.lease is not None and not self.is_over:
            made_by, self.may_act_alone = self.lease, self.may_act_alone and not in_sync

            def done() -> None:
                if made_by is self.lease and made_by.in_sync is False:
                    self.may_act_alone = True

            self.lease.set_in_sync(in_sync, done)

    def _end(self) -> None:
        self.is_over = True

    @property
    def acts(self) -> bool:
        return not self.is_over and self.lease is not None and self.lease.is_held


class World:
    def __init__(self, root: Path) -> None:
        self.now_s, self.sent = 1000.0, list[tuple[str, Any, Callable[[Reply[Vote]], None]]]()
        self.voters = {f"v{i}": Voter(root / f"v{i}", rate) for i, rate in enumerate((0.99, 1.0, 1.01))}
        hosts = tuple(map(Host, self.voters))
        self.standby = Standby(("a", "b"), hosts, LEASE_S)
        self.machines = [Machine(self, "a"), Machine(self, "b")]
        self.highest = dict.fromkeys(self.voters, 0)
        self.acting = [False, False]

    def may_not_lose(self, claimer: Machine) -> bool:
        """Return whether another machine acts alone, with the consent of the voters."""
        return any(one.may_act_alone and one.acts for one in self.machines if one is not claimer)

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        for voter in self.voters.values():
            voter.pass_time(seconds)
        for machine in self.machines:
            if machine.lease is not None and not machine.is_over:
                machine.lease.tick()

    def deliver(self, index: int, *, is_lost: bool = False) -> None:
        if not self.sent:
            return
        name, request, done = self.sent.pop(index % len(self.sent))
        voter = self.voters[name]
        call = voter.terms.renew if isinstance(request, RenewHead) else voter.terms.claim
        vote = Vote.from_header(call(json.loads(json.dumps(request.to_header()))))
        assert vote.term >= self.highest[name], "a term went back"
        self.highest[name] = vote.term
        if not is_lost:
            done(Reply(vote))

    def check(self) -> None:
        self.acting = [machine.acts for machine in self.machines]
        assert sum(self.acting) <= 1, "two machines act"


ACTIONS = st.one_of(
    st.tuples(st.just("deliver"), st.integers(0, 30)),
    st.tuples(st.just("deliver"), st.integers(0, 30)),
    st.tuples(st.just("deliver-all"), st.just(0)),
    st.tuples(st.just("deliver-all"), st.just(0)),
    st.tuples(st.just("lose-reply"), st.integers(0, 30)),
    st.tuples(st.just("pass"), st.sampled_from((1, 4, 10, 19, 25))),
    st.tuples(st.just("pass"), st.sampled_from((1, 4, 10, 19, 25))),
    st.tuples(st.just("claim"), st.integers(0, 1)),
    st.tuples(st.just("restart"), st.integers(0, 1)),
    st.tuples(st.just("cut"), st.integers(0, 1)),
    st.tuples(st.just("in-sync"), st.integers(0, 1)),
    st.tuples(st.just("out-of-sync"), st.integers(0, 1)),
    st.tuples(st.just("reboot"), st.integers(0, 2)),
)


def play(actions: list[tuple[str, int]], root: Path) -> World:
    """Do the actions in a world whose first machine is the head with a standby in sync; check it after each."""
    world = World(root)
    begin = [("claim", 0), *[("deliver-all", 0)] * 3, ("in-sync", 0), ("deliver-all", 0)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lease, "boot_s", lambda: world.now_s)
        patch.setattr(terms, "write_json", lambda path, value: Path(path).write_text(json.dumps(value)))
        for action, number in [*begin, ("follow", 1), *actions]:
            if action == "follow":
                world.machines[1].term = world.machines[0].term
            elif action == "deliver":
                world.deliver(number)
            elif action == "deliver-all":
                for _ in range(len(world.sent)):
                    world.deliver(0)
            elif action == "lose-reply":
                world.deliver(number, is_lost=True)
            elif action == "pass":
                world.pass_time(number)
            elif action == "reboot":
                list(world.voters.values())[number].reboot()
            else:
                machine = world.machines[number]
                calls = {"claim": machine.claim, "restart": machine.restart, "cut": machine.cut}
                calls.get(action, partial(machine.set_in_sync, action == "in-sync"))()
            world.check()
    return world


@settings(max_examples=60, deadline=None)
@given(st.lists(ACTIONS, max_size=80))
def test_two_machines_never_act_at_one_time(actions: list[tuple[str, int]]) -> None:
    with TemporaryDirectory(dir="/dev/shm") as root:
        play(actions, Path(root))


def test_a_standby_in_sync_takes_over_and_the_old_head_ends(tmp_path: Path) -> None:
    move = [("deliver-all", 0), ("cut", 0), ("pass", 25), ("claim", 1), *[("deliver-all", 0)] * 3]
    world = play(move, tmp_path)
    assert world.acting == [False, True]
    world = play([*move, ("restart", 0), ("deliver-all", 0)], tmp_path / "again")
    assert world.acting == [False, True] and world.machines[0].is_over


def test_out_of_sync_with_the_consent_of_the_voters_there_is_no_take_over(tmp_path: Path) -> None:
    moves = [("out-of-sync", 0), *[("deliver-all", 0)] * 2, ("cut", 0), ("pass", 25), ("claim", 1), ("deliver-all", 0)]
    world = play(moves, tmp_path)
    assert world.acting == [False, False]
    assert {vote.why for vote in world.machines[1].votes.votes.values() if isinstance(vote, Vote)} == {"out-of-sync"}
