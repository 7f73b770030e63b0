"""Every command in Chinese: no English sentence, except names, paths and what programs of others print."""

import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "failures"))

from corpus import FOLDER, load
from spooling import spool_case

from ascendrun.cli import main
from ascendrun.cli.app import ALIASES, BY_NAME
from ascendrun.cluster import api
from ascendrun.core.jobfile.spec import parse_program_options
from ascendrun.head.loop import daemon
from ascendrun.planner.training import load_programs
from ascendrun.programs.trainer.options import make_help
from ascendrun.text import use_language
from tests.chinese import english_lines
from tests.lib.top_world import TopWorld, controller_lock, make_usual_world

Say = Callable[..., str]

GOOD = """
name: demo
command: [python3, -m, train]
nodes: 1
devices: {type: cpu, per_node: 2}
hostfile: all.hosts
"""
BAD = """
name: demo
comand: [x]
nodes: 0
devices: {type: npu, per_node: 2, ids: [3, 1]}
hostfile: nowhere.hosts
stage: {dir: .}
timeouts: {start_s: soon}
env: [A]
checkpoint: {dir: relative, signal: NOTASIGNAL}
unknown_key: 1
"""
PROGRAM = """
name: lora
program: qwen_lora
nodes: 1
devices: {type: npu, per_node: 8}
hostfile: all.hosts
args: {how: fsdp2, learning_rate: fast, batch_size: 8, lora_rr: 3, use_amp: true}
"""
PIPELINE = """
name: pipe
hostfile: all.hosts
devices: {type: cpu, per_node: 2}
nodes: 1
stages:
  one: {command: [x], needs: [two]}
  two: {command: [x], needs: [one]}
  three: {command: [x], needs: [four]}
"""
TOUR: dict[str, tuple[str, ...]] = {
    "submit": (
        "",
        "missing.yaml",
        "good.yaml --wait --detach",
        "good.yaml --detatch",
        "good.yaml --set x",
        "good.yaml --set nodes=two",
        "good.yaml --set nodes=9 --dry-run",
        "bad.yaml",
        "program.yaml --dry-run",
        "good.yaml --from-stage one",
        "good.yaml --only one --until two",
        "good.yaml --resume j-0009",
    ),
    "plan": ("", "missing.yaml", "bad.yaml", "program.yaml"),
    "ps": ("", "--all-users", "-a", "-a -o wide", "-o xml", "--nosuch", "extra", "-a -o json", "--until"),
    "sweep": ("", "s-00000000", "j-0001", "nothing-there"),
    "history": ("", "--by user", "--by user -q", "--since soon", "--user nobody", "-o json"),
    "show": ("", "nothing", "j-0001", "j-0002", "JOB"),
    "dashboard": ("--bind 10.0.0.2 --no-browser", "--tls-cert nowhere.pem", "--port many"),
    "top": ("--once", "--once --problems", "--once --sort x", "--once --interval soon", "--once -o json"),
    "logs": (
        "",
        "nothing",
        "j-0001",
        "JOB --files",
        "JOB --first-per-rank",
        "JOB --rank 99",
        "JOB --rank x",
        "JOB --hosts nowhere",
        "JOB --stream x",
        "JOB --grep (",
        "JOB -i",
        "JOB --tail x",
        "JOB --since yesterday",
        "JOB --attempt 9",
        "j-0001 --raw",
        "j-0002",
    ),
    "events": ("", "JOB", "nothing", "--kind x", "--since x", "--since 2h --until 3h", "JOB -o json"),
    "report": ("", "nothing", "j-0001", "JOB -O report.html", "JOB -o x", "j-0002"),
    "export": ("", "nothing", "JOB --format csv", "JOB --format csv -f", "j-0002 --format mlflow", "JOB --format x"),
    "shell": ("", "nothing", "JOB", "JOB --rank 99", "JOB --rank x"),
    "port": ("", "JOB x", "JOB 6006", "JOB 0:6006 --rank 99", "JOB 70000"),
    "stacks": ("", "nothing", "JOB", "JOB --rank x"),
    "explain": ("", "nothing", "JOB", "JOB --all", "JOB --attempt 9", "j-0001", "j-0002"),
    "bundle": (
        "",
        "nothing",
        "JOB --dry-run",
        "JOB",
        "JOB --max-size huge",
        "JOB --layout ascend-fd --no-logs",
        "JOB --layout ascend-fd --dry-run",
        "JOB -O /nowhere/at/all/x.tar.gz",
    ),
    "cp": ("", "a b", "JOB:../x .", "JOB:x JOB:y", "JOB:x good.yaml", "none JOB:x", "JOB:x . --rank 99", "JOB: ."),
    "fetch": ("", "nothing", "JOB ../x", "JOB a ~/b", "JOB -O"),
    "stop": ("", "nothing", "li/j-0001"),
    "wait": ("", "nothing", "JOB --timeout soon"),
    "validate": ("", "good.yaml bad.yaml program.yaml pipeline.yaml bad.hosts missing.yaml empty.yaml list.yaml"),
    "schema": ("", "nothing", "devices", "devices.type", "restart", "qwen_lora", "trajectory", "meshtest", "args.x"),
    "init": ("", "--list", "nothing", "quickstart mine", "quickstart mine", "cluster.hosts x"),
    "demo": ("extra", "--keeep"),
    "sim": ("", "npu", "gpu -- x", "npu --devices 99 -- x", "npu --python /nowhere -- x", "npu --fault odd -- x"),
    "doctor": ("", "missing.yaml", "-H missing.hosts", "-H all.hosts --hosts n9", "--device-type x", "-H bad.hosts"),
    "env": ("", "missing.yaml", "-H missing.hosts"),
    "verify": ("", "missing.yaml", "-H missing.hosts", "-H all.hosts --hosts n9"),
    "nodes": ("", "-H missing.hosts", "-H all.hosts --hosts n9", "--timeout x -H all.hosts"),
    "release": ("", "n[1-"),
    "drain": ("", "n9 --for x"),
    "undrain": ("",),
    "lost": ("",),
    "hold": ("", "nothing"),
    "unhold": ("", "nothing"),
    "retry": ("", "nothing"),
    "leases": ("nowhere",),
    "rm": ("", "nothing", "JOB --froce"),
    "prune": ("extra", "--older soon"),
    "exec": ("", "-H all.hosts", "-H all.hosts --hosts n7 -- x", "--hosts n[1- -- x", "-H all.hosts --timeout x -- x"),
    "trust": ("", "n[1-", "all.hosts", "-H missing.hosts", "--replace"),
    "notify": ("", "--test nowhere"),
    "metrics": (
        "--once",
        "--listen x",
        "--grafana nodes",
        "--once --listen 127.0.0.1:0",
        "--textfile /nowhere/x --once",
    ),
    "config": ("", "get", "get colour", "get color", "set color never", "list -o json"),
    "help": ("nothing-there",),
    "completion": ("", "tcsh"),  # the scripts are code
    "controller": ("", "status", "again", "run --group x"),
    "man": ("", "manuals"),
}
"""Command: command lines. JOB: a recorded failure."""
HELP = re.compile("^# (HELP|TYPE) .*", re.M)
"""Of metrics: Prometheus reads them."""
OTHERS = (
    "missing ), unterminated subpattern at position 0",  # Python's message about a pattern
    "activations are not finite",  # an exception of the program
    "a rank failed",  # the reason that an old store has
    "step epoch loss",  # names of metrics in `ps`
    "concepts not finite: data (+1)",  # codes: a vocabulary, the words that it found, their domain
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TopWorld]:
    """A state directory with a live job (j-0001), a queued one (j-0002) and one that failed."""
    folder = tmp_path_factory.mktemp("tour")
    made = make_usual_world(folder / "state", busy=4, idle=1)
    with controller_lock(folder / "state"):
        yield made


