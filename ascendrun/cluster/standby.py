"""A head on two machines: which of them acts, the copy on the other one, and how that one takes over."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Callable, NamedTuple

from ascendrun.backends import Backends, SshOptions
from ascendrun.backends.controller import find_askpass
from ascendrun.cluster.forward import Errand, open_ssh
from ascendrun.core.errors import AscendrunError, ConflictError, PreflightError, UnreachableError
from ascendrun.core.settings import Settings
from ascendrun.core.standby_settings import Standby, not_set, read_standby
from ascendrun.head.agents.lease import Voters, Votes
from ascendrun.head.loop import guard as guarding
from ascendrun.head.loop.daemon import is_running, running_pid, take_lock
from ascendrun.head.protocol.control_messages import Status
from ascendrun.head.protocol.control_socket import ControlClient
from ascendrun.head.protocol.lease_messages import ClaimHead, Vote
from ascendrun.head.protocol.standby_messages import Acknowledge, Follow
from ascendrun.head.spool.standby_copy import CopyWriter, list_groups, list_trees
from ascendrun.head.state.state_dir import read_values
from ascendrun.head.state.store_file import HeadFile, continues_elsewhere, superseded_by
from ascendrun.head.state.store_place import is_this_machine, standby_dir
from ascendrun.head.state.user_files import read_hostfile
from ascendrun.node.files import write_json
from ascendrun.text import Text

STATE_FILE = "standby.json"
"""In the directory of a copy: {instance, stopped, term}; `stopped`: the head was stopped on purpose."""
LOST_S = 6.0
"""Seconds without a message after which the head counts as lost; it sends one each second."""
AGAIN_S = 2.0
ROLE_S = 60.0
"""Seconds in which a busy machine replies what it is. One that is gone is noticed by ssh."""
CONNECT_S, PATIENT_S = 3, 10
"""Seconds in which a machine that is not lost usually connects, and in which one under load does."""
RECENT_S = 60.0
"""Seconds after the last message of a head in which a lost one is not awaited longer than CONNECT_S."""
POLL_S = 0.5
WHY: Mapping[str, Text] = {
    "superseded": Text("standby.why-superseded", "another machine has a newer term"),
    "held": Text("standby.why-held", "the lease of the head is alive"),
    "unknown": Text("standby.why-unknown", "a lease may be alive"),
    "out-of-sync": Text("standby.why-out-of-sync", "the copy is incomplete"),
    "overtaken": Text("standby.why-overtaken", "a newer request came first"),
}
ROLE_MARK = "ascendrun-role "


class Role(NamedTuple):
    """What a machine is for a head. `name`: head (it has the lease), controller (without), store, standby, superseded,
    or none. `term`: that it has seen."""

    name: str
    term: int = 0

    @property
    def rank(self) -> tuple[int, bool]:
        """Without a head, the machine with the greatest has the jobs: the newest term, then a running controller."""
        return self.term, self.name == "controller"


def role_of(state_dir: Path) -> Role:
    """Return the role of this machine."""
    if standby_dir(state_dir).is_dir():
        return Role("standby")
    head = HeadFile.load(state_dir)
    if head is None:
        return Role("none")
    if head.superseded is not None:
        return Role("superseded", head.term)
    if running_pid(state_dir) is None:
        return Role("store", head.term)
    try:
        with ControlClient(state_dir) as client:
            status = client.call(Status(), timeout_s=CONNECT_S)
    except AscendrunError:
        return Role("controller", head.term)
    return Role("head" if status.standby is None or status.standby["lease"] else "controller", head.term)


def why_superseded(state_dir: Path) -> Text | None:
    """Return which machine continues as the head that this one was; None: none does, or this one is its standby."""
    host = None if standby_dir(state_dir).is_dir() else superseded_by(state_dir)
    return None if host is None else continues_elsewhere(host)


def find_head(hosts: Sequence[str], own: Callable[[], Role] | None = None) -> str | None:
    """Return the machine that is the head, of `user@host` each; all are asked in parallel. None: this one, whose role
    is `own`, if it may be it.

    Raises UnreachableError: none of them can be it.
    """
    pool, processes, is_found = ThreadPoolExecutor(len(hosts)), list[subprocess.Popen[bytes]](), threading.Event()
    waiting = {pool.submit(_ask_role, host, processes, is_found) for host in hosts}
    roles, until_mono = dict[str, Role](), time.monotonic() + CONNECT_S
    candidates: list[str] = []
    try:
        while waiting and not (candidates and time.monotonic() > until_mono):
            roles[""] = Role("standby") if own is None else own()
            done, waiting = wait(waiting, POLL_S, FIRST_COMPLETED)
            roles.update(one.result() for one in done)
            for host, role in roles.items():
                if role.name == "head":
                    return host or None
            candidates = [host for host in (*hosts, "") if _may_be(roles, host)]
    finally:
        is_found.set()
        for process in processes:  # a thread that waits for its reply would delay the end of this process
            process.kill()
        pool.shutdown(wait=False)
    if not candidates:
        raise UnreachableError.of(
            "standby.no-head",
            "none of {hosts} has the jobs or responds",
            "run `ascendrun controller standby --take-over` on a machine with a copy",
            hosts=list(hosts),
        )
    return max(candidates, key=lambda host: roles[host].rank) or None  # the first of equal ones


def _may_be(roles: Mapping[str, Role], host: str) -> bool:
    """Return whether a machine has a list of jobs; of this one, "", only a copy and an old list count as none."""
    name = roles[host].name if host in roles else "none"
    return name in ("controller", "store") or (not host and name == "none")


def find_other_head(settings: Settings) -> str | None:
    """Return the other machine of `standby.heads`, if it is the head; None: this one is, or becomes it.

    Raises UnreachableError: this machine has a copy or was superseded, and the other one does not respond.
    """
    standby = read_standby(settings, read_hostfile)
    return None if standby is None else find_head(others(standby), partial(role_of, settings.state_dir))


def others(standby: Standby) -> list[str]:
    """Return the machines of a head but this one."""
    return [head for head in standby.heads if not is_this_machine(head)]


def _ask_role(host: str, processes: list[subprocess.Popen[bytes]], is_found: threading.Event) -> tuple[str, Role]:
    options = ("-T", "-o", f"ConnectTimeout={PATIENT_S}")
    with open_ssh(Errand(host, has_home=False), "ascendrun controller role", options) as process:
        processes.append(process)
        if is_found.is_set():
            process.kill()
        try:
            text = process.communicate(timeout=ROLE_S)[0].decode(errors="replace")
        except subprocess.TimeoutExpired:
            process.kill()
            return host, Role("none")
    line = next((line for line in text.splitlines() if line.startswith(ROLE_MARK)), None)
    return host, Role("none") if line is None else Role(*json.loads(line[len(ROLE_MARK) :]))


class Follower:
    """The process of a standby: copies the head's store, and becomes the head when the voters agree. Prints why it
    does not."""

    def __init__(self, settings: Settings, standby: Standby) -> None:
        """Raises ConflictError: this machine is the head, or a standby runs here."""
        self._settings, self._standby = settings, standby
        self._root = standby_dir(settings.state_dir)
        if is_running(settings.state_dir):
            raise ConflictError.of(
                "standby.is-head", "a controller runs on this machine", "run it on the other machine of `standby.heads`"
            )
        self._lock: int | None = None
        self._voters: Voters | None = None
        self._last: Text | None = None
        self._heard_mono = float("-inf")

    def run(self) -> None:
        """Follow the head until this process becomes it. Ended by a signal, it is not started again before the machine
        boots."""
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        try:
            while True:
                self._try_all()
                time.sleep(AGAIN_S)
        except (KeyboardInterrupt, SystemExit):
            if self._lock is not None:
                guarding.write_lock(self._lock, guarding.end_mark())
            raise

    def _try_all(self) -> None:
        for host in others(self._standby):
            try:
                self._follow(host)
            except ConflictError:
                raise  # refused, not lost
            except AscendrunError as error:
                self._tell(Text("standby.no-stream", "{host}: {why}", host=host, why=error.message))
            except OSError as error:
                self._tell_unwritten(error)
        try:
            if self._root.is_dir() and not read_values(self._root / STATE_FILE).get("stopped"):
                self.take_over()
        except OSError as error:
            self._tell_unwritten(error)

    def take_over(self, *, may_lose: bool = False) -> None:
        """Become the head if most voters grant it; else report why not. `may_lose`: also with an incomplete copy.
        Raises ConflictError: the voters are others than those of the head. Raises OSError: the copy cannot be
        written."""
        head = HeadFile.load(self._root)
        if head is None:
            self._tell(Text("standby.empty", "this machine has no copy of a head"))
            return
        self._standby.require_voters(head.voters)
        self._take_lock()
        kept = read_values(self._root / STATE_FILE)
        instance = str(kept.get("instance") or os.urandom(8).hex())
        term = max(head.term, int(kept.get("term") or 0)) + 1
        write_json(str(self._root / STATE_FILE), {**kept, "instance": instance})
        request = ClaimHead(head.head_id, term, instance, os.uname().nodename, self._standby.lease_s, may_lose=may_lose)
        votes = self._connected_voters().claim(request)
        if not votes.is_granted:
            write_json(str(self._root / STATE_FILE), {**kept, "instance": instance, "term": max(votes.term, term - 1)})
            self._tell(_refusal(votes))
            return
        replace(head, term=term, instance=instance, superseded=None).write(self._root)
        self._become_head()

    def _become_head(self) -> None:
        state_dir = self._settings.state_dir
        if state_dir.exists():
            state_dir.rename(state_dir.with_name(f"{state_dir.name}.{time.time_ns()}.old"))
        self._root.rename(state_dir)
        (state_dir / STATE_FILE).unlink()
        print(Text("standby.took-over", "this machine is the head now"), flush=True)
        assert self._lock is not None
        os.set_inheritable(self._lock, True)
        environ = {**guarding.environment(str(state_dir)), guarding.KEPT_LOCK_VARIABLE: str(self._lock)}
        os.execve(sys.executable, guarding.ARGV, environ)

    def _connected_voters(self) -> Voters:
        if self._voters is None:
            settings = replace(self._settings, state_dir=self._root)
            backends = Backends(settings, SshOptions(find_askpass(os.environ), settings.transport))
            self._voters = Voters(backends, self._standby)
        return self._voters

    def _take_lock(self) -> None:
        """Hold the lock of the copy: it becomes that of the controller."""
        if self._lock is None:
            self._root.mkdir(mode=0o700, exist_ok=True)
            fd = os.open(self._root / guarding.LOCK_NAME, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            if not take_lock(fd):
                os.close(fd)
                raise ConflictError(
                    Text("standby.already-runs", "a standby already runs for {path}", path=str(self._root))
                )
            self._lock = fd
            guarding.write_lock(fd, f"{os.getpid()}\n".encode())

    def _follow(self, host: str) -> None:
        """Copy what the head sends until it is lost. Raises UnreachableError, OSError: the copy cannot be written."""
        ours, theirs = socket.socketpair()
        limit_s = CONNECT_S if time.monotonic() - self._heard_mono < RECENT_S else PATIENT_S
        options = ("-T", "-o", f"ConnectTimeout={limit_s}", "-o", "BatchMode=yes")
        errand = Errand(host, has_home=False)
        process = open_ssh(errand, "exec ascendrun controller relay", options, theirs.fileno(), theirs.fileno())
        theirs.close()
        try:
            with ControlClient.over(ours) as client:
                if self._root.is_dir():
                    self._take_lock()
                writer, kept = CopyWriter(self._root), read_values(self._root / STATE_FILE)
                request = Follow(os.uname().nodename, list_groups(self._root), tuple(list_trees(self._root)))
                for change, body in client.stream(request, timeout_s=LOST_S):
                    self._take_lock()
                    self._heard_mono = time.monotonic()
                    if (kept.get("host"), kept.get("stopped")) != (host, change.is_stopped):
                        kept.update(host=host, stopped=change.is_stopped)
                        write_json(str(self._root / STATE_FILE), kept)
                        self._tell(Text("standby.follows", "following {host}", host=host))
                    writer.take(change.files, change.gone, body)
                    client.post(Acknowledge(change.stream, change.number))
        finally:
            process.kill()
            process.wait()

    def _tell_unwritten(self, error: OSError) -> None:
        self._tell(Text("standby.no-copy", "cannot write the copy: {why}", why=str(error)))

    def _tell(self, text: Text) -> None:
        if text != self._last:
            self._last = text
            print(text, flush=True)


def _refusal(votes: Votes) -> Text:
    parts = [
        Text("standby.vote", "{host}: {why}", host=host, why=WHY[vote.why] if isinstance(vote, Vote) else vote.message)
        for host, vote in votes.votes.items()
        if not (isinstance(vote, Vote) and vote.granted)
    ]
    return Text("standby.refused", "does not take over: {votes}", votes=parts or ["-"])


def serve(settings: Settings, action: str, *, take_over: bool) -> int:
    """Run `controller standby` until this process is the head; `role` and `relay` are for the other machine.

    Return the exit code. Raises ConflictError, UnreachableError, PreflightError: the settings have no standby.
    """
    if action == "role":
        print(f"{ROLE_MARK}{json.dumps(role_of(settings.state_dir))}")
    elif action == "relay":
        with ControlClient(settings.state_dir) as client:
            client.relay(0, 1)
    else:
        standby = read_standby(settings, read_hostfile)
        if standby is None:
            raise not_set(PreflightError)
        follower = Follower(settings, standby)
        if not take_over:
            follower.run()
        follower.take_over(may_lose=True)
        return 5
    return 0
