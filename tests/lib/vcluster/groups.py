"""Control groups of one cluster: to freeze a host and to read what head and hosts cost in CPU time.

    <cgroup v2>/vcluster-<id>/head
    <cgroup v2>/vcluster-<id>/hosts/<name>

Where only version 1 may be written, its freezer and cpuacct are used; where neither, a host is frozen by SIGSTOP.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tests.lib.vcluster.processes import await_true

ROOT = Path("/sys/fs/cgroup")
_VERSION_2 = (ROOT, ROOT / "unified")
_VERSION_1 = ("freezer", "cpuacct")
_DEADLINE_S = 10.0


class Groups:
    """The groups of cluster `cluster_id`; they exist from `make` to `remove`."""

    def __init__(self, cluster_id: str) -> None:
        self._name = f"vcluster-{cluster_id}"

    def make(self) -> None:
        for base in self._candidates():
            try:
                (base / self._name / "hosts").mkdir(parents=True, exist_ok=True)
                (base / self._name / "head").mkdir(exist_ok=True)
            except OSError:
                continue  # read-only here, as in most containers: see freeze_file and cpu_seconds for what is lost

    def _candidates(self) -> Sequence[Path]:
        found = [base for base in _VERSION_2 if (base / "cgroup.controllers").exists()]
        return found[-1:] or [ROOT / kind for kind in _VERSION_1 if (ROOT / kind).is_dir()]

    def _trees(self) -> list[Path]:
        return [base / self._name for base in self._candidates() if (base / self._name).is_dir()]

    def join_files(self, name: str) -> tuple[str, ...]:
        """The cgroup.procs files that processes of `name` (a host or "head") write "0" to."""
        files = []
        for tree in self._trees():
            folder = tree / name if name == "head" else tree / "hosts" / name
            folder.mkdir(exist_ok=True)
            files.append(str(folder / "cgroup.procs"))
        return tuple(files)

    def freeze(self, host: str, *, frozen: bool) -> bool:
        """Stop or continue with every process of the host; False when no group can do that here."""
        return any(_set_frozen(tree / "hosts" / host, frozen=frozen) for tree in self._trees())

    def cpu_seconds(self, which: str) -> float | None:
        """CPU time of "head" or of all "hosts" so far; None where no group counts it."""
        for tree in self._trees():
            if (tree / which / "cpu.stat").exists():
                lines = dict(line.split() for line in (tree / which / "cpu.stat").read_text().splitlines())
                return int(lines["usage_usec"]) / 1e6
            if (tree / which / "cpuacct.usage").exists():
                return int((tree / which / "cpuacct.usage").read_text()) / 1e9
        return None

    def kill_all(self) -> None:
        """SIGKILL to all of the cluster, frozen hosts included; version 1 cannot, there the inits' death does it."""
        for tree in self._trees():
            if (tree / "cgroup.kill").exists():
                (tree / "cgroup.kill").write_text("1")

    def remove(self) -> None:
        """After the last process has gone; raises OSError when a group is still in use after 10 s."""
        for tree in self._trees():
            if not await_true(partial(_remove_tree, tree), deadline_s=_DEADLINE_S):
                raise OSError(f"{tree} is still in use; see its cgroup.procs")


def _set_frozen(folder: Path, *, frozen: bool) -> bool:
    """Whether this group can freeze and has done so."""
    for control, value, report, wanted in (
        ("cgroup.freeze", str(int(frozen)), "cgroup.events", f"frozen {int(frozen)}"),
        ("freezer.state", ("THAWED", "FROZEN")[frozen], "freezer.state", ("THAWED", "FROZEN")[frozen]),
    ):
        if (folder / control).exists():
            (folder / control).write_text(value)
            return _await_text(folder / report, wanted)
    return False


def _await_text(path: Path, wanted: str) -> bool:
    return await_true(lambda: wanted in path.read_text(), deadline_s=_DEADLINE_S)


def _remove_tree(tree: Path) -> bool:
    for folder, _, _ in sorted(os.walk(tree), key=lambda entry: len(entry[0]), reverse=True):
        try:
            os.rmdir(folder)
        except OSError:
            return False  # a dying process holds it for a moment
    return not tree.exists()


def groups_present(cluster_id: str) -> Sequence[str]:
    """The groups of a cluster that exist now, for checking that none is left."""
    freezer = ROOT / "freezer" / f"vcluster-{cluster_id}"  # of slurm.py
    return [str(tree) for tree in {*Groups(cluster_id)._trees(), freezer} if tree.is_dir()]
