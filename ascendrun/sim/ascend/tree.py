"""Installs a simulated node in a directory: the tools, and the files of driver and CANN."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Callable

from ascendrun.core.errors import InvalidInputError, NotFoundError, Problem
from ascendrun.sim.ascend.scenario import PlannedFault, Scenario, fault_problems, make_faults, make_node
from ascendrun.sim.ascend.tool import model
from ascendrun.sim.ascend.tool.live import ROOT_VARIABLE
from ascendrun.sim.ascend.tool.model import Chip, Fault, Node

ASCEND = "usr/local/Ascend"
FIRST_NEW_LAYOUT = (8, 5)  # from this CANN on it is in /usr/local/Ascend/cann
_COMPONENTS = ("runtime", "compiler", "hccl", "opp", "toolkit", "aoe", "ncs", "opp_kernel")
_INNER = "V100R001C{major:02d}SPC001B{build:03d}"
CODE = "usr/local/lib/ascend-sim"
TOOLS = {"npu-smi": "usr/local/bin/npu-smi", "hccn_tool": f"{ASCEND}/driver/tools/hccn_tool"}
_TOOL_LINKS = {
    "usr/local/sbin/npu-smi": "../bin/npu-smi",
    "usr/local/bin/hccn_tool": "../Ascend/driver/tools/hccn_tool",
}
_MARKERS = f"{model.HOME}/{model.MARKER_FOLDER}"
_FOLDERS = (f"{ASCEND}/driver/lib64/driver", f"{ASCEND}/driver/lib64/common", _MARKERS)
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
    for path, text in version_files(scenario, seen_as=seen_as).items():
        _write(root / path, text, mode=0o444 if path.endswith(".info") else 0o644)
    _write(root / "etc/hccn.conf", hccn_conf(node))
    for path, target in {**links(scenario), **_TOOL_LINKS}.items():
        link = root / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(target)
    # The tools' package alone, under its own name, so that nothing else of ascendrun can be imported there.
    package = (root / CODE).joinpath(*_PACKAGE.split("."))
    package.mkdir(parents=True, exist_ok=True)
    for source in Path(model.__file__).resolve().parent.glob("*.py"):
        shutil.copyfile(source, package / source.name)
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
    for path in (CODE, model.HOME, ASCEND):
        folder = root / path
        for entry in folder.iterdir() if folder.is_dir() else ():  # the directory itself may be a mount
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def _write(path: Path, text: str, *, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(text)
    beside.chmod(mode)
    os.replace(beside, path)


def set_fault(root: Path, card: int | None, fault: str, *, value: str | None = None, after_s: float = 0.0) -> None:
    """From now on (`after_s` seconds on) the node below `root` has the fault; setting it again restarts it.

    `card`: an NPU id, None for a fault of the whole node. Raises InvalidInputError, NotFoundError where no node is
    installed.
    """
    node = read_node(root)
    npu_ids = tuple(dict.fromkeys(chip.npu_id for chip in node.chips))
    problems = fault_problems(PlannedFault(fault, card, value, after_s), npu_ids)
    if problems:
        raise InvalidInputError([Problem(str(root), None, None, message, hint) for message, hint in problems])
    new = Fault(fault, card, time.time() + after_s, value)
    _change(root, lambda faults: [*(one for one in faults if (one.name, one.card) != (fault, card)), new])


def clear_fault(root: Path, card: int | None, fault: str) -> None:
    """Undo one fault, of a card or (None) of the node; nothing happens where it was not set."""
    read_node(root)
    _change(root, lambda faults: [one for one in faults if (one.name, one.card) != (fault, card)])


def clear_all(root: Path) -> None:
    """Undo every fault of the node and its cards."""
    read_node(root)
    _change(root, lambda faults: [])


def list_faults(root: Path) -> list[Fault]:
    """Also those that start later."""
    read_node(root)
    return model.read_faults(str(root / model.HOME))


def read_node(root: Path) -> model.Node:
    """Raises NotFoundError where no simulated node is installed."""
    try:
        return model.read_node(str(root / model.HOME))
    except FileNotFoundError as error:
        raise NotFoundError(
            f"{root}: no simulated node is installed there", hint=f"python -m ascendrun.sim.ascend install {root}"
        ) from error


def _change(root: Path, change: Callable[[list[Fault]], list[Fault]]) -> None:
    """Change the faults under a lock, so that parallel changes are both kept; a reader gets the old or new file."""
    home = root / model.HOME
    with open(home / "lock", "a", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _write(home / model.STATE_FILE, model.dump_faults(change(model.read_faults(str(home)))))


# --- the files that a driver, a firmware and a CANN leave on a node's disk, as texts by path below the root ---


def version_files(scenario: Scenario, *, seen_as: str) -> dict[str, str]:
    """All of them. `seen_as`: the path under which the node's own programs see the root, "" for "/"."""
    files = {
        f"{ASCEND}/driver/version.info": _driver(scenario),
        f"{ASCEND}/firmware/version.info": _firmware(scenario),
        "etc/ascend_install.info": _install(scenario, seen_as),
    }
    if scenario.cann is not None:
        files.update(_cann(scenario, scenario.cann, seen_as))
    if scenario.nnae is not None:
        files.update(_nnae(scenario, scenario.nnae, seen_as))
    return files


