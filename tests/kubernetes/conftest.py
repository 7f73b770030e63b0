"""Jobs in a real Kubernetes of one node: the cluster, started once, and the command next to its API server."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ascendrun.core.settings import STATE_VARIABLE
from tests.cluster.conftest import Ascendrun, head_environ
from tests.cluster.scenes import CODE, Scene, await_that
from tests.lib.kubernetes import BIN, IMAGE, Kubernetes, require_kubernetes
from tests.lib.vcluster.requirements import NotSupportedError

MOUNTS = ["/usr:/usr:ro"]


@pytest.fixture(scope="session")
def kubernetes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubernetes]:
    try:
        require_kubernetes()
    except NotSupportedError as refused:
        pytest.skip(f"{refused.message}; {refused.hint}")
    made = Kubernetes(tmp_path_factory.mktemp("kubernetes"))
    try:
        made.up()
        yield made
    finally:
        made.down()


class KubeAscendrun(Ascendrun):
    """The command, in the namespaces of the cluster."""

    def __init__(self, kubernetes: Kubernetes, folder: Path) -> None:
        self.kubernetes, self.folder, self.state_dir = kubernetes, folder, folder / "state"

    def argv(self, *arguments: object) -> list[str]:
        inside = ["env", f"--chdir={self.folder}", sys.executable, "-m", "ascendrun", *map(str, arguments)]
        return self.kubernetes.argv(inside)

    def environ(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        path = f"{BIN}:{os.environ['PATH']}"
        ours = {"KUBECONFIG": str(self.kubernetes.kubeconfig), "XDG_CONFIG_HOME": str(self.folder), "PATH": path}
        return {**head_environ(self.state_dir), **ours, **(more or {})}


class KubeScene(Scene):
    """Jobs of the engine `cloud`, whose image mounts the machine's Python."""

    def __init__(self, ascendrun: KubeAscendrun) -> None:
        self.ascendrun, self.folder, self._run_ids = ascendrun, ascendrun.folder, {}
        self.kubernetes = ascendrun.kubernetes
        (self.folder / "code").mkdir()
        (self.folder / "code/rank.py").write_bytes((CODE / "tests/cluster/rank.py").read_bytes())
        (self.folder / "ascendrun").mkdir()
        self.settings()

    def settings(self, user: str = "admin", **more: object) -> None:
        cloud = {"type": "kubernetes", "context": user, "image": IMAGE, "mounts": MOUNTS, **more}
        (self.folder / "ascendrun/config.yaml").write_text(json.dumps({"engines": {"cloud": cloud}}))

    def launch(self, name: str, *words: object, nodes: int = 2, per_node: int = 2, more: str = "") -> str:
        return self.start(self.file(name, *words, nodes=nodes, per_node=per_node, more=more), "--engine", "cloud")

    def file(self, name: str, *words: object, nodes: int = 2, per_node: int = 2, more: str = "") -> Path:
        path = self.folder / f"{name}.yaml"
        command = json.dumps(["python3", "rank.py", *map(str, words)])
        path.write_text(
            f"name: {name}\ncommand: {command}\nworkdir: {{path: code}}\nnodes: {nodes}\n"
            f"devices: {{type: cpu, per_node: {per_node}}}\n{more}"
        )
        return path

    def everywhere(self, job: str) -> list[int]:
        mark = f"{self.run(job)}."
        return [
            pid
            for pid, _, environ in self.kubernetes.processes()
            if environ.get("ASCENDRUN_RUN_ID", "").startswith(mark) and "ASCENDRUN_SAMPLER" not in environ
        ]

    def pods(self) -> list[dict[str, Any]]:
        items = json.loads(self.kubernetes.kubectl("get", "pods", "-o=json").stdout)["items"]
        return [item for item in items if "ascendrun/key" in item["metadata"].get("labels", {})]

    def codes(self, job: str) -> list[str]:
        """Codes of a job's events, and those of their reasons."""
        events = self.show(job)["events"]
        reasons = [event["values"].get("reason") for event in events]
        return [event["code"] for event in events] + [one["code"] for one in reasons if isinstance(one, dict)]

    def controllers(self) -> list[int]:
        mine, found = str(self.ascendrun.state_dir), self.kubernetes.processes()
        return [pid for pid, argv, env in found if env.get(STATE_VARIABLE) == mine and "controller" in " ".join(argv)]

    def kill(self, pids: list[int], number: signal.Signals = signal.SIGKILL) -> None:
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def await_no_pod(self) -> None:
        await_that(lambda: not self.pods(), "no pod is left")


@pytest.fixture
def scene(kubernetes: Kubernetes, tmp_path: Path) -> Iterator[KubeScene]:
    made = KubeScene(KubeAscendrun(kubernetes, tmp_path))
    yield made
    made.kill(made.controllers(), signal.SIGTERM)
    await_that(lambda: not made.controllers(), "the controller has ended")
    kubernetes.kubectl("delete", "pods", "--all", "--wait=false", "--grace-period=1")
    await_that(lambda: not made.pods(), "no pod is left")
