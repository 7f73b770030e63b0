import base64
import json
import subprocess
import zlib
from pathlib import Path
from typing import Any

import pytest

from ascendrun.core.samples import DeviceSample, HostSample, RankSample
from ascendrun.health.samples.device_samples import DeviceReader, ToolOutput, sampling_items, sampling_request
from ascendrun.health.samples.sample_lines import LineReader
from ascendrun.sim.ascend.scenario import PlannedFault, Scenario, ShownProcess
from ascendrun.sim.ascend.tree import environ_of, install_tree, set_fault

RECORDINGS = Path(__file__).resolve().parents[3] / "recordings" / "ascend"
T = 1_700_000_000.0
MB = 2**20


def recording(name: str) -> str:
    return (RECORDINGS / f"{name}.txt").read_text(encoding="utf-8")


def section(label: str, text: str, code: int = 0) -> str:
    return f"@@ {label}\n{text}\n@@= {code}\n"


def table(reader: DeviceReader, name: str = "npu_smi_info/L1-910B3-busy", at_s: float = T) -> list[DeviceSample]:
    return list(reader.take(ToolOutput("npu-smi", at_s, recording(name)))[0])


def test_a_table_gives_every_device_with_its_processes_and_nothing_that_it_does_not_say() -> None:
    samples = table(DeviceReader("a1"))
    assert [sample.device for sample in samples] == list(range(len(samples))) and len(samples) >= 2
    busy = next(sample for sample in samples if sample.pids)
    assert busy.utilisation is not None and busy.memory_total_bytes == 65536 * MB and busy.source == "npu-smi"
    assert {sample.frequency_mhz for sample in samples} == {sample.link_up for sample in samples} == {None}
    assert {sample.pids for sample in table(DeviceReader("a1"), "npu_smi_info/L1-910A-idle")} == {()}, "nobody there"


def test_both_dies_of_an_a3_are_devices_of_their_own_with_their_own_processes() -> None:
    samples = table(DeviceReader("a1"), "npu_smi_info/L2-A3-two-dies")
    assert [(one.device, one.pids) for one in samples[:4]] == [(0, ()), (1, ()), (2, ()), (3, (6001,))]
    assert [one.power_w for one in samples[:4]] == [171.2, None, 172.2, None]


def test_a_chip_without_hbm_tells_its_other_memory_and_the_device_number_is_the_tools_own() -> None:
    samples = table(DeviceReader("a1"), "npu_smi_info/L3-310P-ids-with-gaps")
    assert [one.device for one in samples] == [0, 1, 2, 3]
    assert samples[0].memory_used_bytes == 1611 * MB and samples[1].pids == (3003,)


def test_what_slow_items_said_stands_in_the_samples_until_it_is_too_old() -> None:
    reader = DeviceReader("a1")
    table(reader)
    assert reader.take(ToolOutput("npu-cards", T, section("common 0", recording("common/910B1-with-mcu")))) == ((), ())
    reader.take(
        ToolOutput("npu-ports", T, section("link 0", "link status: DOWN\n") + section("link 1", "link status: UP\n"))
    )
    first = table(reader, at_s=T + 5)
    assert first[0].frequency_mhz == 1500 and first[0].link_up is False
    assert first[1].frequency_mhz is None and first[1].link_up is True
    late = table(reader, at_s=T + 100)
    assert late[0].link_up is None and late[0].frequency_mhz == 1500, "ports are asked every 20 s, cards every 30 s"
    assert table(reader, at_s=T + 1000)[0].frequency_mhz is None


def test_what_is_said_beyond_the_figures_is_kept_when_it_changes_and_now_and_then() -> None:
    reader = DeviceReader("a1")
    reader.take(ToolOutput("npu-ecc", T, section("ecc 0", recording("ecc/910B-hbm-only"))))
    table(reader)
    first = {one.device: one for one in reader.new_details()}
    assert len(first) >= 2 and first[0].bus_id and any(one.processes for one in first.values())
    table(reader, at_s=T + 5)
    assert reader.new_details() == ()
    reader.take(
        ToolOutput("npu-ports", T, section("stat 0", "packet statistics:\nroce_rx_err_pkt_num:5\nother_num:1\n"))
    )
    reader.take(ToolOutput("npu-ecc", T, section("ecc 0", recording("ecc/910B-hbm-only"))))
    table(reader, at_s=T + 10)
    (changed,) = reader.new_details()
    assert changed.device == 0 and changed.values["roce_rx_err_pkt_num"] == 5 and "other_num" not in changed.values
    assert "hbm_single_bit" in changed.values and "hbm_double_bit_pages" in changed.values
    table(reader, at_s=T + 41)
    assert {one.device for one in reader.new_details()} == set(first)
    table(reader, at_s=T + 10_000)
    assert not any("roce_rx_err_pkt_num" in one.values for one in reader.new_details()), "too old to be told"


