"""A Python that is not the checkout's own is asked, never changed."""

import ast
import shlex
import subprocess
import sys
import venv
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from ascendrun.query.train_env import PACKAGES

CHECKOUT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("present", "commands"),
    [
        ((), [["torch"], [name for name in PACKAGES.values() if name != "torch"]]),
        (set(PACKAGES) - {"h3"}, [["h3"]]),  # an image for NPUs keeps its torch
        (PACKAGES, []),
    ],
)
def test_another_python_is_refused_with_the_commands_that_install_what_is_missing(
    tmp_path: Path, present: Iterable[str], commands: list[list[str]]
) -> None:
    folder = tmp_path / "their env"
    venv.create(folder, with_pip=False)
    site = next((folder / "lib").glob("python*/site-packages"))
    for module in present:
        (site / f"{module}.py").write_text("raise SystemExit('imported')")
    before, python = sorted(folder.rglob("*")), str(folder / "bin" / "python")
    ask = (
        "from ascendrun.query import train_env\ntry: train_env.ensure_training_stack()\n"
        "except train_env.PreflightError as error: print(error.hint, end='')"
    )
    environ = {"PYTHONPATH": str(CHECKOUT), "PYTHONDONTWRITEBYTECODE": "1"}
    hint = subprocess.run([python, "-c", ask], env=environ, capture_output=True, text=True, check=True).stdout
    shown = [shlex.split(command) for command in hint.split(" && ") if command]
    assert shown == [[python, "-m", "pip", "install", *names] for names in commands]
    assert sorted(folder.rglob("*")) == before


def test_the_packages_named_are_those_that_the_extra_installs() -> None:
    import configparser

    parser = configparser.ConfigParser()
    parser.read(CHECKOUT / "setup.cfg")
    extra = [line.split()[0] for line in parser["options.extras_require"]["train"].splitlines() if line]
    assert sorted(extra) == sorted(PACKAGES.values())


def test_nothing_else_than_these_is_imported_by_the_programs() -> None:
    folder = CHECKOUT / "ascendrun" / "programs"
    found = {name.split(".")[0] for path in folder.rglob("*.py") for name in imported_by(path)}
    extras = {"torch_npu", "deepspeed", "matplotlib", "Bio", "tiktoken"}  # of the vendor's image, or for few jobs
    extras |= {"starlette", "uvicorn"}  # mode: serve
    known = {*PACKAGES, *extras, "ascendrun", *getattr(sys, "stdlib_module_names", found)}
    assert found - known == set()


def imported_by(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or ""
