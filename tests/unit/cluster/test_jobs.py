"""Stopping a pipeline while its stages end by themselves: a controller that answers as the real one would."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ascendrun.cluster import Cluster
from ascendrun.core.errors import ConflictError
from ascendrun.core.events import Event
from ascendrun.core.jobs.job import Job, State
from ascendrun.core.settings import Settings
from ascendrun.head.protocol.control_messages import ControllerStatus
from ascendrun.head.protocol.control_socket import Answer, ControlServer
from ascendrun.head.protocol.messages import Done
from ascendrun.head.state.store import Store

PIPELINE = "j-0001"


class Stages:
    """Two stages of one pipeline in a store. The first one ends with success as soon as the second one is stopped."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        self.stopped: list[str] = []
        with_store = Store.open(state_dir)
        with with_store.writing() as db:
            for number, (stage, state) in enumerate((("prepare", State.RUNNING), ("train", State.QUEUED)), start=1):

                def make(row: int, head_id: str, number: int = number, stage: str = stage, state: State = state) -> Job:
                    return Job(
                        id=f"{PIPELINE}-{number}",
                        name=f"pipe.{stage}",
                        run="r",
                        hosts=("a",),
                        grace_s=1,
                        start_s=1,
                        created_at_s=1.0,
                        state=state,
                        pipeline=PIPELINE,
                        stage=stage,
                    )

                with_store.jobs.insert(db, key=stage, make_job=make, spec={}, hosts=[], trees=[], file=None, now_s=1.0)
        with_store.close()

    def serve(self, op: str, header: Any, body: bytes, answer: Answer) -> None:
        if op == "status":
            answer(ControllerStatus(1), b"", True)
            return
        store = Store.open(self.state_dir)
        try:
            job = store.jobs.find(str(header["job"])).job
            if job.is_terminal:
                answer(ConflictError(f"{job.id} has already ended"), b"", True)
                return
            self.stopped.append(job.id)
            self.end(store, job, State.STOPPED)
            self.end(store, store.jobs.find(f"{PIPELINE}-1").job, State.SUCCEEDED)
            answer(Done(), b"", True)
        finally:
            store.close()

    def end(self, store: Store, job: Job, state: State) -> None:
        store.jobs.save(
            replace(job, state=state, ended_at_s=time.time()),
            [Event("state-changed", {"state": state.value})],
            now_s=time.time(),
        )


@pytest.fixture
def stages(tmp_path: Path) -> Iterator[Stages]:
    made = Stages(tmp_path)
    server = ControlServer(tmp_path, made.serve)
    server.start()
    yield made
    server.close()


def test_a_stage_that_ends_while_the_others_are_stopped_is_no_conflict(stages: Stages) -> None:
    cluster = Cluster(Settings(state_dir=stages.state_dir))
    cluster.jobs.stop("pipe")
    assert stages.stopped == [f"{PIPELINE}-2"]  # the last one first, so that none begins meanwhile
    with pytest.raises(ConflictError, match="already ended"):
        cluster.jobs.stop("pipe")
