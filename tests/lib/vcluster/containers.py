"""Real containers on the virtual cluster: a dockerd in each host, podman next to it, and one image in both.

The image has no files but names: a job mounts the machine's /usr, and so its Python. It also mounts /proc, since a new
one would show the boot id of the machine in place of that of the host.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ascendrun.core.errors import AscendrunError
from tests.lib.vcluster.machines import Machines
from tests.lib.vcluster.processes import Process, await_true
from tests.lib.vcluster.requirements import require_programs

IMAGE = "localhost/site/python:1"
MOUNTS = ("/usr:/usr:ro", "/proc:/proc", "/tmp:/tmp")
PROGRAMS = {"dockerd": "docker.io", "podman": "podman", "runc": "runc"}
DAEMONS = ("dockerd", "containerd")
READY_S = 30.0
_DOCKERD = "exec dockerd --iptables=false --bridge=none --pidfile /run/docker.pid >/var/log/dockerd.log 2>&1"
_FILES = {
    # The default runtime of podman refuses control groups of two versions, and it raises limits that root may not;
    # there is no control group for the number of processes.
    "etc/containers/containers.conf": "[containers]\npids_limit = 0\n"
    "default_ulimits = ['nofile=1000:1000', 'nproc=1000:1000']\n"
    "[engine]\nruntime = 'runc'\nevents_logger = 'file'\n",
    "etc/containers/storage.conf": "[storage]\ndriver = 'vfs'\n"
    "runroot = '/run/podman'\ngraphroot = '/var/lib/podman'\n",
}


def require_containers() -> None:
    """Raises NotSupportedError with what is missing for containers on this machine."""
    require_programs("containers", PROGRAMS)


def start(cluster: Machines) -> None:
    """Start the daemons and load the image. Raises AscendrunError with the last line of a log."""
    for name in cluster.hosts:
        for path, text in _FILES.items():
            file = Path(cluster.path(name, f"/{path}"))
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        start_daemon(cluster, name)
    for name in cluster.hosts:
        await_daemon(cluster, name)
    first = cluster.hosts[0]
    run(cluster, first, "docker", "import", "-", IMAGE, stdin=image_tar(), check=True)  # its time makes its id
    saved = run(cluster, first, "docker", "save", IMAGE, check=True).stdout
    for name in cluster.hosts:
        for runtime in ("docker", "podman"):
            run(cluster, name, runtime, "load", stdin=saved, check=True)


def start_daemon(cluster: Machines, name: str) -> None:
    cluster.host_run(name, ["setsid", "-f", "sh", "-c", _DOCKERD], check=True, capture_output=True)


def await_daemon(cluster: Machines, name: str) -> None:
    if not await_true(lambda: run(cluster, name, "docker", "info").returncode == 0, deadline_s=READY_S):
        lines = Path(cluster.path(name, "/var/log/dockerd.log")).read_text().splitlines() or ["dockerd has no log"]
        raise AscendrunError(f"{name}: {lines[-1]}")


def run(cluster: Machines, name: str, *argv: str, stdin: bytes = b"", check: bool = False) -> Any:
    done = cluster.host_run(name, list(argv), input=stdin, capture_output=True, cwd="/")
    if check and done.returncode != 0:
        raise AscendrunError(f"{name}: {' '.join(argv)}: {done.stderr.decode(errors='replace')}")
    return done


def engine(site: Mapping[str, Any], runtime: str) -> dict[str, Any]:
    """Return an engine of the settings whose jobs run in the image."""
    return {**site, "image": IMAGE, "runtime": runtime, "mounts": list(MOUNTS)}


def left(cluster: Machines) -> list[str]:
    """Containers of jobs on any host, running or not."""
    found = []
    for name in cluster.hosts:
        for runtime in ("docker", "podman"):
            out = run(cluster, name, runtime, "ps", "--all", "--quiet", "--filter=label=ascendrun.tag").stdout
            found += [f"{name} {runtime} {line}" for line in out.decode().split()]
    return found


def is_daemon(process: Process) -> bool:
    """Whether a process belongs to a dockerd that rests."""
    return bool(process.argv) and Path(process.argv[0]).name in DAEMONS


def image_tar() -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for name in ("usr", "proc", "sys", "dev", "etc", "tmp", "root", "run", "var", "var/tmp"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o1777 if name.endswith("tmp") else 0o755
            archive.addfile(folder)
        for name in ("bin", "lib", "lib64", "sbin"):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, f"usr/{name}"
            archive.addfile(link)
    return data.getvalue()
