"""A program is one directory: a package with options, rules and a main, known by an entry point and nothing else."""

import io
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from click.shell_completion import BashComplete

import ascendrun
from ascendrun.cli import main
from ascendrun.cli.app import cli
from ascendrun.core.errors import InvalidInputError
from ascendrun.core.jobfile.launchers import program_command
from ascendrun.core.jobfile.spec import parse_program_options
from ascendrun.core.settings import Settings
from ascendrun.head.state.state_dir import tree_file
from ascendrun.planner.training import find_programs, load_programs, package_of
from tests.lib.pages import options
from tests.lib.plan_world import PlanCluster

JOB = """name: toy
program: toy
devices: {type: cpu, per_node: 2}
hostfile: one.hosts
args: {depth: %s}
"""
FILES = {
    "options.json": '{"options": {"depth": {"type": "int", "default": 2, "min": 1, "help": "layers"}}}',
    "rules.py": """
from ascendrun.planner.training import PlanProblem
from ascendrun.text import Text

TRAINS = ()

def inputs(training):
    return {}

def workload(training):
    return None

def check_depth(training):
    if training.options["depth"] % training.ranks:
        yield PlanProblem("uneven-depth", Text("toy.uneven", "args.depth: not a multiple of the ranks"))

RULES = (check_depth,)
""",
    "__main__.py": "import sys\nprint(sys.argv[1:])\n",
}


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    site = tmp_path / "site"
    (site / "toy").mkdir(parents=True)
    for name, text in FILES.items():
        (site / "toy" / name).write_text(text)
    installed = site / "toy-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[ascendrun.programs]\ntoy = toy\ngone = no_such_package\n")
    (tmp_path / "one.hosts").write_text("localhost slots=4\n")
    monkeypatch.setenv("ASCENDRUN_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.syspath_prepend(site)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "toy.rules", raising=False)
    monkeypatch.delitem(sys.modules, "toy", raising=False)
    return tmp_path


def say(cluster: PlanCluster, *argv: str) -> int:
    try:
        return main(argv, make_cluster=lambda settings: cluster)
    except SystemExit as end:
        return int(end.code or 0)


@pytest.mark.parametrize("depth, valid, planned", [(4, 0, 0), (3, 0, 3), (0, 2, 2)])
def test_a_package_of_a_user_is_validated_planned_and_submitted(
    toy: Path, depth: int, valid: int, planned: int
) -> None:
    (toy / "job.yaml").write_text(JOB % depth)
    cluster = PlanCluster(Settings(state_dir=toy / "state"), toy / "hosts")
    assert say(cluster, "validate", "job.yaml") == valid
    assert say(cluster, "plan", "job.yaml") == planned
    assert say(cluster, "submit", "--dry-run", "job.yaml", "-o", "json") == planned
    assert say(cluster, "submit", "--detach", "job.yaml") == valid
    assert bool(cluster.stored) == (valid == 0), "its plan is judged at the start"
    started = program_command("toy", ["--depth=4"], python="python3", package=package_of("toy"))
    assert started == ("python3", "-m", "toy", "--depth=4")


def test_its_options_are_on_the_page_and_in_the_completion(toy: Path) -> None:
    assert "| `depth` |  | int | `2` | layers. |" in options.render_page()
    found = BashComplete(cli, {}, "ascendrun", "_X").get_completions(["schema"], "toy")
    assert [item.value for item in found] == ["toy", "toy.depth"]


def test_it_is_sent_with_what_programs_may_import(toy: Path) -> None:
    from ascendrun.core.settings import Settings
    from ascendrun.head.protocol.control_messages import ReadJob
    from ascendrun.head.survey.job_reading import read_submissions
    from ascendrun.query.packing import pack_trees

    (toy / "job.yaml").write_text(JOB % 4)
    (one,) = read_submissions(Settings(toy / "state"), ReadJob(str(toy / "job.yaml"), "k"))
    (tree,) = pack_trees(one.values["spec"], toy / "state")
    with tarfile.open(fileobj=io.BytesIO(tree_file(toy / "state", tree.sha256).read_bytes())) as archive:
        archive.extractall(toy / "sent")
    sent = {"PATH": "", "PYTHONPATH": str(toy / "sent"), "PYTHONSAFEPATH": "1"}
    ran = [sys.executable, "-S", "-m", "toy", "--depth=4"]
    assert subprocess.check_output(ran, env=sent, cwd="/", text=True) == "['--depth=4']\n"
    ruled = [sys.executable, "-S", "-c", "import toy.rules, ascendrun.facts.chips"]
    subprocess.run(ruled, env=sent, cwd="/", check=True)


def test_programs_are_packages(toy: Path) -> None:
    found = find_programs()
    bundled = {path.parent.name for path in Path(ascendrun.__file__).parent.glob("programs/*/options.json")}
    assert {"toy", *bundled} == set(found) and {"codon", "meshtest"} < bundled
    assert found["codon"].has_rules and not found["meshtest"].has_rules
    assert [name for name, program in found.items() if not program.is_bundled] == ["toy"]


def test_a_table_is_read_when_its_program_is_named(toy: Path) -> None:
    (toy / "site" / "toy" / "options.json").write_text("{")
    tables = load_programs(parse_program_options)
    assert "toy" in tables and len(tables) == len(find_programs()) and tables["meshtest"].options
    with pytest.raises(InvalidInputError):
        tables["toy"]
