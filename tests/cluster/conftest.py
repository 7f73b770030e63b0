"""Fixtures of the cluster scenarios.

cluster       two hosts and a head, booted once per module; every fault is undone after each test
cluster_of    cluster_of(4, sshd_options=["MaxSessions 1"]): one of its own, down after the test
ascendrun     ascendrun("ps"): the command on the head, with a state dir under tmp_path;
              .popen(...), .pty(...), and .on(other_cluster)(...)
scene         jobs of that command on that cluster: scenes.py
scene_of      scene_of(4): the same on a cluster of its own
no_leftovers  after every test: no process of it on any host or the head; after all tests: no trace on the machine
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Callable

import pytest

from ascendrun.core.settings import STATE_VARIABLE
from ascendrun.node.layout import ROOT_VARIABLE
from tests.lib.vcluster.cluster import VirtualCluster
from tests.lib.vcluster.machines import HEAD
from tests.lib.vcluster.processes import await_true
from tests.lib.vcluster.requirements import NotSupportedError
from tests.lib.vcluster.spec import root_home

sys.path.insert(0, str(Path(__file__).resolve().parent))
import leftovers
from scenes import SAVED, Scene

CODE = Path(__file__).resolve().parents[2]
OWN_HOME = re.compile(r"test_(vcluster|held_machines|soak|failpoints)")
"""Files about the hosts themselves, or with scenarios in which one host's home is removed."""
CONTROLLER_DEADLINE_S = 30.0
FOREIGN = ("ASCENDRUN_", "SSH_", "XDG_")

_ids: list[str] = []
_namespaces: list[int] = []
_failed = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", metavar="SEED,ROUNDS", help="cluster: the soak with random faults, and slow scenarios")
    parser.addoption("--sweep", metavar="N[,SEED]|all", help="cluster: how many pairs of deaths at failpoints")
    parser.addoption("--soak", metavar="SEED,SECONDS[,ROUND]", default="1,40", help="cluster: how much bad luck")
    parser.addoption("--real-time", action="store_true", help="cluster: hangs and slow trainings, two hours")
    parser.addoption("--deaths", metavar="N", type=int, default=1, help="cluster: how often each part of Ray dies")
    parser.addoption("--history", metavar="FILE", help="cluster: the soak's rounds, to be gone on with")


def start_cluster(count: int, **options: Any) -> VirtualCluster:
    """A cluster, or a skip with the reason; in CI a machine that cannot carry one is a failure."""
    try:
        cluster = VirtualCluster.up(count, **options)
    except NotSupportedError as refused:
        reason = f"{refused.message}; {refused.hint}"
        if os.environ.get("CI") == "true":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    _ids.append(cluster.cluster_id)
    _namespaces.extend(leftovers.hold_namespaces(cluster))
    return cluster


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[Any]:
    report = yield
    if report.when == "call":
        item.stash[_failed] = report.failed
    return report


@pytest.fixture(scope="session", autouse=True)
def machine_left_as_found() -> Iterator[None]:
    yield
    try:
        if not await_true(lambda: not leftovers.traces(_ids, _namespaces), deadline_s=leftovers.SETTLE_S):
            pytest.fail(f"the machine is not as it was: {leftovers.traces(_ids, _namespaces)}", pytrace=False)
    finally:
        while _namespaces:  # each module that imports this fixture has it at the end
            os.close(_namespaces.pop())


class Watch:
    """Which state dirs a test's ascendrun used, for the check that its controllers have ended."""

    def __init__(self, item: pytest.Item) -> None:
        self._item = item
        self.state_dirs: list[Path] = []

    def check(self, cluster: VirtualCluster) -> None:
        """Undo the faults, ask controllers to end, and require that nothing is left.

        A test that failed has told its story: what it left is killed without a second one.
        """
        if not cluster.is_up(HEAD):
            return  # the test took it down itself
        cluster.clean()
        for state_dir in self.state_dirs:
            end_controller(cluster, state_dir)
        has_failed = self._item.stash.get(_failed, False)
        try:
            leftovers.require_none(cluster, deadline_s=1.0 if has_failed else leftovers.SETTLE_S)
        except leftovers.LeftoversError:
            if not has_failed:
                raise


