"""The files that a driver, a firmware and a CANN leave on a node's disk, as texts by path below the root."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ascendrun.sim.ascend.scenario import Scenario
from ascendrun.sim.ascend.tool.model import Chip, Node

ASCEND = "usr/local/Ascend"
FIRST_NEW_LAYOUT = (8, 5)  # from this CANN on it is in /usr/local/Ascend/cann
_COMPONENTS = ("runtime", "compiler", "hccl", "opp", "toolkit", "aoe", "ncs", "opp_kernel")
_INNER = "V100R001C{major:02d}SPC001B{build:03d}"


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


def _minor_interval(version: str) -> str:
    """[7.0.0,7.3.99] for 7.3.0.1.231: all of the major version up to the last of the minor one."""
    major, minor = ([*version.split("."), "0"])[:2]
    return f"[{major}.0.0,{major}.{minor}.99]"


def _driver(scenario: Scenario) -> str:
    fits = _minor_interval(scenario.firmware) if scenario.is_compatible else "[1.0.0,1.84.99]"
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
    running = {f"{name}_running_version": f"[{_numbers(version)}:{version}]" for name, version in inner_of.items()}
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
