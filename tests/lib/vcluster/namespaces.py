"""The kernel's calls for namespaces and mounts, by ctypes; each raises OSError with the call's words."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Union

NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
NEWPID, NEWNET = 0x20000000, 0x40000000
HOST_NAMESPACES = NEWNS | NEWUTS | NEWIPC | NEWPID | NEWNET

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2

_CALLS = {"x86_64": {"clone": 56, "pivot_root": 155}, "aarch64": {"clone": 220, "pivot_root": 41}}
_libc = ctypes.CDLL(None, use_errno=True)

PathText = Union[str, "os.PathLike[str]"]


def _checked(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def _number(call: str) -> int:
    machine = os.uname().machine
    if machine not in _CALLS:
        raise OSError(f"{call}: the number of this system call on {machine} is not known here")
    return _CALLS[machine][call]


def clone(flags: int) -> int:
    """Like fork, into new namespaces: 0 in the child. Only for a process with one thread."""
    return _checked(_libc.syscall(_number("clone"), flags | signal.SIGCHLD, 0, 0, 0, 0), "clone")


def unshare(flags: int) -> None:
    _checked(_libc.unshare(flags), "unshare")


def join_opened(fd: int) -> None:
    """Enter the namespace that `fd` holds open; it may have outlived its processes."""
    _checked(_libc.setns(fd, 0), f"setns of descriptor {fd}")


def set_hostname(name: str) -> None:
    text = name.encode()
    _checked(_libc.sethostname(text, len(text)), f"sethostname {name}")


def mount(
    source: PathText | None, target: PathText, fstype: str | None = None, flags: int = 0, options: str = ""
) -> None:
    texts = [None if part is None else os.fsencode(part) for part in (source, target, fstype)]
    data = os.fsencode(options) if options else None
    _checked(_libc.mount(*texts, ctypes.c_ulong(flags), data), f"mount {fstype or source} on {target} ({options})")


def bind(source: PathText, target: PathText, *, deep: bool = False) -> None:
    mount(source, target, None, MS_BIND | (MS_REC if deep else 0))


def unmount(target: PathText) -> None:
    """From the tree at once; from the kernel when nobody uses it any more."""
    _checked(_libc.umount2(os.fsencode(target), MNT_DETACH), f"umount of {os.fspath(target)}")


def make_mounts_private() -> None:
    """Nothing that this mount namespace mounts from now on is seen outside of it."""
    mount(None, "/", None, MS_REC | MS_PRIVATE)


def change_root(root: PathText) -> None:
    """Make `root` the root of this mount namespace and let go of the old one."""
    os.chdir(root)
    _checked(_libc.syscall(_number("pivot_root"), b".", b"."), "pivot_root")
    _checked(_libc.umount2(b".", MNT_DETACH), "umount of the old root")
    os.chdir("/")
