"""Faults of a cluster, on demand: every fault is repeatable, and `clean` undoes it."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from ascendrun.core.errors import AscendrunError
from tests.lib.vcluster import network, provision, wall_clock
from tests.lib.vcluster.folders import Folders
from tests.lib.vcluster.machines import HEAD
from tests.lib.vcluster.network import ip_in
from tests.lib.vcluster.processes import Process, await_true, is_of_the_system

FILL_PATH = "/tmp/.vcluster-fill"
_CLOCK_LIBRARY = "/usr/local/lib/vcluster-clock.so"
_DEADLINE_S = 20.0


class Faults(Folders):
    """Faults by host name."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._disks: dict[str, int] = {}

    # -- power

    def kill(self, name: str) -> None:
        """Kill all its processes; peers see their connections closed."""
        self._note(name, "off")
        self._hold_disk(name)
        self._power_off((name,))

    def crash(self, name: str) -> None:
        """Power loss: as `kill`, but the cable goes first, so that peers see silence."""
        self.cut(name)
        self.kill(name)

    def reboot(self, *names: str, keep_disk: bool = False) -> None:
        """New boot id, sound cable, and an empty disk unless `keep_disk`; works on a host that is off as well.

        The disk of a host that is off is kept by the object that killed it, not across processes.
        """
        self._boot_again(names, keep_disk=keep_disk, boot_ids={})

    def recreate(self, *names: str) -> None:
        """As when the container that a host is was made anew: all its processes dead, an empty home and disk, but the
        machine below it did not boot, so the boot id is what it was."""
        boot_ids = {name: self.path(name, provision.BOOT_ID_PATH).read_text().strip() for name in names}
        self._boot_again(names, keep_disk=False, boot_ids=boot_ids)

    def _boot_again(self, names: Sequence[str], *, keep_disk: bool, boot_ids: Mapping[str, str]) -> None:
        for name in names:
            self._set_quality(name, {})
            self._hold_disk(name)
        self._power_off(names)
        commands = "".join(f"link del {network.cable(self._spec.index(name))}\n" for name in names)
        ip_in(self.init_pid(HEAD), commands, force=True)  # already gone where the kernel was faster
        for name in names:
            self._state.faults.pop(name, None)
        try:
            self._boot(names, kept={name: self._disks[name] for name in names if keep_disk}, boot_ids=boot_ids)
        finally:
            self._let_go_of_disks(names)

    def _power_off(self, names: Sequence[str]) -> None:
        """A call that never returns would keep its host from dying, so the faulty file systems go first."""
        for name in names:
            for folder in self._faulty_folders(name):
                self._end_file_system(name, folder)
        super()._power_off(names)

    def _hold_disk(self, name: str) -> None:
        """Keep the mounts of a host that is up beyond its death."""
        if self.is_up(name):
            self._let_go_of_disks((name,))
            self._disks[name] = os.open(f"/proc/{self.init_pid(name)}/ns/mnt", os.O_RDONLY)

    def _let_go_of_disks(self, names: Sequence[str]) -> None:
        for name in names:
            if name in self._disks:
                os.close(self._disks.pop(name))

    # -- the host itself

    def freeze(self, name: str) -> None:
        """Its programs stop, its kernel continues: TCP connects, and then no data arrives."""
        self._note(name, "frozen")
        if not self._groups.freeze(name, frozen=True):
            self._signal_all(name, signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        if not self._groups.freeze(name, frozen=False):
            self._signal_all(name, signal.SIGCONT)
        self._forget(name, "frozen")

    def fill(self, name: str) -> None:
        """Fill its disk completely."""
        self._note(name, "full")
        with open(self.path(name, FILL_PATH), "ab", buffering=0) as file:
            for size in (1 << 20, 4096, 1):
                _write_until_full(file.fileno(), bytes(size))

    def unfill(self, name: str) -> None:
        if self.path(name, FILL_PATH).exists():
            self.path(name, FILL_PATH).unlink()
        self._forget(name, "full")

    def _signal_all(self, name: str, number: signal.Signals) -> None:
        for process in self.processes(name):
            os.kill(process.pid, number)

    # -- its time

    def clock(self, name: str, offset_s: float) -> None:
        """Shifts the wall clock of all that sshd starts from now on; raises NotSupportedError without a C compiler."""
        with tempfile.TemporaryDirectory() as folder:
            built = Path(folder, "clock.so")
            wall_clock.build(built)
            shutil.copyfile(built, self.path(name, _CLOCK_LIBRARY))
        self.sshd_options(name, (f"SetEnv LD_PRELOAD={_CLOCK_LIBRARY} {wall_clock.SHIFT_VARIABLE}={offset_s:.3f}",))

    # -- sshd

    def sshd_stop(self, name: str) -> None:
        """Connections are refused; sessions live on."""
        self._note(name, "sshd")
        listeners = self._sshd_listeners(name)
        for process in listeners:
            os.kill(process.pid, signal.SIGTERM)
        if not await_true(lambda: not self._sshd_listeners(name), deadline_s=_DEADLINE_S):
            raise AscendrunError(f"{name}: sshd does not end on SIGTERM (is the host frozen?)")

    def sshd_start(self, name: str) -> None:
        if not self._sshd_listeners(name):
            done = self.host_run(name, provision.SSHD_ARGV, text=True, capture_output=True)
            if done.returncode:
                raise AscendrunError(f"{name}: sshd does not start: {done.stderr.strip()}")
        if not await_true(lambda: network.listens(self.init_pid(name)), deadline_s=_DEADLINE_S):
            raise AscendrunError(f"{name}: sshd does not listen; see /var/log/sshd.log there")

    def sshd_restart(self, name: str) -> None:
        self.sshd_stop(name)
        self.sshd_start(name)

    def sshd_options(self, name: str, options: Sequence[str]) -> None:
        """Restarts sshd with these lines before the cluster's own; () takes them back."""
        lines = (*options, *self._spec.sshd_options)
        self.path(name, provision.SSHD_CONFIG_PATH).write_text(provision.sshd_config(lines))
        self.sshd_restart(name)

    def _sshd_listeners(self, name: str) -> list[Process]:
        return [process for process in self.processes(name) if is_of_the_system(process) and process.inner_pid != 1]

    # -- undoing

    def clean(self, *names: str) -> None:
        """Undo every fault of these hosts (none named: of all, and of the head); a host that is off is booted again."""
        wanted = names or (HEAD, *self.hosts)
        self.reboot_dead(wanted)
        for name in wanted:
            for fault in sorted(self._state.faults.get(name, ())):
                self._undo(name, fault)
            self._set_quality(name, {})
            for folder in self._faulty_folders(name):
                if self._state.file_systems[f"{name}:{folder}"].is_alive:
                    self.file_system(name, folder).heal()
                else:
                    self._unmount_dead(name, folder)

    def reboot_dead(self, names: Sequence[str] = ()) -> None:
        """Boot the hosts among `names` (none named: all) that are off."""
        dead = [name for name in (names or self.hosts) if name != HEAD and not self.is_up(name)]
        if dead:
            self.reboot(*dead)

    def _undo(self, name: str, fault: str) -> None:
        undo = {"cut": self.heal, "frozen": self.thaw, "blocked": self.unblock, "full": self.unfill}.get(fault)
        if undo is not None:
            undo(name)
        elif fault == "sshd":
            self.sshd_options(name, ())
        self._forget(name, fault)


def _write_until_full(fd: int, chunk: bytes) -> None:
    while True:
        try:
            os.write(fd, chunk)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            return
