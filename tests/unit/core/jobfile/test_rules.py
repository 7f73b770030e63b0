"""Files that must be refused: every problem of each is told at once, with its place and the way out."""

import json
import tracemalloc
from pathlib import Path

import pytest

from ascendrun.core.errors import InvalidInputError
from ascendrun.core.hosts import parse_hostfile
from ascendrun.core.jobfile.spec import parse_program_options, parse_stages
from ascendrun.core.jobfile.tree import LocalFiles
from ascendrun.text import Text
from ascendrun.text.format import is_hidden

HERE = Path(__file__).parent
PROGRAMS = {
    "trajectory": parse_program_options(
        "trajectory",
        json.dumps(
            {
                "options": {
                    "lr": {"type": "float", "default": 1e-3, "help": "peak learning rate", "min": 0, "max": 1},
                    "epochs": {"type": "int", "default": 10, "help": "passes", "min": 1},
                    "pooling": {"type": "str", "default": "mean", "help": "what is read", "choices": ["mean", "last"]},
                    "fp16": {"type": "bool", "default": False, "help": "half precision"},
                    "columns": {"type": "list", "default": [], "help": "names"},
                    "data": {"type": "path", "default": "", "help": "tracks"},
                }
            }
        ),
    ),
    "needy": parse_program_options(
        "needy",
        json.dumps(
            {
                "options": {
                    "base_model": {"type": "path", "default": None, "help": "the model to tune", "required": True}
                }
            }
        ),
    ),
}
CHECKS = ("clock", "disk-space", "hccl-ping")
JOBS = sorted((HERE / "bad_jobs").glob("*.yaml"))
HOSTFILES = sorted((HERE / "bad_hostfiles").glob("*.hosts"))


def problems_of_job(data, file="job.yaml", overrides=()):
    with pytest.raises(InvalidInputError) as caught:
        parse_stages(data, file, overrides=overrides, programs=PROGRAMS, check_names=lambda: CHECKS)
    return caught.value.problems


def problems_of_hostfile(data, file="my.hosts"):
    with pytest.raises(InvalidInputError) as caught:
        parse_hostfile(data, file)
    return caught.value.problems


def check(path, problems, update_golden):
    found = "".join(f"{problem.file}:{problem.line}:{problem.column}: {data_of(problem)}\n" for problem in problems)
    expected = path.with_suffix(".problems")
    if update_golden:
        expected.write_text(found, encoding="utf-8")
    assert found == expected.read_text(encoding="utf-8")
    shown = "".join(f"{problem}" for problem in problems)
    assert not any(is_hidden(character) for character in shown), "a message must not hide anything"


def data_of(problem):
    """The keys and values of a problem: its sentences may be reworded."""
    return form(problem.message) + (f" | {form(problem.hint)}" if problem.hint else "")


def form(value):
    if not isinstance(value, Text):
        return repr(value)
    values = ", ".join(f"{name}={form(each)}" for name, each in value.values.items())
    return f"{value.key}({values})"


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_a_bad_job_file_is_refused_with_every_problem_at_its_place(path, update_golden):
    check(path, problems_of_job(path.read_bytes(), path.name), update_golden)


@pytest.mark.parametrize("path", HOSTFILES, ids=lambda path: path.stem)
def test_a_bad_hostfile_is_refused_with_every_problem_at_its_place(path, update_golden):
    check(path, problems_of_hostfile(path.read_bytes(), path.name), update_golden)


def test_there_are_enough_bad_files_and_none_is_told_without_a_place():
    assert len(JOBS) >= 50 and len(HOSTFILES) >= 40
    for path in JOBS + HOSTFILES:
        for line in path.with_suffix(".problems").read_text(encoding="utf-8").splitlines():
            file, number, column, _ = line.split(":", 3)
            assert file == path.name and number.isdigit() and column.isdigit(), line


BOMBS = {
    "brackets": "[" * 100_000,
    "braces": "{a: " * 100_000,
    "brackets in a value": "name: ok\ncommand: " + "[" * 100_000,
    "dashes": "- " * 100_000,
    "question marks": "? " * 100_000,
    "aliases": "a: &a [x, x]\n" + "".join(f"b{n}: &b{n} [*a, *a, *a]\n" for n in range(5_000)),
    "many values": "name: ok\nenv: {" + ", ".join(f"A{n}: 1" for n in range(60_000)) + "}\n",
    "digits": "nodes: " + "9" * 500_000,
    "one long name": "name: " + "a" * 900_000 + "\ncommand: [x]\n",
    "too long": "#" * 2_000_000,
}