def test_rates_of_a_port_come_with_the_second_look_and_never_below_zero() -> None:
    def stat(tx: int, rx: int) -> str:
        return section("stat 0", f"packet statistics:\nmac_tx_total_oct_num:{tx}\nmac_rx_total_oct_num:{rx}\n")

    reader = DeviceReader("a1")
    reader.take(ToolOutput("npu-ports", T, stat(1000, 500)))
    assert table(reader, at_s=T)[0].link_tx_bytes_s is None
    reader.take(ToolOutput("npu-ports", T + 20, stat(5000, 400)))
    sample = table(reader, at_s=T + 21)[0]
    assert (sample.link_tx_bytes_s, sample.link_rx_bytes_s) == (200.0, None), "the driver was started anew"


def test_how_often_a_link_went_down_is_known_of_old_drivers_too() -> None:
    reader = DeviceReader("a1")
    reader.take(
        ToolOutput(
            "npu-history",
            T,
            section("link_stat 2", recording("link-history/old"))
            + section("link_stat 5", recording("link-history/new-still-down"))
            + section("link_stat 6", recording("link-history/never-changed")),
        )
    )
    assert [table(reader)[device].link_downs for device in (2, 5, 7)] == [2, 1, None]


@pytest.mark.parametrize(
    "text, why",
    [
        (recording("npu_smi_info/error-driver-not-loaded"), "tool error"),
        ("Segmentation fault\n", "not parsed"),
        ("", "no device"),
        ("\0\ufffd" * 50, "not parsed"),
    ],
)
def test_a_text_that_is_no_table_is_kept_once_with_the_reason(text: str, why: str) -> None:
    reader = DeviceReader("a1")
    samples, raw = reader.take(ToolOutput("npu-smi", T, text))
    assert samples == () and len(raw) == 1 and raw[0].text == text and why in raw[0].why
    assert reader.take(ToolOutput("npu-smi", T + 5, text)) == ((), ())
    assert len(reader.take(ToolOutput("npu-smi", T + 4000, text))[1]) == 1


def test_a_tool_that_is_not_there_or_does_not_answer_gives_no_sample() -> None:
    reader = DeviceReader("a1")
    assert reader.take(ToolOutput("npu-smi", T, "", code=127)) == ((), ())
    assert reader.take(ToolOutput("something", T, "x")) == ((), ())
    samples, raw = reader.take(ToolOutput("npu-smi", T, "half a tab", code=None, timed_out=True))
    assert samples == () and raw[0].why == "it did not answer in time"


def test_gpus_are_told_with_the_processes_of_their_bus() -> None:
    text = section("gpus", recording("nvidia-gpus/two-gpus")) + section("apps", recording("nvidia-apps/two-processes"))
    samples, raw = DeviceReader("g1").take(ToolOutput("nvidia-smi", T, text))
    assert raw == ()
    assert samples[0] == DeviceSample(
        T,
        "g1",
        0,
        "cuda",
        name="NVIDIA H200",
        utilisation=97.0,
        memory_used_bytes=120034 * MB,
        memory_total_bytes=143771 * MB,
        power_w=612.43,
        temperature_c=58.0,
        frequency_mhz=1980.0,
        ecc_errors=0,
        pids=(4711,),
        source="nvidia-smi",
    )
    assert samples[1].pids == (4712,) and samples[1].utilisation == 0.0


def test_gpus_without_the_list_of_processes_do_not_claim_that_nobody_is_there() -> None:
    text = section("gpus", recording("nvidia-gpus/not-supported")) + section("apps", "NVML: no permission\n", 4)
    samples, raw = DeviceReader("g1").take(ToolOutput("nvidia-smi", T, text))
    assert [(one.pids, one.utilisation, one.power_w) for one in samples] == [(None, None, None)] * 2
    assert "NVML: no permission" in raw[0].why


def test_only_the_tools_of_the_family_are_asked_and_never_faster_than_wanted() -> None:
    assert sampling_items("cpu") == ()
    assert [item["name"] for item in sampling_items("cuda")] == ["nvidia-smi"]
    everything = sampling_items(None, every_s=60.0)
    assert {item["name"] for item in everything} >= {"npu-smi", "npu-ports", "nvidia-smi"}
    assert min(item["every_s"] for item in everything) == 60.0
    assert {item["name"]: item["every_s"] for item in sampling_items("npu")}["npu-smi"] == 5.0


# The items themselves, against the simulated tools


def run_item(item: Any, reader: DeviceReader, env: dict[str, str], at_s: float = T) -> Any:
    done = subprocess.run(item["argv"], env={"PATH": "/usr/bin:/bin", **env}, capture_output=True, text=True)
    return reader.take(ToolOutput(item["name"], at_s, done.stdout, done.returncode))


