import re
from pathlib import Path

import pytest
import yaml

from ascendrun.ascend import variables
from ascendrun.ascend.devices import device_faults, fault_classes, fault_of
from ascendrun.ascend.tables import load_table
from ascendrun.ascend.variables import check_environment, check_variable, effective_ids, known_variables
from ascendrun.facts.chips import CHIPS, chip_of
from ascendrun.text import Text

JOBS = Path(__file__).resolve().parents[3] / "jobs"


@pytest.mark.parametrize(
    ("name", "family", "memory_gb", "has_bf16"),
    [
        ("910A", "A1", 32, False),
        ("Ascend 910ProB", "A1", 32, False),
        ("910B", "A1", 32, False),
        ("910B3", "A2", 64, True),
        ("Ascend910B2C", "A2", 64, True),
        ("910B4", "A2", 32, True),
        ("910B4-1", "A2", 64, True),
        ("Ascend910", "A3", 64, True),
        ("Ascend910_9391", "A3", 64, True),
        ("310P3", "310P", 21, False),
        ("Ascend950DT", "950", 128, True),
        ("NVIDIA H200", "cuda", 141, True),
    ],
)
def test_a_chip_is_known_by_the_names_that_npu_smi_and_torch_print(name, family, memory_gb, has_bf16):
    chip = chip_of(name)
    assert (chip.family, chip.memory_gb, chip.has_bf16) == (family, memory_gb, has_bf16)


@pytest.mark.parametrize("name", ["", "Ascend", "Mcu", "910B5x", "Ascend9999", "910C"])
def test_another_name_is_no_chip_of_ours(name):
    assert chip_of(name) is None


@pytest.mark.parametrize(
    ("name", "ids", "faulty"),
    [
        ("910A", [0, 1, 2, 3], False), ("910A", [4, 5], False), ("910A", range(8), False), ("910A", [3, 4], True),
        ("910A", [0, 1, 4, 5], True), ("910A", [0, 1, 2], True), ("910B3", [0, 3, 6], False),
        ("Ascend910", [2, 3], False), ("Ascend910", [1, 2], True), ("Ascend910", [0, 1, 2], True),
        ("Ascend910", range(16), False), ("310P3", [0, 1, 2], False),
    ],
)  # fmt: skip
def test_hccl_takes_only_some_sets_of_devices(name, ids, faulty):
    assert bool(device_faults(chip_of(name), list(ids))) is faulty


def test_a_row_that_is_not_verified_says_what_is_in_doubt():
    for row in load_table("variables")["rows"]:
        assert row["source"] and (row["verified"] or row["doubt"]), row


def test_the_eight_classes_go_from_no_effect_to_beyond_repair():
    names = [one.name for one in fault_classes()]
    assert len(names) == 8 and (names[0], names[-1]) == ("NotHandle", "Separate")


def test_a_code_is_known_with_and_without_0x_and_an_unknown_one_is_not_called_harmless():
    assert fault_of("0x80e18402").fault_class.name == fault_of("80E18402").fault_class.name == "Separate"
    unknown = fault_of("80E1FFFF")
    assert (unknown.fault_class, unknown.message) == (None, None)
    assert fault_of("80E1840") is None and fault_of("OK") is None


A, B, A3 = chip_of("910A"), chip_of("910B3"), chip_of("Ascend910")


