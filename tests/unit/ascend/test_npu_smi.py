import os
import re
from pathlib import Path

import pytest

from ascendrun.ascend import hccn, npu_smi
from ascendrun.ascend.kinds import FILES
from ascendrun.ascend.reading import split_errors
from tests.lib.ascend_recordings import FOLDER, NAMES, PARSERS, RECORDINGS, as_json, npu_ids, parse, read

ALLOWED_UNPARSED = {
    "npu_smi_info/login-noise-before",  # a greeting is no table
    "hccn-conf/two-ports",  # a strange key and no address
    "nvidia-gpus/driver-mismatch",  # a sentence instead of a table
}


@pytest.mark.parametrize("path", RECORDINGS, ids=NAMES)
def test_a_recording_reads_as_expected(path, update_golden):
    expected = path.with_suffix(".json")
    found = as_json(parse(path))
    if update_golden:
        expected.write_text(found, encoding="utf-8")
    assert found == expected.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", RECORDINGS, ids=NAMES)
def test_nothing_of_a_recording_is_left_unread(path):
    name = f"{path.parent.name}/{path.stem}"
    unparsed = getattr(parse(path), "unparsed", ())
    assert bool(unparsed) == (name in ALLOWED_UNPARSED), unparsed


def test_every_folder_of_recordings_has_a_parser_and_every_parser_a_recording():
    assert {path.name for path in FOLDER.iterdir()} == set(PARSERS)


@pytest.mark.parametrize("path", [p for p in RECORDINGS if p.parent.name not in FILES], ids=lambda p: p.stem)
def test_windows_line_ends_change_nothing(path):
    parser = PARSERS[path.parent.name]
    assert parser(read(path).replace("\n", "\r\n")) == parser(read(path))


def recorded(kind, name):
    return PARSERS[kind](read(FOLDER / kind / f"{name}.txt"))


def test_each_layout_is_told_from_the_others():
    layouts = {path.stem: parse(path).layout for path in RECORDINGS if path.parent.name == "npu_smi_info"}
    assert all(layout == name.split("-")[0] for name, layout in layouts.items() if name.startswith("L"))
    assert all(layout is None for name, layout in layouts.items() if name.startswith("error"))


def test_a_dropped_card_leaves_a_gap_and_the_others_keep_their_rows():
    """S0-B8, S1-B7: cards were counted as lines with the word NPU, headings among them."""
    info = recorded("npu_smi_info", "L1-910B3-one-alarm-one-dropped")
    assert npu_ids(info) == (0, 1, 2, 4, 5, 7)
    assert [chip.npu_id for chip in info.chips if chip.health == "Alarm"] == [4]
    assert {chip.npu_id: chip.hbm_used_mb for chip in info.chips} == {n: 3361 + n for n in (0, 1, 2, 4, 5, 7)}


