"""Machines of a running cluster: boot them, run commands on them, inspect them from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ascendrun.core.errors import AscendrunError
from tests.lib.vcluster import spec
from tests.lib.vcluster import state as states
from tests.lib.vcluster.groups import Groups
from tests.lib.vcluster.plan import BootPlan, dump_plan
from tests.lib.vcluster.processes import Process, await_true, processes_in
from tests.lib.vcluster.requirements import NotSupportedError

Completed = subprocess.CompletedProcess  # of str or bytes, depending on `text`

HEAD = "head"
RUN_DEADLINE_S = 120.0
BOOT_DEADLINE_S = 120.0
_GONE_DEADLINE_S = 30.0
_HOST_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
_BOOT = f"import sys; sys.path.insert(0, {str(spec.PACKAGE_HOME)!r}); from tests.lib.vcluster.boot import main; main()"
_ENTER = str(Path(__file__).with_name("enter.py"))


class BootError(AscendrunError):
    """A host of the virtual cluster did not start; the message has its error output."""

    code = "vcluster-boot"


class HostDownError(AscendrunError):
    """The host is switched off (killed, crashed) and can run nothing."""

    code = "vcluster-down"
    exit_code = 7


class Machines:
    """Head and hosts of the cluster whose state is in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._state = states.load(folder)
        self._spec: spec.ClusterSpec = spec.load_spec(self._state.spec)
        self._groups = Groups(self._state.cluster_id)

    @property
    def cluster_id(self) -> str:
        return self._state.cluster_id

    @property
    def hosts(self) -> tuple[str, ...]:
        return self._spec.names

    @property
    def has_shared_home(self) -> bool:
        return self._spec.has_shared_home

    def address(self, name: str) -> str:
        """The IPv4 address of a host, or of the "head"."""
        return self._spec.address(name)

    def init_pid(self, name: str) -> int:
        """The machine's pid of the init of a host or the "head"; raises HostDownError when it is off."""
        pid = self._state.live_init(name)
        if pid is None:
            raise HostDownError(f"{name} is off", hint=f"boot it: reboot {name}")
        return pid

    def is_up(self, name: str) -> bool:
        return self._state.live_init(name) is not None

    # -- commands

    def head_argv(self, argv: Sequence[str], *, cwd: str | None = None) -> list[str]:
        """The command line that runs `argv` as the head, for whatever starts processes (a pty, a benchmark)."""
        return self._argv(HEAD, argv, cwd or os.getcwd())

    def host_argv(self, name: str, argv: Sequence[str], *, cwd: str = "/", groups: Sequence[str] = ()) -> list[str]:
        """The command line that runs `argv` on a host's console, past its sshd. `groups`: more cgroup.procs to join."""
        return self._argv(name, argv, cwd, groups)

    def _argv(self, name: str, argv: Sequence[str], cwd: str, more: Sequence[str] = ()) -> list[str]:
        groups = ":".join((*self._groups.join_files(name), *more)) or "-"
        return [sys.executable, "-I", "-S", _ENTER, str(self.init_pid(name)), cwd, groups, "--", *argv]

    def head_run(self, argv: Sequence[str], *, cwd: str | None = None, **options: Any) -> Completed[Any]:
        """`subprocess.run` in the head's namespaces; a deadline of 120 s unless `timeout` says otherwise."""
        options.setdefault("timeout", RUN_DEADLINE_S)
        return subprocess.run(self.head_argv(argv, cwd=cwd), **options)

    def head_popen(self, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """`subprocess.Popen` in the head's namespaces. Signals to it reach the command, SIGKILL too."""
        return subprocess.Popen(self.head_argv(argv), **options)

    def host_run(
        self, name: str, argv: Sequence[str], *, cwd: str = "/", groups: Sequence[str] = (), **options: Any
    ) -> Completed[Any]:
        """`subprocess.run` on a host's console, with a login's plain environment unless `env` is given."""
        options.setdefault("timeout", RUN_DEADLINE_S)
        options.setdefault("env", self.host_environ())
        return subprocess.run(self.host_argv(name, argv, cwd=cwd, groups=groups), **options)

    def host_popen(self, name: str, argv: Sequence[str], *, cwd: str = "/", **options: Any) -> subprocess.Popen[Any]:
        options.setdefault("env", self.host_environ())
        return subprocess.Popen(self.host_argv(name, argv, cwd=cwd), **options)

    # -- views from outside

    def path(self, name: str, path: str) -> Path:
        """A file of a host as the test may open it. Absolute symlinks on the way lead to the machine's own files."""
        return Path(f"/proc/{self.init_pid(name)}/root{path}")

    def processes(self, name: str) -> list[Process]:
        """Every process on a host (or the "head"), its init among them; [] when it is off."""
        return self.all_processes((name,))[name]

    def all_processes(self, names: Sequence[str] | None = None) -> dict[str, list[Process]]:
        """Processes by machine, in one pass over /proc; `names`: None for the head and all hosts."""
        selected = (HEAD, *self.hosts) if names is None else names
        live = {name: pid for name in selected for pid in [self._state.live_init(name)] if pid is not None}
        return {**{name: [] for name in selected}, **processes_in(live)}

    def cpu_seconds(self, which: str) -> float:
        """CPU time that "head" or all "hosts" used so far; raises AscendrunError where no control group counts it."""
        seconds = self._groups.cpu_seconds(which)
        if seconds is None:
            raise AscendrunError("no control group may be made here, so CPU time is not counted")
        return seconds

    def host_environ(self) -> Mapping[str, str]:
        """Return the environment of a login on a host."""
        return {"PATH": _HOST_PATH, "HOME": spec.root_home(), "USER": "root", "LOGNAME": "root", "LANG": "C.UTF-8"}

    # -- power

    def _boot(
        self,
        names: Sequence[str],
        *,
        with_head: bool = False,
        kept: Mapping[str, int] | None = None,
        boot_ids: Mapping[str, str] | None = None,
    ) -> None:
        """`kept`: a descriptor of the last mount namespace of each host that continues with its files. `boot_ids`: of
        the hosts that get no new one."""
        disks = kept or {}
        plan = self._boot_plan(names, with_head=with_head, kept=disks, boot_ids=boot_ids or {})
        argv = [sys.executable, "-I", "-S", "-c", _BOOT]
        done = subprocess.run(
            argv,
            input=dump_plan(plan),
            text=True,
            capture_output=True,
            timeout=BOOT_DEADLINE_S,
            pass_fds=tuple(disks.values()),
        )
        if done.returncode:
            raise boot_error(done.stderr.strip())
        for line in done.stdout.splitlines():
            inits = {name: states.name_process(pid) for name, pid in json.loads(line).items()}
            self._state.inits.update(inits)
        self._save()

    def _boot_plan(
        self, names: Sequence[str], *, with_head: bool, kept: Mapping[str, int], boot_ids: Mapping[str, str]
    ) -> BootPlan:
        plans = []
        for name in names:
            folder = self.folder / name
            folder.mkdir(exist_ok=True)
            groups = self._groups.join_files(name)
            plans.append(
                spec.make_host_plan(
                    self._spec, name, folder=folder, groups=groups, kept_disk=kept.get(name), boot_id=boot_ids.get(name)
                )
            )
        head = spec.make_head_plan(self._spec, folder=self.folder, groups=self._groups.join_files(HEAD))
        return BootPlan(
            common=spec.make_common(self._spec, self.folder, Path("/proc/self/mountinfo").read_text()),
            hosts=tuple(plans),
            head=head if with_head else None,
            head_pid=None if with_head else self.init_pid(HEAD),
        )

    def _power_off(self, names: Sequence[str]) -> None:
        """SIGKILL their inits and wait until the kernel has killed everything on them."""
        pids = [pid for name in names for pid in [self._state.live_init(name)] if pid is not None]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for name in names:
            if "frozen" in self._state.faults.get(name, ()):
                self._groups.freeze(name, frozen=False)  # version 1 lets nothing frozen die
        if not await_true(lambda: not any(self.is_up(name) for name in names), deadline_s=_GONE_DEADLINE_S):
            raise AscendrunError(f"{', '.join(filter(self.is_up, names))}: its init does not die on SIGKILL")

    # -- what is wrong with them

    def _note(self, name: str, fault: str) -> None:
        if name != HEAD:
            self._spec.index(name)
        noted = self._state.faults.setdefault(name, [])
        if fault not in noted:
            noted.append(fault)
            self._save()

    def _forget(self, name: str, fault: str) -> None:
        if fault in self._state.faults.get(name, ()):
            self._state.faults[name].remove(fault)
            self._save()

    def _save(self) -> None:
        states.save(self.folder, self._state)


def boot_error(words: str) -> AscendrunError:
    """What a failed boot means: this machine refuses (NotSupportedError), or the simulation failed
    (BootError)."""
    last = words.splitlines()[-1] if words else "no error output"
    refused = [line for line in words.splitlines() if line.startswith(("PermissionError", "OSError: [Errno 1]"))]
    if refused:
        return NotSupportedError(
            f"this machine refuses what a virtual cluster needs: {refused[0]}",
            hint="in a container: docker run --privileged",
        )
    return BootError(f"the virtual cluster did not boot: {last}\n{words}")