def links(scenario: Scenario) -> dict[str, str]:
    """Symbolic links by path: where each leads, from its own directory (they must hold below any root)."""
    found = {}
    if scenario.cann is not None and is_new_layout(scenario.cann):
        found[f"{ASCEND}/cann"] = f"cann-{scenario.cann}"
        found[f"{ASCEND}/ascend-toolkit/latest"] = "../cann"
        found[f"{ASCEND}/ascend-toolkit/set_env.sh"] = "../cann/set_env.sh"
    elif scenario.cann is not None:
        found[f"{ASCEND}/ascend-toolkit/latest"] = scenario.cann
    if scenario.nnae is not None:
        found[f"{ASCEND}/nnae/latest"] = scenario.nnae
    return found


def is_new_layout(cann: str) -> bool:
    numbers = re.findall(r"\d+", cann)[:2]
    return tuple(int(number) for number in numbers) >= FIRST_NEW_LAYOUT


def hccn_conf(node: Node) -> str:
    """/etc/hccn.conf as the ports were set up; a port without an address has no lines."""
    return "".join(_port(chip) for chip in node.chips if chip.address is not None)


def _port(chip: Chip) -> str:
    values = {name: getattr(chip, name) for name in ("address", "netmask", "netdetect", "gateway")}
    lines = {f"{name}_{chip.logic_id}": value for name, value in values.items() if value is not None}
    return _lines({**lines, f"send_arp_status_{chip.logic_id}": "1"})


def _lines(values: Mapping[str, str]) -> str:
    return "".join(f"{name}={value}\n" for name, value in values.items())


def _inner(version: str) -> str:
    """An inner version that is the same for the same version."""
    numbers = [int(number) for number in re.findall(r"\d+", version)] or [0]
    return _INNER.format(major=10 + (7 * sum(numbers)) % 30, build=100 + sum(numbers) % 900)


def _driver(scenario: Scenario) -> str:
    major, minor = ([*scenario.firmware.split("."), "0"])[:2]
    # [7.0.0,7.3.99] for 7.3.0.1.231: all of the major version up to the last of the minor one.
    fits = f"[{major}.0.0,{major}.{minor}.99]" if scenario.is_compatible else "[1.0.0,1.84.99]"
    return (
        f"Version={scenario.driver}\nascendhal_version=7.35.19\naicpu_version=1.0\ntdt_version=1.0\nlog_version=1.0\n"
        "prof_version=2.0\ndvppkernels_version=1.1\ntsfw_version=1.0\n"
        f"Innerversion={_inner(scenario.driver)}\ncompatible_version=[V100R001C13],[V100R001C15],[V100R001C17]\n"
        f"compatible_version_fw={fits}\npackage_version={scenario.driver}\n"
    )


def _firmware(scenario: Scenario) -> str:
    fits = scenario.driver if scenario.is_compatible else "1.84.0"
    return (
        f"Version={scenario.firmware}\nfirmware_version=1.0\npackage_version={scenario.driver}\n"
        f"compatible_version_drv=[{fits},{fits}.]\n"
    )


