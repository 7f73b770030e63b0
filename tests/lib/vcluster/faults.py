"""Faults of a cluster, on demand: every fault is repeatable, and `clean` undoes it."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from ascendrun.core.errors import AscendrunError
from tests.lib.vcluster import network, provision, wall_clock
from tests.lib.vcluster.faultfs import FaultFs, serve
from tests.lib.vcluster.machines import HEAD, Machines
from tests.lib.vcluster.network import ip_in
from tests.lib.vcluster.processes import Process, await_true, is_of_the_system
from tests.lib.vcluster.spec import root_home
from tests.lib.vcluster.state import name_process

NODE_FOLDER = f"{root_home()}/.ascendrun"
FILL_PATH = "/tmp/.vcluster-fill"
_CLOCK_LIBRARY = "/usr/local/lib/vcluster-clock.so"
_RELAY = str(Path(__file__).with_name("relay.py"))
_DEADLINE_S = 20.0


class Faults(Machines):
    """Faults by host name."""

    _relays: dict[str, subprocess.Popen[bytes]]
    _disks: dict[str, int]
    _servers: dict[str, subprocess.Popen[bytes]]

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._relays = {}
        self._disks = {}
        self._servers = {}

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

    # -- cable

    def cut(self, name: str) -> None:
        self._note(name, "cut")
        self._in_head(f"link set {self._cable(name)} down")

    def heal(self, name: str) -> None:
        """Plugs the cable in again (of a host that is off: nothing to do)."""
        if self._cable(name) in network.interfaces(self.init_pid(HEAD)):
            self._in_head(f"link set {self._cable(name)} up\n{self._ask_again(name)}")
        self._forget(name, "cut")

    def loss(self, name: str, percent: float) -> None:
        """Frames lost at random, each way."""
        self._set_quality(name, {**self._quality(name), "loss": percent / 100})

    def delay(self, name: str, delay_ms: float, *, jitter_ms: float = 0.0) -> None:
        """Each way, so a round trip takes twice as long."""
        self._set_quality(name, {**self._quality(name), "delay_s": delay_ms / 1000, "jitter_s": jitter_ms / 1000})

    def rate(self, name: str, kbit: float) -> None:
        """Kilobits a second, each way; 0: unlimited."""
        self._set_quality(name, {**self._quality(name), "rate": kbit * 125})

    def isolate(self, one: str, other: str) -> None:
        """Block traffic between the two hosts; all other hosts reach both."""
        self.block(one, other)
        self.block(other, one)

    def block(self, source: str, target: str) -> None:
        """What `source` sends to `target` vanishes; the other way is open. Either may be the "head"."""
        self._note(source, "blocked")
        wrong = f"neigh replace {self.address(target)} lladdr {network.NOWHERE} nud permanent dev {_device(source)}\n"
        ip_in(self.init_pid(source), wrong)

    def unblock(self, source: str) -> None:
        """Undoes every `block` and `isolate` on the side of `source`."""
        ip_in(self.init_pid(source), f"neigh flush dev {_device(source)} nud permanent\n")
        self._forget(source, "blocked")

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

    # -- its files

    def node_fs(self, name: str, *, kind: str = "fuse") -> FaultFs:
        """The faulty file system over ascendrun's folder of a host (root's); mounted by the first call."""
        return self.file_system(name, NODE_FOLDER, kind=kind)

    def file_system(self, name: str, folder: str, *, kind: str = "fuse") -> FaultFs:
        """The faulty file system over a folder of a host or the "head", mounted by the first call.

        `kind`: its type in /proc/mounts; "fuse.remote" looks like a network's.

        Files that were opened before go past it, so mount it before anything runs there. `clean` heals it; it stays
        until the host goes down. Raises NotSupportedError where the kernel has no FUSE.
        """
        server, address = self._state.file_systems.get(f"{name}:{folder}"), self._fs_address(name, folder)
        if server is not None and not server.is_alive:
            self._unmount_dead(name, folder)
            server = None
        if server is None:
            self.path(name, folder).mkdir(parents=True, exist_ok=True)
            child = serve(self.init_pid(name), folder, address, self.folder / f"{address}.log", kind=kind)
            server = name_process(child.pid)
            self._servers[f"{name}:{folder}"] = child
            self._state.file_systems[f"{name}:{folder}"] = server
            self._save()
        return FaultFs(folder, address, server.pid)

    def wipe(self, name: str) -> None:
        """Everything in ascendrun's folder of a host goes, under its running processes: a cleaner of old files.

        They may write meanwhile, so it is done until nothing is left of what was there; OSError after ten tries.
        """
        for path in self.path(name, NODE_FOLDER).iterdir():
            for tries_left in reversed(range(10)):
                try:
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
                    break
                except OSError:
                    if tries_left == 0 and path.exists():
                        raise

    def _fs_address(self, name: str, folder: str) -> str:
        return f"vcluster-{self.cluster_id}-{name}-{zlib.crc32(folder.encode()):08x}"

    def _faulty_folders(self, name: str) -> list[str]:
        served = [key.partition(":") for key in self._state.file_systems]
        return [folder for host, _, folder in served if host == name]

    def _unmount_dead(self, name: str, folder: str) -> None:
        """Of a file system without its process, on a host that is up."""
        self._end_file_system(name, folder)
        self.host_run(name, ["umount", "--lazy", folder], check=True, capture_output=True)

    def _end_file_system(self, name: str, folder: str) -> None:
        server = self._state.file_systems[f"{name}:{folder}"]
        if server.is_alive:  # it may end at any moment, with its host
            FaultFs(folder, self._fs_address(name, folder), server.pid).end()
        child = self._servers.pop(f"{name}:{folder}", None)
        if child is not None:
            child.wait()
        del self._state.file_systems[f"{name}:{folder}"]
        self._save()

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
        if fault == "cut":
            self.heal(name)
        elif fault == "frozen":
            self.thaw(name)
        elif fault == "blocked":
            self.unblock(name)
        elif fault == "full":
            self.unfill(name)
        elif fault == "sshd":
            self.sshd_options(name, ())
        self._forget(name, fault)

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

    # -- inner

    def _cable(self, name: str) -> str:
        return network.cable(self._spec.index(name))

    def _ask_again(self, name: str) -> str:
        """The head forgets that it asked for the host's hardware address in vain; else it says "no route" for 3 s."""
        return f"neigh flush to {self.address(name)} dev {network.BRIDGE}"

    def _in_head(self, command: str) -> None:
        ip_in(self.init_pid(HEAD), f"{command}\n")

    def _signal_all(self, name: str, number: signal.Signals) -> None:
        for process in self.processes(name):
            os.kill(process.pid, number)

    def _quality(self, name: str) -> dict[str, float]:
        return self._state.cables.get(name, {})

    def _set_quality(self, name: str, quality: dict[str, float]) -> None:
        """Replace the relay in the host's cable by one of this quality; {} takes it out."""
        if quality == self._quality(name) and (not quality or self._state.relays[name].is_alive):
            return
        index, cable, head = self._spec.index(name), self._cable(name), self.init_pid(HEAD)
        self._stop_relay(name)
        if any(quality.values()):
            if f"vr{index}" not in network.interfaces(head):
                ip_in(head, relay_commands(index))
            self._start_relay(name, index, quality)
            self._state.cables[name] = quality
            self._in_head(self._ask_again(name))
        else:
            commands = f"link del vr{index}\nlink set {cable} master {network.BRIDGE}\n{self._ask_again(name)}\n"
            ip_in(head, commands, force=True)  # the host may be off, its cable gone with it
            self._state.cables.pop(name, None)
        self._save()

    def _start_relay(self, name: str, index: int, quality: dict[str, float]) -> None:
        numbers = [str(quality.get(key, 0.0)) for key in ("delay_s", "jitter_s", "loss", "rate")]
        enter = ["nsenter", "--target", str(self.init_pid(HEAD)), "--net"]
        argv = [*enter, sys.executable, "-I", "-S", _RELAY, str(index), *numbers]
        child = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
        assert child.stdout is not None and child.stderr is not None
        if child.stdout.read() != b"!":
            words = child.stderr.read().decode().strip()
            child.wait()
            raise AscendrunError(f"{name}: the relay in its cable did not start: {words}")
        child.stdout.close()
        child.stderr.close()
        self._relays[name] = child
        self._state.relays[name] = name_process(child.pid)

    def _stop_relay(self, name: str) -> None:
        relay = self._state.relays.pop(name, None)
        if relay is not None and relay.is_alive:
            os.kill(relay.pid, signal.SIGKILL)
        child = self._relays.pop(name, None)
        if child is not None:
            child.wait()


def relay_commands(index: int) -> str:
    """Take the cable off the bridge and lead it past the relay's pair."""
    return (
        f"link set {network.cable(index)} nomaster\n"
        f"link add vr{index} type veth peer name vs{index}\n"
        f"link set vr{index} up\n"
        f"link set vs{index} master {network.BRIDGE} up\n"
    )


def _device(name: str) -> str:
    return network.BRIDGE if name == HEAD else "eth0"


def _write_until_full(fd: int, chunk: bytes) -> None:
    while True:
        try:
            os.write(fd, chunk)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            return
