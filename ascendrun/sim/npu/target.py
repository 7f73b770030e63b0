"""The Python environment whose torch_npu is to run: where its packages lie, asked of that Python itself."""

from __future__ import annotations

import json
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ascendrun.core.errors import PreflightError

_QUESTION = """
import importlib.metadata, importlib.util, json, sys
def find(name):
    spec = importlib.util.find_spec(name)
    places = spec and spec.submodule_search_locations
    return places and [places[0], importlib.metadata.version(name)]
print(json.dumps({"prefix": sys.prefix, "version": "%d.%d" % sys.version_info[:2], "torch": find("torch"),
                  "torch_npu": find("torch_npu")}))
"""
KNOWN_VERSION = "2.13"
INSTALL_HINT = "bin/setup-env --venv .venv-npu --over .venv npu-sim makes an environment that has both"


@dataclass(frozen=True)
class Target:
    """`prefix`: the environment's own folder."""

    python: str
    prefix: Path
    torch: Path
    torch_version: str
    torch_npu: Path
    torch_npu_version: str


def find_target(python: str) -> Target:
    """Raises PreflightError saying why this Python cannot run torch_npu."""
    if platform.machine() != "x86_64":
        raise PreflightError(f"the simulated CANN was built for x86_64 only; this machine is {platform.machine()}")
    try:
        text = subprocess.run([python, "-c", _QUESTION], capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise PreflightError(f"{python} does not run: {error}", hint="name another Python: --python PATH") from error
    found = json.loads(text)
    lacks = [name for name in ("torch", "torch_npu") if not found[name]]
    if lacks:
        raise PreflightError(
            f"{python} (Python {found['version']}) has no {' and no '.join(lacks)}",
            hint=f"{INSTALL_HINT}; torch_npu {KNOWN_VERSION} has wheels for Python 3.10 and 3.11",
        )
    torch_npu, version = found["torch_npu"]
    if not version.startswith(KNOWN_VERSION):
        raise PreflightError(
            f"{python} has torch_npu {version}; the simulated CANN knows {KNOWN_VERSION}", hint=INSTALL_HINT
        )
    return Target(python, Path(found["prefix"]), Path(found["torch"][0]), found["torch"][1], Path(torch_npu), version)
