"""Logs of hosts whose clocks differ, what is gathered after a failure, and a flood while links are cut."""

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Callable

from scenes import Scene, await_that, run_text

from ascendrun.head.spool.artifact_store import read_artifacts
from ascendrun.head.spool.clocks import read_clocks
from ascendrun.sim.ascend.scenario import Scenario
from tests.lib.vcluster.npus import install_on

CLOCK_S = 90.0
STAMP = re.compile(r"\d{4}-\d\d-\d\dT")

FAILING = """
import os, rank, select, signal, sys, time
folder = os.path.expanduser("~/ascend/log/debug/plog")
os.makedirs(folder, exist_ok=True)
number = int(os.environ["RANK"])
text = "[ERROR] HCCL(1,python):2026-01-01-00:00:00.000.000 [a.cc:1] [1]rank %s failed\\n"
open(os.path.join(folder, "plog-%d_20260101000000000.log" % os.getpid()), "w").write(text % number)
rank.meet()
for _ in range(8):
    print("said at %.3f" % time.monotonic(), flush=True)  # one kernel, one monotonic clock, whatever the host's shows
    select.select([], [], [], 0.2)
sys.exit(3 if number == 3 else signal.pause())
"""


def test_a_failure_brings_plogs_and_npu_states_and_lines_of_shifted_hosts_are_in_order(
    scene_of: Callable[..., Scene],
) -> None:
    scene = scene_of(2)
    for number, name in enumerate(("node1", "node2"), start=1):
        install_on(scene.cluster, name, Scenario(cards=2, number=number))
    scene.cluster.clock("node1", CLOCK_S)
    (scene.folder / "code" / "failing.py").write_text(FAILING)
    more = "checks: {skip: [clock]}\nsetup: source /usr/local/Ascend/ascend-toolkit/set_env.sh\n"
    job_file = scene.job("failing", command=["python3", "failing.py"], more=more)
    job_file.write_text(job_file.read_text().replace("type: cpu", "type: npu"))
    done = scene.ascendrun("submit", job_file)
    assert done.returncode == 1 and "rank 3 on node2" in done.stderr, run_text(done)
    attempt: Path = scene.ascendrun.state_dir / "jobs" / "j-0001" / "attempt-1"

    await_that(lambda: all(read_artifacts(attempt, host).at_s for host in scene.cluster.hosts), "all is gathered")
    for number, host in enumerate(scene.cluster.hosts):
        found = read_artifacts(attempt, host)
        plogs = sorted(file.path.read_bytes()[-14:-8] for file in found.of("plog"))
        assert plogs == [b"rank %d" % rank for rank in (2 * number, 2 * number + 1)], found
        assert {file.is_ours for file in found.of("plog")} == {True}
        assert b"npu-smi" in b"".join(file.path.read_bytes() for file in found.of("npu-smi"))
        assert found.of("hccn") and found.of("supervisor"), found.problems

    clocks = read_clocks(attempt)
    first, second = (clocks[host].readings[0] for host in scene.cluster.hosts)
    assert abs(first.offset_s - second.offset_s - CLOCK_S) < first.error_s + second.error_s + 1, (first, second)
    said = scene.ascendrun("logs", "j-0001", "--grep", "said at", "--timestamps").stdout.splitlines()
    came = [datetime.fromisoformat(next(filter(STAMP.match, line.split()))).timestamp() for line in said]
    assert len(said) >= 8 and came == sorted(came), said
    took = [at_s - float(line.split()[-1].split("±")[0]) for at_s, line in zip(came, said)]
    assert max(took) - min(took) < CLOCK_S / 3, said
    assert json.loads(scene.ascendrun("show", "j-0001", "-o", "json").stdout)["job"]["state"] == "FAILED"
