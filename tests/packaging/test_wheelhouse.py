"""The wheelhouse of bin/wheelhouse installs ascendrun where there is no network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.checkouts import CHECKOUT
from tests.packaging.test_wheel import PARTS


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_wheelhouse_installs_in_a_namespace_without_a_network(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    environ["ASCENDRUN_PYTHON"] = os.path.realpath(sys.executable)
    for part in (*PARTS, "bin", "constraints.txt"):
        target = tmp_path / "source" / part
        target.parent.mkdir(parents=True, exist_ok=True)
        if (CHECKOUT / part).is_dir():
            shutil.copytree(CHECKOUT / part, target, ignore=shutil.ignore_patterns("__pycache__"))
        elif (CHECKOUT / part).exists():
            shutil.copy(CHECKOUT / part, target)
    made = subprocess.run(
        [tmp_path / "source/bin/wheelhouse", "web", "tui"], env=environ, check=True, stdout=subprocess.PIPE, text=True
    )
    archive = tmp_path / "source" / made.stdout.strip()
    subprocess.run(["tar", "-xf", archive], cwd=tmp_path, check=True)
    bare = {**environ, "PIP_CONFIG_FILE": os.devnull, "HOME": str(tmp_path)}
    commands = (
        "wheelhouse/install.sh there && there/bin/ascendrun help docs && there/bin/python -c 'import fastapi, textual'"
    )
    apart = subprocess.run(
        ["unshare", "--net", "sh", "-c", commands], cwd=tmp_path, env=bare, capture_output=True, text=True
    )
    assert apart.returncode == 0 and "install" in apart.stdout, apart.stdout + apart.stderr
    assert [path.name for path in (tmp_path / "source" / "build").iterdir()] == [archive.name]