def test_both_dies_of_an_a3_keep_their_own_numbers_and_the_second_has_no_power():
    chips = recorded("npu_smi_info", "L2-A3-two-dies").chips
    assert [(chip.npu_id, chip.chip_id, chip.phy_id) for chip in chips] == [(n // 2, n % 2, n) for n in range(8)]
    assert [chip.power_w is None for chip in chips] == [False, True] * 4


def test_no_process_table_is_not_the_same_as_no_process():
    assert recorded("npu_smi_info", "error-driver-not-loaded").processes is None
    assert recorded("npu_smi_info", "L1-910A-idle").processes == ()


@pytest.mark.parametrize(
    ("kind", "name", "error", "code"),
    [
        ("npu_smi_info", "error-driver-not-loaded", "driver", -8005),
        ("npu_smi_info", "error-held-by-a-container", "device-held", -8020),
        ("npu_smi_info", "error-not-installed", "missing-tool", None),
        ("npu_smi_info", "error-library-missing", "missing-library", None),
        ("common", "not-in-a-container", "unsupported", None),
        ("link", "failed", "failed", None),
        ("link", "no-permission", "permission", None),
    ],
)
def test_an_error_instead_of_an_answer_is_known_as_one(kind, name, error, code):
    first = recorded(kind, name).errors[0]
    assert (first.kind, first.code) == (error, code)


def test_an_error_text_that_we_do_not_know_is_no_error_but_unparsed():
    assert split_errors(["the moon is full"]) == ((), ["the moon is full"])


def test_a_chip_printed_twice_with_two_values_has_neither():
    text = read(FOLDER / "npu_smi_info" / "L1-910B3-busy.txt")
    rows = [line for line in text.split("\n") if line.startswith("| 1     910B3")]
    after = text.split("\n")[text.split("\n").index(rows[0]) + 1]
    changed = after.replace("57362", "11111")
    assert changed != after
    info = npu_smi.parse_info(text.replace(after, after + "\n" + rows[0] + "\n" + changed))
    one = [chip for chip in info.chips if chip.npu_id == 1]
    assert [(chip.hbm_used_mb, chip.hbm_total_mb) for chip in one] == [(None, 65536)]
    assert set(info.unparsed) == {rows[0], changed}


def test_more_used_than_there_is_reads_as_unknown():
    text = read(FOLDER / "npu_smi_info" / "L1-910A-idle.txt").replace("32768", "    1")
    assert {(chip.hbm_used_mb, chip.hbm_total_mb) for chip in npu_smi.parse_info(text).chips} == {(None, None)}


@pytest.mark.parametrize("cut", ["ipaddr:10.20.3.1", "ipaddr:10.20.3.17\nnetmask:255.255.2"])
def test_an_address_cut_in_the_middle_is_no_address(cut):
    read_so_far = hccn.parse_ip(cut)
    assert read_so_far.address in (None, "10.20.3.17") and read_so_far.netmask is None and read_so_far.unparsed


SAMPLES = os.environ.get("ASCENDRUN_ASCEND_SAMPLES")
PATTERNS = {
    "npu-smi_info_9*": "npu_smi_info", "npu-smi_info_A3*": "npu_smi_info", "npu-smi_info_-t_board*": "board",
    "npu-smi_info_-t_common*": "common", "npu-smi_info_-t_health*": "health", "npu-smi_info_-t_ecc*": "ecc",
    "hccn_tool_-link_-g*": "link", "hccn_tool_-link_stat*": "link-history",
    "hccn_tool_-ip*": "ip", "hccn_tool_-net_health*": "net-health", "hccn_tool_-tls*": "tls",
    "hccn_tool_-ping*": "ping", "hccn_tool_-stat*": "stat", "hccn_tool_-fec*": "fec", "driver_version*": "driver",
    "firmware_version*": "firmware", "ascend_*_install*": "cann", "version.cfg*": "components",
    "hccn.conf*": "hccn-conf",
}  # fmt: skip


@pytest.mark.skipif(not SAMPLES, reason="ASCENDRUN_ASCEND_SAMPLES names no folder of real samples")
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_real_sample_is_read_whole(pattern):
    found = sorted(Path(str(SAMPLES)).glob(pattern))
    assert found, f"no sample matches {pattern}"
    for path in found:
        reading = PARSERS[PATTERNS[pattern]](read(path))
        assert getattr(reading, "unparsed", ()) == () and getattr(reading, "errors", ()) == (), path


COMMANDS = (
    (re.compile(r"npu-smi info$"), "npu_smi_info"),
    (re.compile(r"npu-smi info -m$"), "mapping"),
    (re.compile(r"npu-smi info .*-t (\w+)$"), None),
    (re.compile(r"hccn_tool -i [0-9]+ -(\w+) -g$"), None),
    (re.compile(r"cat \S*driver/version.info$"), "driver"),
    (re.compile(r"cat \S*firmware/version.info$"), "firmware"),
    (re.compile(r"cat \S*_install.info$"), "cann"),
)
KINDS = {"link_stat": "link-history", "net_health": "net-health"}


def kind_of(command):
    for pattern, kind in COMMANDS:
        found = pattern.search(command)
        if found:
            return kind or KINDS.get(found[1], found[1])
    return None


@pytest.mark.skipif(not SAMPLES, reason="ASCENDRUN_ASCEND_SAMPLES names no folder of real samples")
def test_every_answer_that_a_collector_gathered_is_read_whole():
    read_kinds = set()
    for path in sorted(Path(str(SAMPLES)).glob("mindcluster_*npu_info*.txt")):
        command, answer = "", []
        for line in [*read(path).split("\n"), "lspci"]:
            if re.match(r"/?usr/local/\S+/(?:npu-smi|hccn_tool) |cat /|lspci|pip list", line):
                kind = kind_of(command)
                if kind:
                    reading = PARSERS[kind]("\n".join(answer) + "\n")
                    assert reading.unparsed == (), (path, command)
                    dropped = answer[:1] == ["Invalid card id."]
                    assert bool(reading.errors) == dropped, (path, command)
                    read_kinds.add(kind)
                command, answer = line, []
            else:
                answer.append(line)
    wanted = {"npu_smi_info", "mapping", "health", "board", "usages", "ip", "stat", "link-history", "fec", "optical"}
    assert read_kinds >= wanted | {"net-health", "driver", "firmware", "cann"}


@pytest.mark.parametrize("name", ["L1-910A-1.8", "L1-910A-21.0.2", "L3-310-21.0.3"])
@pytest.mark.parametrize("version", ["1.8.21", "20.2.0", "21.0.1", "21.0.2", "21.0.3", "21.0.3.1", "21.0.4", "22.0.2"])
def test_a_table_without_hugepages_is_read_whatever_version_printed_it(name, version):
    text = re.sub(
        r"npu-smi (\S+)", lambda found: f"npu-smi {version}", read(FOLDER / "npu_smi_info" / f"{name}.txt"), count=1
    )
    info, recording = npu_smi.parse_info(text), recorded("npu_smi_info", name)
    assert (info.tool_version, info.chips, info.unparsed) == (version, recording.chips, ())
    assert len(info.chips) == 2 and {chip.hugepages_total for chip in info.chips} == {None}


@pytest.mark.parametrize("view", ["health", "common", "ecc"])
@pytest.mark.parametrize("is_first", [True, False])
def test_the_controller_of_a_board_is_no_chip(view, is_first):
    """MCU: it has a name in place of a chip id."""
    path = next(path for path in RECORDINGS if path.parent.name == view and "controller" not in path.stem)
    head, _, blocks = read(path).strip("\n").partition("\n\n")
    controller = "\tHealth                         : OK\n\tChip Name                      : MCU"
    text = "\n\n".join([head, controller, blocks] if is_first else [head, blocks, controller]) + "\n"
    assert PARSERS[view](text).chips == parse(path).chips
