"""Programs that a model wrote, run in a process of their own that can do little: `run`.

The process cannot start others, open sockets, send signals or change the machine: a filter of system calls, which binds
root too. It cannot read or write files outside of a directory of its own, which is deleted afterwards, except Python's:
an audit hook, and Landlock where the kernel has it. Memory, CPU time and sizes of files are limited. This is for
programs that go wrong, not for attackers. The file is also the program of that process, with the standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

MEMORY_BYTES, FILE_BYTES, OPEN_FILES = 512 << 20, 1 << 20, 64
PASSED, NOT_ISOLATED = "passed", "not isolated"
KEPT_CHARACTERS = 300
# By system call: its number on x86_64 and on aarch64, None: it has none.
DENIED: dict[str, tuple[int | None, int | None]] = {
    "fork": (57, None), "vfork": (58, None), "clone": (56, 220), "clone3": (435, 435), "execve": (59, 221),
    "execveat": (322, 281), "socket": (41, 198), "socketpair": (53, 199), "io_uring_setup": (425, 425),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "mount": (165, 40), "umount2": (166, 39),
    "chroot": (161, 51), "pivot_root": (155, 41), "unshare": (272, 97), "setns": (308, 268), "mknod": (133, None),
    "mknodat": (259, 33), "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
    "memfd_create": (319, 279), "bpf": (321, 280), "perf_event_open": (298, 241), "add_key": (248, 217),
    "request_key": (249, 218), "keyctl": (250, 219), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142),
    "swapon": (167, 224), "swapoff": (168, 225), "sethostname": (170, 161), "setdomainname": (171, 162),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171), "personality": (135, 92),
    "prlimit64": (302, 261), "setrlimit": (160, 164), "setpriority": (141, 140),
}  # fmt: skip
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""By machine: the place of its numbers, and its mark in a filter."""
READABLE = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/dev/null", "/dev/urandom")


class NoSandboxError(Exception):
    """This machine cannot isolate a program, so none is run."""


@dataclass(frozen=True)
class Outcome:
    """`reason`: passed, time limit, the exception of the program, or how it ended."""

    passed: bool
    reason: str


def run(program: str, *, timeout_s: float = 5.0) -> Outcome:
    """Run a Python program; it has passed if it reaches its end. Raises NoSandboxError."""
    with tempfile.TemporaryDirectory(prefix="sandbox-") as folder:
        read, write = os.pipe()
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", os.path.abspath(__file__), str(write), str(timeout_s)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={},
                pass_fds=(write,),
                start_new_session=True,
            )
        finally:
            os.close(write)
        try:
            process.communicate(program.encode("utf-8", "replace"), timeout_s)
            with open(read, "rb", closefd=False) as file:
                reason = file.read(4 * KEPT_CHARACTERS).decode("utf-8", "replace")
        except subprocess.TimeoutExpired:
            reason = "time limit"
        finally:
            process.kill()
            process.wait()
            os.close(read)
    if reason == NOT_ISOLATED:
        raise NoSandboxError(platform.machine())
    return Outcome(reason == PASSED, reason or f"exit code {process.returncode}")


# --- the process of a program ---


def main(report: int, timeout_s: float) -> None:
    source = sys.stdin.buffer.read()
    try:
        isolate(os.getcwd(), timeout_s)
    except Exception:  # whatever is missing here: the program does not run
        os.write(report, NOT_ISOLATED.encode())
        return
    try:
        exec(compile(source, "program", "exec"), {"__name__": "__main__"})
        reason = PASSED
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"[:KEPT_CHARACTERS]
    with contextlib.suppress(OSError):
        os.write(report, reason.encode("utf-8", "replace"))
    os._exit(0)


