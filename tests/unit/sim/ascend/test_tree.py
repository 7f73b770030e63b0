"""What driver, firmware and CANN leave on a simulated node's disk, and the files that scenarios come from."""

import os
import stat
import subprocess

import pytest
from hypothesis import HealthCheck, given, settings

from ascendrun.ascend import install
from ascendrun.core.errors import InvalidInputError
from ascendrun.sim.ascend import tree
from ascendrun.sim.ascend.scenario import PlannedFault, Scenario, ShownProcess, make_node, read_scenario
from ascendrun.sim.ascend.tool.model import dump_node, load_node
from tests.lib.ascend_scenes import scenarios

ROOT = "/usr/local/Ascend"
VERSION_FILES = {
    "driver": ("driver/version.info",),
    "firmware": ("firmware/version.info",),
    "cann": (
        "cann/{arch}-linux/ascend_toolkit_install.info",  # CANN 8.5 and newer
        "ascend-toolkit/latest/{arch}-linux/ascend_toolkit_install.info",  # up to CANN 8.3
    ),
    "nnae": ("nnae/latest/ascend_nnae_install.info", "nnae/latest/{arch}-linux/ascend_nnae_install.info"),
    "components": ("ascend-toolkit/latest/version.cfg",),
}


def found(node, kind, scenario):
    """The first of the files in which a kind's version may stand, as the checks look for it."""
    files = (node.root / ROOT.lstrip("/") / file.format(arch=scenario.arch) for file in VERSION_FILES[kind])
    return next((file.read_text() for file in files if file.exists()), None)


@pytest.mark.parametrize("version", ["7.0.T10", "8.0.RC3", "8.3.RC1", "8.5.0", "9.1.0"])
@pytest.mark.parametrize("arch", ["aarch64", "x86_64"])
def test_each_cann_is_found_in_the_layout_of_its_time(sim_node, version, arch):
    scenario = Scenario(cann=version, nnae="8.0.RC3", arch=arch)
    sim_node.install(scenario)
    toolkit = install.parse_cann(found(sim_node, "cann", scenario))
    assert (toolkit.kind, toolkit.version, toolkit.arch) == ("toolkit", version, arch)
    assert toolkit.path.startswith(str(sim_node.root)) and os.path.isdir(toolkit.path)
    assert (sim_node.root / "usr/local/Ascend/cann").exists() == (version in ("8.5.0", "9.1.0"))
    nnae = install.parse_cann(found(sim_node, "nnae", scenario))
    assert (nnae.kind, nnae.version) == ("nnae", "8.0.RC3") and os.path.isdir(nnae.path)
    assert install.parse_components(found(sim_node, "components", scenario)).cann_versions == (version,)


def test_nothing_of_a_cann_that_is_not_installed_is_there(sim_node):
    scenario = Scenario(cann=None)
    sim_node.install(scenario)
    assert [found(sim_node, kind, scenario) for kind in ("cann", "nnae", "components")] == [None] * 3


def test_a_mixed_cann_names_two_versions(sim_node):
    scenario = Scenario(components={"opp": "8.0.RC2"})
    sim_node.install(scenario)
    assert install.parse_components(found(sim_node, "components", scenario)).cann_versions == ("8.0.RC2", "8.0.RC3")


@pytest.mark.parametrize("fits", [True, False])
def test_driver_and_firmware_fit_as_the_scenario_says(sim_node, fits):
    scenario = Scenario(is_compatible=fits)
    sim_node.install(scenario)
    driver = install.parse_driver(found(sim_node, "driver", scenario))
    firmware = install.parse_firmware(found(sim_node, "firmware", scenario))
    assert (driver.version, firmware.version) == (scenario.driver, scenario.firmware)
    assert driver.unparsed == firmware.unparsed == ()
    assert install.driver_takes_firmware(driver, firmware) is fits


@pytest.mark.parametrize("complete", [True, False])
def test_the_install_record_names_the_drivers_folder_and_whether_it_is_complete(sim_node, complete):
    sim_node.install(Scenario(is_complete=complete))
    record = install.parse_install((sim_node.root / "etc/ascend_install.info").read_text())
    assert record.is_complete is complete and os.path.isdir(record.driver_path)
    assert (record.user, record.for_all_users, record.unparsed) == ("HwHiAiUser", False, ())


def test_hccn_conf_has_the_ports_of_the_node(sim_node):
    addresses = (None, *(f"10.0.0.{n}" for n in range(1, 8)))
    sim_node.install(Scenario(addresses=addresses, gateway=None))
    conf = install.parse_hccn_conf((sim_node.root / "etc/hccn.conf").read_text())
    assert sorted(conf.ports) == [1, 2, 3, 4, 5, 6, 7] and conf.unparsed == ()
    assert conf.ports[7].address == "10.0.0.7" and conf.ports[7].gateway is None


SETS = ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH", "ASCEND_OPP_PATH", "ASCEND_AICPU_PATH", "TOOLCHAIN_HOME")


