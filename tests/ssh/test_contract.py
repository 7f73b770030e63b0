"""What every way of reaching a host promises: paramiko, the OpenSSH binary, a child process of this machine."""

import hashlib
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from sshd import descendants

from ascendrun.core.errors import DeadlineExceededError
from ascendrun.head.ssh.transport import Receiver, StreamClosedError
from tests.lib.vcluster.processes import await_that

MIB = 1024 * 1024


def test_a_server_killed_in_mid_stream_closes_the_stream_once(reach: Any) -> None:
    stream, ear = reach.open("echo on; while :; do echo more; done")
    await_that(lambda: b"more" in ear.output, "output flows")
    if reach.server:
        reach.server.kill_sessions()
    else:
        os.kill(stream.pid, signal.SIGKILL)
    reason, status = ear.wait()
    assert reason
    assert status == (None if reach.server else 128 + signal.SIGKILL)


def test_input_that_nobody_reads_ends_in_a_deadline_with_little_memory_used(reach: Any) -> None:
    stream, _ = reach.open("exec sleep 60")
    payload = memoryview(bytearray(96 * MIB))
    before = resident_bytes()
    with pytest.raises(DeadlineExceededError):
        stream.send(payload, deadline_s=1.0)
    assert resident_bytes() - before < 24 * MIB


def test_a_command_that_ends_while_input_is_sent_closes_the_stream(reach: Any) -> None:
    stream, ear = reach.open("exec head -c 10")
    with pytest.raises(StreamClosedError):
        for _ in range(1000):
            stream.send(bytes(MIB), deadline_s=20.0)
    ear.wait()


def test_a_closed_connection_opens_nothing_and_tells_its_streams(reach: Any) -> None:
    connection = reach.connect()
    stream, ear = reach.open("exec cat", connection)
    connection.close()
    connection.close()
    ear.wait()
    with pytest.raises(StreamClosedError):
        connection.open("true", ear.receiver(), deadline_s=5.0)
    with pytest.raises(StreamClosedError):
        stream.send(b"late", deadline_s=5.0)
    stream.close_input()
    stream.close()


def test_a_closed_stream_tells_once_and_its_command_ends(reach: Any) -> None:
    connection = reach.connect()
    stream, ear = reach.open("echo on; exec cat", connection)
    await_that(lambda: b"on" in ear.output, "the command runs")
    stream.close()
    stream.close()
    ear.wait()
    with pytest.raises(StreamClosedError):
        stream.send(b"late", deadline_s=5.0)
    if reach.server:
        await_that(lambda: not commands(reach.server, "cat"), "cat ends on the host")


def test_a_receiver_may_close_its_stream_from_within(reach: Any) -> None:
    connection = reach.connect()
    streams = []
    closed = threading.Event()
    ready = threading.Event()

    def close_it(_: bytes) -> None:
        ready.wait(60)
        streams[0].close()

    receiver = Receiver(close_it, lambda _: None, lambda *_: closed.set())
    streams.append(connection.open("echo on; exec cat", receiver, deadline_s=10.0))
    ready.set()
    assert closed.wait(60)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_receiver_that_fails_loses_its_stream_and_is_told(reach: Any) -> None:
    closed = threading.Event()

    def fail(_: bytes) -> None:
        raise RuntimeError("a fault of the receiver")

    reach.connect().open("echo on; exec cat", Receiver(fail, fail, lambda *_: closed.set()), deadline_s=10.0)
    assert closed.wait(60)


@pytest.mark.parametrize(
    "command, status", [("true", 0), ("exit 3", 3), ("exit 255", 255), ("no-such-command-here", 127)]
)
def test_the_exit_status_is_told(reach: Any, command: str, status: int) -> None:
    _, ear = reach.open(command)
    assert ear.wait()[1] == status


def test_output_and_errors_arrive_apart_and_complete(reach: Any) -> None:
    _, ear = reach.open("i=0; while [ $i -lt 2000 ]; do echo out$i; echo err$i >&2; i=$((i+1)); done; printf last")
    assert ear.wait()[1] == 0
    assert ear.output == b"".join(b"out%d\n" % i for i in range(2000)) + b"last"
    assert ear.errors == b"".join(b"err%d\n" % i for i in range(2000))


def test_fifty_megabytes_come_back_byte_for_byte(reach: Any) -> None:
    payload = hashlib.shake_256(b"seed").digest(5 * MIB) * 10
    stream, ear = reach.open("exec cat")
    for data in (payload[:7], bytearray(payload[7:MIB]), memoryview(payload)[MIB:]):
        stream.send(data, deadline_s=120.0)
    stream.close_input()
    assert ear.wait(120.0)[1] == 0
    assert hashlib.sha256(ear.output).digest() == hashlib.sha256(payload).digest()


def test_what_several_threads_send_at_once_is_not_mixed(reach: Any) -> None:
    stream, ear = reach.open("exec cat")
    pieces = [letter * MIB for letter in (b"a", b"b", b"c", b"d")]
    threads = [threading.Thread(target=stream.send, args=(piece,), kwargs={"deadline_s": 60.0}) for piece in pieces]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stream.close_input()
    assert ear.wait()[1] == 0
    assert sorted(ear.output[at : at + MIB] for at in range(0, 4 * MIB, MIB)) == pieces


def test_one_connection_serves_commands_one_after_another(reach: Any) -> None:
    connection = reach.connect()
    for number in range(3):
        _, ear = reach.open(f"echo {number}", connection)
        assert ear.wait()[1] == 0
        assert ear.output == b"%d\n" % number


def test_quotes_and_newlines_in_a_command_reach_the_shell(reach: Any) -> None:
    _, ear = reach.open("printf '%s|' 'a b' \"it's\" '$HOME' '\\'\necho \"second line\"")
    assert ear.wait()[1] == 0
    assert ear.output == b"a b|it's|$HOME|\\|second line\n"


def commands(server: Any, name: str) -> list:
    found = []
    for pid in descendants(server.process.pid):
        try:
            found += [pid] if Path(f"/proc/{pid}/comm").read_text().strip() == name else []
        except OSError:
            continue
    return found


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
