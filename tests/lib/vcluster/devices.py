"""Gives a host of the virtual cluster its own /dev with the driver's device nodes; runs on that host."""

from __future__ import annotations

import os
import pwd
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

from tests.lib.vcluster import namespaces as ns

DRIVER_NODES = ("davinci_manager", "devmm_svm", "hisi_hdc")
OWNER = "HwHiAiUser"
MAJOR = 236  # of Huawei's devices; nothing answers there, so opening one fails as on a node whose driver is gone
_NEW = Path("/run/ascend-dev")
_MARK = ".ascend-sim"
_MS_MOVE = 8192


def main(arguments: Sequence[str]) -> None:
    """`arguments`: how many davinci nodes there are to be."""
    if not Path("/dev", _MARK).exists():
        _take_over_dev()
    make_nodes(Path("/dev"), int(arguments[0]))


def make_nodes(folder: Path, count: int) -> None:
    """The driver's nodes and davinci0 to davinci<count - 1>; those of an earlier call are replaced."""
    for old in folder.glob("davinci*"):
        old.unlink()
    for minor, name in enumerate((*DRIVER_NODES, *(f"davinci{number}" for number in range(count)))):
        path = folder / name
        path.unlink(missing_ok=True)
        os.mknod(path, stat.S_IFCHR | 0o660, os.makedev(MAJOR, minor))
        os.chmod(path, 0o660)
        _give_to_owner(path)


def _give_to_owner(path: Path) -> None:
    try:
        owner = pwd.getpwnam(OWNER)
    except KeyError:
        return  # the driver was installed for a user that this host does not have; root then owns them
    os.chown(path, owner.pw_uid, owner.pw_gid)


def _take_over_dev() -> None:
    """A tmpfs over /dev with the same nodes: the machine's /dev is one directory for all hosts."""
    _NEW.mkdir(exist_ok=True)
    ns.mount("ascend-dev", _NEW, "tmpfs", ns.MS_NOSUID, "mode=755,size=1M")
    (_NEW / _MARK).touch()
    for entry in os.scandir("/dev"):
        target = _NEW / entry.name
        status = entry.stat(follow_symlinks=False)
        if entry.is_symlink():
            target.symlink_to(os.readlink(entry.path))
        elif stat.S_ISDIR(status.st_mode):
            target.mkdir()
            ns.bind(entry.path, target, deep=True)
        elif entry.name == "ptmx":
            target.symlink_to("pts/ptmx")
        elif stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode):
            os.mknod(target, status.st_mode, status.st_rdev)
            os.chown(target, status.st_uid, status.st_gid)
            os.chmod(target, stat.S_IMODE(status.st_mode))
        elif stat.S_ISREG(status.st_mode):
            shutil.copy2(entry.path, target)
    ns.mount(_NEW, "/dev", None, _MS_MOVE)
    _NEW.rmdir()