@pytest.mark.parametrize("shell", ["sh", "bash"])
@pytest.mark.parametrize(("version", "path"), [
    ("8.0.RC3", "ascend-toolkit/set_env.sh"), ("8.5.0", "cann/set_env.sh"), ("8.5.0", "ascend-toolkit/set_env.sh"),
])  # fmt: skip
def test_set_env_sets_what_torch_npu_looks_for_also_under_set_u_and_twice(sim_node, shell, version, path):
    sim_node.install(Scenario(cann=version))
    script = sim_node.root / "usr/local/Ascend" / path
    command = f"set -eu; unset LD_LIBRARY_PATH; export PYTHONPATH=/mine; . {script}; . {script}; env"
    done = subprocess.run([shell, "-c", command], capture_output=True, text=True, env=sim_node.environ(), timeout=60)
    said = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    assert done.stderr == "" and set(SETS) <= set(said)
    assert os.path.isfile(f"{said['ASCEND_TOOLKIT_HOME']}/version.cfg") and os.path.isdir(said["ASCEND_OPP_PATH"])
    assert said["PYTHONPATH"].endswith(":/mine") and not said["LD_LIBRARY_PATH"].endswith(":")
    assert said["PATH"].endswith(os.environ["PATH"])


def test_a_tree_that_is_seen_as_the_root_names_the_usual_folders():
    files = tree.version_files(Scenario(nnae="8.0.RC3"), seen_as="")
    assert f"path={ROOT}/ascend-toolkit/8.0.RC3/aarch64-linux\n" in "".join(files.values())
    assert f"Driver_Install_Path_Param={ROOT}\n" in files["etc/ascend_install.info"]


def test_version_files_cannot_be_written_and_device_files_are_there(sim_node):
    mode = (sim_node.root / "usr/local/Ascend/driver/version.info").stat().st_mode
    assert stat.S_IMODE(mode) == 0o444
    names = {path.name for path in (sim_node.root / "dev").iterdir()}
    assert names == {"davinci_manager", "devmm_svm", "hisi_hdc", *(f"davinci{n}" for n in range(8))}


def test_every_link_of_a_tree_leads_into_the_tree(sim_node):
    for version in ("8.0.RC3", "8.5.0"):
        sim_node.install(Scenario(cann=version, nnae=version))
        links = [path for path in sim_node.root.rglob("*") if path.is_symlink()]
        assert len(links) >= 4
        for link in links:
            assert not os.path.isabs(os.readlink(link)) and link.exists()
            assert link.resolve().is_relative_to(sim_node.root.resolve())


# -- scenarios

SHOWN = "{device: 1, pid: 5, name: a, memory_mb: 1}"


def test_a_scenario_file_says_the_whole_node():
    text = """
chip: "910_93"
cards: 2
driver: 25.5.1
layout: L2
cann: 8.5.0
addresses: [10.0.0.1, null, 10.0.0.3, 10.0.0.4]
components: {opp: 8.3.RC1}
fixed: {"1": {health: Warning, power_w: 100.5}}
processes: [{device: 3, pid: 77, name: python, memory_mb: 1000}]
faults: [{name: slow, value: 2.5}, {name: link_down, card: 1, after_s: 60}]
"""
    assert read_scenario(text, "a.yaml") == Scenario(
        chip="910_93",
        cards=2,
        driver="25.5.1",
        layout="L2",
        cann="8.5.0",
        addresses=("10.0.0.1", None, "10.0.0.3", "10.0.0.4"),
        components={"opp": "8.3.RC1"},
        fixed={1: {"health": "Warning", "power_w": 100.5}},
        processes=(ShownProcess(3, 77, "python", 1000),),
        faults=(PlannedFault("slow", None, "2.5"), PlannedFault("link_down", 1, None, 60)),
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("chip: 910B9", "chip: 910B9 is unknown"),
        ("chips: 910B3", "chips is unknown"),
        ("[]", "a.yaml: expected a mapping"),
        ("layout: L4", "layout: L4 is not one of a 910B3"),
        ("npu_ids: [1, 1]", "npu_ids: duplicate id"),
        ("addresses: [10.0.0.1]", "1 for 8 devices"),
        ("faults: [{name: dropped, card: 9}]", "there is no card 9"),
        ("faults: [{nam: dropped}]", "nam is unknown"),
        ("faults: [{card: 1}]", "name"),
        ("fixed: {0: {helth: OK}}", "helth is unknown"),
        ("fixed: {9: {health: OK}}", "there is no device 9"),
        ("processes: [{device: 8, pid: 1, name: a, memory_mb: 1}]", "there is no device 8"),
        (f"processes: [{SHOWN}, {SHOWN}]", "duplicate pid 5 on device 1"),
        ("cards: many", "wrong kind"),
        ("a: [", "a.yaml"),
    ],
)
def test_a_scenario_that_no_node_can_be_is_refused_with_the_reason(text, says):
    with pytest.raises(InvalidInputError) as refused:
        read_scenario(text, "a.yaml")
    assert any(says in str(problem) for problem in refused.value.problems)


@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(scenarios())
def test_a_node_survives_its_file(scenario):
    node = make_node(scenario, now_s=1e9)
    assert load_node(dump_node(node)) == node