def _install(scenario: Scenario, seen_as: str) -> str:
    status = "complete" if scenario.is_complete else "installing"
    return (
        "UserName=HwHiAiUser\nUserGroup=HwHiAiUser\nDriver_Install_Type=full\n"
        f"Driver_Install_Path_Param={seen_as}/{ASCEND}\nDriver_Install_For_All=no\nDriver_Install_Mode=normal\n"
        f"Driver_Install_Status={status}\nFirmware_Install_Type=full\nFirmware_Install_Path_Param={seen_as}/{ASCEND}\n"
    )


def _package(name: str, version: str, compatible: str, arch: str, path: str) -> str:
    return (
        f"package_name={name}\nversion={version}\ninnerversion={_inner(version)}\ncompatible_version={compatible}\n"
        f"arch={arch}\nos=linux\npath={path}\n"
    )


def _cann(scenario: Scenario, cann: str, seen_as: str) -> dict[str, str]:
    home = f"{ASCEND}/cann-{cann}" if is_new_layout(cann) else f"{ASCEND}/ascend-toolkit/{cann}"
    arch_path = f"{home}/{scenario.arch}-linux"
    compatible = "[V100R001C13],[V100R001C15],[V100R001C19]"
    env_folder = home if is_new_layout(cann) else f"{ASCEND}/ascend-toolkit"
    latest = f"{seen_as}/{home}" if is_new_layout(cann) else f"{seen_as}/{ASCEND}/ascend-toolkit/latest"
    inner_of = dict.fromkeys(_COMPONENTS, cann)
    inner_of.update(scenario.components)
    running = {
        f"{name}_running_version": f"[{scenario.build or _numbers(version)}:{version}]"
        for name, version in inner_of.items()
    }
    return {
        f"{arch_path}/ascend_toolkit_install.info": _package(
            "Ascend-cann-toolkit", cann, compatible, scenario.arch, f"{seen_as}/{arch_path}"
        ),
        f"{home}/version.cfg": _lines(running),
        f"{home}/compiler/version.info": _lines({"Version": _numbers(cann)}),
        f"{home}/opp/version.info": _lines({"Version": _numbers(inner_of["opp"])}),
        f"{env_folder}/set_env.sh": set_env(latest, scenario.arch, home_variable="ASCEND_TOOLKIT_HOME"),
    }


def _nnae(scenario: Scenario, nnae: str, seen_as: str) -> dict[str, str]:
    home = f"{ASCEND}/nnae/{nnae}"
    return {
        f"{home}/ascend_nnae_install.info": _package(
            "Ascend-cann-nnae", nnae, "[V100R001C13,V100R001C19],[V100R001C30]", scenario.arch, f"{seen_as}/{home}"
        ),
        f"{ASCEND}/nnae/set_env.sh": set_env(
            f"{seen_as}/{ASCEND}/nnae/latest", scenario.arch, home_variable="ASCEND_NNAE_HOME"
        ),
    }


def _numbers(version: str) -> str:
    """A component's own number, the same for the same CANN: 7.x.0.1.231 next to 8.x."""
    numbers = [int(number) for number in re.findall(r"\d+", version)] or [0]
    return f"7.{numbers[1] + 3 if len(numbers) > 1 else 0}.0.{sum(numbers) % 9 + 1}.231"


def set_env(home: str, arch: str, *, home_variable: str) -> str:
    """A set_env.sh that sets what CANN's own sets; safe under `set -u` and when sourced twice."""
    paths = {
        "LD_LIBRARY_PATH": (f"{home}/lib64", f"{home}/lib64/plugin/opskernel", f"{home}/lib64/plugin/nnengine",
                            f"{home}/opp/built-in/op_impl/ai_core/tbe/op_tiling/lib/linux/{arch}"),
        "PYTHONPATH": (f"{home}/python/site-packages", f"{home}/opp/built-in/op_impl/ai_core/tbe"),
        "PATH": (f"{home}/bin", f"{home}/compiler/ccec_compiler/bin"),
    }  # fmt: skip
    lines = [f"export {home_variable}={home}"]
    lines += [f"export {name}={':'.join(parts)}${{{name}:+:${name}}}" for name, parts in paths.items()]
    lines += [
        f"export ASCEND_AICPU_PATH={home}",
        f"export ASCEND_OPP_PATH={home}/opp",
        f"export TOOLCHAIN_HOME={home}/toolkit",
        f"export ASCEND_HOME_PATH={home}",
    ]
    return "\n".join(lines) + "\n"
