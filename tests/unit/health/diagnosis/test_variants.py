"""Which of several causes of a lack: memory of others or fragments, a limit of the container, inodes, of the host."""

from __future__ import annotations

import pytest

from ascendrun.health.diagnosis import Diagnosis, Evidence, HostEvidence, Line, RankEvidence, diagnose, render

FRAMES = 'Traceback (most recent call last):\n  File "/job/train.py", line 12, in <module>\n    run()\n'
TOTAL = "GPU 0 has a total capacity of 60.00 GiB of which 1.50 GiB is free. "


def explain(error: str, accelerator: str = "npu", disk_free_bytes: int | None = None) -> Diagnosis:
    lines = tuple(Line(text, "out", number) for number, text in enumerate((FRAMES + error).splitlines()))
    ranks = (RankEvidence(0, "a", device=0, code=1, exited_at_s=60.0, lines=lines),)
    hosts = (HostEvidence("a", disk_free_bytes=disk_free_bytes),)
    given = Evidence("j", "FAILED", cause="failure", world_size=1, ranks=ranks, hosts=hosts, device_type=accelerator)
    return render(diagnose(given), "en")


@pytest.mark.parametrize(
    ("report", "shown"),
    [
        (
            f"{TOTAL}Process 4242 has 41.00 GiB memory in use. Process 4243 has 17.00 GiB memory in use. Of the "
            "allocated memory 16.00 GiB is allocated by PyTorch, and 3.00 MiB is reserved by PyTorch but unallocated.",
            "hold most of this device's memory (`4242`)",
        ),
        (  # in a container the own process has another number
            f"{TOTAL}Process 4242 has 58.00 GiB memory in use. Of the allocated memory 56.00 GiB is allocated by "
            "PyTorch, and 300.00 MiB is reserved by PyTorch but unallocated.",
            "lower the micro batch",
        ),
        (
            f"{TOTAL}Including non-PyTorch memory, this process has 58.00 GiB memory in use. Of the allocated memory "
            "30.00 GiB is allocated by PyTorch, and 27.25 GiB is reserved by PyTorch but unallocated.",
            "is not in use (`27.25 GiB`), in pieces too small",
        ),
        (
            "(NPU 0; 60.00 GiB total capacity; 31.00 GiB already allocated; 31.00 GiB current active; 1.50 GiB free; "
            "58.00 GiB reserved in total by PyTorch)",
            "in pieces too small for this request: set `PYTORCH_NPU_ALLOC_CONF` to `expandable_segments:True`",
        ),
        (
            "(NPU 0; 60.00 GiB total capacity; 56.00 GiB already allocated; 56.00 GiB current active; 1.50 GiB free; "
            "58.00 GiB reserved in total by PyTorch)",
            "smaller batch or sequence",
        ),
    ],
)
def test_memory_of_a_device_is_held_by_others_or_in_fragments_or_too_small(report: str, shown: str) -> None:
    found = explain(f"RuntimeError: NPU out of memory. Tried to allocate 4.00 GiB {report}")
    assert found.domain == "device-memory"
    assert shown in found.hint
    assert ("hold most" in found.hint) == ("hold most" in shown) and ("pieces" in found.hint) == ("pieces" in shown)


@pytest.mark.parametrize(("free", "has_room"), [(80 * 2**30, True), (2**20, False), (None, False)])
def test_a_full_disk_with_room_has_no_inodes_a_quota_or_is_another_one(free: int | None, has_room: bool) -> None:
    found = explain("OSError: [Errno 28] No space left on device: '/data/out/x.bin'", disk_free_bytes=free)
    assert found.domain == "storage"
    assert ("had `80.0 GiB` free" in found.hint) == has_room
    assert ("`findmnt -T /data/out/x.bin`" in found.hint) == has_room


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        ("OSError: [Errno 24] Too many open files: '/data/x'", "`ulimit -n 65536`"),
        ("OSError: [Errno 23] Too many open files in system: '/data/x'", "the limit of the whole host"),
        ("RuntimeError: can't start new thread", "`ulimit -u`"),
    ],
)
def test_a_limit_is_that_of_the_process_or_of_the_host(error: str, shown: str) -> None:
    assert explain(error).hint.startswith(shown)


@pytest.mark.parametrize(
    ("kernel", "is_of_container"),
    [
        ("Memory cgroup out of memory: Killed process 77 (python) total-vm:9kB", True),
        ("Out of memory: Killed process 77 (python) total-vm:9kB", False),
    ],
)
def test_memory_of_the_host_and_the_limit_of_a_container_have_their_own_fix(kernel: str, is_of_container: bool) -> None:
    ranks = (RankEvidence(0, "a", pid=77, signal=9, exited_at_s=60.0),)
    hosts = (HostEvidence("a", dmesg=(Line(kernel, "dmesg", 0, 59.5, "dmesg"),)),)
    found = render(diagnose(Evidence("j", "FAILED", cause="failure", world_size=1, ranks=ranks, hosts=hosts)), "en")
    assert found.domain == "host-memory"
    assert found.hint.startswith("the memory limit of the container or job was reached") == is_of_container
