"""doctor over many real hosts of which four do not answer as they should: an answer for each, in time, on one screen.

With --long 64 hosts, and the screen as well.
"""

import json
import re
import subprocess
import time

from ascendrun.head.survey.doctor import CONNECT_LIGHT_S, LIGHT_S, SPARE_S, STARTED_S
from ascendrun.sim.ascend import tree
from ascendrun.sim.ascend.scenario import Scenario
from tests.lib.vcluster.npus import install_on

MANY, FEWER = 64, 12  # so many agents have to come up within STARTED_S, on a slow machine too
FROZEN, TRICKLING, HANGING, SOUND_NPU, THIN = "node3", "node7", "node10", "node11", "node12"
# Connecting, the survey and the touching each with its own time and what we wait beyond it; a start of the command.
DEADLINE_S = STARTED_S + LIGHT_S + SPARE_S + CONNECT_LIGHT_S + SPARE_S + 30.0
MOST_LINES = 60


def test_of_many_hosts_one_frozen_two_trickling_and_one_with_a_hanging_tool_each_has_its_answer_in_time(
    request, ascendrun, cluster_of
):
    count = MANY if request.config.getoption("--long") else FEWER
    cluster = cluster_of(count)
    on = ascendrun.on(cluster)
    hosts = on.folder / "many.hosts"
    hosts.write_text(cluster.hostfile(slots=2))
    for number, name in enumerate((TRICKLING, HANGING, SOUND_NPU), start=1):
        install_on(cluster, name, Scenario(cards=2, number=number))
    tree.set_fault(cluster.path(TRICKLING, "/"), None, "trickle")
    tree.set_fault(cluster.path(HANGING, "/"), None, "hang", value="npu-smi")
    cluster.freeze(FROZEN)
    cluster.rate(THIN, 8)  # a kilobyte a second: no agent comes through that in time
    began = time.monotonic()
    report = json.loads(examine(on, hosts, "-o", "json").stdout)
    first_s = time.monotonic() - began
    assert first_s < DEADLINE_S
    assert len(report["hosts"]) == count and sorted(report["unreached"]) == [THIN, FROZEN]
    told = {}
    for finding in report["findings"]:
        for host in finding["hosts"]:
            told.setdefault(host, set()).add(finding["code"])
    assert "unreachable" in told.pop(FROZEN) & told.pop(THIN)
    assert "npu-smi-hangs" in told.pop(HANGING), report["findings"]
    assert {"npu-smi-hangs", "hccn-hangs", "probe-timeout"} & told.pop(TRICKLING), report["findings"]
    assert not [host for host, codes in told.items() if "probe-timeout" in codes], told
    kernel = next(row for row in report["facts"] if row["name"] == "kernel")
    assert [len(group["hosts"]) for group in kernel["groups"]] == [count - 2]
    if count == MANY:
        require_a_sane_screen(examine(on, hosts), count)
    cluster.crash(THIN)  # its sshd would wait for minutes for bytes that the cable swallowed


def examine(on, hosts, *more) -> subprocess.CompletedProcess[str]:
    done = on("doctor", "-H", hosts, "--quick", "--lang", "en", *more, timeout=2 * DEADLINE_S)
    assert done.returncode in (3, 6), done.stdout + done.stderr
    return done


def require_a_sane_screen(done, count: int) -> None:
    lines = done.stdout.splitlines()
    assert len(lines) <= MOST_LINES, done.stdout
    assert "unknown  node[1-2,4-6,8-" in done.stdout, done.stdout
    # every host that is named is named in folded form: nowhere a row of names
    assert not re.search(r"node\d+, ?node\d+, ?node\d+", done.stdout), done.stdout
    assert lines[-1].startswith(f"{count} hosts, 2 unreachable"), lines[-1]
