"""Jobs in a real Kubernetes of one node: the cluster, started once, and the command next to its API server. Only with
--kubernetes."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ascendrun.core.settings import STATE_VARIABLE
from tests.cluster.conftest import Ascendrun, head_environ
from tests.cluster.leftovers import kill
from tests.cluster.scenes import CODE, DEADLINE_S, ENOUGH, Scene, await_that
from tests.lib.kubernetes import BIN, IMAGE, Kubernetes, require_kubernetes
from tests.lib.vcluster.processes import Process
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
        command = [sys.executable, "-m", "ascendrun", *map(str, arguments)]
        return self.kubernetes.argv(command, cwd=str(self.folder))

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
        return self.start(self.job(name, *words, per_node=per_node, more=more), *self.options(nodes))

    def options(self, nodes: int = 2) -> tuple[str, ...]:
        return ("--engine", "cloud", "--set", f"nodes={nodes}")

    def job(self, name: str, *words: object, per_node: int = 2, more: str = "", command: Any = None, **_: Any) -> Path:
        path = self.folder / f"{name}.yaml"
        path.write_text(
            f"name: {name}\ncommand: {json.dumps(command or ['python3', 'rank.py', *map(str, words)])}\n"
            f"workdir: {{path: code}}\ndevices: {{type: cpu, per_node: {per_node}}}\n{more}"
        )
        return path

    def everywhere(self, job: str) -> list[int]:
        return [one.pid for one in self.of(job) if "ASCENDRUN_SAMPLER" not in one.environ]

    def of(self, job: str) -> list[Process]:
        """The processes of a job in any pod."""
        mark = f"{self.run(job)}."
        found = self.kubernetes.processes()
        return [one for one in found if one.environ.get("ASCENDRUN_RUN_ID", "").startswith(mark)]

    def await_nobody(self, job: str, *, deadline_s: float = DEADLINE_S) -> None:
        await_that(lambda: not self.of(job), "no process is left", deadline_s=deadline_s)

    def enough(self) -> None:
        for one in self.kubernetes.processes():
            if "RANK" in one.environ:
                Path(f"/proc/{one.pid}/root{ENOUGH}").touch()

    def pods(self) -> list[dict[str, Any]]:
        items = json.loads(self.kubernetes.kubectl("get", "pods", "-o=json").stdout)["items"]
        return [item for item in items if "ascendrun/key" in item["metadata"].get("labels", {})]

    def codes(self, job: str) -> list[str]:
        """Codes of a job's events, and those of their reasons."""
        events = self.show(job)["events"]
        reasons = [event["values"].get("reason") for event in events]
        return [event["code"] for event in events] + [one["code"] for one in reasons if isinstance(one, dict)]

    def controllers(self) -> list[Process]:
        mine, found = str(self.ascendrun.state_dir), self.kubernetes.processes()
        return [one for one in found if one.environ.get(STATE_VARIABLE) == mine and "controller" in one.argv]

    def links(self) -> list[Process]:
        """The streams of the connections to pods."""
        found = self.kubernetes.processes()
        return [one for one in found if Path(one.argv[0]).name == "kubectl" and {"exec", "--stdin"} <= {*one.argv}]

    def head_argv(self, argv: Sequence[str]) -> list[str]:
        return self.kubernetes.argv(argv)

    def await_no_pod(self) -> None:
        await_that(lambda: not self.pods(), "no pod is left")

    def close(self) -> None:
        """End the controller and what is left."""
        kill(self.controllers(), signal.SIGTERM)
        await_that(lambda: not self.controllers(), "the controller has ended")
        self.kubernetes.kubectl("delete", "pods", "--all", "--wait=false", "--grace-period=1")
        self.await_no_pod()


@pytest.fixture
def scene(kubernetes: Kubernetes, tmp_path: Path) -> Iterator[KubeScene]:
    with closing(KubeScene(KubeAscendrun(kubernetes, tmp_path))) as made:
        yield made
