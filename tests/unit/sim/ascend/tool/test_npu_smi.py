"""The simulated tools' answers beside recorded ones: the same bytes where a node can be told to be the recorded one.

ASCENDRUN_ASCEND_SAMPLES names the folder of recordings; they are not ours to commit.
"""

import os
import re
from pathlib import Path

import pytest

from ascendrun.ascend import npu_smi
from ascendrun.sim.ascend.scenario import Scenario, make_node
from ascendrun.sim.ascend.tool.main import respond
from ascendrun.sim.ascend.tool.model import Row
from ascendrun.sim.ascend.tree import version_files
from tests.lib.ascend_scenes import fault, hccn, scene_of, scene_of_node, smi

FOLDER = os.environ.get("ASCENDRUN_ASCEND_SAMPLES")
pytestmark = pytest.mark.skipif(not FOLDER, reason="ASCENDRUN_ASCEND_SAMPLES names no folder of real samples")

TABLES = {
    "npu-smi_info_910A_8cards_busy.SYNTH_23.0.5.txt": "910A",
    "npu-smi_info_910A_8cards_idle.SYNTH_23.0.5.txt": "910A",
    "npu-smi_info_910B3_8cards_busy.SYNTH_24.1.rc2.txt": "910B3",
    "npu-smi_info_910B3_8cards_idle.SYNTH_24.1.rc2.txt": "910B3",
    "npu-smi_info_910B3_8cards_npu3_Alarm_npu5_Critical.SYNTH_24.1.rc2.txt": "910B3",
    "npu-smi_info_A3_910_93_8npu_16die_idle.SYNTH_25.0.rc1.1.txt": "910_93",
}
B1 = Scenario(chip="910B1", driver="23.0.rc2", fixed={
    0: {"hbm_used_mb": 2700}, 1: {"power_w": 93.4, "temperature_c": 46, "hbm_used_mb": 2700},
})  # fmt: skip
A = Scenario(chip="910A", driver="23.0.5", firmware="7.1.0.7.220")
B3 = Scenario(fixed={0: {"power_w": 96.5, "temperature_c": 43}})
VIEWS = {
    "npu-smi_info_-t_board_-i_0_910A.REAL_23.0.5.txt": (A, ("info", "-t", "board", "-i", 0)),
    "npu-smi_info_-t_common_-i_1_910B1.REAL_23.0.rc2.txt": (B1, ("info", "-t", "common", "-i", 1)),
    "npu-smi_info_-t_ecc_-i_0_910A.REAL.txt": (A, ("info", "-t", "ecc", "-i", 0)),
    "npu-smi_info_-t_health_-i_0_-c_0_OK.REAL_910A.txt": (A, ("info", "-t", "health", "-i", 0, "-c", 0)),
    "npu-smi_info_-t_health_-i_0_-c_0_Alarm.REAL_910A.txt": (
        Scenario(chip="910A", faults=fault("health_alarm", 0)), ("info", "-t", "health", "-i", 0, "-c", 0),
    ),
    "npu-smi_info_-t_memory_-i_0_910B.SYNTH.txt": (B3, ("info", "-t", "memory", "-i", 0)),
    "npu-smi_info_-t_power_-i_0_910B.SYNTH.txt": (B3, ("info", "-t", "power", "-i", 0)),
    "npu-smi_info_-t_proc-mem_-i_0_none.SYNTH_910B.txt": (B3, ("info", "-t", "proc-mem", "-i", 0)),
    "npu-smi_info_-t_temp_-i_0_server.SYNTH.txt": (B3, ("info", "-t", "temp", "-i", 0)),
    "npu-smi_info_-t_usages_-i_0_910B1.REAL_23.0.rc2.txt": (B1, ("info", "-t", "usages", "-i", 0)),
    "npu-smi_info_-h.REAL_23.0.rc2.txt": (A, ("info", "-h")),
    "npu-smi_info_-l_server_910x_8cards.SYNTH.txt": (Scenario(), ("info", "-l")),
    "npu-smi_info_-m_910B3_8cards.SYNTH.txt": (Scenario(), ("info", "-m")),
    "npu-smi_info_-m_A3_16die.SYNTH.txt": (Scenario(chip="910_93"), ("info", "-m")),
    "npu-smi_info_-t_topo_910B_8cards_fullmesh.REAL_24.1.rc1.txt": (Scenario(), ("info", "-t", "topo")),
    "npu-smi_-v.SYNTH.txt": (Scenario(), ("-v",)),
}  # fmt: skip
PLAIN = Scenario(addresses=("29.1.112.213", *[None] * 7))
PORTS = {
    "hccn_tool_-fec_-g.txt": (PLAIN, 0, ("fec",)),
    "hccn_tool_-fec_-g_none.txt": (Scenario(faults=fault("fec_none", 0)), 0, ("fec",)),
    "hccn_tool_-gateway_-g.SYNTH.txt": (PLAIN, 0, ("gateway",)),
    "hccn_tool_-hw_stats_-g.REAL_910B.txt": (PLAIN, 3, ("hw_stats",)),
    "hccn_tool_-ip_-g.REAL.txt": (PLAIN, 0, ("ip",)),
    "hccn_tool_-ip_-g_unset.REAL_empty.txt": (PLAIN, 1, ("ip",)),
    "hccn_tool_-link_-g.txt": (PLAIN, 0, ("link",)),
    "hccn_tool_-link_-g_DOWN.txt": (Scenario(faults=fault("link_down", 0)), 0, ("link",)),
    "hccn_tool_-mtu_-g.SYNTH.txt": (PLAIN, 0, ("mtu",)),
    "hccn_tool_-net_health_-g_Success.txt": (PLAIN, 0, ("net_health",)),
    "hccn_tool_-net_health_-g_SocketFail.txt": (Scenario(faults=fault("link_down", 0)), 0, ("net_health",)),
    "hccn_tool_-netdetect_-g.SYNTH.txt": (PLAIN, 0, ("netdetect",)),
    "hccn_tool_-speed_-g.SYNTH.txt": (PLAIN, 0, ("speed",)),
    "hccn_tool_-stat_-g_fieldorder.SYNTH_910B.txt": (PLAIN, 0, ("stat",)),
    "hccn_tool_-tls_-g_switch0.REAL.txt": (PLAIN, 0, ("tls",)),
    "hccn_tool_-tls_-g_switch0_oldform.REAL.txt": (Scenario(driver="22.0.4"), 0, ("tls",)),
}


