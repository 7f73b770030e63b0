"""The Python environment with torch_npu: the locations of its packages, queried from that Python."""

from __future__ import annotations

import json
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ascendrun.core.errors import PreflightError
from ascendrun.text import Text

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
INSTALL_HINT = Text(
    "sim.install",
    "create an environment with both (Python 3.10 or 3.11): bin/setup-env --venv .venv-npu --over .venv npu-sim",
)


@dataclass(frozen=True)
class Target:
    """`prefix`: the environment's own directory."""

    python: str
    prefix: Path
    torch: Path
    torch_version: str
    torch_npu: Path
    torch_npu_version: str


def find_target(python: str) -> Target:
    """Return the environment. Raises PreflightError with the reason why this Python cannot run torch_npu."""
    if platform.machine() != "x86_64":
        raise PreflightError(
            Text("sim.machine", "the simulated CANN requires x86_64, got {machine}", machine=platform.machine())
        )
    try:
        text = subprocess.run([python, "-c", _QUESTION], capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise PreflightError(
            Text(
                "sim.python-fails",
                "cannot run {python} ({error})",
                python=python,
                error=getattr(error, "strerror", None) or error,
            ),
            hint=Text("sim.other-python", "name another Python: --python PATH"),
        ) from error
    found = json.loads(text)
    lacks = [name for name in ("torch", "torch_npu") if not found[name]]
    if lacks:
        raise PreflightError(
            Text(
                "sim.no-torch",
                "{python} (Python {version}): {modules} not found",
                python=python,
                version=found["version"],
                modules=lacks,
            ),
            hint=INSTALL_HINT,
        )
    torch_npu, version = found["torch_npu"]
    if not version.startswith(KNOWN_VERSION):
        raise PreflightError(
            Text(
                "sim.other-torch-npu",
                "{python}: the simulated CANN requires torch_npu {known}, got {version}",
                python=python,
                known=KNOWN_VERSION,
                version=version,
            ),
            hint=INSTALL_HINT,
        )
    return Target(python, Path(found["prefix"]), Path(found["torch"][0]), found["torch"][1], Path(torch_npu), version)
