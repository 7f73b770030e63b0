"""What a node reports against what the record says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascendrun.core.jobs.job import Job, Leftover, NodeProgress, Phase, State
from ascendrun.core.jobs.reconcile import AttemptState, NodeState, Verdict, compare

TAG = "head-j-0001.2"
RUNS = AttemptState("running", processes=True)
NOTHING = AttemptState(None, processes=False)
STRAYS = AttemptState(None, processes=True)


def job(state: State = State.RUNNING, phase: Phase = Phase.STARTED, **changes: Any) -> Job:
    node = NodeProgress("n1", 0, phase, boot_id="b", incarnation="i")
    made = Job("j-0001", "demo", "head-j-0001", ("n1",), 30, 60, 0.0, state, attempt=2, go_sent_at_s=1.0, nodes=(node,))
    return replace(made, **changes)


def held() -> Job:
    ended = NodeProgress("n1", 0, Phase.ENDED, boot_id="b", incarnation="i", leftovers=(Leftover(50),))
    return job(State.STOPPED, nodes=(ended,))


def node(*live: str, boot_id: str = "b", incarnation: str | None = "i") -> NodeState:
    return NodeState(boot_id, incarnation, frozenset(live))


TABLE: dict[str, tuple[Job | None, NodeState, AttemptState | None, Verdict]] = {
    "it runs": (job(), node(TAG), None, Verdict.AGREES),
    "another boot": (job(), node(TAG, boot_id="c"), None, Verdict.REBOOTED),
    "another boot, stopping": (job(State.STOPPING), node(boot_id="c"), None, Verdict.REBOOTED),
    "not live": (job(), node(), None, Verdict.QUERY),
    "home recreated": (job(), node(incarnation="k"), None, Verdict.QUERY),
    "home recreated, nothing runs": (job(), node(incarnation="k"), NOTHING, Verdict.GONE),
    "home recreated, ranks run": (job(), node(incarnation="k"), STRAYS, Verdict.STOP),
    "stopped after the home was recreated": (
        job(State.STOPPING),
        node(incarnation="k"),
        AttemptState("ended", processes=False),
        Verdict.GONE,
    ),
    "its directory is gone": (job(), node(), NOTHING, Verdict.GONE),
    "its directory is gone, ranks run": (job(), node(), STRAYS, Verdict.STOP),
    "its end is on the way": (job(), node(), AttemptState("ended", processes=False), Verdict.AGREES),
    "its supervisor is lost": (job(), node(), AttemptState("lost", processes=True), Verdict.AGREES),
    "started by an older agent": (job(), node(), RUNS, Verdict.AGREES),
    "the mark of the home is new, it runs": (job(), node(TAG, incarnation="k"), RUNS, Verdict.AGREES),
    "not readable": (job(), NodeState("b"), None, Verdict.AGREES),
    "GO not acknowledged": (job(State.STARTING, Phase.GO_SENT), node(), None, Verdict.GO),
    "prepared": (job(State.STARTING, Phase.READY, go_sent_at_s=None), node(TAG), None, Verdict.AGREES),
    "an older attempt": (job(), node("head-j-0001.1", TAG), None, Verdict.AGREES),
    "its end there is known, others run": (job(State.RUNNING, Phase.ENDED), node(TAG), None, Verdict.AGREES),
    "over": (job(State.STOPPED, Phase.ENDED), node(TAG), None, Verdict.STOP),
    "over, released by a user": (job(State.STOPPED, Phase.LOST), node(TAG), None, Verdict.STOP),
    "over, gone": (job(State.STOPPED, Phase.ENDED), node(), None, Verdict.AGREES),
    "refused, its preparation stays": (
        job(State.FAILED, Phase.READY, go_sent_at_s=None),
        node(TAG),
        None,
        Verdict.ABORT,
    ),
    "unknown": (None, node(TAG), None, Verdict.FOUND),
    "a newer attempt than known": (job(attempt=1), node(TAG), None, Verdict.FOUND),
    "known only as it was submitted": (job(State.QUEUED, go_sent_at_s=None, nodes=()), node(TAG), None, Verdict.FOUND),
    "known only as it was submitted, already looked at": (
        job(State.CHECKING, Phase.REPORTED, go_sent_at_s=None),
        node(TAG),
        None,
        Verdict.FOUND,
    ),
    "leftovers": (held(), node(), None, Verdict.QUERY),
    "leftovers stay": (held(), node(), AttemptState("ended", processes=True), Verdict.AGREES),
    "leftovers are gone": (held(), node(), AttemptState("ended", processes=False), Verdict.FREED),
    "leftovers, another boot": (held(), node(boot_id="c"), None, Verdict.FREED),
    "leftovers, a new container does not show them": (held(), node(incarnation="k"), NOTHING, Verdict.AGREES),
}


@pytest.mark.parametrize("row", TABLE)
def test_table(row: str) -> None:
    record, seen, attempt, verdict = TABLE[row]
    assert compare(record, "n1", TAG, seen, attempt) is verdict


def test_an_attempt_before_the_present_one_is_stopped() -> None:
    assert compare(job(), "n1", "head-j-0001.1", node("head-j-0001.1", TAG)) is Verdict.STOP


def test_an_attempt_on_a_host_that_its_ended_job_does_not_have_is_stopped() -> None:
    assert compare(job(State.STOPPED, Phase.ENDED), None, TAG, node(TAG)) is Verdict.STOP
    assert compare(job(), None, TAG, node(TAG)) is Verdict.AGREES, "the present GO, by another name of its host"


nodes = st.builds(
    NodeState,
    st.sampled_from("bc"),
    st.sampled_from(("i", "k", None)),
    st.none() | st.sets(st.sampled_from((TAG, "head-j-0001.1", "head-j-0001.3"))).map(frozenset),
)
attempts = st.builds(
    AttemptState, st.sampled_from((None, "prepared", "running", "ended", "lost")), processes=st.booleans()
)
jobs = st.builds(
    lambda state, phase, sent, leftovers: job(
        state,
        go_sent_at_s=sent,
        nodes=(NodeProgress("n1", 0, phase, boot_id="b", incarnation="i", leftovers=leftovers),),
    ),
    st.sampled_from(State),
    st.sampled_from(Phase),
    st.sampled_from((None, 1.0)),
    st.sampled_from(((), (Leftover(50),))),
)


@given(jobs, nodes, attempts)
def test_silence_is_never_a_loss_and_no_process_is_lost_while_it_is_seen(
    record: Job, seen: NodeState, attempt: AttemptState
) -> None:
    first = compare(record, "n1", TAG, seen)
    last = compare(record, "n1", TAG, seen, attempt)
    assert last is not Verdict.QUERY, "one question is enough"
    assert first in (Verdict.QUERY, last), "an answer that was not asked for changes nothing"
    if seen.live is None and seen.boot_id == "b":
        assert first is Verdict.AGREES, "what could not be read proves nothing"
    if last in (Verdict.GONE, Verdict.FREED) and seen.boot_id == "b":
        assert first is Verdict.QUERY and not attempt.processes
    if last in (Verdict.GONE, Verdict.REBOOTED):
        assert record.nodes[0].may_run_processes
    if last is Verdict.STOP and record.nodes[0].may_run_processes:
        assert attempt.phase != "running", "what its supervisor watches is left alone"
    if last is Verdict.STOP and not record.is_terminal:
        assert record.go_sent_at_s is not None or record.nodes[0].may_run_processes, "a preparation is left alone"


@given(jobs, nodes, st.sampled_from(("head-j-0001.1", TAG, "head-j-0001.3")))
def test_an_attempt_that_no_record_explains_is_never_stopped_or_lost(record: Job, seen: NodeState, tag: str) -> None:
    assert compare(None, None, tag, seen) in (Verdict.FOUND, Verdict.AGREES)
    assert compare(record, "n1", "head-j-0001.3", seen) in (Verdict.FOUND, Verdict.AGREES)
