"""What a hint advises, by the mechanism of a failure: who called whom, which device, which field, which layer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from corpus import Builder

from ascendrun.health.diagnosis import Diagnosis, diagnose, render

HEAD = "Traceback (most recent call last):\n"
SITE = "/opt/env/lib/python3.11/site-packages"


def explain(err: str, *, ranks: int = 4, failed: str = "0", **job: Any) -> Diagnosis:
    """The diagnosis of a job whose failed ranks print this, while ascendrun stops the others; in English."""
    groups = [{"ranks": failed, "at": 60, "exit": 1, "err": err}]
    groups += [{"ranks": "rest", "at": 61, "exit": -15, "stopped": True}] if failed != "all" and ranks > 1 else []
    row = {"ranks": ranks, "family": "npu", "groups": groups, **job}
    return render(diagnose(Builder(row, seed="helps").evidence()), "en")


# ---------------------------------------------------------------- who called whom


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_package_that_lacks_a_name_is_of_the_versions_on_any_rank(ranks: int) -> None:
    frames = f'{HEAD}  File "{SITE}/speedlib/rope.py", line 8, in forward\n    torch_npu.npu_turn_v9(x)\n'
    found = explain(f"{frames}AttributeError: module 'torch_npu' has no attribute 'npu_turn_v9'", ranks=ranks)
    assert found.domain == "environment"
    assert found.hint.startswith("`speedlib` uses `npu_turn_v9`, which the installed `torch_npu` does not have")


def test_a_name_that_the_program_of_one_rank_misspells_is_of_the_program() -> None:
    frames = f'{HEAD}  File "/job/train.py", line 8, in main\n    torch.arrange(4)\n'
    assert explain(f"{frames}AttributeError: module 'torch' has no attribute 'arrange'").domain == "program"


def test_a_circle_of_imports_is_no_lack_of_a_package() -> None:
    frames = f'{HEAD}  File "/job/a.py", line 1, in <module>\n    import helpers\n'
    message = "AttributeError: partially initialized module 'helpers' has no attribute 'run'"
    assert explain(frames + message).why[0].key != "versions"


@pytest.mark.parametrize(
    ("frames", "caller"),
    [
        (
            f'  File "/job/roll.py", line 30, in start\n  File "{SITE}/commlib/ring.py", line 9, in check\n',
            "roll.py:30",
        ),
        (
            f'  File "{SITE}/rollkit/a.py", line 3, in go\n  File "{SITE}/commlib/ring.py", line 9, in check\n',
            "rollkit",
        ),
    ],
)
def test_what_called_the_package_that_raised_is_named_too(frames: str, caller: str) -> None:
    found = explain(f"{HEAD}{frames}    assert tensor.device == self.device\nAssertionError")
    assert f"`commlib` raised it in a call by `{caller}`: correct what is passed there" in found.hint


def test_torch_npu_raises_for_others() -> None:
    frames = f'{HEAD}  File "/job/a.py", line 3, in go\n  File "{SITE}/torch_npu/utils/guard.py", line 9, in wrap\n'
    assert "`torch_npu` raised it" not in explain(f"{frames}RuntimeError: no stream for this call").hint


# ---------------------------------------------------------------- what ranks do unlike

FINGERPRINT = (
    "CollectiveFingerPrint(SequenceNumber={}, OpType={}, TensorShape=[{}], TensorDtypes={}, TensorDeviceTypes=x)"
)
SAME = (9, "ALLREDUCE", "64, 8", "Float")


@pytest.mark.parametrize(
    ("place", "value", "fix"),
    [
        (0, 11, "one rank is at call `9` of the group and another at call `11`"),
        (1, "BROADCAST", "one rank calls `ALLREDUCE` where another calls `BROADCAST`"),
        (2, "65, 8", "one call has the shape `64, 8` on one rank and `65, 8` on another"),
        (3, "Half", "one call has the type `Float` on one rank and `Half` on another"),
    ],
)
def test_the_field_in_which_two_calls_differ_is_named_with_both_values(place: int, value: Any, fix: str) -> None:
    other = [*SAME[:place], value, *SAME[place + 1 :]]
    own, theirs = FINGERPRINT.format(*SAME), FINGERPRINT.format(*other)
    head = "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: "
    found = explain(f"{HEAD}{head}{own}, but Rank 1 is running collective: {theirs}.")
    assert found.domain == "collectives" and found.hint.startswith(fix)
    assert "TORCH_DISTRIBUTED_DEBUG" not in found.hint  # it is on


def test_sizes_that_a_transport_compares_are_of_the_collectives_and_not_of_the_network() -> None:
    line = "a1:7:9 [0] transport/net_ib.cc:77 NCCL WARN NET/IB : req 1/1 peer 10.0.0.3<40000> "
    found = explain(f"{line}collective mismatch error, local size 1024 remote size 4096", family="cuda")
    assert found.domain == "collectives"
    assert found.hint.startswith("the sizes of one call differ, `1024` and `4096`")


WATCH = "[rank{0}]:[E1 a.cpp:9] [Rank {0}] Watchdog caught collective operation timeout: Work{5}CCL("
SIZES = (
    "SeqNum={1}, OpType={2}, NumelIn={3}, NumelOut={3}, Timeout(ms)=300000) ran for {4} milliseconds before timing out."
)


def explain_waits(*waits: tuple[Any, ...], late_s: float = 0.0, library: str = "N") -> Diagnosis:
    """The diagnosis of ranks whose watchdogs report these calls (rank, number, operation, elements, milliseconds)."""
    lines = [(one[0], (WATCH + SIZES).format(*one, library)) for one in waits]
    groups = [
        {"ranks": rank, "at": 400 + late_s * place, "exit": -6, "err": line} for place, (rank, line) in enumerate(lines)
    ]
    groups += [{"ranks": "rest", "at": 430, "exit": -15, "stopped": True}] if late_s else []
    job = {"ranks": len(waits) + bool(late_s), "launcher": "torchrun", "family": "cuda", "groups": groups}
    return render(diagnose(Builder(job, seed="helps").evidence()), "en")


@pytest.mark.parametrize("library", ["N", "H"])
def test_two_ranks_in_one_call_with_other_sizes_are_told_both_and_no_limit(library: str) -> None:
    found = explain_waits((0, 71, "REDUCE", 128, 300020), (1, 71, "REDUCE", 4096, 300031), library=library)
    assert (found.domain, found.code) == ("collectives", "collectives-mismatch")
    assert found.hint.startswith("in the call `REDUCE 71`, rank `0` passes `128` elements and rank `1` passes `4096`")
    assert "the same number of batches" in found.hint and "timeout=" not in found.hint


def test_the_rank_with_another_operation_in_one_call_is_the_first() -> None:
    waits = [(rank, 12, "BARRIER" if rank == 2 else "ALLREDUCE", 1, 300010) for rank in range(4)]
    found = explain_waits(*waits)
    assert (found.ranks, found.domain) == ((2,), "collectives")
    assert found.hint.startswith("one rank calls `ALLREDUCE` where another calls `BARRIER`")


def test_calls_of_other_numbers_are_not_compared() -> None:
    found = explain_waits((0, 12, "ALLREDUCE", 8, 300010), (1, 13, "BROADCAST", 64, 300010))
    assert found.code != "collectives-mismatch"


@pytest.mark.parametrize(("ran_ms", "is_read"), [(300_012, True), (4_000, False)])
def test_a_wait_that_began_before_the_stop_is_no_consequence_of_it(ran_ms: int, is_read: bool) -> None:
    found = explain_waits((0, 7, "BROADCAST", 8, 300010), (1, 7, "BROADCAST", 64, ran_ms), late_s=9.0)
    assert (found.code == "collectives-mismatch") is is_read


OUT = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 80.00 GiB"
HELD = " of which 5.00 MiB is free. {} this process has 20.00 GiB memory in use."


@pytest.mark.parametrize(("pids", "is_crowd"), [((40010, 40020), True), ((3, 4, 5), True), ((3,), False)])
def test_ranks_that_share_a_device_are_not_called_processes_of_others(pids: tuple[int, ...], is_crowd: bool) -> None:
    listed = " ".join(f"Process {pid} has 19.00 GiB memory in use." for pid in pids)
    found = explain(f"{HEAD}{OUT}{HELD.format(listed)}", family="cuda")
    assert found.domain == "device-memory"
    assert (f"`{len(pids) + 1}` processes of this job hold memory of the same device" in found.hint) is is_crowd
    assert not (is_crowd and "end those of an earlier job" in found.hint)


# ---------------------------------------------------------------- the layer of the network

SOCKETS = "nc -vz 10.7.0.4 50100"


@pytest.mark.parametrize(
    ("warning", "domain", "fix"),
    [
        ("misc/socket.cc:50 NCCL WARN socketStartConnect: Connect to 10.7.0.4<50100> failed", "network", SOCKETS),
        ("bootstrap.cc:90 NCCL WARN could not use the ring at 10.7.0.4<50100>", "network", SOCKETS),
        ("proxy.cc:9 NCCL WARN the call Setup to rank 2 was refused", "network", "NCCL_IB_HCA"),
        ("transport/nvls.cc:3 NCCL WARN Cuda failure 1 'invalid argument'", "device", "nvidia-fabricmanager"),
    ],
)
def test_the_part_of_nccl_that_warns_gives_the_layer_to_check(warning: str, domain: str, fix: str) -> None:
    found = explain(f"w0:7:9 [0] {warning}\nw0:7:9 [0] NCCL INFO init.cc:1 -> 2", family="cuda")
    assert found.domain == domain and fix in found.hint
    assert "NCCL_DEBUG=INFO" not in found.hint  # it is on


# ---------------------------------------------------------------- what advises, and what only warns or lists


def test_a_warning_in_the_same_output_advises_nothing() -> None:
    warning = (
        "(Actor pid=7) [rank3]:[W714 10:11:12.123456 a.cpp:9] Warning: a thing is off. You can set OTHER_SWITCH=0 then."
    )
    found = explain(f"{HEAD}RuntimeError: the value of plan_size must be 4\n{warning}")
    assert "OTHER_SWITCH" not in found.hint


def test_an_item_of_a_list_of_reasons_is_no_advice() -> None:
    message = (
        "the graph ran twice. It has one of the following reasons: 1) Use of a layer in two places. 2) A lost hook."
    )
    found = explain(f"{HEAD}RuntimeError: {message}")
    assert "the program says" not in found.hint
    assert found.hint.startswith("the message lists what may be the reason: check each item")


# ---------------------------------------------------------------- operands, headers, libraries to link


@pytest.mark.parametrize(
    ("report", "fix"),
    [
        (
            "EZ1001: [PID: 7] 2026-06-01-08:30:11.204.512 The shape of scale cannot be used with x.",
            "the shapes or sizes",
        ),
        ("AclNN_Parameter_Error(EZ1001): Dimension 2 of self is 7 and that of other is 9.", "the shapes or sizes"),
        (
            "AclNN_Parameter_Error(EZ1001): expected a tensor for weightScale, but it is nullptr.",
            "an operand is missing",
        ),
    ],
)
def test_a_rejected_operand_has_the_hint_of_the_property_that_is_wrong(report: str, fix: str) -> None:
    raised = "RuntimeError: mm:a.ts:9 NPU function error: call aclnnMm failed, error code is 161002"
    found = explain(f"{HEAD}{raised}\n{report}")
    assert found.domain == "program" and found.hint.startswith(fix)


@pytest.mark.parametrize(
    ("line", "fix", "not_fix"),
    [
        (
            "op.cpp:3:10: fatal error: acl/acl_op.h: No such file or directory",
            "the CANN toolkit has this header",
            "older",
        ),
        ("op.cpp:3:10: fatal error: nccl.h: No such file or directory", "this builds for CUDA", "two CUDA"),
        ("/usr/bin/ld: cannot find -lcuda: No such file or directory", "lib64/stubs", "two CUDA"),
        ("/usr/bin/ld: cannot find -lascendcl", "the CANN toolkit has this header or library", "older"),
        ("op.cpp:1:10: fatal error: infiniband/verbs.h: No such file or directory", "libibverbs-dev", "CANN"),
        ("op.cpp:1:10: fatal error: torch/extension.h: No such file or directory", "--no-build-isolation", "CANN"),
    ],
)
def test_who_installs_a_header_or_a_library_to_link_gives_the_hint(line: str, fix: str, not_fix: str) -> None:
    frames = f'{HEAD}  File "/job/a.py", line 3, in build\n'
    raised = "subprocess.CalledProcessError: Command '['ninja', '-v']' returned non-zero exit status 1."
    found = explain(f"{line}\n{frames}{raised}", family="other")
    assert found.domain == "environment" and fix in found.hint and not_fix not in found.hint


def test_a_device_of_number_minus_one_was_not_selected() -> None:
    found = explain(f"{HEAD}RuntimeError: there is no stream for a tensor on device -1")
    assert "on every rank: init_process_group, set_device" in found.hint


# ---------------------------------------------------------------- what is stated without an exception


@pytest.mark.parametrize(
    ("lines", "domain", "fix"),
    [
        (
            "PLAN_BUFFER_MB is too SMALL, batch = 8, NEEDED_PLAN_BUFFER_MB(8 * 9) = 72MB\nthe check failed",
            "program",
            "`PLAN_BUFFER_MB`",
        ),
        ("slurmstepd: error: step 7.0 exceeded memory limit (9 > 8), being killed\nbye", "host-memory", "Slurm --mem"),
        (
            "The error from device(chipId:2), number 4.\nthere is a plain sdma error, channel is 1,\nstate=0x1",
            "device",
            "ascendrun doctor --hosts npu01",
        ),
    ],
)
def test_a_statement_before_the_end_without_an_exception_decides(lines: str, domain: str, fix: str) -> None:
    found = explain(lines)
    assert found.domain == domain and fix in found.hint


def test_a_library_that_was_not_loaded_before_a_general_exception_is_named() -> None:
    line = "Could not load library libplanfft.so.3. Error: /opt/x/libplanfft.so.3: cannot open shared object file"
    found = explain(f"{line}\n{HEAD}RuntimeError: GET was unable to find an engine")
    assert found.domain == "environment" and "libplanfft.so.3" in render(found).message


def test_an_npu_without_an_address_is_of_the_environment_with_the_file_that_a_container_needs() -> None:
    plog = "[TopoCheck] the device ip of card 3 is not configured, it is needed for several servers"
    groups = [
        {"ranks": 0, "at": 40, "exit": 1, "plog": plog},
        {"ranks": "rest", "at": 41, "exit": -15, "stopped": True},
    ]
    found = render(diagnose(Builder({"ranks": 2, "family": "npu", "groups": groups}, seed="helps").evidence()), "en")
    assert found.domain == "environment" and "-v /etc/hccn.conf" in found.hint


def test_a_watch_of_some_ranks_only_leads_to_those_that_did_not_call() -> None:
    work = "WorkNCCL(SeqNum=4, OpType=ALLREDUCE, Timeout(ms)=600000)"
    line = f"[E1 a.cpp:9] [Rank 1] Watchdog caught collective operation timeout: {work} ran for 600001 milliseconds."
    assert (
        "one of the others (`0,2-3`) takes another path (`if rank == 0`"
        in explain(line, failed="1", family="cuda").hint
    )


@pytest.mark.parametrize(
    ("line", "step"),
    [
        (
            "EI0019: [PID: 7] 2026-02-21-11:38:29.575.404 Communication_Error_Bind_IP_Port(EI0019): Failed to enable.",
            "two groups of this job",
        ),
        (
            "RuntimeError: a.ts:9 NPU function error: aclrtSetDevice(device), error code is 107001",
            "RAY_EXPERIMENTAL_NOSET_ASCEND",
        ),
        ("dcmi module initialize failed. ret is -8005", "other containers that hold the device"),
    ],
)
def test_placement_has_the_steps_of_the_job_itself_and_of_containers(line: str, step: str) -> None:
    assert step in explain(line).hint


# ---------------------------------------------------------------- what a release supports


def test_a_layer_without_a_part_leads_to_the_support_matrix() -> None:
    frames = f'{HEAD}  File "/job/quant.py", line 30, in apply\n    layer.weight_scale\n'
    message = "AttributeError: 'PackedRowLinear' object has no attribute 'weight_scale'"
    found = explain(frames + message)
    assert found.domain == "program" and "support matrix" in found.hint
    assert "support matrix" not in explain(f"{frames}AttributeError: 'Plan' object has no attribute 'weight'").hint
