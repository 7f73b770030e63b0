"""What the simulated tools print, our own parsers read back: every layout and view, over random nodes."""

import re

import pytest
from hypothesis import given, settings

from ascendrun.ascend import hccn as ports
from ascendrun.ascend import npu_smi, npu_smi_views
from ascendrun.sim.ascend.scenario import Scenario, ShownProcess, make_faults, make_node
from ascendrun.sim.ascend.tool import hccn as hccn_tool
from ascendrun.sim.ascend.tool import main as npu_smi_tool
from ascendrun.sim.ascend.tool.hccn import ITEMS, Port
from ascendrun.sim.ascend.tool.live import Scene, readings
from ascendrun.sim.ascend.tool.model import FAMILIES, KINDS, Faults
from ascendrun.sim.ascend.tool.views import VIEWS
from tests.lib.ascend_recordings import npu_ids
from tests.lib.ascend_scenes import fault, hccn, scenarios, scene_of, smi

EXAMPLES = settings(max_examples=60)
WITH_PORTS = sorted(name for name, family in FAMILIES.items() if family.speed_mbit)


def understood(parsed):
    assert parsed.errors == () and parsed.unparsed == (), (parsed.errors, parsed.unparsed)
    return parsed


def shown_layout(layout):
    """The layout's name where the parser tells it: widths are told for the 910s only."""
    return {"L2c": "L2", "L3a": "L3", "L4c": "L4"}.get(layout, layout)


@EXAMPLES
@given(scenarios())
def test_the_table_says_what_every_chip_reads(scenario):
    scene = scene_of(scenario)
    info = understood(npu_smi.parse_info(smi(scene, "info")))
    node = scene.node
    assert (info.layout, info.tool_version, info.driver_version) == (
        shown_layout(node.layout), node.tool_version, node.driver_version,
    )  # fmt: skip
    assert len(info.chips) == len(scene.readings)
    for chip, reading in zip(info.chips, scene.readings):
        want = reading.chip
        assert (chip.npu_id, chip.name, chip.health) == (want.npu_id, node.family.name, reading.health)
        assert (chip.load_percent, chip.temperature_c) == (reading.load_percent, reading.temperature_c)
        assert (chip.ddr_used_mb, chip.ddr_total_mb) == (reading.ddr_used_mb, want.ddr_mb)
        assert chip.bus_id == (None if want.bus_id == "NA" else want.bus_id)
        assert chip.phy_id == (want.logic_id if "L2" in node.layout else None)
        assert chip.logic_id == (want.logic_id if "L3" in node.layout else None)
        assert chip.chip_id == (None if "L4" in node.layout else want.chip_id)
        no_power = node.chip.startswith("310P") or ("L2" in node.layout and want.chip_id)
        assert chip.power_w == (None if no_power else reading.power_w)
        if want.hbm_mb:
            assert (chip.hbm_used_mb, chip.hbm_total_mb) == (reading.hbm_used_mb, reading.hbm_mb)


@EXAMPLES
@given(scenarios())
def test_the_process_table_says_who_uses_what_and_no_more_than_eight_a_chip(scenario):
    scene = scene_of(scenario)
    text = smi(scene, "info")
    info = understood(npu_smi.parse_info(text))
    want = [
        (reading.chip.npu_id, None if "L4" in scene.node.layout else reading.chip.chip_id, row.pid, row.name[:15],
         row.memory_mb)
        for reading in scene.readings
        for row in reading.rows[:8]
    ]  # fmt: skip
    assert [(one.npu_id, one.chip_id, one.pid, one.name, one.memory_mb) for one in info.processes] == want
    busy = {one.npu_id for one in info.processes}
    idle = [int(npu) for npu in re.findall(r"No running processes found in NPU (\d+)", text)]
    assert idle == [one for one in npu_ids(info) if one not in busy]


