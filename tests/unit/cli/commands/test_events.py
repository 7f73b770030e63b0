"""The events of jobs on the screen and for programs, followed or not."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ascendrun.core.events import Event
from ascendrun.core.jobs.job import Job, State
from ascendrun.core.jobs.reasons import because
from ascendrun.head.state.store import Store
from tests.lib.demo_jobs import store_job
from tests.lib.story_cluster import Desk, end, run


class Writer:
    """Jobs and stories as a controller writes them."""

    def __init__(self, state_dir: Path) -> None:
        self.store = Store.open(state_dir)

    def submit(self, name: str) -> Job:
        return store_job(self.store, name, now_s=time.time(), name=name, hosts=("n1", "n2", "n3"))

    def add(self, job: Job, *events: Event) -> None:
        self.store.jobs.save(job, [replace(event, at_s=time.time()) for event in events], now_s=time.time())


def state(name: str, reason: str = "x") -> Event:
    return Event("state-changed", {"state": name, "reason": because("rejected", why=reason)}, attempt=1)


def gone(host: str) -> Event:
    return Event("processes-gone", {}, (host,), attempt=1)


@pytest.fixture
def writer(desk: Desk) -> Iterator[Writer]:
    writer = Writer(desk.folder / "state")
    yield writer
    writer.store.close()


def codes(out: str) -> list[str]:
    return [json.loads(line)["code"] for line in out.splitlines()]


def test_before_anything_happened_it_says_so(desk: Desk) -> None:
    result = desk.say("events")
    assert (result.code, result.out) == (0, "") and result.err


def test_all_stories_are_one_stream_with_hosts_folded(desk: Desk, writer: Writer) -> None:
    one, two = writer.submit("one"), writer.submit("two")
    writer.add(one, state("CHECKING"), gone("n1"), gone("n2"))
    writer.add(two, state("FAILED", "\x1b[31mrank 3"))
    lines = desk.say("events").out.splitlines()
    assert [line.split()[2] for line in lines] == ["j-0001", "j-0002", "j-0001", "j-0001", "j-0002"]
    assert "n[1-3]" in lines[0] and "n[1-2]" in lines[3]
    assert "\x1b" not in lines[4]


def test_a_reason_of_several_lines_is_one_line_with_the_way_to_the_rest(desk: Desk, writer: Writer) -> None:
    job = writer.submit("one")
    writer.add(job, state("FAILED", "rank 3 failed\nTraceback:\n  it was so"), gone("n1"))
    lines = desk.say("events").out.splitlines()
    assert lines[-2].endswith("rank 3 failed … (ascendrun show j-0001)") and "…" not in lines[-1]
    record = json.loads(desk.say("events", "-o", "jsonl").out.splitlines()[-2])
    assert record["values"]["reason"]["why"] == "rank 3 failed\nTraceback:\n  it was so"


def test_programs_get_every_event_unfolded(desk: Desk, writer: Writer) -> None:
    writer.add(writer.submit("one"), gone("n1"), gone("n2"))
    events = json.loads(desk.say("events", "-o", "json").out)["events"]
    assert [event["hosts"] for event in events[1:]] == [["n1"], ["n2"]]
    assert set(events[0]) == {
        *("number", "at", "job", "name", "code", "severity"),
        *("attempt", "hosts", "ranks", "values", "message"),
    }
    assert codes(desk.say("events", "-o", "jsonl").out) == [event["code"] for event in events]


def test_one_job_some_kinds_and_a_time_are_chosen(desk: Desk, writer: Writer) -> None:
    job = writer.submit("demo")
    writer.submit("other")
    writer.add(job, state("RUNNING"), Event("straggler", {}, ("n1",), (3,), 1), gone("n1"))
    assert len(codes(desk.say("events", "j-0001", "-o", "jsonl").out)) == 4
    out = desk.say("events", "--kind", "state-changed,straggler", "-o", "jsonl").out
    assert codes(out) == ["state-changed", "straggler"]
    assert desk.say("events", "--since", "2999-01-01T00:00").out == ""


def test_following_a_job_ends_with_it_as_it_ended(desk: Desk, writer: Writer) -> None:
    writer.add(writer.submit("demo"), state("FAILED"))
    desk.cluster.story = [run(), *end("FAILED")]
    result = desk.say("events", "-f", "demo", "-o", "jsonl")
    assert (result.code, codes(result.out)[-1]) == (1, "state-changed")


def test_following_all_goes_on_over_controllers_until_interrupted(desk: Desk) -> None:
    state_dir = desk.folder / "state"
    process = subprocess.Popen(
        [sys.executable, "-m", "ascendrun", "events", "-f", "-o", "jsonl"],
        env={
            **os.environ,
            "ASCENDRUN_STATE_DIR": str(state_dir),
            "PYTHONPATH": str(Path(__file__).resolve().parents[4]),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    with process:
        try:
            first = Writer(state_dir)  # it was started before there was anything to read
            job = replace(first.submit("demo"), state=State.SUCCEEDED)
            first.add(job, state("RUNNING"))
            seen = [process.stdout.readline() for _ in range(2)]
            first.store.close()
            second = Writer(state_dir)
            second.add(job, state("SUCCEEDED"))
            seen.append(process.stdout.readline())
            second.store.close()
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    assert codes("".join(seen)) == ["submitted", "state-changed", "state-changed"]
    assert [json.loads(line)["values"].get("state") for line in seen] == [None, "RUNNING", "SUCCEEDED"]