@pytest.fixture
def say(world: TopWorld, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Say:
    folder = world.state_dir.parent
    for name in ("LC_ALL", "LC_MESSAGES", "LANGUAGE", "ASCENDRUN_LANG", "ASCENDRUN_HOSTFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LANG", "zh_CN.UTF-8")
    monkeypatch.setenv("ASCENDRUN_STATE_DIR", str(world.state_dir))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
    monkeypatch.setattr(daemon, "STALL_S", 1.0)  # the world's controller holds the lock, and never responds
    monkeypatch.setattr(api, "REPEAT_S", 1.0)
    monkeypatch.chdir(folder)
    files = {"good.yaml": GOOD, "bad.yaml": BAD, "program.yaml": PROGRAM, "pipeline.yaml": PIPELINE}
    files |= {"all.hosts": "n1 addr=local slots=8\n", "bad.hosts": "n1 slot=8\nn1\nn[2 x\nn3:8\n"}
    files |= {"empty.yaml": "", "list.yaml": "- 1\n"}
    for name, text in files.items():
        (folder / name).write_text(text)

    def run(*argv: str) -> str:
        """What the command printed on stdout and stderr."""
        capsys.readouterr()
        assert main(argv) != 8, argv  # an internal error
        printed = capsys.readouterr()
        return printed.out + printed.err

    return run


def test_the_tour_visits_every_command() -> None:
    assert set(TOUR) == set(BY_NAME)


@pytest.mark.parametrize("command", ["", *BY_NAME, *ALIASES])
def test_help(say: Say, command: str) -> None:
    assert english_lines(say(*command.split(), *["--help"][: command != ""])) == []


@pytest.mark.parametrize("command", TOUR)
def test_command(say: Say, world: TopWorld, command: str) -> None:
    case = load(FOLDER / "sixty_four_ranks_and_the_noise_of_the_stop.yaml")
    foreign = "\n".join([*(line.text for rank in case.evidence.ranks for line in rank.lines), *OTHERS])
    if not (world.state_dir / "jobs" / "j-0003").exists():
        spool_case(replace(case, evidence=replace(case.evidence, name="job-3")), world.state_dir)
    found = []
    for words in TOUR[command]:
        argv = ["j-0003" if word == "JOB" else word for word in words.split()]
        screen = HELP.sub("", say(command, *argv)).replace("waits", "j-0002")
        found += [f"{command} {words}: {line}" for line in english_lines(screen, foreign)]
    assert found == [], "\n".join(found)


def test_top_notes_that_a_slow_rank_was_sampled_minutes_ago(
    say: Say, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = make_usual_world(tmp_path / "old", busy=4, idle=1, now_s=time.time() - 120)
    monkeypatch.setenv("ASCENDRUN_STATE_DIR", str(made.state_dir))
    with controller_lock(made.state_dir):
        screen = say("top", "--once")
    assert "偏慢、2m" in screen and english_lines(screen.replace("waits", "j-0002")) == []


def test_the_help_of_bundled_programs() -> None:
    use_language("zh")
    for table in load_programs(parse_program_options).values():
        assert english_lines(make_help(table), "You are a helpful assistant.") == []  # a default
