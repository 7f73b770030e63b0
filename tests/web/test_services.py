"""Metrics of a real job in the programs that people open them with: TensorBoard, MLflow, Prometheus."""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import urllib.request
import venv
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode

import pytest

from tests.lib.vcluster.processes import await_that
from tests.ports import free_port

pytestmark = [pytest.mark.thorough, pytest.mark.slow, pytest.mark.timeout(900)]
CHECKOUT = Path(__file__).resolve().parents[2]
PYTHON = CHECKOUT / ".venv-trackers" / "bin" / "python"
START_S = 240.0
TRAINING = """import os, time, ascendrun
for step in range(1, 4):
    ascendrun.log(step=step, loss=4.0 / step)
while not os.path.exists({go!r}):
    time.sleep(0.1)
ascendrun.log(step=4, loss=0.5)
ascendrun.log(step=4, eval_accuracy=0.75)
"""


@pytest.fixture(scope="module")
def trackers() -> Path:
    """An interpreter that has the extra `trackers` over the packages of .venv."""
    folder, lock = PYTHON.parents[1], Path(__file__).with_name("trackers.txt")
    known = folder / "trackers.txt"
    if not known.exists() or known.read_text() != lock.read_text():
        venv.create(folder, with_pip=True, clear=True)
        target = next((folder / "lib").glob("python*/site-packages"))
        (target / "below.pth").write_text("\n".join(site.getsitepackages()))
        install = [folder / "bin" / "pip", "install", "-q", "--no-deps", "-r", lock]
        assert subprocess.run(install, stdin=subprocess.DEVNULL).returncode == 0
        known.write_text(lock.read_text())
    return PYTHON


@dataclass(frozen=True)
class Place:
    """A user with a job that logs three steps, and a fourth one when `go` exists."""

    folder: Path
    python: Path
    environ: Mapping[str, str]

    def ascendrun(self, *argv: str) -> str:
        done = subprocess.run(
            [self.python, "-m", "ascendrun", *argv], cwd=self.folder, env=self.environ, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def finish(self) -> None:
        (self.folder / "go").touch()
        self.ascendrun("wait", "curves")


@pytest.fixture
def place(tmp_path: Path, trackers: Path) -> Iterator[Place]:
    (tmp_path / "train.py").write_text(TRAINING.format(go=str(tmp_path / "go")))
    (tmp_path / "local.hosts").write_text("local1 slots=1 addr=local\n")
    (tmp_path / "job.yaml").write_text(
        "name: curves\ncommand: [python, train.py]\nnodes: 1\ndevices: {type: cpu, per_node: 1}\n"
        "hostfile: local.hosts\nworkdir: {path: ., exclude: [state/, nodes/]}\n"
    )
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))},
        "PYTHONPATH": str(CHECKOUT),
        "ASCENDRUN_STATE_DIR": str(tmp_path / "state"),
        "ASCENDRUN_NODE_ROOT": str(tmp_path / "nodes"),
    }
    made = Place(tmp_path, trackers, environ)
    made.ascendrun("submit", "-d", "job.yaml")
    await_that(lambda: '"step": 3' in made.ascendrun("ps", "-a", "-o", "json"), deadline_s=START_S)
    yield made
    made.finish()
    made.ascendrun("controller", "stop")


@contextmanager
def service(place: Place, *argv: str) -> Iterator[None]:
    with open(place.folder / "service.log", "wb") as log:
        child = subprocess.Popen(argv, cwd=place.folder, env=place.environ, stdout=log, stderr=log)
        try:
            yield
        finally:
            child.terminate()
            child.wait(60)


def read(url: str, **query: str) -> Any:
    """The JSON that a service replies; None while it does not reply."""
    try:
        with urllib.request.urlopen(f"{url}?{urlencode(query)}", timeout=30) as reply:
            return json.load(reply)
    except (URLError, ConnectionError, TimeoutError, ValueError):
        return None


def test_tensorboard_shows_a_running_job_and_its_end(place: Place) -> None:
    port = free_port()
    export = subprocess.Popen(
        [place.python, "-m", "ascendrun", "export", "curves", "--follow"], cwd=place.folder, env=place.environ
    )
    argv = ("--logdir", "runs", "--host", "127.0.0.1", "--port", str(port), "--reload_interval", "1")
    with service(place, str(place.python), "-m", "tensorboard.main", *argv):

        def curve(name: str) -> list[tuple[int, float]]:
            url = f"http://127.0.0.1:{port}/data/plugin/scalars/scalars"
            return [(step, round(value, 3)) for _, step, value in read(url, run="j-0001", tag=name) or []]

        await_that(lambda: curve("train/loss") == [(1, 4.0), (2, 2.0), (3, 1.333)], deadline_s=START_S)
        place.finish()
        await_that(lambda: curve("train/loss")[3:] == [(4, 0.5)], deadline_s=START_S)
        await_that(lambda: curve("eval/accuracy") == [(4, 0.75)], deadline_s=START_S)
    assert export.wait(60) == 0, "it ends with the job"


def mlflow_runs(port: int) -> list[str]:
    """The ids of the runs called j-0001, as MLflow's server returns them, the newest first."""
    api = f"http://127.0.0.1:{port}/api/2.0/mlflow"
    found = read(f"{api}/experiments/search", max_results="20") or {"experiments": []}
    ids = [one["experiment_id"] for one in found["experiments"]]
    request = urllib.request.Request(
        f"{api}/runs/search", json.dumps({"experiment_ids": ids}).encode(), {"Content-Type": "application/json"}
    )
    if not ids:
        return []
    with urllib.request.urlopen(request, timeout=30) as reply:
        infos = [run["info"] for run in json.load(reply).get("runs", ())]
    return [info["run_id"] for info in infos if info["run_name"] == "j-0001"]


