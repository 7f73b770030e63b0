"""A control group of version 2 for an attempt, where the system permits it: a list of its processes.

It finds processes without any other trace (own session, cleared environment, dead supervisor). It is optional.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    pass


def parse_mount(mountinfo: str) -> str | None:
    """Return the mount point of the version 2 hierarchy; None: not mounted."""
    for line in mountinfo.splitlines():
        before, separator, after = line.partition(" - ")
        if separator and after.split(" ", 1)[0] == "cgroup2":
            return before.split(" ")[4].replace("\\040", " ")
    return None


def parse_own(text: str) -> str | None:
    """Return the path of this process's group within the hierarchy, from /proc/self/cgroup."""
    for line in text.splitlines():
        if line.startswith("0::/"):
            return line[3:]
    return None


def make_group(tag: str) -> str | None:
    """Return the new group's directory; None: not permitted."""
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
    """Add the calling process; do nothing if there is no group or the kernel rejects it."""
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
    """Return the pids of the group; [] without a group."""
    if folder is None:
        return []
    try:
        with open(os.path.join(folder, "cgroup.procs"), "rb") as file:
            return [int(line) for line in file.read().split()]
    except (OSError, ValueError):
        return []


def remove_group(folder: str | None) -> None:
    """Remove the group if it is empty."""
    if folder is None:
        return
    try:
        os.rmdir(folder)
    except OSError:
        pass
