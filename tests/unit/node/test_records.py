"""The folder of an attempt fails, is removed, or is changed: what was recorded is kept, what is lost is named."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ascendrun.node import layout, records
from ascendrun.node.agent.follow import Follow
from ascendrun.node.files import UnreadableError, exists, read_claim, read_json
from ascendrun.node.records import IoErrors, Records, read_events
from ascendrun.node.supervisor import spool as spools
from ascendrun.node.supervisor.spool import Spool

ERRORS = [errno.EACCES, errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EROFS, errno.EDQUOT]


@contextmanager
def failing(number: int, *calls: str) -> Iterator[None]:
    """Within it, system calls fail as on a file server that restarts; a full disk can still be opened and looked at."""
    full = number in (errno.ENOSPC, errno.EDQUOT)
    names = calls or (("write",) if full else ("open", "write", "fstat"))

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(os, name, fail)
        yield


def content(folder: Path, name: str = "rank-0.out") -> dict[int, bytes]:
    return {int(path.suffix[1:]): path.read_bytes() for path in folder.glob(f"{name}.[0-9]*")}


def story(folder: Path) -> list[tuple[int, str]]:
    return [(event["seq"], event["event"]) for event in read_events(str(folder))]


@pytest.mark.parametrize("number", ERRORS)
def test_output_waits_for_a_disk_that_fails_and_comes_in_order_when_it_works(tmp_path: Path, number: int) -> None:
    spool = Spool(str(tmp_path), "rank-0.out")
    spool.write(b"before\n", 1)
    with failing(number):
        spool.write(b"during\n", 2)
        spool.write(b"still\n", 3)
        assert spool.error is not None and spool.error.errno == number
    spool.write(b"after\n", 4)
    spool.close()
    assert content(tmp_path) == {0: b"before\nduring\nstill\nafter\n"}
    assert (spool.dropped_bytes, spool.holes, spool.cuts) == (0, [], [])


def test_output_beyond_the_limit_loses_its_oldest_bytes_and_names_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spools, "WAIT_BYTES", 10)
    spool = Spool(str(tmp_path), "rank-0.out")
    spool.write(b"before\n", 1)
    with failing(errno.EIO):
        for number in range(5):
            spool.write(b"line %d\n" % number, 2 + number)
    assert spool.holes == [[0, 7, 25]] and spool.dropped_bytes == 25 and "EIO" in spool.drop_reason
    spool.close()
    assert content(tmp_path) == {0: b"before\n 3\nline 4\n"}


def test_output_that_never_finds_its_disk_is_lost_at_the_end_and_counted(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path), "rank-0.out")
    with failing(errno.EIO):
        spool.write(b"gone\n", 1)
        spool.close()
    assert spool.holes == [[0, 0, 5]] and content(tmp_path) == {}


@pytest.mark.parametrize("number", ERRORS)
def test_records_wait_for_a_disk_that_fails(tmp_path: Path, number: int) -> None:
    writer = Records(str(tmp_path))
    writer.add("one")
    with failing(number):
        writer.add("two", durable=True)
        writer.add("three")
        assert not writer.flush() and writer.error is not None and writer.error.errno == number
    assert writer.flush() and writer.error is None
    writer.add("four")
    assert story(tmp_path) == [(1, "one"), (2, "two"), (3, "three"), (4, "four")]


def remove(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    os.truncate(path, 3)


def forge(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b'{"seq":9,"event":"ended"}\n{"torn')


def replace(path: Path) -> None:
    path.with_name("x").write_bytes(b'{"seq":9,"event":"ended"}\n')
    path.with_name("x").rename(path)


@pytest.mark.parametrize("harm", [remove, cut, forge, replace])
def test_records_that_others_change_continue_complete_in_the_next_generation(tmp_path: Path, harm: Any) -> None:
    writer = Records(str(tmp_path))
    writer.add("one")
    writer.add("two")
    harm(tmp_path / "events.0")
    writer.add("three")
    assert writer.generation == 1
    lines = records.parse_events((tmp_path / "events.1").read_bytes())
    assert [(event["seq"], event["event"]) for event in lines] == [(1, "one"), (2, "two"), (3, "three")]
    assert [one for one in story(tmp_path) if one != (9, "ended")] == [(1, "one"), (2, "two"), (3, "three")]


def test_lines_that_no_supervisor_wrote_do_not_disturb_readers_and_writers(tmp_path: Path) -> None:
    lines = [
        '{"event": "rank_started", "rank": "x"}',
        '{"seq": "z", "event": ["a"]}',
        '{"seq": 1, "event": "rank_exited", "rank": 0, "code": "0"}',
        '{"seq": 2, "event": "rank_started", "rank": 0, "pid": 5, "start": 6}',
    ]
    (tmp_path / "events.0").write_text("\n".join(lines) + "\n")
    writer = Records(str(tmp_path))
    writer.add("ended")
    events = read_events(str(tmp_path))
    assert [(event["seq"], event["event"]) for event in events] == [("z", ["a"]), (2, "rank_started"), (3, "ended")]


def test_a_folder_that_is_made_again_gets_the_records_again(tmp_path: Path) -> None:
    folder = tmp_path / "attempt"
    folder.mkdir()
    writer = Records(str(folder))
    writer.add("one")
    (folder / "events.0").unlink()
    folder.rmdir()
    writer.add("two")
    assert writer.error is not None
    folder.mkdir()
    assert writer.flush() and story(folder) == [(1, "one"), (2, "two")] and writer.generation > 0


@pytest.mark.parametrize("known, generation", [({}, 0), ({"0": 5}, 0), ({"0": 500}, 1), ({"0": 9, "3": 1}, 4)])
def test_a_writer_continues_after_what_the_head_has(tmp_path: Path, known: dict[str, int], generation: int) -> None:
    (tmp_path / "events.0").write_bytes(b'{"seq":1,"event":"one"}\n')
    writer = Records(str(tmp_path), known=known)
    writer.add("two")
    assert writer.generation == generation and (2, "two") in story(tmp_path)


def test_only_notes_are_dropped_when_too_many_records_wait_and_how_many_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "KEEP_BYTES", 400)
    writer = Records(str(tmp_path))
    with failing(errno.EIO):
        for number in range(20):
            writer.add("rank_started", rank=number, pid=1, start=1)
            writer.add("log_dropped", rank=number)
    assert writer.flush()
    events = read_events(str(tmp_path))
    assert [event["rank"] for event in events if event["event"] == "rank_started"] == list(range(20))
    assert [event["count"] for event in events if event["event"] == "records_lost"] == [20]


def test_an_error_is_recorded_once_and_at_the_end_how_often(tmp_path: Path) -> None:
    writer = Records(str(tmp_path))
    errors = IoErrors(writer)
    for step in ("logs", "logs", "stop-file", "logs"):
        errors.note(step, OSError(errno.ESTALE, "stale"))
    errors.finish()
    told = [(event["step"], event["errno"], event["count"]) for event in read_events(str(tmp_path))]
    assert told == [("logs", "ESTALE", 1), ("stop-file", "ESTALE", 1), ("logs", "ESTALE", 3)]


def test_a_file_that_cannot_be_read_is_not_a_missing_file(tmp_path: Path) -> None:
    path = str(tmp_path / "stop.json")
    assert read_json(path) is None and not exists(path)
    (tmp_path / "stop.json").write_text("")
    with pytest.raises(UnreadableError):
        read_json(path)
    assert read_claim(path) == {} and exists(path)
    (tmp_path / "loop").symlink_to("loop")
    for read in (read_json, read_claim):
        with pytest.raises(UnreadableError) as caught:
            read(str(tmp_path / "loop"))
        assert caught.value.errno == errno.ELOOP
    with failing(errno.EIO, "lstat"), pytest.raises(UnreadableError):
        exists(path)


def test_every_generation_of_events_is_followed_in_order(tmp_path: Path) -> None:
    folder = Path(layout.attempt_dir(str(tmp_path), "head-job.1"))
    folder.mkdir(parents=True)
    sent: list[tuple[str, int, bytes]] = []
    follow = Follow(
        str(tmp_path),
        "head-job.1",
        {"events": {"0": 3}},
        lambda header, body: sent.append((header["event"], header["generation"], body)),
        {},
    )
    (folder / "events.0").write_bytes(b"a\nb\n")
    follow.poll(1.0)
    (folder / "events.0").write_bytes(b"")
    (folder / "events.2").write_bytes(b"a\nb\nc\n")
    for now_s in (2.0, 3.0):
        follow.poll(now_s)
    assert sent == [("data", 0, b"\n"), ("truncated", 0, b""), ("data", 2, b"a\nb\nc\n")]


@pytest.mark.parametrize("call", ["scandir", "lstat", "open", "pread"])
def test_a_folder_that_cannot_be_read_is_reported_once_and_followed_again(tmp_path: Path, call: str) -> None:
    folder = Path(layout.attempt_dir(str(tmp_path), "head-job.1"))
    folder.mkdir(parents=True)
    (folder / "events.0").write_bytes(b"{}\n")
    sent: list[tuple[str, bytes]] = []
    follow = Follow(str(tmp_path), "head-job.1", {}, lambda header, body: sent.append((header["event"], body)), {})
    with failing(errno.ESTALE, call):
        for now_s in (1.0, 2.0, 3.0):
            assert not follow.poll(now_s)
    follow.poll(4.0)
    assert sent == [("follow_held", b""), ("data", b"{}\n")]