def mlflow_history(port: int, run: str, name: str) -> list[tuple[int, float]]:
    api = f"http://127.0.0.1:{port}/api/2.0/mlflow"
    found = read(f"{api}/metrics/get-history", run_id=run, metric_key=name)
    return [(int(one.get("step", 0)), round(one["value"], 3)) for one in (found or {}).get("metrics", ())]


def test_mlflow_shows_a_running_job_and_its_end_and_those_of_two_heads_apart(place: Place) -> None:
    port = free_port()
    export = ("export", "curves", "--format", "mlflow", "-O", "store")
    place.ascendrun(*export)
    argv = ("--host", "127.0.0.1", "--port", str(port), "--workers", "1")
    with service(
        place, str(place.python), "-m", "mlflow", "server", "--backend-store-uri", "sqlite:///store/mlflow.db", *argv
    ):

        def curves(name: str) -> list[list[tuple[int, float]]]:
            return [mlflow_history(port, run, name) for run in mlflow_runs(port)]

        await_that(lambda: curves("train/loss") == [[(1, 4.0), (2, 2.0), (3, 1.333)]], deadline_s=START_S)
        place.finish()
        place.ascendrun(*export)
        whole = [(1, 4.0), (2, 2.0), (3, 1.333), (4, 0.5)]
        assert curves("train/loss") == [whole] and curves("eval/accuracy") == [[(4, 0.75)]]
        other = replace(place, environ={**place.environ, "ASCENDRUN_STATE_DIR": str(place.folder / "nodes" / "other")})
        other.ascendrun("submit", "job.yaml")
        other.ascendrun(*export)
        other.ascendrun("controller", "stop")
        assert curves("train/loss") == [whole, whole]


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="on Debian apt install prometheus")
def test_prometheus_scrapes_a_running_job_and_evaluates_the_rules(place: Place) -> None:
    exporter, port = free_port(), free_port()
    (place.folder / "alerts.yml").write_text(place.ascendrun("metrics", "--grafana", "alerts"))
    (place.folder / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s, evaluation_interval: 1s}\nrule_files: [alerts.yml]\n"
        f"scrape_configs: [{{job_name: ascendrun, static_configs: [{{targets: ['127.0.0.1:{exporter}']}}]}}]\n"
    )
    subprocess.run(["promtool", "check", "config", "prometheus.yml"], cwd=place.folder, check=True, capture_output=True)
    address = ("--config.file=prometheus.yml", f"--web.listen-address=127.0.0.1:{port}", "--storage.tsdb.path=tsdb")
    api = f"http://127.0.0.1:{port}/api/v1"

    def values(query: str) -> list[float]:
        found = read(f"{api}/query", query=query) or {"data": {"result": []}}
        return [float(series["value"][1]) for series in found["data"]["result"]]

    export = (str(place.python), "-m", "ascendrun", "metrics", "--listen", f"127.0.0.1:{exporter}")
    with service(place, *export), service(place, "prometheus", *address):
        await_that(lambda: values('ascendrun_job_step{job_name="curves"}') == [3.0], deadline_s=START_S)
        rules = [rule for group in read(f"{api}/rules")["data"]["groups"] for rule in group["rules"]]
        assert len(rules) > 10
        for rule in rules:
            await_that(lambda query=rule["query"]: read(f"{api}/query", query=query)["status"] == "success")
        for name in ("cluster", "job", "node"):
            for panel in json.loads(place.ascendrun("metrics", "--grafana", name))["panels"]:
                for target in panel.get("targets", ()):
                    query = target["expr"].replace("$job", ".*").replace("$host", ".*")
                    assert read(f"{api}/query", query=query)["status"] == "success", query
        assert values("ascendrun_scrape_ok") == [1.0] and values('sum(ascendrun_jobs{state="RUNNING"})') == [1.0]


def test_a_program_writes_to_all_trackers_without_a_network(trackers: Path, tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from tests.programs.test_trackers import train; "
    code += "train(Path(sys.argv[1]), 'tensorboard', 'swanlab', 'wandb', 'mlflow')"
    environ = {**os.environ, "PYTHONPATH": str(CHECKOUT), "ASCENDRUN_JOB_ID": "j-0007"}
    apart = ["unshare", "--net", str(trackers), "-c", code, str(tmp_path)]
    done = subprocess.run(apart, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=START_S)
    assert done.returncode == 0 and "warning" not in done.stdout, done.stdout + done.stderr
    written = {
        name: sum(path.stat().st_size for path in tmp_path.glob(pattern))
        for name, pattern in {
            "tensorboard": "tensorboard/j-0007/events.*",
            "wandb": "wandb/offline-run-*-j-0007/*.wandb",
            "swanlab": "swanlog/run-*/*.swanlab",
            "mlflow": "mlflow.db",
        }.items()
    }
    assert all(written.values()), written
    query = "import mlflow; c = mlflow.MlflowClient('sqlite:///mlflow.db'); "
    query += "print([(m.step, m.value) for m in c.get_metric_history(mlflow.search_runs(search_all_experiments=True,"
    query += " output_format='list')[0].info.run_id, 'loss')])"
    environ["MLFLOW_TRACKING_URI"] = "sqlite:///mlflow.db"
    asked = subprocess.run([trackers, "-c", query], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert asked.stdout.strip().endswith("[(1, 4.5), (2, 2.5)]"), asked.stderr
