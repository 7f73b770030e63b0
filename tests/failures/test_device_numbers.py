"""Numbers of devices and names of interfaces in the output: what a process counts, and what it sees."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from test_what_helps import explain

# ---------------------------------------------------------------- numbers of devices


@pytest.mark.parametrize(
    ("line", "head"),
    [
        (
            "RuntimeError: device_id 5 is out of range for assigned_physical_gpu_ids [4, 5] (2 devices assigned)",
            "the process sees the devices `4, 5` of the node and counts them from 0: `5` is a number of the node",
        ),
        (
            "EE1001: The argument is invalid.Reason: Set visible device failed, invalid device=1, input visible "
            "devices:1\nRuntimeError: Invalid device ID",
            "the process sees the devices `1` of the node and counts them from 0: `1` is a number of the node",
        ),
        (
            "EE1001: [PID: 7310] 2026-06-01-08:30:11.204.512 The argument is invalid.Reason: Set device failed, "
            "invalid device, set device=8, valid device range is [0, 8)",
            "device `8` was requested, and this process has the devices 0 to `7`",
        ),
    ],
)
def test_a_number_that_is_not_below_the_count_of_devices_is_one_of_numbering(line: str, head: str) -> None:
    found = explain(line)
    assert found.domain == "program" and found.hint.startswith(head)


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: Invalid device ID",
        "invalid device=0, input visible devices:4,5",
        "EE1001: Set device failed, invalid device, set device=0, valid device range is [0, 0)",
    ],
)
def test_without_both_numbers_or_below_the_count_nothing_is_concluded(line: str) -> None:
    hint = explain(line).hint
    assert "is a number of the node" not in hint and "was requested" not in hint


def test_a_setting_that_the_runtime_refuses_is_no_lost_device() -> None:
    reason = "The argument is invalid.Reason: set ASCEND_RT_VISIBLE_DEVICES:2,0 error, it must be in ascending order"
    call = "RuntimeError: init:a.ts:2 NPU function error: aclrtGetDeviceCount(&device_count), error code is 207004"
    plain, refused = explain(call), explain(f"{call}\nEE1001: [PID: 71] 2026-07-17-08:06:53.296.370 {reason}")
    assert (plain.domain, plain.retry) == ("device", "exclude")
    assert (refused.domain, refused.retry) == ("program", "never") and refused.reason_grade.value != "certain"
    assert (
        "the variable that the message names (`ASCEND_RT_VISIBLE_DEVICES`)" in refused.hint
        and "dropped off the bus" not in refused.cause
    )


def test_a_rank_that_reports_another_device_than_its_own_may_share_it() -> None:
    lines = (
        "RuntimeError: create_config:a.ts:102 HCCL function error: init(comm), error code is 7\n"
        "[ERROR] 2026-04-24-16:14:56 (PID:46, Device:{}, RankID:2) ERR02200 DIST call hccl api failed.\n"
        "EJ0001: [PID: 46] 2026-04-24-16:14:56.975.866 Failed to initialize the HCCP process. Reason: Maybe the last "
        "training process is running.\n"
    )
    shared, own = (explain(lines.format(device), failed="2") for device in (0, 2))
    assert shared.hint.startswith("rank `2` reports device `0`")
    assert "reports device" not in own.hint and shared.domain == own.domain == "resource"


# ---------------------------------------------------------------- interfaces


def test_an_address_that_the_message_does_not_have_is_not_spoken_of() -> None:
    warning = "n1:52:61 [0] misc/socket.cc:673 NCCL WARN {}"
    unknown = explain(
        warning.format("ncclSocketInit: connecting to address with family 0 is no AF_INET"), family="cuda"
    )
    known = explain(warning.format("socketStartConnect: Connect to 10.1.0.7<51024> failed : No route"), family="cuda")
    assert "ADDRESS" not in unknown.hint and "GLOO_SOCKET_IFNAME" in unknown.hint
    assert known.hint.startswith("`10.1.0.7` is of the interface")


USING = "NCCL INFO NET/Socket : Using [0]{}:10.1.0.7<0> [1]br-05ab:172.19.0.1<0> [2]veth61:fe80::b8%veth61<0>\n"


def test_interfaces_of_containers_among_those_that_nccl_uses_come_first() -> None:
    error = "ncclSystemError: System call (socket, malloc, munmap, etc) failed."
    found = explain(USING.format("bond0") + error, family="cuda")
    assert found.hint.startswith("NCCL uses `3` interfaces, also those of containers (`br-05ab, veth61`)")
    assert "NCCL_SOCKET_IFNAME=bond0" in found.hint and found.reason_grade.value != "certain"
    plain = explain("NCCL INFO NET/Socket : Using [0]bond0:10.1.0.7<0>\n" + error, family="cuda")
    assert "interfaces, also" not in plain.hint
