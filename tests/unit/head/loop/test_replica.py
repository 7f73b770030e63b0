"""What a head does waits for its standby; a copy is complete for what was acknowledged, whoever is killed."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable

import pytest

from ascendrun.core.jobs.job import State
from ascendrun.head.loop import replica as replicas
from ascendrun.head.loop.replica import Replica
from ascendrun.head.loop.rescue import restore_rows
from ascendrun.head.protocol.standby_messages import Acknowledge, Follow, StandbyChange
from ascendrun.head.spool.standby_copy import CopyWriter, list_groups, list_trees
from ascendrun.head.state.store import Store
from tests.lib.vcluster.processes import await_true
from tests.unit.head.state.test_job_files import submission, submit


class Voters:
    """Records that wait for a majority until `agree`."""

    def __init__(self) -> None:
        self.asked: list[bool] = []
        self._done: list[Callable[[], None]] = []

    def set_in_sync(self, in_sync: bool, done: Callable[[], None]) -> None:
        self.asked.append(in_sync)
        self._done.append(done)

    def agree(self) -> None:
        done, self._done = self._done, []
        for call in done:
            call()


class Head:
    """A store with its replica; `turn` is a turn of the controller's loop."""

    def __init__(self, folder: Path) -> None:
        self.store, self.voters = Store.open(folder), Voters()
        if self.store.needs_restore():
            restore_rows(self.store)
        self._calls: list[Callable[[], None]] = []
        self.replica = Replica(self.store, self._calls.append, lambda call: call())
        self.replica.begin(self.voters)
        self.done: list[str] = []

    def alone(self) -> None:
        self.voters.agree()

    def turn(self) -> None:
        while self._calls:
            self._calls.pop(0)()
        self.replica.flush()

    def do(self, name: str) -> None:
        self.replica.after(lambda: self.done.append(name))


class Copy:
    """A standby whose process takes messages when it is called, and can be killed between any two."""

    def __init__(self, folder: Path) -> None:
        self.writer, self.inbox = CopyWriter(folder), list[Any]()

    def follow(self, head: Head) -> None:
        self.inbox = []
        groups, trees = list_groups(self.writer.root), tuple(list_trees(self.writer.root))
        request = Follow("standby", groups, trees)
        inbox = self.inbox
        head.replica.serve(request.OP, request.to_header(), lambda reply, body, last: inbox.append((reply, body)))

    def take(self, head: Head, most: int = 1000) -> None:
        while self.inbox and most:
            most -= 1
            change, body = self.inbox.pop(0)
            assert isinstance(change, StandbyChange), change
            self.writer.take(change.files, change.gone, body)
            message = Acknowledge(change.stream, change.number)
            head.replica.serve(message.OP, message.to_header(), lambda reply, body, last: None)

    def await_sync(self, head: Head) -> None:
        def is_in_sync() -> bool:
            head.turn()
            self.take(head)
            return head.replica.status.in_sync and not head.replica.is_waiting

        assert await_true(is_in_sync, deadline_s=20.0)
        head.voters.agree()


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    made = Head(tmp_path / "head")
    yield made
    made.store.close()


def jobs_in(folder: Path) -> dict[str, State]:
    """The jobs that a head has that is rebuilt from a copy."""
    target = folder.with_name("rebuilt")
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder, target)
    with Store.open(target) as store:
        restore_rows(store)
        return {stored.job.id: stored.job.state for stored in store.jobs.all()}


def synced(head: Head, folder: Path) -> Copy:
    """Return the copy of a standby that has everything."""
    head.alone()
    copy = Copy(folder / "copy")
    copy.follow(head)
    copy.await_sync(head)
    return copy


def test_nothing_waits_without_a_standby_once_the_voters_know(head: Head) -> None:
    head.do("early")
    assert (head.done, head.voters.asked) == ([], [False])
    head.alone()
    head.do("late")
    assert head.done == ["early", "late"]


