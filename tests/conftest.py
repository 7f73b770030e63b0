"""What every test gets: a home of its own, none of the developer's settings, and a look for processes left behind."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from ascendrun.text import use_language
from tests.thorough import THOROUGH_VARIABLE

SESSION_VARIABLE = "ASCENDRUN_TEST_SESSION"
LEFTOVER_GRACE_S = 20.0
LEFT = pytest.StashKey[list[str]]()


# A slow machine is no failure; in CI the same examples every time, so that a red run can be repeated.
hypothesis.settings.register_profile("ascendrun", deadline=None, derandomize=os.environ.get("CI") == "true")
hypothesis.settings.load_profile("ascendrun")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="also the tests marked so, and all random examples")
    parser.addoption("--update-golden", action="store_true", help="write expected results anew; review them as code")
    parser.addoption("--quick", action="store_true", help="not the tests listed in tests/slow.txt (bin/check)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skipped = set()
    if not config.getoption("--thorough"):
        skipped |= {item for item in items if item.get_closest_marker("thorough")}
    if config.getoption("--quick"):
        slow = frozenset(Path(__file__).with_name("slow.txt").read_text().split())
        skipped |= {item for item in items if item.nodeid.partition("[")[0] in slow}
    if skipped:
        config.hook.pytest_deselected(items=[item for item in items if item in skipped])
        items[:] = [item for item in items if item not in skipped]


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT] = []
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and so would ours
    real_home = Path.home()
    if (real_home / ".pyenv").is_dir():
        os.environ.setdefault("PYENV_ROOT", str(real_home / ".pyenv"))
    kept = "ASCENDRUN_ASCEND_SAMPLES"  # real answers of Ascend tools, which are not ours to commit
    for name in [name for name in os.environ if name.startswith(("ASCENDRUN_", "XDG_")) and name != kept]:
        del os.environ[name]
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each of a thousand processes would compile the package again
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # torch's idle threads take two thirds of a rank's CPU time
    home = Path(tempfile.mkdtemp(prefix="ascendrun-home-"))
    config.add_cleanup(lambda: shutil.rmtree(home, ignore_errors=True))
    os.environ["HOME"] = str(home)
    if config.getoption("--thorough"):
        os.environ[THOROUGH_VARIABLE] = "yes"
    os.environ[SESSION_VARIABLE] = uuid.uuid4().hex


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-golden"))


@pytest.fixture(autouse=True)
def english() -> Iterator[None]:
    """A test that runs the command in this process with another language leaves English to the next one."""
    yield
    use_language("en")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not is_shared_out(session.config):  # workers started the tests' processes, and look for themselves
        left = await_nobody_left()
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["left"] = left  # a worker's exit status is asked by nobody
        else:
            session.config.stash[LEFT].extend(left)
    if session.config.stash[LEFT]:
        print("\nprocesses that tests left behind:", *session.config.stash[LEFT], sep="\n  ")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[LEFT].extend(getattr(node, "workeroutput", {}).get("left", ()))


def is_shared_out(config: pytest.Config) -> bool:
    return bool(getattr(config.option, "numprocesses", None)) and not hasattr(config, "workerinput")


def await_nobody_left() -> list[str]:
    """The processes of this session that are still there after a while."""
    deadline_s = time.monotonic() + LEFTOVER_GRACE_S
    while left := processes_of_this_session():
        if time.monotonic() > deadline_s:
            break
        time.sleep(0.05)
    return left


def processes_of_this_session() -> list[str]:
    """Every process, however detached, that inherited this session's mark; ours to read only, so also as non-root."""
    mark = f"{SESSION_VARIABLE}={os.environ[SESSION_VARIABLE]}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.append(f"{folder.name} {command}")
        except OSError:  # gone by now, or another user's
            continue
    return found