def end_controller(cluster: VirtualCluster, state_dir: Path) -> None:
    """By SIGTERM, its guard with it. One that stays all the same, the check for leftovers finds."""
    found = leftovers.controllers(cluster, state_dir)
    guards = {one.ppid for one in found}
    leftovers.kill([one for one in found if one.pid not in guards], signal.SIGTERM)
    await_true(lambda: not leftovers.controllers(cluster, state_dir), deadline_s=CONTROLLER_DEADLINE_S)


@pytest.fixture
def only_long(request: pytest.FixtureRequest) -> None:
    """For scenarios that take more than 20 s: silence has to last until it is called that."""
    if not request.config.getoption("--long", default=None):
        pytest.skip("takes long: --long=SEED,ROUNDS")


@pytest.fixture
def only_real_time(request: pytest.FixtureRequest) -> None:
    """For scenarios with the windows that jobs have."""
    if not request.config.getoption("--real-time", default=False):
        pytest.skip("takes very long: --real-time")


@pytest.fixture(autouse=True)
def no_leftovers(request: pytest.FixtureRequest) -> Watch:
    """The fixtures below run its check when they end; it knows the state dirs that the test used."""
    return Watch(request.node)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with a test that may take long come first: of two workers none is left with one of them at the end."""
    longest: dict[Path, float] = {}
    for item in items:
        mark = item.get_closest_marker("timeout")
        limit_s = 0.0 if mark is None else float(mark.args[0]) or float("inf")
        longest[item.path] = max(limit_s, longest.get(item.path, 0.0))
    items.sort(key=lambda item: -longest[item.path])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Scenarios marked `shared_home` run a second time with one home for all hosts; by --thorough all of them do."""
    is_asked = metafunc.definition.get_closest_marker("shared_home") or (
        metafunc.config.getoption("--thorough", default=False)
        and not OWN_HOME.match(Path(metafunc.module.__file__).name)
    )
    if is_asked and "module_cluster" in metafunc.fixturenames:
        homes = {"own": None, "shared": {"shared_home": True}}
        metafunc.parametrize("module_cluster", homes.values(), ids=homes, indirect=True, scope="module")


@pytest.fixture(scope="module")
def module_cluster(request: pytest.FixtureRequest) -> Iterator[VirtualCluster]:
    with start_cluster(2, **(getattr(request, "param", None) or {})) as cluster:
        yield cluster


@pytest.fixture
def cluster(module_cluster: VirtualCluster, no_leftovers: Watch) -> Iterator[VirtualCluster]:
    yield module_cluster
    no_leftovers.check(module_cluster)


@pytest.fixture
def cluster_of(no_leftovers: Watch) -> Iterator[Callable[..., VirtualCluster]]:
    started: list[VirtualCluster] = []

    def start(count: int, **options: Any) -> VirtualCluster:
        started.append(start_cluster(count, **options))
        return started[-1]

    yield start
    try:
        for one in started:
            no_leftovers.check(one)
    finally:
        for one in started:
            one.down()


def head_environ(state_dir: Path) -> dict[str, str]:
    """The environment of an ascendrun on the head: this checkout, a state dir and a node root of its own.

    $HOME is root's, where the head's ~/.ssh lies; the mark of the test session stays, for the look at its end.
    ASCENDRUN_LANG=pseudo stays as well: with it only assertions about the words on a screen may fail.
    """
    kept = [name for name in os.environ if name == "ASCENDRUN_TEST_SESSION" or not name.startswith(FOREIGN)]
    if os.environ.get("ASCENDRUN_LANG") == "pseudo":
        kept.append("ASCENDRUN_LANG")
    ours = {name: os.environ[name] for name in kept}
    ours["HOME"] = root_home()
    ours["PYTHONPATH"] = str(CODE)
    ours[STATE_VARIABLE] = str(state_dir)
    ours[ROOT_VARIABLE] = str(state_dir.parent / "local-node")
    return ours


