"""Without any command: the controller comes back by its guard, or its crontab line, and a dead rank is noticed."""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from test_controller_crashes import CODE, DEADLINE_S, Head, head
from test_head_bad_days import long_job

from ascendrun.cluster import Cluster
from ascendrun.cluster.install import install, installed, key_of, uninstall
from ascendrun.core.errors import AscendrunError
from ascendrun.core.jobs.job import Job
from ascendrun.head.loop.daemon import is_running, start_controller
from ascendrun.head.loop.guard import should_run
from ascendrun.head.protocol.control_messages import ControllerStatus
from ascendrun.head.state.state_dir import StoreUnusableError
from ascendrun.head.state.store import Store
from ascendrun.head.state.store_file import HeadFile
from ascendrun.text import Text
from tests.lib.vcluster.processes import await_that, is_alive

__all__ = ["head"]

CRONTAB = """#!{python}
import os, sys
path = {path!r}
if sys.argv[1:] == ["-l"]:
    if not os.path.exists(path):
        sys.exit("no crontab for you")
    sys.stdout.write(open(path).read())
else:
    open(path, "w").write(sys.stdin.read())
"""


def status(head: Head) -> ControllerStatus:
    found = Cluster(state_dir=head.state_dir).controller.status(timeout_s=DEADLINE_S)
    assert found is not None, "no controller runs"
    return found


def stored(head: Head) -> Job:
    """The job by its record: looking with a command would start a controller."""
    with Store.open_for_reading(head.state_dir) as store:
        return store.jobs.find("j-0001").job


def kill_a_rank(head: Head) -> None:
    node = stored(head).nodes[0]
    os.kill(node.pids[min(node.pids)], signal.SIGKILL)


def await_end(head: Head) -> None:
    pids = [pid for node in stored(head).nodes for pid in node.pids.values()]
    await_that(lambda: stored(head).is_terminal)
    assert stored(head).state.value == "FAILED" and not any(map(is_alive, pids))


