"""Folders of hosts that fail on demand."""

from __future__ import annotations

import shutil
import subprocess
import zlib
from pathlib import Path

from tests.lib.vcluster.cables import Cables
from tests.lib.vcluster.faultfs import FaultFs, serve
from tests.lib.vcluster.spec import root_home
from tests.lib.vcluster.state import name_process

NODE_FOLDER = f"{root_home()}/.ascendrun"


class Folders(Cables):
    """Faults of the folders of a host or the "head", by name."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._servers: dict[str, subprocess.Popen[bytes]] = {}

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
