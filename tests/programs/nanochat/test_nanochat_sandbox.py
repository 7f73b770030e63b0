"""Programs that do harm are stopped, as root too, and leave nothing; each would do little if it were not stopped."""

import os
import socket
import sys
import tempfile
import types
from pathlib import Path

import pytest

from ascendrun.programs.nanochat import sandbox


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """The folders of programs are below `tmp_path / programs`, which is empty afterwards."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


def test_a_program_passes_if_it_reaches_its_end():
    fine = "import math, json, re, collections, decimal, random, heapq\nassert math.gcd(12, 18) == 6\n"
    assert sandbox.run(fine, timeout_s=60) == sandbox.Outcome(True, "passed")
    own = "with open('a', 'w') as f: f.write('x')\nimport os\nos.rename('a', 'b')\nassert open('b').read() == 'x'"
    assert sandbox.run(own, timeout_s=60).passed


@pytest.mark.parametrize(
    "program, reason",
    [
        ("assert 1 == 2", "AssertionError"),
        ("def f(:", "SyntaxError"),
        ("import sys; sys.exit(0)", "SystemExit"),
        ("import os; os._exit(0)", "exit code 0"),
        ("import torch", "ModuleNotFoundError"),
        ("x = bytearray(4 << 30)", "MemoryError"),
        ("open('big', 'wb').write(bytes(64 << 20))", "OSError"),
        ("import sys; sys.setrecursionlimit(9999); f = lambda: f(); f()", "RecursionError"),
    ],
)
def test_other_ends_do_not_pass(program, reason):
    found = sandbox.run(program, timeout_s=60)
    assert not found.passed and reason in found.reason


@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(300)"])
def test_endless_programs_end_at_the_limit(program):
    assert sandbox.run(program, timeout_s=1.0) == sandbox.Outcome(False, "time limit")


def done(imports, *actions, module=sandbox):
    """Return those of these actions that a program was allowed to do."""
    lines = [f"import {imports}", "done = []"]
    for action in actions:
        lines += [
            "try:",
            f"    {action}",
            f"    done.append({action!r})",
            "except (OSError, RuntimeError, ValueError): pass",
        ]
    found = module.run("\n".join([*lines, "assert not done, done"]), timeout_s=100)
    return "" if found.passed else found.reason


def test_a_program_starts_no_process():
    """If it could, it would start eight that end at once."""
    forks = "[os.fork() or os._exit(0) for _ in range(8)]"
    spawn, replace = "os.posix_spawn('/bin/true', ['true'], {})", "os.execv('/bin/true', ['true'])"
    thread = "threading.Thread(target=print).start()"
    assert done("os, subprocess, threading", forks, "subprocess.run(['/bin/true'])", spawn, thread, replace) == ""
    assert "AssertionError" in sandbox.run("import os\nassert os.system('true') == 0", timeout_s=100).reason


def test_a_program_opens_no_socket():
    with socket.create_server(("127.0.0.1", 0)) as server:
        connect = f"socket.create_connection({server.getsockname()!r})"
        assert done("socket", connect, "socket.socketpair()", "socket.socket(socket.AF_UNIX)") == ""


@pytest.mark.parametrize("has_landlock", [True, False])
def test_files_outside_stay_as_they_are(tmp_path, own_folder, has_landlock):
    """Also on kernels without Landlock."""
    module = sandbox if has_landlock else changed(own_folder, "if version < 1:", "if True:")
    precious = tmp_path / "precious"
    precious.write_text("kept")
    (tmp_path / "folder").mkdir()
    actions = (
        "open({path!r}, 'w')", "open({path!r}, 'a')", "open({path!r})", "os.open({path!r}, os.O_RDWR)",
        "os.remove({path!r})", "os.rename({path!r}, 'mine')", "os.truncate({path!r}, 0)", "os.chmod({path!r}, 0)",
        "os.link({path!r}, 'mine')", "os.symlink({path!r}, 'mine'); open('mine', 'w')",
        "os.rmdir({folder!r} + '/folder')", "shutil.rmtree({folder!r})", "pathlib.Path({path!r}).unlink()",
        "os.mkdir({path!r} + '-2')", "os.mkfifo({path!r} + '-2')",
        "import ctypes; ctypes.CDLL(None).unlink({path!r}.encode())",
    )  # fmt: skip
    places = {"path": str(precious), "folder": str(tmp_path)}
    assert done("os, pathlib, shutil", *(action.format(**places) for action in actions), module=module) == ""
    assert precious.read_text() == "kept" and os.stat(precious).st_nlink == 1
    assert {each.name for each in tmp_path.iterdir()} - {"changed.py"} == {"folder", "precious", "programs"}


def test_other_processes_and_limits_are_out_of_reach():
    limits = "resource.setrlimit(resource.RLIMIT_NOFILE, (9, 9))"
    assert done("os, resource", f"os.kill({os.getpid()}, 0)", limits, "os.setpriority(0, 0, 5)") == ""


def test_without_isolation_no_program_runs(own_folder):
    """As on a machine whose system calls are not known."""
    module = changed(own_folder, '"x86_64": (', '"other": (', '"aarch64": (', '"another": (')
    with pytest.raises(module.NoSandboxError):
        module.run("open('x', 'w')", timeout_s=60)


def changed(folder, *words):
    """Return a sandbox with some of its text replaced."""
    text = Path(sandbox.__file__).read_text(encoding="utf-8")
    for old, new in zip(words[::2], words[1::2]):
        assert text.count(old) == 1
        text = text.replace(old, new)
    module = types.ModuleType("changed")
    module.__file__ = str(folder.parent / "changed.py")
    Path(module.__file__).write_text(text, encoding="utf-8")
    sys.modules[module.__name__] = module  # dataclasses look there
    exec(compile(text, module.__file__, "exec"), module.__dict__)
    del sys.modules[module.__name__]
    return module
