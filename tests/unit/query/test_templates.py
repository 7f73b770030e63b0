"""Templates: each is a valid job with its hostfile, and copying never writes over anything."""

import ast
import json
from pathlib import Path

import pytest

from ascendrun.core.errors import ConflictError, NotFoundError
from ascendrun.core.hosts import parse_hostfile
from ascendrun.core.jobfile.model import job_json_schema
from ascendrun.head.survey.job_reading import read_job
from ascendrun.query.templates import copy_template, list_templates
from ascendrun.text import Text

NAMES = [template.name for template in list_templates()]


def test_the_templates_are_there_and_say_what_they_are() -> None:
    assert {"quickstart", "script", "trajectory", "qwen32b"} <= set(NAMES)
    assert len(set(NAMES)) == len(NAMES), "a name leads to one template"
    assert all(template.summary.endswith(".") for template in list_templates())


@pytest.mark.parametrize("name", NAMES)
def test_a_copied_template_is_a_valid_job_beside_its_hostfile(name: str, tmp_path: Path) -> None:
    written = copy_template(name, tmp_path / "new folder")
    job_file = written[0]
    assert job_file.suffix == ".yaml"
    job = read_job(job_file)
    assert job.hostfile is not None
    hostfile = job_file.parent / job.hostfile
    assert len(parse_hostfile(hostfile.read_text(), str(hostfile))) >= 2
    schema = job_file.parent / job_file.read_text().splitlines()[0].partition("$schema=")[2]
    assert json.loads(schema.read_text()) == job_json_schema(), "an editor finds the schema where the job file says"
    for path in written:
        if path.suffix == ".py":
            ast.parse(path.read_text(), feature_version=(3, 7))


def test_nothing_is_written_when_one_file_is_there_already(tmp_path: Path) -> None:
    (tmp_path / "cluster.hosts").write_text("mine\n")
    with pytest.raises(ConflictError, match=r"cluster\.hosts"):
        copy_template("script", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["cluster.hosts"]
    assert (tmp_path / "cluster.hosts").read_text() == "mine\n"


def test_a_dangling_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConflictError):
        copy_template("script", tmp_path)
    assert not (tmp_path / "elsewhere").exists()


def test_an_unknown_template_is_told_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError) as caught:
        copy_template("scrpt", tmp_path)
    values = {"name": "scrpt", "names": NAMES}
    assert caught.value.message == Text("init.unknown", "", **values)
    assert caught.value.hint == Text("init.unknown.hint", "", **values)
    assert not any(tmp_path.iterdir())
