"""Help and version come at once: nothing heavy is imported for them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ascendrun
from ascendrun import __version__
from ascendrun.cli.app import COMMANDS

PACKAGE = Path(ascendrun.__file__).parent
HEAVY = {
    "paramiko",
    "cryptography",
    "pydantic",
    "rich",
    "torch",
    "numpy",
    "asyncio",
    "textual",
    "ClusterShell",
    "psutil",
    "yaml",
    "sqlite3",
    "prometheus_client",
}


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "ascendrun", *arguments], text=True, capture_output=True, timeout=60
    )


def imported(log: str) -> list[str]:
    return [line.rsplit("|", 1)[1].strip() for line in log.splitlines() if line.startswith("import time:")]


def test_the_import_log_is_read_right() -> None:
    run = subprocess.run([sys.executable, "-X", "importtime", "-c", "import sqlite3"], text=True, capture_output=True)
    assert "sqlite3" in imported(run.stderr)


def test_version_is_answered_without_the_command_line() -> None:
    run = start("--version")
    assert (run.returncode, run.stdout) == (0, f"ascendrun {__version__}\n")
    assert not {name.split(".")[0] for name in imported(run.stderr)} & {"click", *HEAVY}
    assert "ascendrun.cli" not in imported(run.stderr)


HELPS = """
import contextlib, io, json, os, sys
import ascendrun.cli.app
from ascendrun.__main__ import main
for words in json.loads(sys.argv[1]):
    if os.fork() == 0:
        sys.argv[1:] = [*words, "--help"]
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            code = main()
        print(json.dumps([words, code, printed.getvalue(), [*sys.modules]]), flush=True)
        os._exit(0)
    os.wait()
