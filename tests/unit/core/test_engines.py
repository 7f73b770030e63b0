"""Engines of the settings and of job files: what a site adds, and what cannot be."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ascendrun
from ascendrun.core.engines import time_limit_s
from ascendrun.core.errors import InvalidInputError, NotFoundError
from ascendrun.core.jobfile.origins import origins_of
from ascendrun.core.settings import Settings
from ascendrun.head.state.user_files import load_settings
from ascendrun.head.survey.job_reading import read_job, read_pool

SETTINGS = """
engines:
  lab: {type: ssh, hostfile: lab.hosts, env: {A: site, B: site}, setup: source /site.sh, python: /site/python}
  far: {type: ssh, hostfile: /far.hosts}
default_engine: lab
"""
JOB = "name: a\ncommand: [x]\nenv: {B: own}\n"


def site(folder: Path, text: str = SETTINGS) -> Settings:
    (folder / "config.yaml").write_text(text)
    (folder / "lab.hosts").write_text("npu1\nnpu2\n")
    return load_settings({"XDG_STATE_HOME": str(folder)}, files=[folder / "config.yaml"])


def job(folder: Path, more: str = "") -> Path:
    (folder / "job.yaml").write_text(JOB + more)
    return folder / "job.yaml"


def test_the_site_adds_to_a_job_whose_own_values_win(tmp_path: Path) -> None:
    file, settings = job(tmp_path, "python: own\n"), site(tmp_path)
    spec = read_job(file, settings)
    assert spec.env == {"A": "site", "B": "own"} and (spec.setup, spec.python) == ("source /site.sh", "own")
    assert spec.engine["name"] == "lab" and spec.engine["applied"] == ["setup", "env.A"]
    assert [host.name for host in read_pool(spec, file, hostfile=None)] == ["npu1", "npu2"]


def test_each_value_that_a_site_may_set_tells_where_it_came_from(tmp_path: Path) -> None:
    spec = read_job(job(tmp_path, "python: own\n"), site(tmp_path))
    found = [(one.key, one.value, one.origin) for one in origins_of(spec)]
    assert found == [
        ("engine", "lab", "settings"),
        ("hostfile", str(tmp_path / "lab.hosts"), "engine"),
        ("setup", "source /site.sh", "engine"),
        ("python", "own", "job"),
        ("env.A", "site", "engine"),
        ("env.B", "own", "job"),
    ]
    boxed = read_job(job(tmp_path, "engine: far\ncontainer: {image: own, mounts: ['/o:/o']}\n"), site(tmp_path, BOXED))
    found = [(one.key, one.value, one.origin) for one in origins_of(boxed) if one.key.startswith("container")]
    assert {("container.image", "own", "job"), ("container.runtime", "podman", "engine")} <= set(found)
    assert {("container.mounts", "/d:/d", "engine"), ("container.mounts", "/o:/o", "job")} <= set(found)
    assert origins_of(boxed)[0].origin == "job" and origins_of(read_job(job(tmp_path, "hostfile: h\n"))) == ()


@pytest.mark.parametrize(
    ("more", "engine", "hostfile"),
    [("", "far", "/far.hosts"), ("engine: far\n", None, "/far.hosts"), ("hostfile: own.hosts\n", "far", "/far.hosts")],
)
def test_the_engine_that_is_named_replaces_the_default(tmp_path: Path, more: str, engine: str, hostfile: str) -> None:
    from ascendrun.head.survey.job_reading import read_stages

    (stage,) = read_stages(job(tmp_path, more), site(tmp_path), engine=engine)
    assert (stage.spec.engine["name"], stage.spec.hostfile) == ("far", hostfile)


def test_a_job_with_a_hostfile_has_no_engine_by_default(tmp_path: Path) -> None:
    spec = read_job(job(tmp_path, "hostfile: own.hosts\n"), site(tmp_path))
    assert spec.engine is None and spec.hostfile == str(tmp_path / "own.hosts") and spec.setup is None


def test_an_engine_in_full_is_that_of_the_job_and_its_paths_are_relative_to_it(tmp_path: Path) -> None:
    spec = read_job(job(tmp_path, "engine: {type: ssh, hostfile: near.hosts}\n"), site(tmp_path))
    assert spec.hostfile == str(tmp_path / "near.hosts")


def test_engine_and_hostfile_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError) as caught:
        read_job(job(tmp_path, "engine: lab\nhostfile: own.hosts\n"), site(tmp_path))
    assert [each.message.key for each in caught.value.problems] == ["engine.and-hostfile"]


def test_an_unknown_engine_is_named_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError) as caught:
        read_job(job(tmp_path, "engine: lap\n"), site(tmp_path))
    assert caught.value.message.key == "engine.unknown" and "lab" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("engines", "key", "line"),
    [
        ("engines:\n  lab: {type: ssh, hostfil: x}\n", "jobfile.required", 2),
        ("engines:\n  lab: {type: shh}\n", "engine.type", 2),
        ("engines:\n  lab: ssh\n", "engine.mapping", 2),
        ("engines: lab\n", "engine.block", 1),
    ],
)
def test_problems_of_the_settings_have_their_place(tmp_path: Path, engines: str, key: str, line: int) -> None:
    with pytest.raises(InvalidInputError) as caught:
        read_job(job(tmp_path), site(tmp_path, engines + "default_engine: lab\n"))
    assert (key, line) in [(each.message.key, each.line) for each in caught.value.problems]


def test_problems_of_an_engine_in_a_job_file_are_reported_with_the_others(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError) as caught:
        read_job(job(tmp_path, "engine: {type: ssh, hostfile: a, partition: x}\nnodes: 0\n"), site(tmp_path))
    assert [each.line for each in caught.value.problems] == [4, 5]


BOXED = SETTINGS.replace("far.hosts}", "far.hosts, image: site/cann, runtime: podman, mounts: ['/d:/d', '/m:/m:ro']}")


def test_the_site_adds_its_image_and_mounts_and_the_job_replaces_what_it_names(tmp_path: Path) -> None:
    settings = site(tmp_path, BOXED)
    spec = read_job(job(tmp_path, "engine: far\n"), settings)
    assert spec.container.model_dump(include={"image", "runtime", "mounts"}) == {
        "image": "site/cann",
        "runtime": "podman",
        "mounts": ("/d:/d", "/m:/m:ro"),
    }
    assert spec.engine["applied"] == ["container.image", "container.runtime", "container.mounts"]
    spec = read_job(job(tmp_path, "engine: far\ncontainer: {image: own, mounts: ['/other:/m']}\n"), settings)
    assert (spec.container.image, spec.container.mounts) == ("own", ("/d:/d", "/other:/m"))
    assert read_job(job(tmp_path, "engine: lab\n"), settings).container is None


def test_a_job_of_slurm_has_the_container_of_its_site(tmp_path: Path) -> None:
    engine = "{type: slurm, image: a, runtime: podman, mounts: ['/d:/d']}"
    spec = read_job(job(tmp_path, f"nodes: 2\nengine: {engine}\n"), site(tmp_path))
    assert spec.container.model_dump(include={"image", "runtime", "mounts"}) == {
        "image": "a",
        "runtime": "podman",
        "mounts": ("/d:/d",),
    }
    assert read_job(job(tmp_path, "nodes: 2\nengine: {type: slurm}\n"), site(tmp_path)).container is None


PODS = SETTINGS.replace(
    "default_engine: lab",
    "  pods: {type: kubernetes, context: c, image: site/cann, mounts: ['pvc:data:/d', '/m:/m'], template: pod.yaml}\n"
    "  bare: {type: kubernetes, context: c}\n",
)


def test_the_pods_of_an_engine_run_the_image_in_place_of_a_container_on_a_node(tmp_path: Path) -> None:
    spec = read_job(job(tmp_path, "engine: pods\nnodes: 2\n"), site(tmp_path, PODS))
    assert spec.container is None and spec.engine["container"] == {
        "image": "site/cann",
        "mounts": ("pvc:data:/d", "/m:/m"),
    }
    assert spec.engine["template"] == str(tmp_path / "pod.yaml")
    box = "container: {image: own, mounts: ['/o:/d:ro'], shm_size: 1GiB}"
    spec = read_job(job(tmp_path, f"engine: pods\nnodes: 2\n{box}\n"), site(tmp_path, PODS))
    assert spec.engine["container"] == {"image": "own", "mounts": ("/m:/m", "/o:/d:ro"), "shm_size": "1GiB"}
    found = {(one.key, one.value, one.origin) for one in origins_of(spec)}
    assert {("container.image", "own", "job"), ("container.mounts", "/m:/m", "engine")} <= found
    assert ("container.mounts", "/o:/d:ro", "job") in found


@pytest.mark.parametrize(
    ("more", "keys"),
    [
        ("engine: bare\nnodes: 2\n", ["engine.image"]),
        ("engine: pods\n", ["engine.nodes"]),
        ("engine: pods\nnodes: 2\ncontainer: {image: a, runtime: docker, options: [x]}\n", ["engine.key"] * 2),
        ("engine: {type: kubernetes, context: c, image: a, mounts: [data]}\nnodes: 2\n", ["jobfile.value"]),
    ],
)
def test_what_pods_cannot_have_is_refused(tmp_path: Path, more: str, keys: list[str]) -> None:
    with pytest.raises(InvalidInputError) as caught:
        read_job(job(tmp_path, more), site(tmp_path, PODS))
    assert [problem.message.key for problem in caught.value.problems] == keys


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 1800), ("1:30", 90), ("2:00:05", 7205), ("1-2", 93600), ("1-0:30", 88200), ("1-00:00:01", 86401)]
    + [("infinite", None), ("", None)],
)
def test_a_time_limit_has_the_forms_of_sbatch(text: str, seconds: float | None) -> None:
    assert time_limit_s({"type": "slurm", "time": text}) == seconds and time_limit_s(None) is None


class WithoutTexts(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        return None if isinstance(node.value, ast.Constant) else node


def test_outside_its_directory_only_settings_and_the_table_of_engines_name_slurm() -> None:
    package = Path(ascendrun.__file__).parent
    naming = [path for path in package.rglob("*.py") if "slurm" in path.read_text().lower()]
    codes = {path.relative_to(package): WithoutTexts().visit(ast.parse(path.read_text())) for path in naming}
    found = {path for path, code in codes.items() if "slurm" in ast.unparse(code).lower()}
    elsewhere = {str(path) for path in found if path.parts[:2] != ("backends", "slurm")}
    assert elsewhere == {"backends/__init__.py", "core/engine_types.py", "cluster/forward.py"}  # its SLURM_CONF
