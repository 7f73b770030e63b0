"""The same diagnosis from the head's own files: what is in the spool is all that there is to know."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from corpus import Builder, Case, Expected, case_files, case_of, one_of
from spooling import spool_case

from ascendrun.core.rank_env import FLIGHT_FILE

NEEDS_MORE = frozenset(
    {  # samples, device tools, device addresses and guesses at clocks are not spooled here
        "killed_and_the_kernel_log_is_closed_but_memory_was_gone",
        "an_alarm_on_the_device_after_a_hang",
        "a_driver_error_code_and_the_kernels_words_are_too_old",
        "a_port_is_down_after_links_timed_out",
        "an_alarm_on_a_device_that_nobody_uses",
        "a_driver_error_code_and_the_device_is_in_alarm",
        "roce_gives_up_between_two",
        "a_network_port_of_a_device_went_down",
        "a_memory_alarm_on_a_device_and_everybody_times_out",
        "others_stumble_over_what_the_root_did_not_send",
    }
)
CASES = [path for path in case_files() if path.stem not in NEEDS_MORE]


@pytest.mark.parametrize("path", one_of(6, CASES), ids=lambda path: path.stem)
def test_what_the_spool_holds_leads_to_the_same_diagnosis(path: Path, tmp_path: Path) -> None:
    from ascendrun.query.explain import explain_job

    case, expected = case_of(path)
    job = spool_case(case, tmp_path)
    found = explain_job(tmp_path, job, now_s=case.evidence.now_s).diagnosis
    assert (found.code, found.ranks, found.hosts) == (expected.code, expected.ranks, expected.hosts), found.message
    assert found.confidence is expected.confidence, found.caveats
    for proof in found.evidence:
        if proof.file is not None and proof.offset is not None and ".error." not in proof.file:
            data = (tmp_path / "jobs" / job / "attempt-1" / proof.file).read_bytes()
            line = data[proof.offset :].decode().lstrip().partition("\n")[0]
            assert "\x1b" in line or proof.text[:40] in line, proof


DUMPS = """
import os, sys, torch, torch.distributed as dist
import torch._C._distributed_c10d as c10d
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=3)
dist.all_reduce(torch.ones(3, 4))
work = [dist.all_reduce(torch.ones(2), async_op=True)] if rank != int(sys.argv[3]) else []
open(f"{folder}/flight-{rank}", "wb").write(c10d._dump_fr_trace())
os._exit(0)
"""


@pytest.mark.skipif(find_spec("torch") is None, reason="no torch here")
def test_gathered_dumps_of_the_real_torch_name_the_rank_that_did_not_come(tmp_path: Path) -> None:
    from ascendrun.query.explain import explain_job

    environ = {"TORCH_FR_BUFFER_SIZE": "100", "GLOO_SOCKET_IFNAME": "lo", "PATH": "/usr/bin", "OMP_NUM_THREADS": "1"}
    commands = [[sys.executable, "-c", DUMPS, str(rank), str(tmp_path), "2"] for rank in range(3)]
    processes = [subprocess.Popen(command, env=environ) for command in commands]
    assert [process.wait(timeout=300) for process in processes] == [0, 0, 0]
    groups = [{"ranks": "all", "at": 700, "until": 99, "err": "nccl_watchdog", "exit": -6}]
    row = {"ranks": 3, "family": "cuda", "groups": groups, "expect": {"code": "x"}}
    case = Case("dumps", Builder(row, seed="dumps").evidence(), Expected((2,), None, ("x",), ("likely",)))
    job = spool_case(case, tmp_path)
    folder = tmp_path / "jobs" / job / "attempt-1" / "npu01" / "gathered"
    (folder / "flight-recorder").mkdir()
    index = json.loads((folder / "index.json").read_text())
    for name in (f"{FLIGHT_FILE}{rank}" for rank in range(3)):
        data = (tmp_path / name).read_bytes()
        (folder / "flight-recorder" / name).write_bytes(data)
        index["files"].append({"name": "flight-recorder", "file": name, "source": name, "bytes": len(data)})
    (folder / "index.json").write_text(json.dumps(index))
    found = explain_job(tmp_path, job, now_s=case.evidence.now_s).diagnosis
    assert (found.code, found.ranks, found.rules[-1]) == ("collective-not-reached", (2,), "recorded"), found.message
    assert (found.values["index"], found.values["others"]) == ("1", "2")
    assert "gloo:all_reduce" in str(found.evidence[0].text) and "2" in str(found.evidence[1].text)
