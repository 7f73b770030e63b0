"""Deaths at named places of the code: the controller at one while an agent or a supervisor dies at another.

The names are read from the code, so a new failpoint is swept by itself. A few pairs run always; `--sweep N,SEED` takes
N others, `--sweep all` every one.
"""

import itertools
import json
import random
import subprocess

import pytest
from failpoints import Deaths, failpoints
from invariants import check_ended, too_open
from scenes import Scene, await_that, run_text

from tests.lib.vcluster.machines import HEAD
from tests.lib.vcluster.processes import await_true

START_S, END_S = 15, 150.0
VICTIM = "node2"
FAR = {"rotate.before_new": "needs 256 MiB of output"}
"""Failpoints that no job of this sweep reaches, and why."""
CANARY = "canary-4711-secret"
MORE = f"checkpoint: {{grace_period_s: 1}}\ntimeouts: {{start_s: {START_S}}}\nenv: {{HF_TOKEN: {CANARY}}}\n"
RESTART = "restart: {max_restarts: 1, causes: [infra]}\n"


def every_pair() -> list[tuple[str, str]]:
    """("", "") left out: where the head and where the node dies, "" nowhere."""
    head, node = (["", *(name for name in failpoints()[side] if name not in FAR)] for side in ("head", "node"))
    return list(itertools.product(head, node))[1:]


def chosen(wish: str) -> list[tuple[str, str]]:
    """`wish`: "all", or how many and from which seed."""
    pairs = every_pair()
    if wish == "all":
        return pairs
    count, _, seed = wish.partition(",")
    return random.Random(seed or "1").sample(pairs, min(int(count), len(pairs)))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "head_point" in metafunc.fixturenames:
        option = metafunc.config.getoption("--sweep", default=None)
        wish = option or ("40,1" if metafunc.config.getoption("--thorough") else "2,1")
        pairs = chosen(wish)
        ids = [f"{head or 'alive'}-{node or 'alive'}" for head, node in pairs]
        metafunc.parametrize(("head_point", "node_point"), pairs, ids=ids)


def test_every_failpoint_is_swept() -> None:
    swept = {name for pair in every_pair() for name in pair}
    assert swept | set(FAR) == {"", *failpoints()["head"], *failpoints()["node"]}
    assert len(failpoints()["head"]) >= 8 and len(failpoints()["node"]) >= 15


def test_deaths_at(scene: Scene, head_point: str, node_point: str) -> None:
    """Every promise holds, whoever died where; a job that only its controller left does what it does else."""
    is_stopped = "stop." in head_point + node_point
    fails = head_point.startswith("judge.") and not is_stopped  # judged is what fails, and could restart
    points = {machine: point for machine, point in ((HEAD, head_point), (VICTIM, node_point)) if point}
    (scene.folder / "code" / "new").write_text(head_point + node_point)  # code that no node has yet
    words = ["deaf", "family", "print", "ready", "beat", 60] if is_stopped else ["family", "print", "ready", "beat", 2]
    last, more = (["exit", 3], MORE + RESTART) if fails else ([], MORE)
    config = scene.folder / "config" / "ascendrun" / "config.yaml"
    config.parent.mkdir(parents=True)
    config.write_text("hook: {command: [/bin/true]}\n")  # a target for notices: the controller comes there too
    with Deaths(scene.cluster, points) as deaths:
        environ = {**deaths.environ(), "XDG_CONFIG_HOME": str(config.parent.parent)}
        controller = scene.ascendrun.popen(
            "controller", "run", env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            job = scene.start(scene.job("doomed", *words, "print", "done", *last, more=more))
            if is_stopped:
                ready = lambda: sum(b"ready" in path.read_bytes() for path in scene.spooled(job, "rank-*.out.0"))  # noqa: E731
                await_true(lambda: ready() == 4, deadline_s=START_S)  # or it will never run
                done = scene.ascendrun("stop", "--no-wait", job)
                assert done.returncode in (0, 7), run_text(done)
            scene.ascendrun("wait", job, timeout=END_S)
            await_that(lambda: not scene.show(job)["unconfirmed_hosts"], f"{job} is confirmed")
            if head_point.startswith("notices."):
                await_true(lambda: HEAD in deaths.reached, deadline_s=START_S)  # a stopped controller sends none
        finally:
            scene.ascendrun("controller", "stop")
            controller.kill()
            controller.wait()
    scene.ascendrun("exec", "-H", scene.folder / "doomed.hosts", "--", "true")  # its controller copies what is left
    check(scene, job, deaths, expected="STOPPED" if is_stopped else "FAILED" if fails else "SUCCEEDED")


def check(scene: Scene, job: str, deaths: Deaths, *, expected: str) -> None:
    """`expected`: the state of a job whose nodes had no death."""
    state = scene.state(job)
    if len(deaths.points) == 1:
        assert deaths.reached, f"nobody came to {deaths.points}"
    if VICTIM not in deaths.reached:
        assert state == expected, json.dumps(scene.show(job)["events"], indent=1)
    check_ended(scene, job, state=state)
    if state == "SUCCEEDED":
        logs = scene.on_head(job, "rank-*.out.0")
        assert len(logs) == 4 and all(data.endswith(b"done\n") for data in logs.values())
    assert [one["id"] for one in json.loads(scene.ascendrun("ps", "-a", "-o", "json").stdout)["jobs"]] == [job]
    scene.ascendrun("stop", "--no-wait", job)
    assert scene.state(job) == state, "an end is final"
    assert not too_open(scene.ascendrun.state_dir)
    log = scene.ascendrun.state_dir / "controller.log"
    assert not log.exists() or CANARY not in log.read_text()