@EXAMPLES
@given(scenarios())
def test_every_view_says_what_the_card_reads(scenario):
    scene = scene_of(scenario)
    node = scene.node
    is_950 = node.chip.startswith("Ascend950")
    for card in scenario.cards_ids:
        mine = [reading for reading in scene.readings if reading.chip.npu_id == card]
        ids = [None] if is_950 else [reading.chip.chip_id for reading in mine]

        def view(kind, parse, card=card, ids=ids):
            parsed = understood(parse(smi(scene, "info", "-t", kind, "-i", card)))
            assert parsed.npu_id == card and [chip.chip_id for chip in parsed.chips] == ids
            assert parsed.chip_count == (None if is_950 else len(ids))
            return parsed.chips

        for chip, reading in zip(view("common", npu_smi_views.parse_common), mine):
            assert (chip.aicore_now_mhz, chip.aicore_mhz) == (reading.aicore_mhz, node.family.mhz)
            assert (chip.aicore_count, chip.temperature_c) == (node.family.cores, reading.temperature_c)
        for chip, reading in zip(view("ecc", npu_smi_views.parse_ecc), mine):
            counts = chip.hbm if reading.chip.hbm_mb else chip.ddr
            assert (counts.single_bit, counts.double_bit) == (reading.single_bit, reading.double_bit)
        memory = re.findall(r"HBM Capacity\(MB\) +: (\d+)", smi(scene, "info", "-t", "memory", "-i", card))
        assert [int(size) for size in memory] == [reading.hbm_mb for reading in mine if reading.hbm_mb]
        for chip, reading in zip(view("health", npu_smi_views.parse_health), mine):
            assert (chip.health, chip.error_codes) == (reading.health, reading.error_codes)
        board = understood(npu_smi_views.parse_board(smi(scene, "info", "-t", "board", "-i", card)))
        assert (board.software_version, board.firmware_version) == (scenario.driver, scenario.firmware)
        assert board.compatibility == ("OK" if scenario.is_compatible else "NOK")
        chip_board = understood(npu_smi_views.parse_board(smi(scene, "info", "-t", "board", "-i", card, "-c", 0)))
        assert (chip_board.chip_name, chip_board.chip_id) == (node.family.name, 0)


@EXAMPLES
@given(scenarios().filter(lambda scenario: scenario.family.speed_mbit))
def test_every_item_of_hccn_tool_says_how_the_port_is_set_up(scenario):
    scene = scene_of(scenario)
    for reading in scene.readings:
        chip, device = reading.chip, reading.chip.logic_id
        address = understood(ports.parse_ip(hccn(scene, device, "ip")))
        assert (address.address, address.netmask) == (chip.address, chip.netmask)
        assert understood(ports.parse_link(hccn(scene, device, "link"))).is_up
        history = understood(ports.parse_link_history(hccn(scene, device, "link_stat")))
        assert (history.device_id, history.up_count, len(history.changes)) == (device, 1, 1)
        assert history.down_count == (0 if scene.node.is_new else None)
        tls = understood(ports.parse_tls(hccn(scene, device, "tls")))
        assert (tls.device_id, tls.is_enabled, tls.alarm_days) == (device, scenario.has_tls, 60)
        assert understood(ports.parse_net_health(hccn(scene, device, "net_health"))).status == "Success"
        assert understood(ports.parse_fec(hccn(scene, device, "fec"))).mode == "rs FEC mode"
        ping = understood(ports.parse_ping(hccn(scene, device, "ping", "address", "29.1.2.3", "pkt", 4)))
        assert (ping.device_id, ping.address, ping.sent, ping.received) == (device, "29.1.2.3", 4, 4)
        assert understood(ports.parse_stat(hccn(scene, device, "stat"))).values["roce_rx_err_pkt_num"] == 0
        assert understood(ports.parse_optical(hccn(scene, device, "optical"))).is_present


@pytest.mark.parametrize("chip", WITH_PORTS)
def test_the_950s_form_of_the_command_line_is_understood_too(chip):
    scene = scene_of(Scenario(chip=chip))
    asked = hccn_tool.respond(["-g", "-link", "-i", "1", "-u", "0", "-p", "0"], scene)
    assert asked == hccn_tool.respond(["-i", "1", "-link", "-g"], scene) and ports.parse_link(asked.text).is_up


# -- faults, as the parsers tell them


