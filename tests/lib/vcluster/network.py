"""Addresses and cables: a veth pair per host, plugged into one bridge that is in the head's own network."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

HEAD_ADDRESS = "10.77.0.1"
BRIDGE = "vcbr"
NOWHERE = "02:77:de:ad:00:00"
"""A hardware address that no process has: frames to it are dropped without a reply, as by a firewall."""

MANY_HOSTS, NEIGHBOURS = 100, 64
"""From so many hosts on the kernel keeps so many addresses for each."""
NEIGHBOUR_LIMITS = Path("/proc/sys/net/ipv4/neigh/default")

_SIOCGIFFLAGS, _SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK = 0x8913, 0x8914, 0x8916, 0x891C
_IFF_UP_RUNNING = 0x41


def host_address(index: int) -> str:
    """10.77.1.1 for host 1; 250 a row."""
    return f"10.77.{1 + (index - 1) // 250}.{1 + (index - 1) % 250}"


def cable(index: int) -> str:
    """The bridge's end of host `index`'s cable."""
    return f"vc{index}"


def bring_up(interface: str, address: str = "") -> None:
    """By ioctl, in this process's network namespace: no fork per host."""
    name = interface.encode().ljust(16, b"\0")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        if address:
            fcntl.ioctl(control, _SIOCSIFADDR, name + _sockaddr(address))
            fcntl.ioctl(control, _SIOCSIFNETMASK, name + _sockaddr("255.255.0.0"))
        flags = struct.unpack("=16xH", fcntl.ioctl(control, _SIOCGIFFLAGS, name + bytes(16))[:18])[0]
        fcntl.ioctl(control, _SIOCSIFFLAGS, name + struct.pack("=H14x", flags | _IFF_UP_RUNNING))


def _sockaddr(address: str) -> bytes:
    return struct.pack("=HH4s8x", socket.AF_INET, 0, socket.inet_aton(address))


def quieten_kernel() -> None:
    """No IPv6 chatter over the bridge, and cubic as on most clusters (bbr paces data out over a veth)."""
    _set("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1")
    if not _set("/proc/sys/net/ipv4/tcp_congestion_control", "cubic"):
        _set("/proc/sys/net/ipv4/tcp_congestion_control", "reno")


def admit_neighbours(hosts: int, limits: Path = NEIGHBOUR_LIMITS) -> None:
    """Raise the kernel's limits of known addresses for many hosts: one table, of 1024 at most by default, serves all
    network namespaces. Where it is full, hosts cannot reach each other. Limits that are larger stay."""
    if hosts < MANY_HOSTS:
        return
    for path in (limits / f"gc_thresh{number}" for number in (3, 2, 1)):  # the largest first
        if path.exists() and int(path.read_text()) < hosts * NEIGHBOURS:
            _set(path, str(hosts * NEIGHBOURS))


def _set(path: str | Path, value: str) -> bool:
    try:
        Path(path).write_text(value)
    except OSError:
        return False  # not compiled in, or not allowed here: the cluster works without
    return True


def bridge_commands() -> str:
    return (
        f"link add {BRIDGE} type bridge stp_state 0 forward_delay 0\n"
        f"addr add {HEAD_ADDRESS}/16 dev {BRIDGE}\n"
        f"link set {BRIDGE} up\n"
    )


def cable_commands(index: int, init_pid: int) -> str:
    """Cable one host: its end is created as eth0 in the host's network, ours is plugged into the bridge."""
    tail = f"{index >> 8:02x}:{index & 255:02x}"
    return (
        f"link add {cable(index)} address 02:77:ff:00:{tail} type veth "
        f"peer name eth0 address 02:77:00:00:{tail} netns {init_pid}\n"
        f"link set {cable(index)} master {BRIDGE} up\n"
    )


def ip_in(init_pid: int, commands: str, *, force: bool = False) -> None:
    """Run `ip` commands in the network of process `init_pid`; `force`: continue over those that fail.

    Raises OSError with ip's own words.
    """
    argv = ["nsenter", "--target", str(init_pid), "--net", "ip", *(["-force"] if force else []), "-batch", "-"]
    done = subprocess.run(argv, input=commands, text=True, capture_output=True, timeout=60)
    if done.returncode and not force:
        raise OSError(f"ip: {done.stderr.strip()} in {commands.strip()!r}")


def interfaces(init_pid: int) -> Sequence[str]:
    lines = Path(f"/proc/{init_pid}/net/dev").read_text().splitlines()[2:]
    return [line.split(":")[0].strip() for line in lines]


def listens(init_pid: int) -> bool:
    """Whether a process listens on port 22 in the network of process `init_pid` (which must live)."""
    for family in ("tcp", "tcp6"):
        path = f"/proc/{init_pid}/net/{family}"
        lines = Path(path).read_text().splitlines()[1:] if os.path.exists(path) else []
        if any(line.split()[1].endswith(":0016") and line.split()[3] == "0A" for line in lines):
            return True
    return False
