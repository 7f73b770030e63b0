"""Owns the ranks of one attempt on one node: claims the attempt once, detached from SSH, agent and head.

It outlives everything but the node, and ends with the last process of the attempt.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from ascendrun.node import cgroup, layout, procs
from ascendrun.node.failpoint import failpoint
from ascendrun.node.files import claim_json, read_json
from ascendrun.node.layout import IDENTITY, PREPARED
from ascendrun.node.op_errors import os_failure
from ascendrun.node.records import Records, free_reserve
from ascendrun.node.supervisor.watch import Supervisor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def main(folder: str) -> int:
    """Run `supervise FOLDER`: read {master_port, hccl_base, secret_env, umask, leases} from stdin, print one JSON line
    on stdout: {"pid": ...}, {"already": true} when another supervisor owns the attempt, or {"error": {...}}.

    `leases`: {"devices", "ports"}: inherited descriptors that hold leases (agent/leases.py) until they are closed."""
    os.umask(0o077)
    with os.fdopen(0, "rb", closefd=False) as stdin:
        spec = json.loads(stdin.read().decode("utf-8"))
    if os.fork():
        os._exit(0)
    for fd in (fd for fds in (spec.get("leases") or {}).values() for fd in fds):
        os.set_inheritable(fd, False)
    os.chdir("/")
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until Supervisor handles it: a stop may come right after the claim
    procs.become_subreaper()
    try:
        supervisor = _take_over(folder, spec)
    except OSError as error:
        _report({"error": os_failure(error, "keep-records", path=folder).as_json()})
        return 1
    if supervisor is None:
        _report({"already": True})
        return 0
    _report({"pid": os.getpid()})
    supervisor.run()
    return 0


def _take_over(folder: str, spec: dict[str, Any]) -> Supervisor | None:
    """Claim the attempt; None when it was claimed before. Raises OSError; then nothing is claimed."""
    prepared = read_json(os.path.join(folder, PREPARED))
    if prepared is None:
        raise FileNotFoundError(2, "there is no prepared attempt", folder)
    if read_json(os.path.join(folder, IDENTITY)) is not None:
        return None
    streams = layout.streams_dir(folder)
    records = Records(streams)
    try:
        records.hold_reserve()
    except OSError:
        free_reserve(streams)
        raise
    group = cgroup.make_group("%s-%d" % (prepared["tag"], os.getpid()))  # a machine may be several nodes
    failpoint("launch.before_claim")
    identity = dict(procs.identify(os.getpid()), cgroup=group)
    if not claim_json(os.path.join(folder, IDENTITY), identity):
        return None
    failpoint("launch.after_claim")
    records.add("supervising", pid=identity["pid"], start=identity["start"], boot_id=identity["boot_id"])
    return Supervisor(folder, prepared, spec, records, identity)


def _report(answer: dict[str, Any]) -> None:
    """Print the reply. The serving agent may be gone: the attempt runs without it."""
    try:
        os.write(1, json.dumps(answer).encode("ascii") + b"\n")
    except OSError:
        pass
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):
        os.dup2(null, fd)
    os.close(null)
    sys.stdout = None