@pytest.mark.parametrize(
    ("name", "value", "health", "codes"),
    [
        ("health_warning", None, "Warning", ("80E18402",)),
        ("health_alarm", None, "Alarm", ("A4025021", "8C03A000", "8C084E00")),
        ("health_critical", "80E01801 81078603", "Critical", ("80E01801", "81078603")),
        ("health_unknown", None, "UNKNOWN", ()),
    ],
)
def test_an_ill_card_shows_its_word_in_the_table_and_its_codes_in_its_health(name, value, health, codes):
    scene = scene_of(Scenario(faults=fault(name, 3, value)))
    info = npu_smi.parse_info(smi(scene, "info"))
    assert [chip.health for chip in info.chips] == ["OK"] * 3 + [health] + ["OK"] * 4
    for more in ((), ("-c", 0)):
        view = understood(npu_smi_views.parse_health(smi(scene, "info", "-t", "health", "-i", 3, *more)))
        assert (view.chips[0].health, view.chips[0].error_codes) == (health, codes)
        assert len(view.chips[0].error_texts) == len(codes)


@pytest.mark.parametrize(
    ("name", "field", "pinned", "shown"),
    [
        ("health_alarm", "health", "OK", "Alarm"),
        ("hot", "temperature_c", 40, 96),
        ("hbm_held", "hbm_used_mb", 5, 3380 + 29000),
    ],
)
def test_a_fault_shows_although_the_scenario_pins_the_reading(name, field, pinned, shown):
    healthy = Scenario(fixed={3: {field: pinned}})
    assert getattr(npu_smi.parse_info(smi(scene_of(healthy), "info")).chips[3], field) == pinned
    ill = Scenario(fixed={3: {field: pinned}}, faults=fault(name, 3))
    assert getattr(npu_smi.parse_info(smi(scene_of(ill), "info")).chips[3], field) == shown


def at(scenario, seconds):
    """The node so long after its faults were switched on."""
    node = make_node(scenario, now_s=1e9)
    faults = Faults(make_faults(scenario, now_s=1e9), 1e9 + seconds)
    return Scene(node, faults, readings(node, faults, ()), is_complete=True, is_privileged=True)


def test_errors_grow_with_time():
    scenario = Scenario(faults=(*fault("ecc_single", 1, "2"), *fault("ecc_double", 2, "0.5")))
    counts = []
    for seconds in (0, 10):
        scene = at(scenario, seconds)
        cards = [npu_smi_views.parse_ecc(smi(scene, "info", "-t", "ecc", "-i", card)).chips[0].hbm for card in (1, 2)]
        counts.append((cards[0].single_bit, cards[0].double_bit, cards[1].double_bit, cards[1].double_bit_pages))
    assert counts == [(1, 0, 1, 1), (21, 0, 6, 6)]


def test_held_memory_has_no_process_and_a_ghost_has_one():
    scene = scene_of(Scenario(faults=(*fault("hbm_held", 1, "30000"), *fault("ghost_process", 2, "4711"))))
    info = npu_smi.parse_info(smi(scene, "info"))
    assert info.chips[1].hbm_used_mb > 30000 and 1 not in {one.npu_id for one in info.processes}
    assert info.chips[2].hbm_used_mb > 29000 and info.chips[2].load_percent == 0
    assert [(one.npu_id, one.pid) for one in info.processes] == [(2, 4711)]


def test_a_throttled_card_is_hot_and_slow_and_a_short_one_has_lost_memory():
    row = ShownProcess(device=0, pid=7, name="python", memory_mb=1000, load=90)
    scene = scene_of(Scenario(processes=(row,), faults=fault("throttled", 0)))
    common = npu_smi_views.parse_common(smi(scene, "info", "-t", "common", "-i", 0)).chips[0]
    assert common.aicore_now_mhz < 0.6 * common.aicore_mhz and common.temperature_c > 90


def test_a_dropped_card_is_in_no_list_and_asking_for_it_is_an_error():
    scene = scene_of(Scenario(faults=fault("dropped", 3)))
    left = [0, 1, 2, 4, 5, 6, 7]
    assert list(npu_ids(npu_smi.parse_info(smi(scene, "info")))) == left
    refused = npu_smi_tool.respond(["info", "-t", "health", "-i", "3"], scene)
    assert refused.code and npu_smi_views.parse_health(refused.text).errors[0].kind == "no-card"
    assert ports.parse_link(hccn(scene, 3, "link")).errors


