"""Stages of a pipeline that are chosen at its submission, and packed directories."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ascendrun.cluster import Cluster
from ascendrun.core.errors import InvalidInputError, NotFoundError
from ascendrun.core.jobs.job import State
from ascendrun.core.settings import Settings
from ascendrun.head.protocol import release
from ascendrun.head.protocol.control_messages import ReadJob, Submit
from ascendrun.head.state.store import Store
from ascendrun.head.survey.job_reading import read_submissions
from ascendrun.head.survey.submission import add_jobs
from ascendrun.query import packing
from ascendrun.query.submit import Submission, choose_stages, stages_to_repeat
from tests.lib.demo_jobs import demo_job
from tests.lib.top_world import controller_lock

PIPELINE = """
name: ships
hostfile: hosts
command: [python3, -c, pass]
devices: {type: cpu, per_node: 1}
stages:
  - {name: prepare}
  - {name: pretrain}
  - {name: finetune}
  - {name: evaluate, needs: pretrain}
"""


@pytest.fixture
def stages(tmp_path: Path) -> tuple[Submission, ...]:
    (tmp_path / "hosts").write_text("n1 addr=local\n")
    (tmp_path / "ships.yaml").write_text(PIPELINE)
    settings = Settings(state_dir=tmp_path / "state")
    return read_submissions(settings, ReadJob(str(tmp_path / "ships.yaml"), "k"))


def needs_of(stages: tuple[Submission, ...]) -> dict[str, str]:
    return {str(one.stage): one.needs or "" for one in stages}


def test_each_chosen_stage_requires_the_nearest_one_above_it_that_is_chosen_too(stages: tuple[Submission, ...]) -> None:
    whole = {"prepare": "", "pretrain": "prepare", "finetune": "pretrain", "evaluate": "pretrain"}
    assert needs_of(choose_stages(stages)) == whole
    assert needs_of(choose_stages(stages, last="pretrain")) == {"prepare": "", "pretrain": "prepare"}
    assert needs_of(choose_stages(stages, first="finetune")) == {"finetune": "", "evaluate": ""}
    assert needs_of(choose_stages(stages, only=["evaluate", "prepare"])) == {"prepare": "", "evaluate": "prepare"}


def test_a_pipeline_of_some_stages_is_resumed_with_the_others_or_repeated_alone(stages: tuple[Submission, ...]) -> None:
    done = [demo_job(id=f"j-{name}", stage=name, state=State.SUCCEEDED) for name in ("prepare", "pretrain")]
    resumed = stages_to_repeat(stages, done, None, "j-0001")
    assert [one.stage for one in resumed] == ["finetune", "evaluate"]
    failed = [done[0], replace(done[1], state=State.FAILED)]
    again = stages_to_repeat(choose_stages(stages, only=["prepare", "pretrain"]), failed, None, "j-0001")
    assert [one.stage for one in again] == ["pretrain"]


@pytest.mark.parametrize(
    ("only", "first", "last", "hint"),
    [(["finetone"], None, None, "finetune"), ((), "prepaer", None, "prepare"), (["prepare"], "finetune", None, None)],
)
def test_a_stage_that_the_file_does_not_have_and_an_empty_choice_are_refused(
    stages: tuple[Submission, ...], only: list[str], first: str, last: str, hint: str
) -> None:
    with pytest.raises(NotFoundError) as error:
        choose_stages(stages, only=only, first=first, last=last)
    assert hint is None or hint in str(error.value.hint)


def test_a_package_is_packed_once_and_again_after_a_change(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "ascendrun"
    shutil.copytree(release.PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    monkeypatch.setattr(release, "PACKAGE", package)
    monkeypatch.setattr(packing.ascendrun, "__file__", str(package / "__init__.py"))
    jobs = [{"name": "j", "command": ("true",)}, {"name": "j", "program": "trajectory"}]

    def pack() -> tuple[object, int]:  # the trees, and how many were packed now
        before = {path.stat().st_mtime_ns for path in tmp_path.glob("state/trees/*.json")}
        trees = [packing.pack_trees(job, tmp_path / "state") for job in jobs]
        return trees, len({path.stat().st_mtime_ns for path in tmp_path.glob("state/trees/*.json")} - before)

    first, _ = pack()
    assert pack() == (first, 0)
    next(tmp_path.glob("state/trees/*.tar")).unlink()
    assert pack() == (first, 1), "the file was pruned"
    next(tmp_path.glob("state/trees/*.json")).write_text("{")  # damaged
    assert pack() == (first, 1)
    (package / "text" / "en.json").write_text("{}\n")
    assert pack()[1] == 2 and pack()[0] != first


SWEEP = """
name: tune
hostfile: hosts
nodes: 1
program: qwen_lora
args: {base_model: /m, data_path: /d, lora_rank: 4, learning_rate: 1e-5, output_dir: "/out/{sweep}"}
devices: {type: cpu, per_node: 1}
checkpoint: {dir: "/ckpt/{sweep}"}
sweep: {args.learning_rate: [1e-4, 3e-4], args.lora_r: [8, 16]}
"""


def sweep_of(tmp_path: Path, text: str = SWEEP, key: str = "k") -> tuple[Submission, ...]:
    (tmp_path / "hosts").write_text("n1 addr=local\n")
    (tmp_path / "tune.yaml").write_text(text)
    settings = Settings(state_dir=tmp_path / "state")
    return read_submissions(settings, ReadJob(str(tmp_path / "tune.yaml"), key))


def test_a_sweep_is_one_job_for_each_combination(tmp_path: Path) -> None:
    made = sweep_of(tmp_path)
    specs = [Submission.from_json(one.to_json()).spec for one in made]
    assert [one.name for one in specs] == ["tune-1", "tune-2", "tune-3", "tune-4"] and len(
        {one.key for one in made}
    ) == 4
    assert [(one.args["learning_rate"], one.args["lora_r"]) for one in specs] == [
        (1e-4, 8),
        (1e-4, 16),
        (3e-4, 8),
        (3e-4, 16),
    ]
    assert [one.checkpoint.dir for one in specs] == [f"/ckpt/{number}" for number in (1, 2, 3, 4)]
    assert all("lora_rank" not in one.args for one in specs)
    places = [one.sweep for one in specs if one.sweep]
    assert [(one.index, one.count) for one in places] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert places[1].values == {"args.learning_rate": 1e-4, "args.lora_r": 16}
    assert len({one.id for one in places}) == 1 and places[0].id != sweep_of(tmp_path, key="other")[0].spec.sweep.id  # type: ignore[union-attr]
    assert len({one.trees for one in made}) == 1


def test_a_sweep_of_chosen_combinations(tmp_path: Path) -> None:
    chosen = "sweep: [{args.lora_r: 8}, {args.lora_r: 16, nodes: 1, args.learning_rate: 2e-4}]"
    specs = [one.spec for one in sweep_of(tmp_path, SWEEP[: SWEEP.index("sweep: {")] + chosen)]
    assert [(one.args["learning_rate"], one.args["lora_r"]) for one in specs] == [(1e-5, 8), (2e-4, 16)]


@pytest.mark.parametrize(
    ("old", "new", "keys"),
    [
        ('"/ckpt/{sweep}"', "/ckpt", ["sweep.same-path"]),
        ('"/out/{sweep}"', "/out", ["sweep.same-path"]),
        ("[8, 16]", "8", ["sweep.form"]),
        ("[8, 16]", "[]", ["sweep.form"]),
        ("{args.learning_rate: [1e-4, 3e-4], args.lora_r: [8, 16]}", "[{args.lora_r: 8}, 3]", ["sweep.form"]),
        ("{args.learning_rate: [1e-4, 3e-4], args.lora_r: [8, 16]}", "[{}]", ["sweep.form"]),
        ("[8, 16]", f"{list(range(1, 502))}", ["sweep.too-many"]),
        ("sweep:", "stages: [{name: a}]\nsweep:", ["sweep.stages"]),
        # all problems of all jobs, each once
        ("[8, 16]", "[x, y, 8]", ["options.value", "options.value"]),
    ],
)
def test_a_sweep_that_cannot_be_run_is_refused_with_all_its_problems(
    tmp_path: Path, old: str, new: str, keys: list[str]
) -> None:
    with pytest.raises(InvalidInputError) as error:
        sweep_of(tmp_path, SWEEP.replace(old, new))
    assert [problem.message.key for problem in error.value.problems] == keys
    assert {problem.file for problem in error.value.problems} == {str(tmp_path / "tune.yaml")}


def test_a_sweep_is_stored_at_once_and_each_job_keeps_its_values_and_results(tmp_path: Path) -> None:
    made = sweep_of(tmp_path)
    request = Submit(tuple(one.to_json() for one in made))
    with Store.open(tmp_path / "state") as store:
        jobs = [job.id for job, _ in add_jobs(store, request, now_s=1.0)]
        assert [job.id for job, _ in add_jobs(store, request, now_s=2.0)] == jobs  # repeated: nothing more
    with controller_lock(tmp_path / "state"):  # no controller starts
        cluster = Cluster(state_dir=tmp_path / "state")
        rows = cluster.samples.sweep(jobs[2])
        assert [row.id for row in rows] == jobs and [row.id for row in cluster.samples.sweep(rows[0].sweep)] == jobs
        assert rows[3].values == {"args.learning_rate": 3e-4, "args.lora_r": 16} and rows[3].loss is None
        assert cluster.samples.sweep("j-9999") == ()