def run_items(root: Path, reader: DeviceReader, at_s: float) -> Any:
    """The samples of the table, which comes after all else."""
    for item in sorted(sampling_items("npu"), key=lambda one: one["name"] == "npu-smi"):
        samples, raw = run_item(item, reader, environ_of(root, {"PATH": "/usr/bin:/bin"}), at_s)
        assert raw == (), (item["name"], raw)
    return samples


@pytest.mark.slow
def test_a_simulated_node_is_read_completely(tmp_path: Path) -> None:
    install_tree(tmp_path, Scenario(cards=2, processes=(ShownProcess(1, 4711, "python", 30000, 88),)))
    reader = DeviceReader("n1")
    run_items(tmp_path, reader, T)
    set_fault(tmp_path, 0, "link_down")
    samples = run_items(tmp_path, reader, T + 20)
    assert [(one.device, one.health, one.link_up) for one in samples] == [(0, "OK", False), (1, "OK", True)]
    assert samples[1].pids == (4711,) and samples[1].utilisation == 88.0
    for sample in samples:
        unknown = [name for name, value in vars(sample).items() if value is None]
        assert unknown == [], "everything is told after the second look"


def test_a_node_without_npus_answers_that_the_tool_is_not_there(tmp_path: Path) -> None:
    for item in sampling_items(None):
        found = run_item(item, DeviceReader("n1"), {"ASCENDRUN_SIM_ROOT": str(tmp_path)})
        assert found == ((), ()), item["name"]


def test_a_driver_that_is_away_is_kept_as_text(tmp_path: Path) -> None:
    install_tree(tmp_path, Scenario(cards=2, faults=(PlannedFault("driver_missing"),)))
    env = environ_of(tmp_path, {"PATH": "/usr/bin:/bin"})
    samples, raw = run_item(sampling_items("npu")[0], DeviceReader("n1"), env)
    assert samples == () and "-8005" in raw[0].why


# Lines


def test_lines_of_the_sampler_become_samples_by_the_heads_clock() -> None:
    reader = LineReader("a1", job="j-0001", attempt=2)
    line = {
        "at_ns": int((T + 90) * 1e9),
        "host": {"cpu": 12.5, "memory_used_bytes": 5},
        "ranks": [{"rank": 3, "pid": 77, "device": 3, "cpu": 100.0, "state": "R"}],
    }
    assert reader.read(json.loads(json.dumps(line)), ahead_s=90.0).samples == (
        HostSample(T, "a1", cpu=12.5, memory_used_bytes=5),
        RankSample(T, "a1", "j-0001", 2, 3, pid=77, device=3, cpu=100.0, state="R"),
    )
    packed = base64.b64encode(zlib.compress(recording("npu_smi_info/L1-910B3-busy").encode())).decode()
    tool = {"at_ns": int(T * 1e9), "tool": "npu-smi", "code": 0, "z": packed}
    assert list(reader.read(tool).samples) == table(DeviceReader("a1"))


@pytest.mark.parametrize(
    "line",
    [
        {},
        {"at_ns": "x"},
        {"at_ns": -1},
        {"at_ns": 10**30, "host": {}},
        {"at_ns": 1, "host": 3, "ranks": {}},
        {"at_ns": 1, "ranks": [None, 3, {"rank": "0"}, {"rank": -1}]},
        {"at_ns": 1, "tool": 5},
        {"at_ns": 1, "tool": "nobody", "z": "!!"},
    ],
)
def test_a_line_that_is_none_of_the_samplers_gives_nothing(line: Any) -> None:
    assert LineReader("a1", job="j").read(line).samples == ()


def test_figures_that_cannot_be_are_unknown() -> None:
    line = {"at_ns": 1, "host": {"cpu": -3, "load1": "high", "memory_used_bytes": True, "disk_free_bytes": 1e300}}
    assert LineReader("a1").read(line).samples == (HostSample(0.0, "a1"),)


def test_a_text_that_cannot_be_unpacked_is_an_empty_one() -> None:
    for z in ("!!", base64.b64encode(b"no zlib").decode()):
        raw = LineReader("a1").read({"at_ns": 1, "tool": "npu-smi", "code": 0, "z": z}).raw
        assert raw[0].text == "" and raw[0].why == "no device listed"


def test_a_small_line_does_not_unpack_to_gigabytes() -> None:
    bomb = base64.b64encode(zlib.compress(b"x" * (64 << 20))).decode()
    raw = LineReader("a1").read({"at_ns": 1, "tool": "npu-smi", "code": 0, "z": bomb}).raw
    assert len(raw[0].text) == 4 << 20


def test_a_head_with_very_many_hosts_gets_fewer_samples_of_each_which_screens_still_show() -> None:
    intervals = [sampling_request("npu", every_s=5.0, hosts=hosts) or {} for hosts in (8, 320, 960)]
    assert [one["every_s"] for one in intervals] == [5.0, 5.0, 15.0]
    assert all(item["every_s"] >= one["every_s"] for one in intervals for item in one["items"])
    assert sampling_request("npu", every_s=0.0, hosts=960) is None
