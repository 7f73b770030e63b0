"""Small checkouts to try the scripts of bin/ on: our scripts and package; the requirements are wheels made here."""

import os
import shutil
import subprocess
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ascendrun.query.train_env import PACKAGES

CHECKOUT = Path(__file__).resolve().parents[2]
SCRIPTS = ("ascendrun", "setup-env", "setup_env.py")
SETUP_CFG = "[options]\ninstall_requires =\n    tiny-base >= 1\n[options.extras_require]\ntrain =\n"
SETUP_CFG += "".join(f"    {name}\n" for name in PACKAGES.values())


def make_checkout(folder: Path) -> Path:
    (folder / "bin").mkdir(parents=True)
    for name in SCRIPTS:
        shutil.copy(CHECKOUT / "bin" / name, folder / "bin")
    shutil.copytree(CHECKOUT / "ascendrun", folder / "ascendrun", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "setup.cfg").write_text(SETUP_CFG)
    (folder / "constraints.txt").write_text("tiny-base==1.0\n")
    return folder


def make_wheel(folder: Path, name: str, version: str, module: str) -> None:
    """A wheel with one empty module."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{name.replace('-', '_')}-{version}"
    files = {
        f"{module}.py": f"version = {version!r}\n",
        f"{stem}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{stem}.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = f"{stem}.dist-info/RECORD"
    lines = [f"{path},,{len(text)}" for path, text in files.items()] + [f"{record},,"]
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        for path, text in {**files, record: "\n".join(lines) + "\n"}.items():
            wheel.writestr(path, text)


def pip_only_from(wheels: Path) -> dict[str, str]:
    """An environment in which pip knows these wheels and no network, and which names no Python of the test's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON", "VIRTUAL_ENV"))}
    return {**kept, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_CONFIG_FILE": os.devnull}


def run(
    argv: Sequence[object], environ: dict[str, str], *, timeout_s: float = 120.0, **options: Any
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in argv],
        env=environ,
        text=True,
        capture_output=True,
        timeout=timeout_s,
        stdin=subprocess.DEVNULL,
        **options,
    )
