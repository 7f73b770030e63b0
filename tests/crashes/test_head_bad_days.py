"""Bad days of the head itself, on local hosts: a full disk, a locked store, clients that hang, sleep."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Iterator, List

import pytest
from test_controller_crashes import DEADLINE_S, Head, await_that, head

from ascendrun.head.control import ControlClient
from ascendrun.head.daemon import is_running

__all__ = ["head"]

HANG = "import signal, sys\nprint('ready', flush=True)\nsignal.pause()\n"


def submit(head: Head, *options: str) -> str:
    done = head.run("submit", "job.yaml", "--detach", "-o", "json", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return str(json.loads(done.stdout)["id"])


def await_state(head: Head, job: str, state: str) -> None:
    try:
        await_that(lambda: head.show(job)["job"]["state"] == state)
    except AssertionError:
        raise AssertionError(json.dumps(head.show(job)["events"], indent=1)) from None


def test_a_client_that_stops_reading_holds_up_nobody(head: Head) -> None:
    submit(head)
    hosts = [{"name": name, "slots": 2, "addr": "local", "user": None, "port": None, "devices": None, "groups": [],
              "line": 1} for name in "ab"]
    fields = {"hosts": hosts, "argv": [sys.executable, "-c", "print('x' * 900_000)"], "timeout_s": 30}
    with ControlClient(head.state_dir) as client:
        next(client.stream("exec", fields, timeout_s=DEADLINE_S))  # the other host's answer is never read
        status = head.run("controller", "status")
    assert status.returncode == 0, status.stderr


def test_twenty_submits_at_once_make_twenty_jobs_and_one_controller(head: Head) -> None:
    with ThreadPoolExecutor(20) as pool:
        jobs = list(pool.map(lambda _: submit(head), range(20)))
    assert len(set(jobs)) == 20
    ids = [job["id"] for job in json.loads(head.run("ps", "-a", "-o", "json").stdout)["jobs"]]
    assert sorted(ids) == sorted(jobs)
    head.run("stop", "--now", *jobs)


def test_looking_whether_a_controller_runs_never_keeps_one_from_starting(head: Head) -> None:
    head.state_dir.mkdir(mode=0o700)
    (head.state_dir / "controller.lock").touch()
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            is_running(head.state_dir)

    watchers = [threading.Thread(target=look) for _ in range(3)]
    for watcher in watchers:
        watcher.start()
    try:
        for _ in range(3):
            assert head.run("ps", "-a").returncode == 0
            submit(head)
            head.run("controller", "stop")
    finally:
        over.set()