def test_what_is_done_waits_for_the_copy_of_what_was_stored(head: Head, tmp_path: Path) -> None:
    head.alone()
    (before,) = submit(head.store, submission("before"))
    copy = Copy(tmp_path / "copy")
    copy.follow(head)
    copy.await_sync(head)
    assert head.voters.asked[-1] is True
    (job,) = submit(head.store, submission("job"))
    head.do("answer")
    head.turn()
    assert head.done == []
    copy.take(head)
    assert head.done == ["answer"] and jobs_in(tmp_path / "copy") == {before: State.QUEUED, job: State.QUEUED}
    numbers = head.replica.status
    head.turn()
    assert head.replica.status == numbers  # nothing changed: no message


def test_a_message_without_the_change_does_not_stand_for_it(
    head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = synced(head, tmp_path)
    (job,) = submit(head.store, submission("job"))
    head.do("answer")
    monkeypatch.setattr(replicas, "BEAT_S", -1.0)
    head.replica.tick()  # in the same turn of the loop
    copy.take(head)
    assert head.done == []
    head.turn()
    copy.take(head)
    assert head.done == ["answer"] and jobs_in(tmp_path / "copy") == {job: State.QUEUED}


def test_a_standby_that_does_not_acknowledge_is_left_only_when_the_voters_know(
    head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = synced(head, tmp_path)
    submit(head.store, submission("job"))
    head.do("answer")
    head.turn()
    head.replica.tick()
    assert head.voters.asked[-1] is True
    monkeypatch.setattr(replicas, "ACKNOWLEDGED_S", -1.0)
    head.replica.tick()
    assert (head.voters.asked[-1], head.done) == (False, [])
    head.voters.agree()
    assert head.done == ["answer"] and not head.replica.status.in_sync
    assert [event.event.code for event in head.store.events.stream()][-1] == "standby-out-of-sync"
    monkeypatch.undo()
    copy.take(head)  # of the stream that was left
    assert not head.replica.status.in_sync
    copy.follow(head)
    copy.await_sync(head)
    assert len(jobs_in(tmp_path / "copy")) == 1


def test_a_copy_that_stays_incomplete_is_reported_once(
    head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    head.store.jobs.outbox = lambda job, events: seen.extend(one.event.code for one in events) or []  # type: ignore
    head.alone()
    head.replica.tick()
    assert seen == []
    monkeypatch.setattr(replicas, "MISSING_S", -1.0)
    for _ in range(2):
        head.replica.tick()
    assert seen == ["standby-missing"]
    copy = Copy(tmp_path / "copy")
    copy.follow(head)
    copy.await_sync(head)
    head.replica.tick()
    assert seen == ["standby-missing", "standby-in-sync"]


def test_a_packed_directory_is_there_before_the_job(head: Head, tmp_path: Path) -> None:
    copy = synced(head, tmp_path)
    content = random.Random(1).randbytes(20 << 20)
    (tmp_path / "head/trees").mkdir()
    (tmp_path / f"head/trees/{'a' * 64}.tar").write_bytes(content)
    head.replica.after_trees(["a" * 64], lambda: head.do("job"))

    def has_job() -> bool:
        head.turn()
        copy.take(head, 3)
        return bool(head.done)

    assert await_true(has_job, deadline_s=20.0)
    assert (tmp_path / f"copy/trees/{'a' * 64}.tar").read_bytes() == content


def test_a_submission_does_not_wait_for_a_standby_that_is_gone(
    head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced(head, tmp_path)
    monkeypatch.setattr(replicas, "BEAT_S", -1.0)
    for _ in range(20):
        head.replica.tick()
    (tmp_path / "head/trees").mkdir()
    (tmp_path / f"head/trees/{'a' * 64}.tar").write_bytes(b"packed")
    head.replica.after_trees(["a" * 64], lambda: head.done.append("job"))
    monkeypatch.setattr(replicas, "ACKNOWLEDGED_S", -1.0)
    head.replica.tick()
    assert (head.voters.asked[-1], head.done) == (False, [])
    head.voters.agree()
    assert await_true(lambda: head.turn() or head.done, deadline_s=20.0)  # type: ignore[func-returns-value]


def test_a_packed_directory_that_was_sent_to_nobody_is_sent_to_the_next_standby(
    head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head.alone()
    copy, path = Copy(tmp_path / "copy"), f"trees/{'a' * 64}.tar"
    copy.follow(head)
    copy.await_sync(head)
    with monkeypatch.context() as patch:
        patch.setattr(replicas, "BEAT_S", -1.0)
        for _ in range(20):
            head.replica.tick()
    (tmp_path / "head/trees").mkdir()
    (tmp_path / "head" / path).write_bytes(b"packed")

    def is_done(name: str) -> bool:
        head.turn()
        copy.take(head)
        return name in head.done

    head.replica.after_trees(["a" * 64], lambda: head.done.append("first"))
    copy.follow(head)  # it was started again
    assert await_true(lambda: is_done("first"), deadline_s=20.0)
    copy.await_sync(head)
    head.replica.after_trees(["a" * 64], lambda: head.done.append("second"))
    assert await_true(lambda: is_done("second"), deadline_s=20.0)
    assert (tmp_path / "copy" / path).read_bytes() == b"packed"


@pytest.mark.parametrize("seed", range(3))
def test_what_was_acknowledged_is_in_the_copy_whoever_is_killed(tmp_path: Path, seed: int) -> None:
    rng, head, copy = random.Random(seed), Head(tmp_path / "head"), Copy(tmp_path / "copy")
    head.alone()
    copy.follow(head)
    copy.await_sync(head)
    known: dict[str, State] = {}
    for turn in range(12):
        names = [f"{seed}-{turn}-{number}" for number in range(rng.randrange(3))]
        ids = [job for name in names for job in submit(head.store, submission(name))]
        for job in rng.sample(sorted(known), min(len(known), rng.randrange(3))):
            stored = head.store.jobs.find(job).job
            head.store.jobs.save(replace(stored, state=State.SUCCEEDED, ended_at_s=1.0), [], now_s=1.0)
            head.replica.after(lambda job=job: known.update({job: State.SUCCEEDED}))  # type: ignore[misc]
        head.replica.after(lambda ids=ids: [known.setdefault(job, State.QUEUED) for job in ids])  # type: ignore
        head.turn()
        copy.take(head, rng.randrange(4))
        died = rng.random()
        if died < 0.2:  # the standby; a part of a message may be on disk
            if copy.inbox:
                change, body = copy.inbox[0]
                copy.writer.take(change.files[: rng.randrange(len(change.files) + 1)], (), body)
            copy = Copy(tmp_path / "copy")
            copy.follow(head)
            copy.await_sync(head)
        elif died < 0.4:  # the head
            found = jobs_in(tmp_path / "copy")
            assert known.keys() <= found.keys()
            assert {job for job, state in known.items() if state is State.SUCCEEDED} <= {
                job for job, state in found.items() if state is State.SUCCEEDED
            }
            head.store._db.close()
            head = Head(tmp_path / "head")
            head.alone()
            copy.follow(head)
            copy.await_sync(head)
    copy.await_sync(head)
    assert jobs_in(tmp_path / "copy") == {stored.job.id: stored.job.state for stored in head.store.jobs.all()}
    head.store.close()


def test_files_of_removed_jobs_go_and_other_names_are_refused(head: Head, tmp_path: Path) -> None:
    head.alone()
    copy = Copy(tmp_path / "copy")
    first, second = submit(head.store, submission("a"), submission("b"))
    copy.follow(head)
    copy.await_sync(head)
    head.store.jobs.remove([first])
    shutil.rmtree(tmp_path / "head/jobs" / first)
    copy.await_sync(head)
    assert [path.name for path in (tmp_path / "copy/jobs").iterdir()] == [second]
    with pytest.raises(ValueError, match="not copied"):
        copy.writer.write("jobs/../../evil", b"", has_more=False)
