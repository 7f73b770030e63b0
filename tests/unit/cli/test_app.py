"""The command line as a process: on a terminal, in a pipe, interrupted; and what it imports."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest

from ascendrun.cli.app import COMMANDS
from ascendrun.cli.commands.job_files import QUESTIONS
from ascendrun.head.survey.job_reading import read_job
from ascendrun.text import template_of
from tests.lib.terminal import DEADLINE_S, PseudoTerminal

pytestmark = pytest.mark.slow
CHECKOUT = Path(__file__).resolve().parents[3]
STORY = CHECKOUT / "tests" / "lib" / "story_cluster.py"


@pytest.fixture
def world(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "all.hosts").write_text("n1 addr=10.0.0.1 slots=2\nn2 addr=10.0.0.2 slots=2\n")
    (tmp_path / "job.yaml").write_text(
        "name: demo\ncommand: [python, -m, train]\nnodes: 2\ndevices: {type: cpu, per_node: 2}\nhostfile: all.hosts\n"
    )
    terminal = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")  # xdist sets the last two
    kept = {name: value for name, value in os.environ.items() if name not in terminal}
    path = os.pathsep.join(part for part in (str(CHECKOUT), os.environ.get("PYTHONPATH", "")) if part)
    return {
        **kept,
        "ASCENDRUN_STATE_DIR": str(tmp_path / "state"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "STORY_MAY_END": str(tmp_path / "end"),
        "JOB": str(tmp_path / "job.yaml"),
        "TERM": "xterm-256color",
        "PYTHONPATH": path,
    }


class Terminal(PseudoTerminal):
    def __init__(self, environ: dict[str, str], *argv: str, columns: int = 100) -> None:
        super().__init__(argv, environ, columns=columns)

    def wait_for(self, fact: Callable[[list[str]], bool]) -> list[str]:
        """The lines on the screen once `fact` holds for them."""
        self.wait_until(lambda: fact(self.lines()))
        return self.lines()


@pytest.fixture
def live(world: dict[str, str]) -> Iterator[Terminal]:
    terminal = Terminal(world, str(STORY), "live", "submit", world["JOB"])
    yield terminal
    terminal.child.close(force=True)


def test_a_terminal_shows_lines_above_one_progress_line_that_goes_away(live: Terminal, world: dict[str, str]) -> None:
    lines = live.wait_for(lambda lines: "[0-3] line one" in lines and "step 3" in lines[-1])
    assert lines[-1].startswith("j-0001 RUNNING · ")
    assert lines[-1].endswith("step 3 · loss 2.5 · 15.3k tokens/s")
    Path(world["STORY_MAY_END"]).touch()
    assert live.end() == 0
    assert not any(" · loss 2.5 · 15.3k tokens/s" in line and "RUNNING ·" in line for line in live.lines())
    assert [line for line in live.lines() if "line one" in line] == ["[0-3] line one"]


def test_control_c_detaches_says_so_and_leaves_the_job_alone(live: Terminal) -> None:
    live.wait_for(lambda lines: "[0-3] line one" in lines)
    live.child.sendintr()
    assert live.end() == 130
    said = " ".join(live.lines())
    assert "detached; j-0001" in said and "hint: ascendrun logs -f j-0001" in said
    assert "Traceback" not in said and "step 3" not in live.lines()[-1]


def test_a_narrow_terminal_is_never_wrapped_by_the_progress_line(world: dict[str, str]) -> None:
    terminal = Terminal(world, str(STORY), "live", "submit", world["JOB"], columns=20)
    try:
        terminal.wait_for(lambda lines: any("…" in line for line in lines))
        Path(world["STORY_MAY_END"]).touch()
        assert terminal.end() == 0
    finally:
        terminal.child.close(force=True)


@pytest.mark.parametrize(
    ("environ", "flags", "is_coloured"),
    [
        ({}, [], True),
        ({"NO_COLOR": "1"}, [], False),
        ({"TERM": "dumb"}, [], False),
        ({}, ["--color", "never"], False),
        ({"NO_COLOR": "1"}, ["--color", "always"], True),
    ],
)
def test_colour_is_for_terminals_and_can_be_had_or_not(
    world: dict[str, str], environ: dict[str, str], flags: list[str], is_coloured: bool
) -> None:
    terminal = Terminal({**world, **environ}, str(STORY), "good", *flags, "submit", world["JOB"])
    try:
        assert terminal.end() == 0
        assert (b"\x1b[36m[0-3]" in terminal.raw) == is_coloured
    finally:
        terminal.child.close(force=True)


@pytest.mark.parametrize(
    ("environ", "out"), [({}, b"[0-3] hello\n[2] only two\n"), ({"FORCE_COLOR": "1"}, b"\x1b[36m[0-3]\x1b[0m hello\n")]
)
def test_a_pipe_gets_no_progress_and_colour_only_when_forced(
    world: dict[str, str], environ: dict[str, str], out: bytes
) -> None:
    argv = [sys.executable, str(STORY), "good", "submit", world["JOB"]]
    done = subprocess.run(argv, env={**world, **environ}, capture_output=True, check=True)
    assert done.stdout.startswith(out) and b"\x1b" not in done.stderr and (environ or b"\x1b" not in done.stdout)


def test_a_reader_that_leaves_ends_the_command_quietly(world: dict[str, str]) -> None:
    log = Path(world["ASCENDRUN_STATE_DIR"]) / "jobs" / "j-0001" / "attempt-1" / "n1" / "rank-0.out.0"
    log.parent.mkdir(parents=True)
    log.write_bytes(b"x\n" * 500_000)
    child = subprocess.Popen(
        [sys.executable, str(STORY), "live", "logs", "demo"], env=world, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None and child.stderr is not None
    child.stdout.read(1000)
    child.stdout.close()
    assert child.stderr.read() == b""
    child.stderr.close()
    assert child.wait(DEADLINE_S) == 141


def test_an_interrupted_stop_says_that_it_goes_on(world: dict[str, str]) -> None:
    child = subprocess.Popen([sys.executable, str(STORY), "live", "stop", "demo"], env=world, stderr=subprocess.PIPE)
    assert child.stderr is not None
    assert child.stderr.readline() == b"j-0001 STOPPING: stopped by you\n"
    child.send_signal(signal.SIGINT)
    assert b"detached" in child.stderr.read()
    child.stderr.close()
    assert child.wait(DEADLINE_S) == 130


@pytest.mark.parametrize("module", ["ascendrun.cli", "ascendrun.text", "click"])
def test_a_command_that_is_interrupted_while_it_imports_ends_without_a_traceback(
    world: dict[str, str], tmp_path: Path, module: str
) -> None:
    hook = f"""
