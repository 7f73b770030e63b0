"""Cables of a cluster: cut, slow, lossy, blocked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from ascendrun.core.errors import AscendrunError
from tests.lib.vcluster import network
from tests.lib.vcluster.machines import HEAD, Machines
from tests.lib.vcluster.network import ip_in
from tests.lib.vcluster.state import name_process

_RELAY = str(Path(__file__).with_name("relay.py"))


class Cables(Machines):
    """Faults of the cable between a host and the head, by host name."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._relays: dict[str, subprocess.Popen[bytes]] = {}

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

    def delay(self, name: str, delay_ms: float) -> None:
        """Each way, so a round trip takes twice as long."""
        self._set_quality(name, {**self._quality(name), "delay_s": delay_ms / 1000})

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

    def _cable(self, name: str) -> str:
        return network.cable(self._spec.index(name))

    def _ask_again(self, name: str) -> str:
        """The head forgets that it asked for the host's hardware address in vain; else it says "no route" for 3 s."""
        return f"neigh flush to {self.address(name)} dev {network.BRIDGE}"

    def _in_head(self, command: str) -> None:
        ip_in(self.init_pid(HEAD), f"{command}\n")

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
        numbers = [str(quality.get(key, 0.0)) for key in ("delay_s", "loss", "rate")]
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
