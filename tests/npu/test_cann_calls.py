"""Calls to the simulated CANN itself, below torch_npu: what is given back is free again, what is cast is the number."""

import ctypes
from pathlib import Path
from typing import Any

import pytest

ACL_FLOAT, ACL_BOOL = 0, 12
MIB = 1 << 20


class PhysicalMemory(ctypes.Structure):
    """aclrtPhysicalMemProp."""

    _fields_ = [
        ("handle_type", ctypes.c_int),
        ("allocation_type", ctypes.c_int),
        ("attribute", ctypes.c_int),
        ("device", ctypes.c_uint32),
        ("place", ctypes.c_int),
        ("reserve", ctypes.c_uint64),
    ]


@pytest.fixture
def cann(toolkit: Path) -> Any:
    library = ctypes.CDLL(str(toolkit / "lib64" / "libascendcl.so"))
    for name in ("aclCreateTensorDesc", "aclCreateDataBuffer"):
        getattr(library, name).restype = ctypes.c_void_p
    return library


def free_bytes(cann: Any) -> int:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    assert cann.aclrtGetMemInfo(1, ctypes.byref(free), ctypes.byref(total)) == 0
    return free.value


def test_memory_of_which_a_part_was_mapped_is_free_again_on_the_device_and_on_the_host(cann: Any) -> None:
    before, at, handle = free_bytes(cann), ctypes.c_void_p(), ctypes.c_void_p()
    assert cann.aclrtReserveMemAddress(ctypes.byref(at), ctypes.c_size_t(4 * MIB), ctypes.c_size_t(0), None, 1) == 0
    request = ctypes.byref(PhysicalMemory())
    assert cann.aclrtMallocPhysical(ctypes.byref(handle), ctypes.c_size_t(4 * MIB), request, ctypes.c_uint64(0)) == 0
    assert free_bytes(cann) == before - 4 * MIB
    assert cann.aclrtMapMem(at, ctypes.c_size_t(2 * MIB), ctypes.c_size_t(0), handle, ctypes.c_uint64(0)) == 0
    ctypes.memset(at, 7, 2 * MIB)
    assert "simulated-npu" in Path("/proc/self/maps").read_text()
    assert cann.aclrtUnmapMem(at) == 0
    assert cann.aclrtFreePhysical(handle) == 0
    assert free_bytes(cann) == before
    assert "simulated-npu" not in Path("/proc/self/maps").read_text()


def test_what_is_not_zero_is_true(cann: Any) -> None:
    numbers, truths = (ctypes.c_float * 4)(0.5, 0.0, -3.0, 256.0), (ctypes.c_uint8 * 4)()

    def one(made: int) -> Any:
        return (ctypes.c_void_p * 1)(made)

    descriptions: list[Any] = [one(cann.aclCreateTensorDesc(kind, 0, None, 0)) for kind in (ACL_FLOAT, ACL_BOOL)]
    buffers = [
        one(cann.aclCreateDataBuffer(ctypes.byref(data), ctypes.c_size_t(ctypes.sizeof(data))))
        for data in (numbers, truths)
    ]
    assert (
        cann.aclopCompileAndExecuteV2(
            b"Cast", 1, descriptions[0], buffers[0], 1, descriptions[1], buffers[1], None, 0, 0, None, None
        )
        == 0
    )
    assert list(truths) == [1, 0, 1, 1]