def sample(name):
    return Path(FOLDER, name).read_text()


def node_like(info, chip):
    """The node that the recorded table is of: its chips with the recorded totals and readings, its processes."""
    node = make_node(Scenario(chip=chip, driver=info.tool_version, cards=8), now_s=1e9)
    chips, rows = [], []
    for ours, said in zip(node.chips, info.chips):
        fixed = {
            "health": said.health,
            "power_w": said.power_w or 0.0,
            "temperature_c": said.temperature_c,
            "load_percent": said.load_percent,
            "ddr_used_mb": said.ddr_used_mb,
            "hbm_used_mb": said.hbm_used_mb,
        }
        chips.append(
            ours._replace(
                ddr_mb=said.ddr_total_mb,
                hugepages_used=said.hugepages_used,
                hugepages_total=said.hugepages_total,
                fixed=fixed,
            )
        )
        mine = [one for one in info.processes if (one.npu_id, one.chip_id) == (ours.npu_id, ours.chip_id)]
        rows += [Row(ours.logic_id, one.pid, one.name, one.memory_mb, 0, 0.0) for one in mine]
    return node._replace(chips=tuple(chips), rows=tuple(rows))


@pytest.mark.parametrize("name", sorted(TABLES))
def test_a_recorded_table_is_printed_again_byte_for_byte(name):
    text = sample(name)
    assert smi(scene_of_node(node_like(npu_smi.parse_info(text), TABLES[name])), "info") == text