import os, signal, sys
class Interrupting:
    def find_spec(self, name, *_):
        if name == {module!r}:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
"""
    (tmp_path / "sitecustomize.py").write_text(hook)
    environ = {**world, "PYTHONPATH": os.pathsep.join((str(tmp_path), world["PYTHONPATH"]))}
    argv = [sys.executable, "-m", "ascendrun", "fetch", "j-0001"]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (130, False), done.stderr


def loaded(world: dict[str, str], *argv: str, run: str = "ascendrun.cli") -> set[str]:
    """The modules that a command line imports; `run`: of which module it is the function main."""
    code = f"import sys; from {run} import main; main(); print(*sys.modules, file=sys.stderr)"
    environ = {**world, "PYTHONPATH": os.pathsep.join((world["PYTHONPATH"], str(STORY.parent)))}
    done = subprocess.run([sys.executable, "-c", code, *argv], env=environ, capture_output=True, text=True, check=True)
    return {*(names := done.stderr.split()), *(name.partition(".")[0] for name in names)}


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["completion", "bash"], ["submit", "--help"], ["config"]])
def test_what_needs_no_library_imports_none(world: dict[str, str], argv: list[str]) -> None:
    unused = {"paramiko", "pydantic", "rich", "torch", "asyncio", "ClusterShell", "sqlite3", "yaml"}
    assert loaded(world, *argv).isdisjoint(unused)


def test_the_list_of_jobs_imports_nothing_for_hosts_logs_and_costs(world: dict[str, str]) -> None:
    found = loaded(world, "ps")
    assert "ascendrun.query.views" in found
    unused = {"statistics", "tempfile", "csv", "subprocess", "hashlib", "paramiko", "pydantic", "yaml"}
    assert found.isdisjoint({*unused, "ascendrun.backends", "ascendrun.health", "ascendrun.core.logs.folding"})


def test_reading_logs_needs_neither_paramiko_nor_pydantic(world: dict[str, str]) -> None:
    found = loaded(world, "good", "logs", "demo", run="story_cluster")
    assert found.isdisjoint({"paramiko", "pydantic", "rich", "torch"})


def test_init_asks_and_writes_what_validate_and_doctor_accept(world: dict[str, str], tmp_path: Path) -> None:
    answers = (
        ("hosts", "local1=local local2=local"),
        ("user", ""),
        ("devices", "gpu"),
        ("devices", "cpu"),
        ("per_node", "2"),
        ("python", str(Path(sys.executable).parent.parent)),
        ("interface", "lo"),
        ("script", "my_train.py --epochs 2"),
    )
    here = tmp_path / "new"
    here.mkdir()
    environ = {**world, "ASCENDRUN_NODE_ROOT": str(tmp_path / "node"), "ASCENDRUN_LANG": "zh"}
    run = f"import os, sys; os.chdir({str(here)!r}); from ascendrun.cli import main; sys.exit(main(sys.argv[1:]))"
    questions = {key: template_of(question.key, "", "zh") for key, question, _ in QUESTIONS}
    with Terminal(environ, "-c", run, "init", columns=200) as terminal:
        for key, answer in answers:
            terminal.child.expect_exact(questions[key].encode())
            terminal.child.sendline(answer)
        assert terminal.end() == 0, terminal.text
    job = read_job(here / "job.yaml")
    assert (job.name, job.nodes, job.devices.type, job.devices.per_node) == ("my-train", 2, "cpu", 2)
    assert job.command == ("python", "my_train.py", "--epochs", "2") and job.env["GLOO_SOCKET_IFNAME"] == "lo"
    for command in ("validate job.yaml cluster.hosts", "doctor job.yaml", "controller stop"):
        argv = [sys.executable, "-c", run, *command.split()]
        done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    with Terminal(environ, "-c", run, "init") as terminal:
        assert terminal.end() == 7, "nothing is overwritten, and nothing asked before that is said"


WITHOUT_RECORDS = {
    "dashboard", "shell", "port", "sim", "demo",  # they run until the user ends them
    "export", "bundle", "init", "man",  # they write files
    "help", "completion", "schema", "metrics",  # what they print has a format: text, a script, JSON Schema, Prometheus
    "trust",  # it asks the user; --print is for programs
}  # fmt: skip


def test_every_command_with_data_prints_it_for_programs() -> None:
    found = set()
    for entry in COMMANDS:
        command = getattr(import_module(f"ascendrun.cli.commands.{entry.module}"), entry.attribute)
        formats = [one.type.choices for one in command.params if "--output" in one.opts]
        found |= {entry.name for choices in formats if "json" in choices}
    assert {entry.name for entry in COMMANDS} - found == WITHOUT_RECORDS