@pytest.mark.parametrize(
    ("name", "value", "chip", "codes"),
    [
        ("HCCL_CONNECT_TIMEOUT", "120", B, []),
        ("HCCL_CONNECT_TIMEOUT", "7200", B, []),
        ("HCCL_CONNECT_TIMEOUT", "119", B, ["range"]),
        ("HCCL_CONNECT_TIMEOUT", "7201", B, ["range"]),
        ("HCCL_CONNECT_TIMEOUT", "10m", B, ["form"]),
        ("HCCL_CONNECT_TIMEOUT", "", B, ["form"]),
        ("HCCL_EXEC_TIMEOUT", "600", A, ["step"]),
        ("HCCL_EXEC_TIMEOUT", "612", A, []),
        ("HCCL_EXEC_TIMEOUT", "17408", A, ["range"]),
        ("HCCL_EXEC_TIMEOUT", "17408", B, []),
        ("HCCL_EXEC_TIMEOUT", "0", A, ["range", "harmful"]),
        ("HCCL_EXEC_TIMEOUT", "1800", B, ["harmful"]),
        ("HCCL_RDMA_TC", "132", B, []),
        ("HCCL_RDMA_TC", "133", B, ["step"]),
        ("HCCL_RDMA_TIMEOUT", "22", B, ["range"]),
        ("HCCL_RDMA_TIMEOUT", "22", A, []),
        ("HCCL_DETERMINISTIC", "true", A, ["no-effect"]),
        ("HCCL_OP_RETRY_ENABLE", "L1:1", B, ["no-effect"]),
        ("HCCL_OP_RETRY_ENABLE", "L1:1", A3, []),
        ("HCCL_OP_EXPANSION_MODE", "AIV", B, ["harmful"]),
        ("HCCL_IF_IP", "10.0.0.300", B, ["form"]),
        ("HCCL_IF_IP", "fd00::1", B, []),
        ("HCCL_SOCKET_IFNAME", "^=eth0,enp1s0", B, []),
        ("HCCL_SOCKET_IFNAME", "eth0 eth1", B, ["form"]),
        ("HCCL_HOST_SOCKET_PORT_RANGE", "50000-50031,50100", B, []),
        ("HCCL_HOST_SOCKET_PORT_RANGE", "50031-50000", B, ["form"]),
        ("HCCL_ALGO", "level0:NA;level1:H-D_R", B, []),
        ("HCCL_ALGO", "allreduce=level0:NA;level1:ring/allgather=level0:NA;level1:NHR", B, []),
        ("HCCL_ALGO", "level0:ring", B, ["form"]),
        ("HCCL_INTRA_ROCE_ENABLE", "1", B, ["harmful"]),
        ("HCCL_WHITELIST_DISABLE", "1", B, ["harmful"]),
        ("HCCL_DFS_CONFIG", "cluster_heartbeat:off", B, ["harmful"]),
        ("HCCL_CONECT_TIMEOUT", "600", B, ["unknown"]),
        ("NCCL_TIMEOUT", "600", B, ["no-effect"]),
        ("ASCEND_LAUNCH_BLOCKING", "1", B, ["harmful"]),
        ("ASCEND_GLOBAL_LOG_LEVEL", "0", B, ["harmful"]),
        ("ASCEND_GLOBAL_LOG_LEVEL", "3", B, []),
        ("ASCEND_RT_VISIBLE_DEVICES", "0,1,2", B, []),
        ("ASCEND_RT_VISIBLE_DEVICES", "0-7", B, ["form"]),
        ("ASCEND_RT_VISIBLE_DEVICES", "0, 1", B, ["form"]),
        ("ASCEND_RT_VISIBLE_DEVICES", "2,1", B, ["form"]),
        ("ASCEND_RT_VISIBLE_DEVICES", "1,1", B, ["form"]),
        ("ASCEND_VISIBLE_DEVICES", "0-3,6", B, []),
        ("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True", B, []),
        ("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:512", B, ["form"]),
        ("PYTORCH_NPU_ALLOC_CONF", "garbage_collection_threshold:1.5", B, ["form"]),
        ("RANK_TABLE_FILE", "ranks.json", B, ["form", "harmful"]),
        ("PATH", "x", B, []),
        ("MY_SETTING", "", None, []),
    ],
)
def test_a_setting_is_judged_for_its_chip(name, value, chip, codes):
    found = check_variable(name, value, chip)
    assert [one.code for one in found] == codes
    assert all(one.message and one.hint for one in found)


def test_a_misspelt_name_is_told_its_neighbour():
    assert check_variable("HCCL_CONECT_TIMEOUT", "600")[0].hint.values == {"name": "HCCL_CONNECT_TIMEOUT"}


def test_a_rounded_timeout_names_what_will_hold():
    assert check_variable("HCCL_EXEC_TIMEOUT", "600", A)[0].message.values["effective"] == 544
    assert check_variable("HCCL_EXEC_TIMEOUT", "50", A)[0].message.values["effective"] == 68


@pytest.mark.parametrize(("value", "ids"), [("0,1,2", (0, 1, 2)), ("1, 2,3", (1,)), ("0-7", ()), ("", ())])
def test_the_runtime_stops_at_the_first_word_that_is_no_number(value, ids):
    assert effective_ids(value) == ids