@pytest.mark.parametrize("name", sorted(VIEWS))
def test_a_recorded_view_is_printed_again_byte_for_byte(name):
    scenario, arguments = VIEWS[name]
    assert smi(scene_of(scenario), *arguments) == sample(name)


@pytest.mark.parametrize("name", sorted(PORTS))
def test_a_recorded_answer_of_hccn_tool_is_given_again_byte_for_byte(name):
    scenario, device, (item, *more) = PORTS[name]
    assert hccn(scene_of(scenario), device, item, *more) == sample(name)


def test_a_recorded_ping_is_given_again_but_for_its_times():
    text = sample("hccn_tool_-ping_-g_address.REAL_910B.txt")
    ours = hccn(scene_of(Scenario()), 3, "ping", "address", "29.1.137.205")
    assert re.sub(r"time=[0-9]\.[0-9]{6}ms", "time", ours) == re.sub(r"time=[0-9]\.[0-9]{6}ms", "time", text)


def names_of(text):
    """What stands left of each line's separator, in order."""
    return [re.split(r"[:=]", line)[0].rstrip() for line in text.splitlines() if re.search(r"[:=]", line)]


@pytest.mark.parametrize(
    ("name", "driver"),
    [
        ("hccn_tool_-link_stat_-g_910A.REAL.txt", "23.0.5"),
        ("hccn_tool_-link_stat_-g_new_down_count.REAL_hccldoc.txt", "25.5.1"),
    ],
)
def test_a_link_history_has_the_recorded_lines_and_widths(name, driver):
    ours = hccn(scene_of(Scenario(driver=driver)), 0, "link_stat").splitlines()
    theirs = sample(name).splitlines()
    heads = 4 if "new" in name else 3
    when = r"[A-Z][a-z]{2} [A-Z][a-z]{2} [ 0-9][0-9] [0-9:]{8} [0-9]{4}"
    for our_line, their_line in zip(ours[:heads], theirs[:heads]):
        assert re.sub(r"(: ).*", r"\1", our_line) == re.sub(r"(: ).*", r"\1", their_line)
    shape = re.compile(rf"\[devid 0\]    {when}    LINK (UP|DOWN)")
    assert all(shape.fullmatch(line) for line in (*ours[heads:], *theirs[heads:]))


def test_an_optical_module_and_a_chips_board_have_the_recorded_fields_in_order():
    recorded = sample("mindcluster_faultdiag_npu_info_before_910A.txt")
    optical = recorded[
        recorded.index("optical info:") : recorded.index("/usr/local/bin/npu-smi info -i 0 -c 0 -t board")
    ]
    assert names_of(hccn(scene_of(A), 0, "optical")) == names_of(optical)
    board = recorded[recorded.index("-c 0 -t board\n") + len("-c 0 -t board\n") :].split("\n\n")[0]
    assert names_of(smi(scene_of(A), "info", "-i", 0, "-c", 0, "-t", "board")) == names_of(board)


def test_the_views_of_newer_drivers_have_the_recorded_fields_in_order():
    text = sample("npu-smi_info_-t_usages_-i_0_910B_new_fields.SYNTH_25.x.txt")
    assert names_of(smi(scene_of(Scenario(driver="25.5.1")), "info", "-t", "usages", "-i", 0)) == names_of(text)
    text = sample("npu-smi_info_-t_board_-i_0_910B.SYNTH_24.1.rc2.txt")
    ours = smi(scene_of(Scenario()), "info", "-t", "board", "-i", 0)
    assert re.sub("(Serial Number.*: ).*", r"\1NA", ours) == text


def test_a_switch_describes_itself_in_the_recorded_order():
    recorded = [line for line in sample("hccn_tool_-lldp_-g.REAL_910B.txt").splitlines() if line.endswith("TLV")]
    ours = [line for line in hccn(scene_of(Scenario()), 0, "lldp").splitlines() if line in recorded]
    assert ours == recorded


