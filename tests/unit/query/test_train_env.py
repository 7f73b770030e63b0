"""A Python that is not the checkout's own is asked, never changed."""

from __future__ import annotations

import ast
import shlex
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from ascendrun.core.errors import PreflightError
from ascendrun.query.train_env import PACKAGES, ensure_training_stack


def test_another_python_without_the_stack_is_refused_with_the_commands_that_mend_it(tmp_path: Path) -> None:
    folder = tmp_path / "their env"
    venv.create(folder, with_pip=False)
    python = str(folder / "bin" / "python")
    before = sorted(folder.rglob("*"))
    with pytest.raises(PreflightError) as caught:
        ensure_training_stack(python, print)
    assert caught.value.message.values["packages"][0] == "torch"
    first, second = (caught.value.hint or "").split(" && ")
    assert shlex.split(first) == [python, "-m", "pip", "install", "torch"]
    assert shlex.split(second)[4:] == [name for name in PACKAGES.values() if name != "torch"]
    assert sorted(folder.rglob("*")) == before


def test_only_what_is_missing_is_named_so_that_an_npu_image_keeps_its_torch(tmp_path: Path) -> None:
    venv.create(tmp_path, with_pip=False)
    site = next((tmp_path / "lib").glob("python*/site-packages"))
    for module in PACKAGES:
        if module != "h3":
            (site / f"{module}.py").write_text("raise SystemExit('imported')")
    python = str(tmp_path / "bin" / "python")
    with pytest.raises(PreflightError) as caught:
        ensure_training_stack(python)
    assert caught.value.hint == f"{python} -m pip install h3"
    (site / "h3.py").touch()
    ensure_training_stack(python)


@pytest.mark.parametrize("text", [None, "#!/bin/sh\necho 'no library' >&2\nexit 127\n", "#!/bin/sh\necho hello\n"])
def test_a_python_that_does_not_run_is_told_as_such(tmp_path: Path, text: str) -> None:
    python = tmp_path / "python"
    if text is not None:
        python.write_text(text)
        python.chmod(0o755)
    with pytest.raises(PreflightError, match=str(python)):
        ensure_training_stack(str(python))


def test_the_packages_named_are_those_that_the_extra_installs() -> None:
    import configparser

    parser = configparser.ConfigParser()
    parser.read(Path(__file__).resolve().parents[3] / "setup.cfg")
    extra = [line.split()[0] for line in parser["options.extras_require"]["train"].splitlines() if line]
    assert sorted(extra) == sorted(PACKAGES.values())


def test_nothing_else_than_these_is_imported_by_the_programs() -> None:
    folder = Path(__file__).resolve().parents[3] / "ascendrun" / "programs"
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
