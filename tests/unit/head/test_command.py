"""The operator's command gets the notice, is bounded in time and output, and leaves nothing behind."""

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ascendrun.head.command import OUTPUT_BYTES, CommandEnd, run_session
from tests.lib.vcluster.processes import is_alive


def run(script: str, *, stdin: bytes = b"", timeout_s: float = 60.0, **options: Any) -> CommandEnd:
    return run_session(
        ["/bin/sh", "-c", script],
        stdin=stdin,
        env={"PATH": os.environ["PATH"], "X": "y"},
        timeout_s=timeout_s,
        **options,
    )


def test_it_reads_the_notice_and_its_environment() -> None:
    end = run("cat; echo $X", stdin=b'{"kind": "failed"}\n')
    assert (end.code, end.output) == (0, b'{"kind": "failed"}\ny\n')


def test_its_exit_code_and_what_it_said_are_kept() -> None:
    end = run("echo out; echo err >&2; exit 3")
    assert (end.code, end.output) == (3, b"out\nerr\n")


def test_of_much_output_the_beginning_and_the_end_are_kept() -> None:
    end = run("echo first; head -c 5000000 /dev/zero | tr '\\0' x; echo last")
    assert end.output.startswith(b"first\n") and end.output.endswith(b"last\n")
    assert len(end.output) < OUTPUT_BYTES + 100


def test_one_that_takes_no_input_is_no_failure() -> None:
    assert run("exit 0", stdin=b"x" * 1_000_000).code == 0


@pytest.mark.parametrize("script", ["sleep 600", "trap '' TERM; sleep 600", "sleep 600 & sleep 600 & wait"])
def test_when_its_time_is_over_its_whole_session_is_gone(tmp_path: Path, script: str) -> None:
    started, pids, timeout_s = tmp_path / "pid", [], 0.3
    while len(pids) < 2:  # on a busy machine its time is over before it has started anything
        started.unlink(missing_ok=True)
        begin = f"echo $$ > {started}; (trap '' TERM; sleep 601) & echo $! >> {started}"
        end = run(f"{begin}; {script}", timeout_s=timeout_s)
        assert end.code is None and timeout_s < 60
        pids = started.read_text().split() if started.exists() else []
        timeout_s *= 3
    assert not any(is_alive(int(pid)) for pid in pids)


def test_a_new_process_group_of_the_same_session_does_not_escape(tmp_path: Path) -> None:
    code = f"import os,time; os.setpgid(0,0); open('{tmp_path}/pid','w').write(str(os.getpid())); time.sleep(600)"
    end = run(f'{sys.executable} -c "{code}" & while [ ! -s {tmp_path}/pid ]; do sleep 0.02; done; exit 0')
    assert end.code == 0
    assert not is_alive(int((tmp_path / "pid").read_text()))


def test_the_controllers_end_is_its_end() -> None:
    stop = threading.Event()
    threading.Timer(0.1, stop.set).start()
    began = time.monotonic()
    assert run("sleep 600", stop=stop).code is None
    assert time.monotonic() - began < 300


def test_a_command_that_does_not_exist_is_an_os_error() -> None:
    with pytest.raises(FileNotFoundError):
        run_session(["/nowhere/at/all"], stdin=b"", env={}, timeout_s=1)
