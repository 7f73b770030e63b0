"""The boot process: clones head and hosts into their namespaces, cables them, waits for every sshd; then it ends.

A separate process, because `clone` and `setns` want one thread, which a test run does not have. Reads a BootPlan
on stdin, prints {"name": init pid} on stdout; whatever it started is gone again when it fails.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
import time
import traceback
from pathlib import Path
from typing import Callable, NoReturn

from tests.lib.vcluster import disk, network, provision
from tests.lib.vcluster import namespaces as ns
from tests.lib.vcluster.plan import BootPlan, Common, HeadPlan, HostPlan, load_plan
from tests.lib.vcluster.processes import processes_in

HEAD = "head"
SSHD_DEADLINE_S = 60.0
SSHD_LOOK_S = 1.0
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_POLL_S = 0.01


def main() -> None:
    plan = load_plan(sys.stdin.read())
    pids: dict[str, int] = {}
    try:
        head_pid = plan.head_pid if plan.head is None else _boot_head(plan.head, pids)
        assert head_pid is not None
        _boot_hosts(plan, head_pid, pids)
        print(json.dumps(pids), flush=True)  # who reads it may be gone by now, and then all this has no owner
    except BaseException:
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
        raise


def _spawn(body: Callable[[], None]) -> int:
    """Clone; the child runs `body`, which ends in an exec, and is init of its namespaces."""
    sys.stdout.flush()
    pid = ns.clone(ns.HOST_NAMESPACES)
    if pid:
        return pid
    try:
        body()
    except BaseException:  # the child of a fork must never return into its parent's code
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)


def _boot_head(head: HeadPlan, pids: dict[str, int]) -> int:
    ready_in, ready_out = os.pipe()
    pid = pids[HEAD] = _spawn(lambda: _head_init(head, ready_out))
    os.close(ready_out)
    if os.read(ready_in, 1) != b"!":
        raise OSError("the head did not start; its output is above")
    os.close(ready_in)
    network.ip_in(pid, network.bridge_commands())
    return pid


def _head_init(head: HeadPlan, ready: int) -> None:
    _join_groups(head.groups)
    ns.make_mounts_private()
    ns.set_hostname(HEAD)
    folder = Path(head.home) / ".ssh"
    folder.mkdir(mode=0o700, exist_ok=True)
    ns.mount("vcluster-head", folder, "tmpfs", 0, "size=16M,mode=700")
    for name, text in head.ssh_files.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o600)
    ns.mount("proc", "/proc", "proc", ns.MS_NOSUID | ns.MS_NODEV | ns.MS_NOEXEC)
    own_hosts = Path(head.folder) / "hosts"
    own_hosts.write_text(head.etc_hosts)
    ns.bind(own_hosts, "/etc/hosts")
    network.quieten_kernel()
    network.bring_up("lo")
    os.write(ready, b"!")
    _become_init("/dev/null", {"PATH": PATH})


def _boot_hosts(plan: BootPlan, head_pid: int, pids: dict[str, int]) -> None:
    if not plan.hosts:
        return
    ready_in, ready_out = os.pipe()
    go_in, go_out = os.pipe()
    for host in plan.hosts:
        pids[host.name] = _spawn(_host_body(host, plan.common, ready_out, go_in, go_out))
    os.close(ready_out)
    os.close(go_in)
    network.ip_in(head_pid, "".join(network.cable_commands(host.index, pids[host.name]) for host in plan.hosts))
    missing = {host.index: host.name for host in plan.hosts}
    while missing:
        record = os.read(ready_in, 4)
        if not record:
            raise OSError(f"{', '.join(missing.values())} did not start; their output is above")
        missing.pop(struct.unpack("=i", record)[0])
    os.write(go_out, b"!" * len(plan.hosts))
    os.close(go_out)
    _await_sshd({host.name: pids[host.name] for host in plan.hosts})


def _host_body(host: HostPlan, common: Common, ready: int, go: int, go_writer: int) -> Callable[[], None]:
    def body() -> None:
        os.close(go_writer)
        _host_init(host, common, ready, go)

    return body


def _host_init(host: HostPlan, common: Common, ready: int, go: int) -> None:
    _join_groups(host.groups)
    ns.unshare(ns.NEWCGROUP)
    ns.set_hostname(host.name)
    if host.kept_disk is None:
        ns.make_mounts_private()
        ns.change_root(disk.build_root(host, common))
        provision.write_identity(host, common)
    else:
        disk.take_over_root(host.kept_disk)
        provision.write_sshd_config(host)
    provision.start_run_folder(host.boot_id)
    os.write(ready, struct.pack("=i", host.index))
    os.close(ready)
    if os.read(go, 1) != b"!":
        return
    network.quieten_kernel()
    network.bring_up("lo")
    network.bring_up("eth0", host.address)
    environ = {"PATH": PATH, "HOME": common.home}
    os.chdir("/")
    os.umask(0o022)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    if os.fork() == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _redirect("/var/log/console.log")
        os.execve(provision.SSHD_ARGV[0], provision.SSHD_ARGV, environ)
    _become_init("/var/log/console.log", environ)


def _join_groups(files: tuple[str, ...]) -> None:
    for path in files:
        Path(path).write_text("0")


def _redirect(output: str) -> None:
    null = os.open("/dev/null", os.O_RDWR)
    log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.closerange(3, 4096)


def _become_init(output: str, environ: dict[str, str]) -> NoReturn:
    """Two binaries a host: this sleep is PID 1, and with SIGCHLD ignored the kernel reaps its orphans by itself."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.setsid()
    _redirect(output)
    os.execvpe("sleep", ["sleep", "infinity"], environ)


def _await_sshd(pids: dict[str, int]) -> None:
    waiting: list[str] = list(pids)
    deadline, look = time.monotonic() + SSHD_DEADLINE_S, time.monotonic() + SSHD_LOOK_S
    while waiting:
        waiting = [name for name in waiting if not network.listens(pids[name])]
        if waiting and time.monotonic() > look:
            look += SSHD_LOOK_S
            _require_sshd({name: pids[name] for name in waiting})
        if waiting and time.monotonic() > deadline:
            words = "; ".join(f"{name}: {_last_words(pids[name])}" for name in waiting)
            raise OSError(f"sshd does not listen after {SSHD_DEADLINE_S:.0f} s: {words}")
        if waiting:
            time.sleep(_POLL_S)


def _require_sshd(pids: dict[str, int]) -> None:
    """Raise OSError for a host on which nothing runs but its init: its sshd has ended.

    Of an sshd that goes into the background, one look may see neither the parent nor the child.
    """
    ended = pids
    for _ in range(2):
        ended = {name: pids[name] for name, found in processes_in(ended).items() if len(found) < 2}
    if ended:
        raise OSError(f"sshd ended: {'; '.join(f'{name}: {_last_words(pids[name])}' for name in ended)}")


def _last_words(pid: int) -> str:
    """The last line of the sshd.log of the host with this init."""
    try:
        lines = Path(f"/proc/{pid}/root{provision.SSHD_LOG_PATH}").read_text(errors="replace").splitlines()
    except OSError as error:
        return f"no log ({error.strerror})"
    return lines[-1].strip() if lines else "an empty log"


if __name__ == "__main__":
    main()