@pytest.mark.parametrize(
    ("name", "item", "parse", "field", "ill", "well"),
    [
        ("link_down", "link", ports.parse_link, "is_up", False, True),
        ("link_down", "net_health", ports.parse_net_health, "status", "Socket fail", "Success"),
        ("net_health", "net_health", ports.parse_net_health, "status", "Receive timeout", "Success"),
        ("tls_on", "tls", ports.parse_tls, "is_enabled", True, False),
        ("ip_missing", "ip", ports.parse_ip, "is_set", False, True),
        ("ip_v6", "ip", ports.parse_ip, "is_set", False, True),
        ("hccn_conf_stale", "ip", ports.parse_ip, "address", "29.1.1.112", "29.1.1.11"),
        ("fec_none", "fec", ports.parse_fec, "mode", "no FEC mode", "rs FEC mode"),
        ("optical_absent", "optical", ports.parse_optical, "is_present", False, True),
    ],
)
def test_a_fault_of_a_port_shows_on_its_card_and_on_no_other(name, item, parse, field, ill, well):
    scene = scene_of(Scenario(faults=fault(name, 1)))
    assert getattr(understood(parse(hccn(scene, 1, item))), field) == ill
    other = getattr(understood(parse(hccn(scene, 2, item))), field)
    assert other == (well.replace("11", "12") if field == "address" else well)


def test_tls_can_be_off_on_one_card_of_a_node_that_has_it_on():
    scene = scene_of(Scenario(has_tls=True, faults=fault("tls_off", 6)))
    assert [ports.parse_tls(hccn(scene, device, "tls")).is_enabled for device in range(8)] == [True] * 6 + [False, True]


def test_a_card_may_have_an_ipv6_address_only():
    scene = scene_of(Scenario(faults=fault("ip_v6", 0)))
    assert understood(ports.parse_ip(hccn(scene, 0, "ip", "-inet6"))).address == "fd00::1"
    assert understood(ports.parse_ip(hccn(scene, 1, "ip", "-inet6"))).is_set is False


def test_ping_fails_to_the_one_address_that_is_unreachable():
    scene = scene_of(Scenario(faults=fault("unreachable", 0, "29.1.9.9")))
    lost = understood(ports.parse_ping(hccn(scene, 0, "ping", "address", "29.1.9.9")))
    assert (lost.sent, lost.received) == (3, 0)
    assert ports.parse_ping(hccn(scene, 0, "ping", "address", "29.1.9.8")).received == 3
    assert ports.parse_ping(hccn(scene, 1, "ping", "address", "29.1.9.9")).received == 3


def test_a_link_that_flaps_has_a_history_in_order_and_counts_on():
    scene = at(Scenario(driver="25.5.1", faults=fault("link_flaps", 0, "10")), 65)
    port = Port(scene.node, scene.faults, scene.readings[0], (), 1e9 + 65)
    history = understood(ports.parse_link_history(ITEMS["-link_stat"](port)))
    assert (history.up_count, history.down_count) == (8, 7)
    pairs = list(zip(history.changes, history.changes[1:]))
    assert {(up.at - down.at).total_seconds() for up, down in pairs if not down.is_up} == {1.0}


@pytest.mark.parametrize("name", sorted(KINDS))
@pytest.mark.parametrize("chip", ["910A", "910_93", "310P3", "Ascend950PR"])
def test_with_any_fault_every_question_has_an_answer_that_reads(name, chip):
    card = 2 if KINDS[name].of == "card" else None
    scene = scene_of(Scenario(chip=chip, faults=fault(name, card)))
    asked = [["info"], ["info", "-l"], ["info", "-m"], ["info", "-t", "topo"], ["info", "watch"]]
    asked += [["info", "-t", kind, "-i", "2", *chip_id] for kind in VIEWS for chip_id in ((), ("-c", "0"))]
    for arguments in asked:
        assert npu_smi_tool.respond(arguments, scene).text.endswith("\n")
    for item in ITEMS:
        assert hccn_tool.respond(["-i", "2", item, "-g"], scene).text.endswith("\n")
    info = npu_smi.parse_info(npu_smi_tool.respond(["info"], scene).text)
    assert info.unparsed == () and (info.chips or info.errors)