@pytest.fixture
def notices(head: Head, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that gets a line for each notification."""
    told, config = head.folder / "notices", head.folder / "config" / "ascendrun"
    config.mkdir(parents=True)
    hook = head.folder / "hook"
    hook.write_text(f"#!/bin/sh\ncat >> {told}\n")
    hook.chmod(0o700)
    (config / "config.yaml").write_text(f"hook: {{command: [{hook}]}}\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(config.parent))
    return told


def test_at_night_a_killed_controller_comes_back_and_stops_the_peers_of_a_dead_rank(head: Head, notices: Path) -> None:
    long_job(head)
    first = status(head)
    assert first.guard_pid is not None
    os.kill(first.pid, signal.SIGKILL)
    kill_a_rank(head)
    await_end(head)
    await_that(lambda: notices.exists() and "j-0001" in notices.read_text())
    again = status(head)
    assert again.guard_pid == first.guard_pid and again.pid != first.pid
    head.run("controller", "stop")
    await_that(lambda: not is_alive(again.guard_pid or 0))  # ended on purpose


def test_with_the_guard_killed_too_an_agent_on_the_head_node_brings_both_back(head: Head) -> None:
    long_job(head)
    first = status(head)
    assert first.guard_pid is not None
    os.kill(first.guard_pid, signal.SIGKILL)
    os.kill(first.pid, signal.SIGKILL)
    kill_a_rank(head)
    await_end(head)
    again = status(head)
    assert again.pid != first.pid and again.guard_pid not in (None, first.guard_pid)
    assert head.run("controller", "stop").returncode == 0
    await_that(lambda: not is_alive(again.guard_pid or 0))


HANGING = CODE / "tests" / "cluster" / "hanging.py"
HANG_S = 40
"""Of the job: divided by 20, the shortest time in which a hang is acted upon is shorter than that."""
HANG_LIMIT_S = 900.0
"""Silence, samples and stacks of a new controller take minutes on a machine with other work."""


@pytest.mark.timeout(2 * HANG_LIMIT_S)
def test_a_hang_after_the_agent_on_the_head_node_has_brought_both_back_restarts_the_job(
    head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASCENDRUN_HANG_DIVISOR", "20")
    (head.folder / "rank.py").write_text(HANGING.read_text())
    command = [sys.executable, str(head.folder / "rank.py"), "none", "3", "20"]
    (head.folder / "job.yaml").write_text(
        f"name: hanging\ncommand: {json.dumps(command)}\nhostfile: two.hosts\ntimeouts: {{hang_s: {HANG_S}}}\n"
        "sampling: {interval_s: 0.5}\nrestart: {max_restarts: 1, backoff_s: [0, 0]}\n"
    )
    job = head.submit()
    await_that(lambda: len(stored(head).nodes) == 2 and all(node.pids for node in stored(head).nodes))
    metrics = partial(head.state_dir.glob, "local/*/nodes/*/runs/*/attempt-1/rank-3.metrics.0")
    # before its first step, a rank may take the time of a start
    await_that(lambda: any('"step": 2,' in one.read_text() for one in metrics()))
    first = status(head)
    for pid in (first.guard_pid, first.pid):
        os.kill(pid or 0, signal.SIGKILL)
    await_that(lambda: not is_alive(first.pid) and is_running(head.state_dir))  # no command is given
    os.kill(stored(head).nodes[1].pids[3], signal.SIGSTOP)

    def told() -> dict[str, Any]:
        with Store.open_for_reading(head.state_dir) as store:
            return {event.code: event for event in store.events.of(job)}

    await_that(lambda: stored(head).attempt == 2, lambda: f"{stored(head)}\n{told()}", deadline_s=HANG_LIMIT_S)
    assert told()["hang"].ranks == (3,) and stored(head).past[0].failure
    assert status(head).pid != first.pid


def test_a_controller_whose_guard_was_killed_gets_another(head: Head) -> None:
    job = long_job(head)
    first, ranks = status(head), head.show(job)["ranks"]
    assert first.guard_pid is not None
    os.kill(first.guard_pid, signal.SIGKILL)
    await_that(lambda: (found := status(head)).guard_pid not in (None, first.guard_pid) and found.pid != first.pid)
    os.kill(status(head).pid, signal.SIGKILL)
    kill_a_rank(head)
    await_end(head)
    assert [rank["pid"] for rank in head.show(job)["ranks"]] == [rank["pid"] for rank in ranks]


@pytest.fixture
def fake_cron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A crontab command before all others on PATH, and no systemd user manager; the file that it writes."""
    path = tmp_path / "crontab.txt"
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in (
        ("crontab", CRONTAB.format(python=sys.executable, path=str(path))),
        ("systemctl", "#!/bin/sh\nexit 1\n"),
    ):
        (tools / name).write_text(text)
        (tools / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    return path


def run_crontab(path: Path) -> None:
    """What cron does each minute (no cron runs here)."""
    for line in path.read_text().splitlines():
        if line.startswith("* * * * * "):
            command = line[len("* * * * * ") :].replace("\\%", "%")
            environ = {"HOME": os.environ["HOME"], "PATH": "/usr/bin:/bin"}
            subprocess.run(["/bin/sh", "-c", command], env=environ, cwd="/", timeout=DEADLINE_S, check=True)


def test_with_the_guard_killed_too_the_crontab_line_brings_the_controller_back(head: Head, fake_cron: Path) -> None:
    fake_cron.write_text("0 5 * * * backup 100\\%\n")
    assert head.run("controller", "install").returncode == 0
    long_job(head)
    first = status(head)
    assert first.guard_pid is not None
    run_crontab(fake_cron)
    assert status(head).pid == first.pid, "a running controller is left alone"
    os.kill(first.guard_pid, signal.SIGKILL)
    os.kill(first.pid, signal.SIGKILL)
    await_that(lambda: not is_running(head.state_dir))
    kill_a_rank(head)
    run_crontab(fake_cron)
    await_end(head)
    assert head.run("controller", "uninstall").returncode == 0
    assert fake_cron.read_text() == "0 5 * * * backup 100\\%\n"


def test_an_end_on_purpose_lasts_until_the_machine_boots_again(head: Head, fake_cron: Path) -> None:
    install(head.state_dir, head.environ())
    start_controller(head.state_dir, limit_s=DEADLINE_S)
    os.kill(status(head).pid, signal.SIGTERM)  # as each process gets when the machine shuts down
    await_that(lambda: not is_running(head.state_dir))
    assert not should_run(str(head.state_dir))
    ended = (head.state_dir / "controller.lock").read_text().split()[0]
    (head.state_dir / "controller.lock").write_text(f"{ended} 6a64bb0d-5a4c-4c0c-8d6f-1b1c5e1a3c55\n")  # another boot
    run_crontab(fake_cron)
    await_that(lambda: is_running(head.state_dir))
    head.run("controller", "stop")


def test_a_superseded_head_is_started_once_and_then_no_more(head: Head, fake_cron: Path) -> None:
    with Store.open(head.state_dir) as store:
        store.update_head(term=1, superseded="head2")
    (head.state_dir / "controller.lock").write_text("4711\n")  # the power of the machine was cut
    install(head.state_dir, head.environ())
    assert should_run(str(head.state_dir))
    run_crontab(fake_cron)
    await_that(lambda: not is_running(head.state_dir) and not should_run(str(head.state_dir)))
    await_that(lambda: "head2" in (head.state_dir / "controller.log").read_text())
    assert "head2" in head.run("controller", "status", code=4).stderr


def test_a_controller_that_cannot_start_is_reported_and_not_guarded(head: Head) -> None:
    head.state_dir.mkdir(mode=0o700)
    (head.state_dir / "state.db").mkdir()
    head.run("controller", "run", code=8)


def test_a_command_that_starts_a_controller_reports_why_it_refuses(head: Head) -> None:
    with Store.open(head.state_dir) as store:
        newer = len(store.MIGRATIONS) + 1
    with sqlite3.connect(head.state_dir / "state.db") as database:
        database.execute(f"PRAGMA user_version = {newer}")
    written = HeadFile.load(head.state_dir)
    assert written is not None
    replace(written, schema=newer).write(head.state_dir)
    with pytest.raises(StoreUnusableError) as caught:
        start_controller(head.state_dir, limit_s=DEADLINE_S)
    message = caught.value.message
    assert isinstance(message, Text) and (message.key, message.values["found"]) == ("store.newer", newer)
    assert caught.value.hint is not None and caught.value.exit_code == 8


BLOCK = "{heads: [me@h1, me@h2], hostfile: %s/all.hosts, voters: [n1, n2, %s]}"


@pytest.mark.parametrize(("voter", "code"), [("n3", "conflict"), ("n9", "invalid-input")])
def test_a_command_reports_why_a_controller_refuses_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, voter: str, code: str
) -> None:
    with Store.open(tmp_path / "state") as store:
        store.update_head(term=1, voters=["n1", "n2", "n4"])
    (tmp_path / "all.hosts").write_text("n1\nn2\nn3\nn4\n")
    (tmp_path / "ascendrun").mkdir()
    (tmp_path / "ascendrun/config.yaml").write_text(f"standby: {BLOCK % (tmp_path, voter)}\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with pytest.raises(AscendrunError) as caught:
        start_controller(tmp_path / "state", limit_s=DEADLINE_S)
    assert caught.value.code == code


def test_a_standby_that_a_person_ended_does_not_come_back(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = head.state_dir.with_name("state.standby")
    with Store.open(copy) as store:
        store.update_head(term=1, voters=["n1", "n2", "n3"])
    (head.folder / "all.hosts").write_text("n1\nn2\nn3\n")
    (head.folder / "ascendrun").mkdir()
    (head.folder / "ascendrun/config.yaml").write_text(f"standby: {BLOCK % (head.folder, 'n3')}\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(head.folder))
    command = [sys.executable, "-m", "ascendrun", "controller", "standby"]
    with subprocess.Popen(command, env=head.environ(), cwd=head.folder, stdout=subprocess.DEVNULL) as standby:
        await_that(lambda: is_running(copy))
        standby.terminate()
        assert standby.wait(DEADLINE_S) == 0
    assert not should_run(str(copy))


def test_every_state_directory_has_its_own_entry(fake_cron: Path, tmp_path: Path) -> None:
    one, other = tmp_path / "one % two", tmp_path / "other"
    environ = {"ASCENDRUN_COLOR": "never", "SECRET_TOKEN": "x"}
    for folder in (one, other, one):
        folder.mkdir(exist_ok=True)
        install(folder, environ)
    lines = fake_cron.read_text().splitlines()
    assert len(lines) == 4 and sum(key_of(one) in line for line in lines) == 2
    assert all("ASCENDRUN_COLOR=never" in line and "SECRET" not in line for line in lines)
    assert "one \\% two" in fake_cron.read_text()
    assert uninstall(one) and installed(one) is None and installed(other) is not None
    assert not uninstall(one)


SYSTEMCTL = """#!/bin/sh
echo "$@" >> {log}
case "$*" in *Linger) echo Linger={linger};; esac
"""


@pytest.mark.parametrize("linger", ["yes", "no"])
def test_systemd_gets_a_service_and_a_timer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linger: str) -> None:
    tools, log = tmp_path / "tools", tmp_path / "log"
    tools.mkdir()
    for name in ("systemctl", "loginctl"):
        (tools / name).write_text(SYSTEMCTL.format(log=log, linger=linger))
        (tools / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    state = tmp_path / 'a "b" % c'
    found = install(state, {})
    assert found.kind == "systemd" and (found.warning is None) == (linger == "yes")
    service = (tmp_path / "config/systemd/user" / f"{key_of(state)}.service").read_text()
    assert "KillMode=process" in service and 'a \\"b\\" %% c"' in service
    assert f"enable --now {key_of(state)}.timer" in log.read_text()
    assert uninstall(state) and installed(state) is None
    assert list((tmp_path / "config/systemd/user").iterdir()) == []


def test_where_neither_is_there_the_message_names_both(head: Head, tmp_path: Path, monkeypatch: Any) -> None:
    tools = tmp_path / "none"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    done = subprocess.run(
        [sys.executable, "-m", "ascendrun", "controller", "install"],
        env={**head.environ(), "PYTHONPATH": str(CODE), "PATH": str(tools)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 3 and "systemd" in done.stderr and "crontab" in done.stderr


def test_a_controller_that_died_and_was_stopped_by_a_person_does_not_come_back(head: Head) -> None:
    start_controller(head.state_dir, limit_s=DEADLINE_S)
    controller = status(head).pid
    guard = int(Path(f"/proc/{controller}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(controller, signal.SIGKILL)
    assert head.run("controller", "stop").returncode == 0
    await_that(lambda: not is_alive(guard))
    assert not is_running(head.state_dir)
    assert not should_run(str(head.state_dir)) and not should_run(str(head.folder))


def test_a_controller_ends_when_its_state_directory_is_moved_away(head: Head) -> None:
    job = long_job(head)
    first, ranks = status(head), head.show(job)["ranks"]
    away = head.state_dir.rename(head.folder / "away")
    try:
        await_that(lambda: not is_alive(first.pid))
        assert head.run("controller", "status").returncode == 4
        assert [line for line in head.run("ps", "--all", "-o", "json").stdout.split() if job in line] == []
        assert head.run("exec", "--hostfile", "two.hosts", "--", "true").returncode == 0  # starts one of its own
        second = status(head)
        assert second.pid != first.pid and second.jobs == ()
        assert head.run("controller", "stop").returncode == 0
    finally:
        shutil.rmtree(head.state_dir, ignore_errors=True)
        away.rename(head.state_dir)
    await_that(lambda: head.show(job)["job"]["state"] == "RUNNING")
    assert [rank["pid"] for rank in head.show(job)["ranks"]] == [rank["pid"] for rank in ranks]