def test_routes_and_watch_have_the_recorded_columns():
    text = sample("hccn_tool_-route_-g.REAL_910B.txt")
    addresses = tuple(f"29.1.7.{device}" for device in range(8))
    ours = hccn(scene_of(Scenario(addresses=addresses)), 3, "route").splitlines()
    assert ours[:5] == text.splitlines()[:5]
    watch = sample("npu-smi_info_watch_310orA1.REAL.txt").splitlines()
    watched = smi(scene_of(Scenario(chip="910A", driver="23.0.5")), "info", "watch").splitlines()
    assert watched[0] == watch[0] and len(watched[1]) == len(watch[1])


def test_the_950s_process_line_is_the_recorded_one():
    text = sample("npu-smi_info_-t_proc-mem_-i_0.REAL_950doc.txt")
    found = re.search(r"Process id:(\d+)\s+Process name:(\S+)\s+Process memory\(MB\):(\d+)", text)
    node = make_node(Scenario(chip="Ascend950PR", driver="25.7.rc1"), now_s=1e9)
    node = node._replace(rows=(Row(0, int(found[1]), found[2], int(found[3]), 0, 0.0),))
    assert smi(scene_of_node(node), "info", "-t", "proc-mem", "-i", 0) == text


ERRORS = [
    (("info",), Scenario(faults=fault("driver_missing"))),
    (("info",), Scenario(faults=fault("device_used"))),
    (("info", "-t", "power"), Scenario()),
    (("info", "-t", "power", "-i", "9"), Scenario()),
    (("info", "-t", "board", "-i", "0", "-c", "7"), Scenario()),
    (("info", "-t", "product", "-i", "0"), Scenario()),
    (("foo",), Scenario()),
]


def test_the_errors_are_the_recorded_ones():
    blocks = re.split(r"^\$ npu-smi .*\n", sample("npu-smi_errors.SYNTH_from_source.txt"), flags=re.MULTILINE)[1:]
    answers = [respond(arguments, scene_of(scenario)) for arguments, scenario in ERRORS]
    assert [one.text for one in answers] == blocks
    assert all(one.code for one in answers)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("driver_version.info.REAL_23.0.7.txt", "usr/local/Ascend/driver/version.info"),
        ("firmware_version.info.REAL_23.0.7.txt", "usr/local/Ascend/firmware/version.info"),
        (
            "ascend_toolkit_install.info.REAL_7.0.T10.txt",
            "usr/local/Ascend/ascend-toolkit/8.0.RC3/aarch64-linux/ascend_toolkit_install.info",
        ),
        ("ascend_nnae_install.info.REAL_8.0.RC3.txt", "usr/local/Ascend/nnae/8.0.RC3/ascend_nnae_install.info"),
    ],
)
def test_the_version_files_have_the_recorded_keys_in_order(name, path):
    files = version_files(Scenario(nnae="8.0.RC3"), seen_as="")
    assert names_of(files[path]) == names_of(sample(name))


def test_the_version_file_of_the_newer_disk_layout_names_the_recorded_path():
    text = sample("ascend_toolkit_install.info.REAL_8.5.0_cann_layout.txt")
    ours = version_files(Scenario(cann="8.5.0"), seen_as="")[
        "usr/local/Ascend/cann-8.5.0/aarch64-linux/ascend_toolkit_install.info"
    ]
    assert ours.splitlines()[-1] == text.splitlines()[-1] and names_of(ours) == names_of(text)


def test_hccn_conf_and_version_cfg_have_the_recorded_keys_in_order():
    from ascendrun.sim.ascend.tree import hccn_conf

    assert names_of(hccn_conf(scene_of(Scenario()).node)) == names_of(sample("hccn.conf.REAL_910B_8nic.txt"))
    cfg = version_files(Scenario(), seen_as="")["usr/local/Ascend/ascend-toolkit/8.0.RC3/version.cfg"]
    recorded = names_of(sample("version.cfg.REAL_8.0.RC2_head.txt"))
    assert names_of(cfg)[: len(recorded)] == recorded