"""
"""Each as in a new interpreter: what all of them import is imported once, and counts for each."""


@pytest.mark.parametrize(
    "every", [[[]], pytest.param([[verb.name] for verb in COMMANDS], marks=pytest.mark.slow)], ids=["", "of commands"]
)
def test_help_imports_nothing_heavy(every: list[list[str]]) -> None:
    run = subprocess.run([sys.executable, "-c", HELPS, json.dumps(every)], text=True, capture_output=True, timeout=240)
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert [words for words, *_ in found] == every, run.stderr[-2000:]
    for words, code, printed, modules in found:
        assert code == 0 and printed.startswith("Usage: ascendrun"), (words, printed)
        assert {name.split(".")[0] for name in modules} & HEAVY == set(), words


@pytest.mark.slow
def test_nothing_of_the_head_imports_what_paramiko_wants_and_we_never_use(tmp_path: Path) -> None:
    (tmp_path / "invoke.py").write_text("raise SystemExit('invoke was imported')\n")
    names = [
        f"ascendrun.{folder}.{path.stem}"
        for folder in ("head", "backends")
        for path in (PACKAGE / folder).glob("*.py")
        if path.stem != "__init__"
    ]
    code = f"import sys, {', '.join(sorted(names))}; assert 'invoke' not in sys.modules; import importlib.metadata"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(PACKAGE.parent)])}
    run = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, env=environ, timeout=60)
    assert (run.returncode, run.stderr) == (0, "")


def test_a_controller_comes_up_without_what_only_people_and_jobs_need(tmp_path: Path) -> None:
    environ = {**os.environ, "ASCENDRUN_STATE_DIR": str(tmp_path), "ASCENDRUN_CONTROLLER_IDLE_S": "0.1"}
    run = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "ascendrun", "controller", "run"],
        text=True,
        capture_output=True,
        env=environ,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert (tmp_path / "state.db").exists()
    order = imported(run.stderr)
    assert order.index("ascendrun.head.loop.guard") < order.index("ascendrun.cli")  # only a child loads the rest
    names = set(order)
    assert not names & {
        "ascendrun.head.loop.job.runner",
        "ascendrun.core.jobs.job",
        "ascendrun.core.jobs.plan",
        "ascendrun.cluster.jobs",
        "ascendrun.core.logs.redaction",
        "ascendrun.ascend.hccl_env",
    }
    assert not {name.split(".")[0] for name in names} & ((HEAVY | {"click"}) - {"sqlite3"})


@pytest.mark.slow
def test_exec_and_submit_and_their_controller_import_no_more_than_they_need(tmp_path: Path) -> None:
    (tmp_path / "here.hosts").write_text("here addr=local slots=1\n")
    (tmp_path / "job.yaml").write_text("{name: j, command: [sleep, '60'], devices: {type: cpu}, hostfile: here.hosts}")
    state = tmp_path / "state"
    environ = {**os.environ, "ASCENDRUN_STATE_DIR": str(state), "ASCENDRUN_NODE_ROOT": str(tmp_path / "node")}
    environ |= {"PYTHONPATH": str(PACKAGE.parent), "PYTHONPROFILEIMPORTTIME": "1"}

    def run(*arguments: str) -> tuple[set[str], list[str]]:  # modules of the command, and of the controller after it
        argv = [sys.executable, "-m", "ascendrun", *arguments]
        done = subprocess.run(argv, env=environ, cwd=tmp_path, capture_output=True, text=True, check=True)
        return set(imported(done.stderr)), imported((state / "controller.log").read_text())

    jobs = {"ascendrun.core.jobs.plan", "ascendrun.cluster.jobs", "ascendrun.query.submit", "ascendrun.health"}
    packages = {"importlib.metadata", "email", "zipfile", "ascendrun.core.engine_types"}
    command, controller = run("exec", "-H", "here.hosts", "--", "true")
    try:
        assert not command & {*jobs, *packages, "tempfile", "logging", "sqlite3"}
        assert not {*controller} & {*jobs, *packages, "ascendrun.head.loop.job.runner"}
        assert not {name.split(".")[0] for name in {*command, *controller}} & (HEAVY - {"sqlite3"})
        command, controller = run("submit", "-d", "job.yaml")
        run("stop", "--now", "j")
        assert not command & {*packages, "paramiko", "asyncio", "rich", "ascendrun.health"}
        assert not command & {"pydantic", "yaml", "ascendrun.core.jobfile.model", "ascendrun.query.submit"}
        assert not {*controller[: controller.index("ascendrun.core.jobfile.model")]} & packages
    finally:
        run("controller", "stop")


def test_a_controller_comes_up_without_the_methods_of_messages_that_it_does_not_use() -> None:
    code = (
        "import ascendrun.head.loop.controller; from ascendrun.head.protocol.messages import Message, Request; "
        "kinds = {*Message.__subclasses__(), *Request.__subclasses__()} - {Request}; "
        "print(len(kinds), [kind.__name__ for kind in kinds if '__repr__' in vars(kind)])"
    )
    run = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=60)
    count, _, made = run.stdout.strip().partition(" ")
    assert (int(count) > 50, made) == (True, "[]"), run.stderr


def test_a_python_that_is_too_old_is_told_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ascendrun import __main__

    monkeypatch.setattr(sys, "version_info", (3, 8, 18))
    assert __main__.main() == 3
    assert "needs Python 3.9 or newer" in capsys.readouterr().err


def test_doctor_without_a_job_imports_nothing_that_reads_job_files() -> None:
    code = (
        "import sys; import ascendrun.cli.commands.doctor, ascendrun.cluster.checks; "
        "from ascendrun.cluster import Cluster; Cluster().checks.engine(None); print(*sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=60)
    loaded = set(run.stdout.split())
    assert "ascendrun.health.checks" in loaded, run.stderr
    unneeded = {"pydantic", "yaml", "http.client", "ascendrun.core.jobfile.model", "ascendrun.query.submit"}
    assert not loaded & unneeded


def test_hosts_are_read_without_what_reads_job_files(tmp_path: Path) -> None:
    """`exec` and `nodes` read a hostfile each time."""
    (tmp_path / "hosts").write_text("npu01 slots=8\n")
    code = (
        "import sys; import ascendrun.query.host_views; from ascendrun.cluster import Cluster; "
        "Cluster().hosts.select(hostfile=sys.argv[1]); print(*sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "hosts")], text=True, capture_output=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    names = set(run.stdout.split())
    assert "ascendrun.core.hosts" in names
    assert not names & {"ascendrun.core.jobs.job", "ascendrun.core.machines", "ascendrun.core.events"}
    assert {name.split(".")[0] for name in run.stdout.split()} & HEAVY == set()
