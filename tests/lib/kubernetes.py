"""A real Kubernetes of one node, in network, process and mount namespaces of its own: nothing of it outlives `down`.

`bin/setup-kubernetes` has built it. What the kubelet writes to sysctls goes to plain files. The user `admin` may do
everything, `trainer` nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ascendrun.core.errors import AscendrunError
from tests.lib.vcluster import enter
from tests.lib.vcluster.processes import Process, await_true, read_process
from tests.lib.vcluster.requirements import NotSupportedError
from tests.lib.vcluster.spec import root_home

SETUP = Path(__file__).resolve().parents[2] / "bin/setup-kubernetes"
CACHE = Path(root_home()) / ".cache/ascendrun/kubernetes"
BIN = CACHE / "bin"
IMAGE = "localhost/site/python:1"
READY_S = 120.0
GATEWAY = "10.88.0.1"
PARTS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "containerd", "kubelet")
_INIT = """\
import signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("up", flush=True)
while True:
    signal.pause()
"""
_BOOT = f"""
set -e
mount --make-rprivate /
mount -t proc proc /proc
mount -t tmpfs tmpfs /run
ip link set lo up
ip link add kbr0 type bridge
ip addr add {GATEWAY}/16 dev kbr0
ip link set kbr0 up
for name in vm/overcommit_memory kernel/panic kernel/panic_on_oops; do
    mkdir -p "$1/sysctl/${{name%/*}}" && cat "/proc/sys/$name" >"$1/sysctl/$name"
    mount --bind "$1/sysctl/$name" "/proc/sys/$name"
done
exec {sys.executable} -c "$2"
"""
_READY = '{.items[*].status.conditions[?(@.type=="Ready")].status}'
_FLAGS = """
etcd --data-dir={run}/etcd --unsafe-no-fsync --log-level=error
kube-apiserver --etcd-servers=http://127.0.0.1:2379 --secure-port=6443 --bind-address=127.0.0.1
    --advertise-address={gateway} --service-cluster-ip-range=10.99.0.0/24 --cert-dir={run}/certs
    --token-auth-file={run}/tokens.csv --authorization-mode=RBAC --service-account-issuer=https://it
    --service-account-signing-key-file={run}/sa.key --service-account-key-file={run}/sa.key --allow-privileged
    --disable-admission-plugins=ServiceAccount --kubelet-preferred-address-types=InternalIP
kube-controller-manager --leader-elect=false --kubeconfig={run}/kubeconfig
    --service-account-private-key-file={run}/sa.key
kube-scheduler --leader-elect=false --kubeconfig={run}/kubeconfig
containerd --config={run}/containerd.toml
kubelet --kubeconfig={run}/kubeconfig --config={run}/kubelet.json --root-dir={run}/kubelet --container-runtime=remote
    --container-runtime-endpoint=unix://{run}/containerd.sock --hostname-override=node1 --node-ip={gateway}
"""


def require_kubernetes() -> None:
    """Raises NotSupportedError unless it was built."""
    if not (CACHE / "ready").exists():
        raise NotSupportedError("Kubernetes is not built", hint="bin/setup-kubernetes")


class Kubernetes:
    """One cluster, of which all files are in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.kubeconfig = folder, folder / "kubeconfig"
        self._parts: dict[str, subprocess.Popen[bytes]] = {}
        boot = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "sh", "-c", _BOOT, "boot"]
        self._init = subprocess.Popen([*boot, str(folder), _INIT], stdout=subprocess.PIPE)
        assert self._init.stdout is not None and self._init.stdout.readline() == b"up\n"
        self.pid = int(Path(f"/proc/{self._init.pid}/task/{self._init.pid}/children").read_text().split()[0])

    def argv(self, argv: Sequence[str], *, cwd: str = "/") -> list[str]:
        """The command line that runs a command inside."""
        return [sys.executable, "-I", "-S", enter.__file__, str(self.pid), cwd, "-", "--", *argv]

    def up(self) -> None:
        """Raises AscendrunError with the last lines of a log."""
        subprocess.run([SETUP, "--files", self.folder], check=True, env={**os.environ, "HOME": root_home()})
        load = [str(BIN / "ctr"), f"--address={self.folder}/containerd.sock", "--namespace=k8s.io", "images", "import"]
        load = self.argv([*load, str(self.folder / "images.tar")])
        awaited: dict[str, Callable[[], bool]] = {
            "kube-apiserver": lambda: self.kubectl("get", "--raw=/readyz").returncode == 0,
            "containerd": lambda: subprocess.run(load, capture_output=True).returncode == 0,
            "kubelet": lambda: "True" in self.kubectl("get", "nodes", f"-o=jsonpath={_READY}").stdout,
        }
        for name in PARTS:
            self.start(name)
            if name in awaited and not await_true(awaited[name], deadline_s=READY_S):
                lines = (self.folder / f"{name}.log").read_text(errors="replace").splitlines()[-5:]
                raise AscendrunError(f"{name} has not started\n" + "\n".join(lines))

    def down(self) -> None:
        """End every process, and remove the control groups of containers."""
        self._init.kill()
        for process in (self._init, *self._parts.values()):
            process.wait()
        groups = [path for group in Path("/sys/fs/cgroup").glob("*/k8s.io") for path in (group, *group.rglob("*/"))]
        for path in sorted(groups, reverse=True):
            path.rmdir()

    def start(self, name: str) -> None:
        flags = next(one for one in _FLAGS.replace("\n    ", " ").split("\n") if one.split(" ")[0] == name).split()[1:]
        argv = [str(BIN / name), *(flag.format(run=self.folder, gateway=GATEWAY) for flag in flags)]
        env = {**os.environ, "PATH": f"{BIN}:/usr/sbin:/usr/bin:/sbin:/bin"}
        with open(self.folder / f"{name}.log", "ab") as log:
            self._parts[name] = subprocess.Popen(self.argv(argv), stdout=log, stderr=log, env=env)

    def stop(self, name: str) -> None:
        """SIGKILL a part."""
        for process in self.processes():
            if process.argv[0] == str(BIN / name):
                os.kill(process.pid, 9)
        self._parts.pop(name).wait()

    def processes(self) -> list[Process]:
        """Every process inside, containers too."""
        found, own = [], Path(f"/proc/{self.pid}/ns/pid").readlink()
        for path in Path("/proc").glob("[0-9]*"):
            try:
                is_inside = (path / "ns/pid").readlink() == own or _is_below(int(path.name), self.pid)
            except (OSError, ValueError):
                continue
            process = read_process(int(path.name)) if is_inside else None
            if process is not None and process.argv:
                found.append(process)
        return found

    def kubectl(self, *argv: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        command = [str(BIN / "kubectl"), f"--kubeconfig={self.kubeconfig}", *argv]
        return subprocess.run(self.argv(command), input=stdin, capture_output=True, text=True, timeout=60, cwd="/")


def _is_below(pid: int, ancestor: int) -> bool:
    while pid not in (0, ancestor):
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid == ancestor
