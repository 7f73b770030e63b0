"""Jobs on two simulated nodes, started, watched, stopped and explained in Chinese: no English sentence anywhere."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ascendrun.cli import main
from ascendrun.cli.commands.demo import demo_environ
from ascendrun.core.settings import LOGIN_FILE, Settings, local_root
from ascendrun.sim.demo import nodes
from tests.chinese import english_lines, sentences
from tests.lib.vcluster.processes import await_that

RANK = """
import json, os, signal, sys, time
rank, seconds, bad = int(os.environ["RANK"]), float(sys.argv[1]), sys.argv[2:]  # seconds 0: until it is stopped
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print(f"rank {rank}：开始", flush=True)
with open(os.environ["ASCENDRUN_METRICS_FILE"], "a") as metrics:
    for step in range(1, 6):
        line = {"step": step, "timestamp": time.time(), "loss": 1 / step, "step_s": 0.1, "tokens_per_s": 1000.0}
        print(json.dumps(line), file=metrics, flush=True)
        time.sleep(seconds / 5)
if not seconds:
    signal.pause()
if str(rank) in bad:
    raise ValueError("样本 17 没有标签")
"""
JOB = """
name: {name}
command: [python3, rank.py, {words}]
nodes: 2
devices: {{type: npu, per_node: 2}}
hostfile: demo.hosts
workdir: {{path: code}}
setup: source "$ASCENDRUN_SIM_ROOT/usr/local/Ascend/ascend-toolkit/set_env.sh"
checks: {{skip: [torch, torch-npu, hccl-ports, device-files, variables-consistency]}}
sampling: {{interval_s: 0.5}}
"""
PIPELINE = """
name: pipe-1
nodes: 1
devices: {type: cpu, per_node: 1}
hostfile: demo.hosts
workdir: {path: code}
stages:
- {name: one, command: [python3, rank.py, '0.1', '0']}
- {name: two, command: [python3, rank.py, '0.1'], needs: one}
"""
SOURCES = "Meta RSC-1, 16k A100, 11 months (arXiv 2410.21680)"
"""Of the forecast: the name of a publication."""


class Tour:
    """The command line in a directory of its own, in a Chinese locale; `english` collects what it should not print."""

    def __init__(self, folder: Path, capture: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capture = folder, capture
        self.english: list[str] = []

    def __call__(self, command: str, *, code: int = 0) -> str:
        """What the command printed on stdout."""
        self._capture.readouterr()
        found = main(shlex.split(command))
        printed = self._capture.readouterr()
        screen = printed.out + printed.err
        assert found == code, f"{command}: {found}\n{screen}"
        if " -o json" in command:
            texts = [text for _, text in sentences(json.loads(printed.out))]
            screen = "\n".join(texts)
        self.english += [f"{command}: {line}" for line in english_lines(screen, SOURCES)]
        return printed.out

    def write(self, name: str, *words: object, **changes: str) -> None:
        """A job file; `changes`: old and new text."""
        text = JOB.format(name=name, words=", ".join(json.dumps(str(word)) for word in words))
        for old, new in changes.items():
            text = text.replace(old, new)
        (self.folder / f"{name}.yaml").write_text(text, encoding="utf-8")

    def await_running(self, job: str) -> None:
        await_that(lambda: json.loads(self(f"show {job} -o json"))["job"]["state"] == "RUNNING", f"{job} runs")

    def fault(self, *words: str) -> None:
        """Injects a fault of an NPU, or clears it."""
        subprocess.run([sys.executable, "-m", "ascendrun.sim.ascend", *words], cwd=self.folder, check=True)


@pytest.fixture
def tour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Tour]:
    environ = demo_environ(os.environ, tmp_path)
    environ |= {"LANG": "zh_CN.UTF-8", "LC_ALL": "", "LC_MESSAGES": "", "ASCENDRUN_LANG": ""}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    nodes.make_nodes(tmp_path)
    nodes.make_job(tmp_path)
    (tmp_path / "code" / "rank.py").write_text(RANK, encoding="utf-8")
    (tmp_path / "state").mkdir(mode=0o700)
    for name in nodes.NAMES:
        root = local_root(Settings(state_dir=tmp_path / "state"), name)
        root.mkdir(mode=0o700, parents=True)
        login = nodes.login_of(tmp_path, name, environ)
        (root / LOGIN_FILE).write_text("".join(f"{one}={value}\n" for one, value in login.items()))
    config = tmp_path / "config" / "ascendrun" / "config.yaml"
    config.parent.mkdir(parents=True)
    config.write_text(
        "hook:\n  command: ['true']\nnotify:\n- {type: generic, name: team, url: 'http://127.0.0.1:9/x'}\n"
    )
    config.chmod(0o600)
    yield Tour(tmp_path, capsys)
    main(["controller", "stop"])


def test_jobs_from_start_to_end(tour: Tour) -> None:
    tour.write("good-1", 1)
    tour.write("bad-1", 1, 3)
    tour.write("long-1", 0)
    tour.write("lost-1", python3="nosuchprogram")
    tour.write("setup-1", **{"setup: source": "setup: exit 3; source"})
    (tour.folder / "pipe.yaml").write_text(PIPELINE, encoding="utf-8")

    tour("nodes -H demo.hosts -o wide")
    tour("env job.yaml --diff")
    tour("env job.yaml --write env.sh")
    tour("exec -H demo.hosts -- echo 好")
    tour("exec -H demo.hosts -- sh -c 'exit 3'", code=6)
    tour("exec -H demo.hosts -- nosuchprogram", code=6)
    tour("trust -H demo.hosts")
    tour("doctor job.yaml --quick")
    tour.fault("fault", "nodes/npu2", "3", "health_alarm")
    tour("doctor job.yaml --quick", code=3)
    tour("doctor job.yaml --quick --fix-script", code=3)
    tour("submit good-1.yaml", code=1)
    tour.fault("clear", "nodes/npu2")
    tour("submit good-1.yaml --dry-run")
    tour("submit pipe.yaml --dry-run")
    tour("notify")
    tour("notify --test", code=6)
    tour("config")
    tour("submit good-1.yaml")
    for name in ("bad-1", "lost-1", "setup-1", "pipe"):
        tour(f"submit {name}.yaml", code=1)
    tour("submit long-1.yaml --detach")
    tour.await_running("long-1")
    tour("submit good-1.yaml --detach")  # it waits for the nodes
    for command in ("ps", "ps -a", "show long-1", "show bad-1 -o wide", "show pipe-1", "events", "top --once"):
        tour(command)
    for command in ("nodes -H demo.hosts", "logs bad-1", "logs bad-1 --files", "logs bad-1 --grep 标签 -t", "notify"):
        tour(command)
    for job in ("bad-1", "bad-1 --collect", "long-1", "lost-1", "setup-1", "pipe-1.one"):
        tour(f"explain {job}")
    for command in ("report bad-1", "bundle bad-1", "bundle bad-1 --layout ascend-fd --dry-run", "controller status"):
        tour(command)
    for command in ("ps -a", "show bad-1", "events", "explain bad-1", "report bad-1"):
        tour(f"{command} -o json")
    tour("doctor job.yaml --quick -o json", code=3)  # long-1 uses the devices
    tour("stop good-1", code=0)
    tour("stop long-1 --no-wait")
    tour("wait long-1", code=1)
    tour("show long-1")
    tour("stop long-1", code=7)
    tour("controller stop")
    assert tour.english == [], "\n".join(tour.english)
