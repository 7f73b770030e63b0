"""A control group of version 2 around an attempt, where the system lets us make one: a roll of its processes.

It finds what no other trace finds (own session, cleared environment, dead supervisor). Nothing depends on it.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    pass


def parse_mount(mountinfo: str) -> str | None:
    """Where the version 2 hierarchy is mounted; None: nowhere."""
    for line in mountinfo.splitlines():
        before, separator, after = line.partition(" - ")
        if separator and after.split(" ", 1)[0] == "cgroup2":
            return before.split(" ")[4].replace("\\040", " ")
    return None


def parse_own(text: str) -> str | None:
    """The path of this process's group within the hierarchy, from /proc/self/cgroup."""
    for line in text.splitlines():
        if line.startswith("0::/"):
            return line[3:]
    return None


def make_group(tag: str) -> str | None:
    """The new group's folder; None where we may not make one."""
    try:
        with open("/proc/self/mountinfo") as file:
            mount = parse_mount(file.read())
        with open("/proc/self/cgroup") as file:
            own = parse_own(file.read())
        if mount is None or own is None:
            return None
        folder = os.path.join(mount, own.lstrip("/"), "ascendrun-" + tag)
        os.mkdir(folder)
    except FileExistsError:
        return folder
    except OSError:
        return None
    return folder


def enter_group(folder: str | None) -> None:
    """Puts the calling process in; does nothing when there is no group or it refuses."""
    if folder is None:
        return
    try:
        fd = os.open(os.path.join(folder, "cgroup.procs"), os.O_WRONLY)
    except OSError:
        return
    try:
        os.write(fd, b"0")
    except OSError:
        pass
    finally:
        os.close(fd)


def group_pids(folder: str | None) -> list[int]:
    """Who is in it; [] without a group."""
    if folder is None:
        return []
    try:
        with open(os.path.join(folder, "cgroup.procs"), "rb") as file:
            return [int(line) for line in file.read().split()]
    except (OSError, ValueError):
        return []


def remove_group(folder: str | None) -> None:
    """Removes it when it is empty."""
    if folder is None:
        return
    try:
        os.rmdir(folder)
    except OSError:
        pass
