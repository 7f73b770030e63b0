"""A host's file tree: the machine's own, read through an overlay, with one small tmpfs under everything written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tests.lib.vcluster import namespaces as ns
from tests.lib.vcluster.plan import Common, HostPlan

PRIVATE_TO_HOST = ("/tmp", "/run", "/var/log", "/usr/local/Ascend")
PRIVATE_TO_HOME = (".ssh", ".ascendrun", ".local/state", ".config", ".cache/torch_extensions")
SHARED_OF_HOME = (".ascendrun", ".local/state", ".config")
"""What of root's home the hosts of a cluster with a shared home have in common; its keys are the same anyway."""
NOT_OF_A_DISK = ("proc", "sysfs", "tmpfs", "devtmpfs", "devpts", "cgroup", "cgroup2", "mqueue")


def submounts(mountinfo: str) -> Sequence[str]:
    """Folders of /proc/self/mountinfo that hosts must see too: disks mounted below "/" (an overlay shows one only)."""
    found = []
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        target, fstype = left.split()[4], right.split()[0]
        if target == "/" or fstype in NOT_OF_A_DISK or target.split("/")[1] in ("proc", "sys", "dev", "run", "tmp"):
            continue
        path = target.encode().decode("unicode_escape")  # mountinfo writes a space as \040
        if os.path.isdir(path) and path not in found:
            found.append(path)
    return found


def build_root(host: HostPlan, common: Common) -> Path:
    """Mount the host's tree and return its root; `host.folder` becomes the host's disk."""
    disk = Path(host.folder)
    ns.mount("vcluster-disk", disk, "tmpfs", 0, f"size={host.disk},mode=755")
    root = disk / "root"
    root.mkdir()
    _overlay("/", root, disk / "layers" / "root")
    for number, path in enumerate(common.covers):
        _overlay(path, Path(f"{root}{path}"), disk / "layers" / str(number))
    home = common.home.rstrip("/")
    shared = {f"{home}/{name}": name for name in SHARED_OF_HOME} if common.shared_home else {}
    for path in (*PRIVATE_TO_HOST, *(f"{home}/{name}" for name in PRIVATE_TO_HOME)):
        if path not in shared:
            _private_folder(disk, root, path)
    for path, name in {**shared, **({"/home": "home"} if common.shared_home else {})}.items():
        _bind_folder(Path(f"{common.shared_home}/{name}"), root, path)
    mount_kernel_folders(root)
    for source, target in common.shares:
        Path(f"{root}{target}").mkdir(parents=True, exist_ok=True)
        ns.bind(source, f"{root}{target}", deep=True)
    return root


def _overlay(lower: str, target: Path, layer: Path) -> None:
    for name in ("upper", "work"):
        (layer / name).mkdir(parents=True)
    status = os.stat(lower)
    os.chmod(layer / "upper", status.st_mode & 0o7777)
    os.chown(layer / "upper", status.st_uid, status.st_gid)
    escaped = lower.replace("\\", "\\\\").replace(":", "\\:").replace(",", "\\,")
    ns.mount("overlay", target, "overlay", 0, f"lowerdir={escaped},upperdir={layer}/upper,workdir={layer}/work")


def _private_folder(disk: Path, root: Path, path: str) -> None:
    own = disk / "own" / path.strip("/").replace("/", "-")
    own.mkdir(parents=True)
    own.chmod({"/tmp": 0o1777}.get(path, 0o700 if path.endswith(".ssh") else 0o755))
    _bind_folder(own, root, path)


def _bind_folder(source: Path, root: Path, path: str) -> None:
    target = Path(f"{root}{path}")
    target.mkdir(parents=True, exist_ok=True)
    ns.bind(source, target)


def take_over_root(kept: int) -> None:
    """Go on with the files of an earlier boot, as a reboot does: all but /run, /dev/shm and the kernel's own."""
    ns.join_opened(kept)
    ns.unshare(ns.NEWNS)
    ns.make_mounts_private()
    ns.mount("vcluster-run", "/run", "tmpfs", ns.MS_NOSUID, "mode=755")  # something may be mounted below the old one
    mount_kernel_folders(Path("/"))


def mount_kernel_folders(root: Path) -> None:
    safe = ns.MS_NOSUID | ns.MS_NODEV | ns.MS_NOEXEC
    ns.mount("proc", root / "proc", "proc", safe)
    ns.bind("/dev", root / "dev")
    (root / "dev/pts").mkdir(exist_ok=True)
    options = "newinstance,ptmxmode=0666,mode=620,gid=5"
    ns.mount("devpts", root / "dev/pts", "devpts", ns.MS_NOSUID | ns.MS_NOEXEC, options)
    ns.bind(root / "dev/pts/ptmx", root / "dev/ptmx")
    (root / "dev/shm").mkdir(exist_ok=True)
    ns.mount("vcluster-shm", root / "dev/shm", "tmpfs", ns.MS_NOSUID | ns.MS_NODEV, "mode=1777")
    try:
        ns.mount("sysfs", root / "sys", "sysfs", safe | ns.MS_RDONLY)
        if os.path.isdir("/sys/fs/cgroup"):
            ns.mount("cgroup2", root / "sys/fs/cgroup", "cgroup2", safe)
    except OSError:
        return  # a locked-down container refuses these two; nothing of a host depends on them