class Ascendrun:
    """`python -m ascendrun` on the head of a cluster; called, it returns the completed process with text output."""

    def __init__(self, cluster: Callable[[], VirtualCluster], folder: Path, watch: Watch) -> None:
        self._cluster = cluster
        self._watch = watch
        self.folder = folder
        self.state_dir = folder / "state"
        watch.state_dirs.append(self.state_dir)

    def on(self, cluster: VirtualCluster) -> Ascendrun:
        """The same user (state dir, files) on the head of another cluster."""
        return Ascendrun(lambda: cluster, self.folder, self._watch)

    def argv(self, *arguments: object) -> list[str]:
        """The whole command line, from outside the head's namespaces."""
        command = [sys.executable, "-m", "ascendrun", *map(str, arguments)]
        return self._cluster().head_argv(command, cwd=str(self.folder))

    def __call__(
        self,
        *arguments: object,
        env: Mapping[str, str] | None = None,
        stdin: str = "",
        timeout: float = 120.0,
        code: int | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """`code`: the exit code that it must have."""
        done = subprocess.run(
            self.argv(*arguments), env=self.environ(env), input=stdin, capture_output=True, text=True, timeout=timeout
        )
        assert code in (None, done.returncode), f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def ask(self, *arguments: object, code: int = 0, **options: Any) -> Any:
        """What it prints with `-o json`."""
        return json.loads(self(*arguments, "-o", "json", code=code, **options).stdout)

    def popen(self, *arguments: object, env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[Any]:
        return subprocess.Popen(self.argv(*arguments), env=self.environ(env), **options)

    def pty(self, *arguments: object, env: Mapping[str, str] | None = None, timeout: float = 60.0) -> Any:
        """A pexpect child: the command with a terminal of 100 columns and 30 lines; text is UTF-8."""
        import pexpect

        argv = self.argv(*arguments)
        return pexpect.spawn(
            argv[0], argv[1:], env=self.environ(env), timeout=timeout, encoding="utf-8", dimensions=(30, 100)
        )

    def end_controller(self, cluster: VirtualCluster) -> None:
        end_controller(cluster, self.state_dir)

    def environ(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        return {**head_environ(self.state_dir), **(more or {})}


@pytest.fixture
def ascendrun(request: pytest.FixtureRequest, no_leftovers: Watch, tmp_path: Path) -> Ascendrun:
    """On the head of `cluster`, unless the test asks for `cluster_of` and says `.on(its own)`."""
    cluster: list[VirtualCluster] = []
    if "cluster" in request.fixturenames or "cluster_of" not in request.fixturenames:
        cluster.append(request.getfixturevalue("cluster"))

    def chosen() -> VirtualCluster:
        assert cluster, "the test has no `cluster`: say ascendrun.on(cluster_of(…))(…)"
        return cluster[0]

    return Ascendrun(chosen, tmp_path, no_leftovers)


@pytest.fixture
def scene(ascendrun: Ascendrun, cluster: VirtualCluster) -> Scene:
    return Scene(ascendrun, cluster)


@pytest.fixture
def scene_of(ascendrun: Ascendrun, cluster_of: Callable[..., VirtualCluster]) -> Callable[..., Scene]:
    def start(count: int, **options: Any) -> Scene:
        cluster = cluster_of(count, **options)
        return Scene(ascendrun.on(cluster), cluster)

    return start


@pytest.fixture
def training_scene_of(
    ascendrun: Ascendrun, cluster_of: Callable[..., VirtualCluster], tmp_path: Path
) -> Callable[..., Scene]:
    """training_scene_of(count): hosts that share a directory at SAVED, and the scripts of trainings."""

    def start(count: int, kind: type[Scene] = Scene) -> Scene:
        folder = tmp_path / "saved"
        folder.mkdir()
        cluster = cluster_of(count, shares={str(folder): SAVED})
        made = kind(ascendrun.on(cluster), cluster)
        made.add_code("hanging.py", "training.py")
        return made

    return start
