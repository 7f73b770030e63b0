"""Installs a simulated node in a directory: the tools, and the files of driver and CANN."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

from ascendrun.sim.ascend import cann
from ascendrun.sim.ascend.scenario import Scenario, make_faults, make_node
from ascendrun.sim.ascend.tool import model
from ascendrun.sim.ascend.tool.processes import ROOT_VARIABLE

CODE = "usr/local/lib/ascend-sim"
TOOLS = {"npu-smi": "usr/local/bin/npu-smi", "hccn_tool": f"{cann.ASCEND}/driver/tools/hccn_tool"}
_TOOL_LINKS = {
    "usr/local/sbin/npu-smi": "../bin/npu-smi",
    "usr/local/bin/hccn_tool": "../Ascend/driver/tools/hccn_tool",
}
_MARKERS = f"{model.HOME}/{model.MARKER_FOLDER}"
_FOLDERS = (f"{cann.ASCEND}/driver/lib64/driver", f"{cann.ASCEND}/driver/lib64/common", _MARKERS)
_DEVICE_FILES = ("davinci_manager", "devmm_svm", "hisi_hdc")
_PACKAGE = "ascendrun.sim.ascend.tool"
_SCRIPT = """\
#!{python} -IS
import os, sys
root = os.path.realpath(__file__){cut}
sys.path.insert(0, os.path.join(root or "/", "{code}"))
from {package}.main import main
main("{tool}", root or "/")
"""


def install_tree(
    root: Path, scenario: Scenario, *, seen_as: str = "", python: str = "", has_devices: bool = True
) -> None:
    """Make `root` a node of this scenario; what an earlier call left there is replaced. Raises InvalidInputError,
    OSError.

    `seen_as`: the path under which the node's own programs see `root` ("" where it is their "/"). `python`: the
    interpreter of the tools (3.7 or newer), this one's by default: they must run where no `python3` is on PATH.
    `has_devices`: whether `root`/dev gets plain files in place of the device nodes; off where that is a real /dev.
    """
    now_s = time.time()
    node = make_node(scenario, now_s=now_s)
    _clear(root)
    for folder in _FOLDERS:
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / _MARKERS).chmod(0o1777)
    _write(root / model.HOME / model.NODE_FILE, model.dump_node(node))
    _write(root / model.HOME / model.STATE_FILE, model.dump_faults(make_faults(scenario, now_s=now_s)))
    for path, text in cann.version_files(scenario, seen_as=seen_as).items():
        _write(root / path, text, mode=0o444 if path.endswith(".info") else 0o644)
    _write(root / "etc/hccn.conf", cann.hccn_conf(node))
    for path, target in {**cann.links(scenario), **_TOOL_LINKS}.items():
        _link(root / path, target)
    _write_code(root / CODE)
    for tool, path in TOOLS.items():
        _write(root / path, script(tool, path, python or os.path.realpath(sys.executable)), mode=0o755)
    if has_devices:
        for name in (*_DEVICE_FILES, *(f"davinci{chip.logic_id}" for chip in node.chips)):
            _write(root / "dev" / name, "", mode=0o660)


def script(tool: str, path: str, python: str) -> str:
    """The executable of a tool that is at `path` below the root; it finds the root from where it is."""
    cut = f"[: -len({'/' + path!r})]"
    return _SCRIPT.format(python=python, cut=cut, code=CODE, package=_PACKAGE, tool=tool)


def environ_of(root: Path, environ: dict[str, str]) -> dict[str, str]:
    """An environment of a process on the node in the directory `root`: its PATH finds the tools there first."""
    path = f"{root}/usr/local/bin{os.pathsep}{environ.get('PATH', os.defpath)}"
    return {**environ, "PATH": path, ROOT_VARIABLE: str(root.resolve())}


def _clear(root: Path) -> None:
    for path in (CODE, model.HOME, cann.ASCEND):
        folder = root / path
        for entry in folder.iterdir() if folder.is_dir() else ():  # the directory itself may be a mount
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def _write_code(folder: Path) -> None:
    """The tools' package alone, under its own name, so that nothing else of ascendrun can be imported there."""
    package = folder.joinpath(*_PACKAGE.split("."))
    package.mkdir(parents=True, exist_ok=True)
    for source in Path(model.__file__).resolve().parent.glob("*.py"):
        shutil.copyfile(source, package / source.name)


def _write(path: Path, text: str, *, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(text)
    beside.chmod(mode)
    os.replace(beside, path)


def _link(path: Path, target: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(target)
