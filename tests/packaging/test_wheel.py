"""The wheel carries everything that the checkout runs with, and works when nothing else is there."""

import configparser
import json
import os
import shutil
import site
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ascendrun import __version__
from ascendrun.cli.app import COMMANDS
from ascendrun.query.templates import list_templates
from ascendrun.text import translations
from tests.docs.transcript import find_mismatch, read_block
from tests.packaging.checkouts import CHECKOUT, run

PARTS = (
    "ascendrun",
    "docs",
    "jobs",
    "hostfiles",
    "templates",
    "locks",
    "MANIFEST.in",
    "setup.cfg",
    "setup.py",
    "pyproject.toml",
    "README.md",
    "CHANGELOG.md",
    "LICENSE",
)
RUN_S = 500.0
OF_THE_CHECKOUT = ("vcluster", "_page.py", "faultfs", "conftest", "/test_", "benchmarks")
"""Parts of names that no file of the wheel has: what only tests, benchmarks and generators of docs run."""


@pytest.fixture(scope="module")
def environ() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    return {**kept, "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


@pytest.fixture(scope="module")
def wheel(environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: a build leaves folders in the tree it builds."""
    folder = tmp_path_factory.mktemp("wheel")
    for part in PARTS:
        source = CHECKOUT / part
        if source.is_dir():
            shutil.copytree(source, folder / "source" / part, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, folder / "source" / part)
    return build(folder / "source", folder, environ)


def build(source: Path, into: Path, environ: dict[str, str]) -> Path:
    """Build the wheel of a tree or a source archive."""
    argv = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", into, source]
    built = run(argv, environ)
    assert built.returncode == 0, built.stdout + built.stderr
    return next(into.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with only the wheel; its dependencies are lent from ours, ascendrun's own code is not."""
    folder = tmp_path_factory.mktemp("env")
    venv.create(folder, with_pip=False, symlinks=True)
    target = next((folder / "lib").glob("python*/site-packages"))
    install = run(
        [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--no-deps", wheel], environ
    )
    assert install.returncode == 0, install.stdout + install.stderr
    (target / "lent.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return folder


@pytest.fixture
def user(installed: Path, environ: dict[str, str], tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a user who has only the wheel; at the end no controller of it runs."""
    own = {
        **environ,
        "PATH": f"{installed}/bin:/usr/bin:/bin",
        "ASCENDRUN_STATE_DIR": str(tmp_path / "state"),
        "ASCENDRUN_NODE_ROOT": str(tmp_path / "node"),
    }
    yield own
    subprocess.run(["ascendrun", "controller", "stop"], env=own, timeout=60, check=False, capture_output=True)


def ask(installed: Path, environ: dict[str, str], code: str) -> str:
    answer = run([installed / "bin" / "python", "-I", "-c", code], environ, cwd=installed)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def test_the_wheel_has_every_source_file_and_nothing_of_the_tests(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {
        path.relative_to(CHECKOUT).as_posix()
        for path in (CHECKOUT / "ascendrun").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    for folder in ("docs", "jobs", "hostfiles", "templates"):
        expected |= {
            f"ascendrun/data/{path.relative_to(CHECKOUT).as_posix()}"
            for path in (CHECKOUT / folder).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
    assert names == {*expected, "ascendrun/data/sbom.cdx.json"}
    assert [name for name in names if any(part in name for part in OF_THE_CHECKOUT)] == []


def test_the_wheel_has_a_bill_of_what_the_command_runs_with(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        bill = json.loads(archive.read("ascendrun/data/sbom.cdx.json"))
    assert (bill["bomFormat"], bill["metadata"]["component"]["version"]) == ("CycloneDX", __version__)
    parts = {part["bom-ref"]: part for part in bill["components"]}
    assert {"click", "paramiko", "cryptography", "pyyaml"} <= {part["name"] for part in parts.values()}
    assert all(part["purl"] == f"pkg:pypi/{part['name']}@{part['version']}" for part in parts.values())
    assert bill["dependencies"] == [{"ref": bill["metadata"]["component"]["bom-ref"], "dependsOn": list(parts)}]


def test_the_installed_command_answers(installed: Path, environ: dict[str, str]) -> None:
    answer = run([installed / "bin" / "ascendrun", "--version"], environ, cwd=installed)
    assert (answer.returncode, answer.stdout) == (0, f"ascendrun {__version__}\n"), answer.stderr
    help_text = run([installed / "bin" / "ascendrun", "--help"], environ, cwd=installed).stdout
    assert help_text.startswith("Usage: ascendrun")
    where = ask(installed, environ, "import ascendrun; print(ascendrun.__file__)")
    assert where.startswith(str(installed))


def test_the_installed_command_has_the_checkouts_templates(
    installed: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    code = "from ascendrun.query.templates import list_templates as l; print([(s.name, sorted(s.files)) for s in l()])"
    assert ask(installed, environ, code) == f"{[(each.name, sorted(each.files)) for each in list_templates()]}\n"
    made = run([installed / "bin" / "ascendrun", "init", "script", tmp_path / "mine"], environ, cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    first, _, rest = (tmp_path / "mine" / "job.yaml").read_text().partition("\n")
    assert first.endswith("$schema=job.schema.json") and (tmp_path / "mine" / "job.schema.json").is_file()
    assert rest == (CHECKOUT / "templates/script/job.yaml").read_text().partition("\n")[2]


def test_the_wheel_has_the_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/LICENSE") and ".dist-info/" in name)
        assert archive.read(name) == (CHECKOUT / "LICENSE").read_bytes()


def test_the_installed_command_speaks_chinese(user: dict[str, str], tmp_path: Path) -> None:
    answer = run(["ascendrun", "--help"], {**user, "LC_ALL": "zh_CN.UTF-8", "LANG": "zh_CN.UTF-8"}, cwd=tmp_path)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout.startswith(translations("zh")["click.usage"])


def test_the_installed_command_writes_its_man_pages(user: dict[str, str], tmp_path: Path) -> None:
    written = run(["ascendrun", "man", tmp_path / "share" / "man1"], user, cwd=tmp_path)
    assert written.returncode == 0, written.stderr
    pages = {path.name for path in (tmp_path / "share" / "man1").iterdir()}
    listed = {entry.name for entry in COMMANDS if not entry.hidden}
    assert pages == {"ascendrun.1", *(f"ascendrun-{name}.1" for name in listed)}
    assert set(written.stdout.split()) == {str(tmp_path / "share" / "man1" / name) for name in pages}


@pytest.mark.slow
@pytest.mark.timeout(RUN_S + 60)
def test_the_demo_runs_from_the_wheel_in_chinese(user: dict[str, str], tmp_path: Path) -> None:
    told = run(["ascendrun", "--lang", "zh", "demo", "--no-pause"], user, cwd=tmp_path, timeout_s=RUN_S)
    assert told.returncode == 0, told.stdout + told.stderr
    shown = read_block((CHECKOUT / "README.zh.md").read_text(encoding="utf-8"))
    assert shown and find_mismatch(["...", *shown, "..."], told.stdout.splitlines()) is None, told.stdout


@pytest.mark.slow
@pytest.mark.timeout(RUN_S + 60)
def test_the_quickstart_trains_from_the_wheel(user: dict[str, str], tmp_path: Path) -> None:
    made = run(["ascendrun", "init", "quickstart"], user, cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    short = ["--set", "args.num_train_epochs=1", "--set", "args.synthetic_tracks=400"]
    trained = run(["ascendrun", "submit", *made.stdout.split()[:1], *short], user, cwd=tmp_path, timeout_s=RUN_S)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    jobs = json.loads(run(["ascendrun", "ps", "--all", "-o", "json"], user, cwd=tmp_path).stdout)["jobs"]
    assert [(job["name"], job["state"]) for job in jobs] == [("quickstart", "SUCCEEDED")]


def test_the_installed_package_knows_its_programs(installed: Path, environ: dict[str, str]) -> None:
    code = "from ascendrun.planner.training import find_programs; print(sorted(find_programs()))"
    here = sorted(path.parent.name for path in (CHECKOUT / "ascendrun/programs").glob("*/options.json"))
    assert ask(installed, environ, code) == f"{here}\n"


def test_the_metadata_names_what_it_needs(installed: Path, environ: dict[str, str]) -> None:
    code = "import importlib.metadata as m; d = m.distribution('ascendrun'); print(*d.requires, sep='\\n')"
    requires: list[str] = ask(installed, environ, code).splitlines()
    base = {line.split(">")[0].strip() for line in requires if "extra" not in line}
    parser = configparser.ConfigParser()
    parser.read(CHECKOUT / "setup.cfg")
    assert base == {line.split(">")[0].strip() for line in parser["options"]["install_requires"].split("\n") if line}
    assert any(line.startswith("torch>=") and 'extra == "train"' in line for line in requires)
    assert not any(line.startswith("torch==") for line in requires)  # an NPU's image brings its own


def test_a_source_archive_builds_the_same_wheel(wheel: Path, environ: dict[str, str], tmp_path: Path) -> None:
    source = wheel.parent / "source"
    subprocess.run(
        [sys.executable, "-m", "build", "--sdist", "--no-isolation", "-o", tmp_path, source],
        env=environ,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
        timeout=120,
    )
    again = build(next(tmp_path.glob("*.tar.gz")), tmp_path / "again", environ)
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(again) as two:
        assert {i.filename: i.CRC for i in one.infolist()} == {i.filename: i.CRC for i in two.infolist()}