HOST_BOMBS = [
    "npu[1-100000000]",
    "npu[1-999999999]",
    "r[1-4000]n[1-4000]p[1-4000]",
    "npu[" + "1," * 100_000 + "1]",
    "a" * 500_000,
    "x " + "slots=8 " * 100_000,
    "[" * 100_000,
]


@pytest.mark.parametrize(
    ("read", "bomb"),
    [*((problems_of_job, bomb) for bomb in BOMBS.values()), *((problems_of_hostfile, line) for line in HOST_BOMBS)],
    ids=[*BOMBS, *(line[:20] for line in HOST_BOMBS)],
)
def test_a_file_that_is_a_bomb_is_refused_without_building_it(read, bomb):
    tracemalloc.start()
    try:
        problems = read(bomb)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert problems and len(problems) <= 501
    if read is problems_of_job:
        assert sum(len(str(problem)) for problem in problems) < 200_000
    assert peak_bytes < 150_000_000


def test_a_file_above_a_megabyte_is_refused_for_its_size():
    for problems in (problems_of_job("#" * 1_000_001), problems_of_hostfile("#" * 1_000_001)):
        assert [problem.message.values for problem in problems] == [{"size": 1000001, "limit": 1000000}]


LOST = [
    "[python, lost.py]",
    "[python3, -u, ./lost.py, --lr, '1']",
    "[bash, lost.sh]",
    "[./lost]",
    "[env, A=1, sub/lost]",
    "[bash, -c, 'exec python lost.py']",
    "[python, ../train.py]",
]
HERE_TOO = ["[python, train.py]", "[python3, -u, ./train.py, lost.py]", "[bash, run.sh]", "[./run.sh]"]
UNKNOWN_HERE = [
    "[train, --x]",
    "[train.py]",
    "[python, -m, pkg]",
    "[python, -X, dev, lost.py]",
    "[python, /data/lost.py]",
    "[bash, -c, 'cp /d/a.py . && python a.py']",
    "[bash, -c, 'python $HOME/a.py']",
]


def placed(text):
    """Return (key of the message, key of the hint) of each problem, on a disk where train.py and run.sh are."""
    there = {"train.py", "./train.py", "run.sh", "./run.sh"}
    files = LocalFiles(is_directory=lambda path: path == ".", is_readable=lambda path: path in there)
    try:
        parse_stages(f"name: x\n{text}\n", "job.yaml", programs=PROGRAMS, files=files)
    except InvalidInputError as error:
        return [(problem.message.key, problem.hint.key) for problem in error.problems]
    return []


@pytest.mark.parametrize("command", LOST)
def test_a_command_of_a_file_that_no_node_will_have_is_refused(command):
    assert placed(f"command: {command}") == [("jobfile.not-staged", "jobfile.stage-or-absolute")]
    assert placed(f"command: {command}\nworkdir: {{path: .}}") == [
        ("jobfile.not-in-workdir", "jobfile.stage-or-absolute")
    ]
    assert placed(f"command: {command}\nsetup: source /opt/env.sh") != []
    assert placed(f"command: {command}\nsetup: git clone https://host/x .") == []


@pytest.mark.parametrize("command", HERE_TOO)
def test_a_command_of_a_file_beside_the_job_file_needs_workdir(command):
    assert placed(f"command: {command}") == [("jobfile.not-staged", "suggest.write")]
    assert placed(f"command: {command}\nworkdir: {{path: .}}") == []
    assert placed(f"command: {command}\nworkdir: {{path: ., exclude: [r*, train.py]}}") == [
        ("jobfile.not-in-workdir", "jobfile.stage-or-absolute")
    ]


@pytest.mark.parametrize("command", UNKNOWN_HERE)
def test_a_command_whose_files_only_the_nodes_know_is_left_to_them(command):
    assert placed(f"command: {command}") == []


def test_a_script_of_a_launcher_is_looked_for_like_one_of_python():
    assert placed("command: [lost.py]\nlauncher: torchrun") == [("jobfile.not-staged", "jobfile.stage-or-absolute")]


def test_a_later_stage_may_run_what_an_earlier_one_left():
    assert placed("stages:\n- {name: build, command: [make, all]}\n- {name: run, command: [./made]}") == []