@pytest.mark.parametrize(
    ("environment", "conflicting"),
    [
        ({"HCCL_CONNECT_TIMEOUT": "1800", "HCCL_EXEC_TIMEOUT": "1200"}, {"HCCL_EXEC_TIMEOUT"}),
        ({"HCCL_CONNECT_TIMEOUT": "7200"}, {"HCCL_CONNECT_TIMEOUT"}),
        ({"HCCL_CONNECT_TIMEOUT": "1200"}, set()),
        ({"HCCL_EXEC_TIMEOUT": "3600"}, {"HCCL_EXEC_TIMEOUT"}),
        ({"HCCL_EXEC_TIMEOUT": "3600", "HCCL_EVENT_TIMEOUT": "3700"}, set()),
        ({"PYTORCH_NPU_ALLOC_CONF": "a:1", "PYTORCH_ALLOC_CONF": "a:1"}, {"PYTORCH_ALLOC_CONF"}),
        ({"HCCL_INTRA_ROCE_ENABLE": "1", "HCCL_INTRA_PCIE_ENABLE": "1"}, {"HCCL_INTRA_ROCE_ENABLE"}),
        ({"HCCL_INTRA_PCIE_ENABLE": "0"}, {"HCCL_INTRA_PCIE_ENABLE"}),
        ({"ASCEND_LAUNCH_BLOCKING": "1", "TASK_QUEUE_ENABLE": "2"}, {"TASK_QUEUE_ENABLE"}),
        ({"HCCL_WHITELIST_FILE": "/w.json"}, {"HCCL_WHITELIST_FILE"}),
        ({"PATH": "/bin"}, set()),
    ],
)
def test_settings_that_do_not_go_together_are_named_once(environment, conflicting):
    found = [one.name for one in check_environment(environment, B) if one.code == "conflict"]
    assert sorted(found) == sorted(conflicting)


@pytest.mark.parametrize("job", sorted(JOBS.glob("*.yaml")), ids=lambda path: path.name)
def test_the_variables_of_a_ready_job_are_nothing_that_doctor_would_warn_of(job):
    environment = {name: str(value) for name, value in yaml.safe_load(job.read_text()).get("env", {}).items()}
    assert check_environment(environment, B) == ()


def test_every_default_is_within_its_own_range():
    for variable in known_variables().values():
        if variable.default is not None and not variable.harmful:
            wrong = [one for one in check_variable(variable.name, variable.default) if one.code in ("range", "form")]
            assert wrong == [], variable.name


def test_every_table_row_is_of_a_kind_that_is_judged():
    kinds = {"int", "choice", "ip", "ifname", "ports", "path", "text", "algo", "alloc", "ids", "visible"}
    families = {chip.family for _, chip in CHIPS}
    for variable in known_variables().values():
        assert variable.kind in kinds and set(variable.families or ()) | set(variable.by_family) <= families
        assert all(re.match(r"any$|[=~].", rule["when"]) for rule in variable.harmful)
        assert variable.kind != "choice" or variable.choices
    assert len(known_variables()) == len(load_table("variables")["rows"]) > 60
    assert {variables.ERROR, variables.WARNING, variables.NOTE} >= {
        rule["severity"] for variable in known_variables().values() for rule in variable.harmful
    }


def table_texts():
    for row in load_table("variables")["rows"]:
        for rule in row.get("harmful", ()):
            value = "x" if rule["when"] == "any" else rule["when"][1:]
            for family in ("910A", "910B3", "Ascend910", "310P3"):
                for found in check_environment({row["name"]: value}, chip_of(family)):
                    yield found.message
                    yield found.hint
    for name in ("NCCL_DEBUG", "CM_CHIEF_IP", "HCCL_NEW", "HCCL_CONECT_TIMEOUT"):
        for found in check_environment({name: "1"}):
            yield found.message
            yield found.hint
    for fault_class in fault_classes():
        yield fault_class.hint
    for row in load_table("fault_codes")["rows"]:
        yield fault_of(row["code"]).message


def test_every_message_of_a_table_has_its_chinese():
    texts = {text.key: text for text in table_texts() if isinstance(text, Text)}
    assert len(texts) > 60
    missing = [key for key, text in texts.items() if not re.search("[一-鿿]", text.render("zh"))]
    assert missing == []
