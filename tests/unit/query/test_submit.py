"""Stages of a pipeline that are chosen at its submission, and packed directories."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ascendrun.core.errors import NotFoundError
from ascendrun.core.jobfile.model import JobSpec
from ascendrun.core.jobs.job import State
from ascendrun.core.settings import Settings
from ascendrun.head.protocol import release
from ascendrun.query import submit
from ascendrun.query.submit import Submission, choose_stages, make_submissions, stages_to_repeat
from tests.lib.demo_jobs import demo_job

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
    return make_submissions(tmp_path / "ships.yaml", settings, overrides=(), hostfile=None, key="k")


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
    monkeypatch.setattr(submit.ascendrun, "__file__", str(package / "__init__.py"))
    jobs = [{"name": "j", "command": ("true",)}, {"name": "j", "program": "trajectory"}]

    def pack() -> tuple[object, int]:  # the trees, and how many were packed now
        before = {path.stat().st_mtime_ns for path in tmp_path.glob("state/trees/*.json")}
        trees = [submit.pack_trees(JobSpec.model_validate(job), tmp_path / "state") for job in jobs]
        return trees, len({path.stat().st_mtime_ns for path in tmp_path.glob("state/trees/*.json")} - before)

    first, _ = pack()
    assert pack() == (first, 0)
    next(tmp_path.glob("state/trees/*.tar")).unlink()
    assert pack() == (first, 1), "the file was pruned"
    next(tmp_path.glob("state/trees/*.json")).write_text("{")  # damaged
    assert pack() == (first, 1)
    (package / "text" / "en.json").write_text("{}\n")
    assert pack()[1] == 2 and pack()[0] != first