def isolate(folder: str, timeout_s: float) -> None:
    """Take everything from this process that it does not need. Raises OSError or KeyError where that is impossible."""
    libc = ctypes.CDLL(None, use_errno=True)
    check(libc.prctl(1, 9, 0, 0, 0))  # PR_SET_PDEATHSIG: end with the parent
    for kind, most in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_CPU, int(timeout_s) + 1),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))
    check(libc.prctl(38, 1, 0, 0, 0))  # PR_SET_NO_NEW_PRIVS, which the next two need
    readable = [path for path in (*READABLE, sys.base_prefix, os.path.dirname(os.__file__)) if os.path.exists(path)]
    lock_files(libc, folder, readable)
    filter_calls(libc)
    watch_files(os.path.realpath(folder), [os.path.realpath(path) for path in readable])


def check(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), "prctl")
    return result


def filter_calls(libc: Any) -> None:
    """Make the denied system calls fail with EPERM, and end the process at those of another machine."""
    place, mark = MACHINES[platform.machine()]
    refuse, kill, allow = 0x00050001, 0x80000000, 0x7FFF0000
    steps = [(0x20, 0, 0, 4), (0x15, 1, 0, mark), (0x06, 0, 0, kill), (0x20, 0, 0, 0)]
    if place == 0:
        steps += [(0x35, 0, 1, 0x40000000), (0x06, 0, 0, kill)]  # numbers of the x32 interface
    for numbers in DENIED.values():
        if numbers[place] is not None:
            steps += [(0x15, 0, 1, numbers[place] or 0), (0x06, 0, 0, refuse)]
    steps.append((0x06, 0, 0, allow))

    class Step(ctypes.Structure):
        _fields_ = [("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("k", ctypes.c_uint32)]

    class Filter(ctypes.Structure):
        _fields_ = [("length", ctypes.c_uint16), ("steps", ctypes.POINTER(Step))]

    array = (Step * len(steps))(*(Step(*step) for step in steps))
    check(libc.prctl(22, 2, ctypes.byref(Filter(len(steps), array)), 0, 0))  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def lock_files(libc: Any, folder: str, readable: list[str]) -> None:
    """Limit files to these paths by Landlock; without effect on kernels before 5.13, which lack it."""
    version = libc.syscall(444, None, 0, 1)
    if version < 1:
        return
    every = (1 << {1: 13, 2: 14}.get(version, 15)) - 1
    rules = libc.syscall(444, ctypes.byref(ctypes.c_uint64(every)), 8, 0)
    check(rules)

    class Rule(ctypes.Structure):
        _pack_ = 1
        _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]

    for path in (folder, *readable):
        allowed = every if path == folder else 0b1101 if os.path.isdir(path) else 0b111
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
        check(libc.syscall(445, rules, 1, ctypes.byref(Rule(allowed, parent)), 0))
        os.close(parent)
    check(libc.syscall(446, rules, 0))
    os.close(rules)


def watch_files(folder: str, readable: list[str]) -> None:
    """Refuse what Python does with paths outside of the folder, and ways around this hook."""
    real, sep = os.path.realpath, os.sep
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    changes = {f"os.{name}" for name in (
        "remove", "rename", "rmdir", "mkdir", "link", "symlink", "truncate", "chmod", "chown", "utime", "chflags",
        "setxattr", "removexattr",
    )} | {"sqlite3.connect"}  # fmt: skip

    def within(path: Any, *roots: str) -> bool:
        found = real(os.fsdecode(path))
        return any(found == root or found.startswith(root.rstrip(sep) + sep) for root in roots)

    def hook(event: str, given: tuple[Any, ...]) -> None:
        if event.startswith("ctypes.") or (event == "import" and given[0] in ("ctypes", "_ctypes")):
            raise PermissionError("ctypes")
        if event == "open":
            path, _, flags = given
            if isinstance(path, int) or within(path, folder):
                return
            if (isinstance(flags, int) and flags & writing) or not within(path, *readable):
                raise PermissionError(f"outside of the directory: {path}")
        elif event in changes:
            for path in given[:2]:
                if isinstance(path, (str, bytes)) and not within(path, folder):
                    raise PermissionError(f"outside of the directory: {path!r}")

    sys.modules.pop("ctypes", None)
    sys.addaudithook(hook)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
