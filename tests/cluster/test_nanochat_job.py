"""jobs/nanochat.yaml as it is shipped, on two virtual hosts: from generated texts to a report, each stage over both."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.programs.conftest import REPO

STAGES = ("tokenizer", "base", "eval-base", "mid", "sft", "eval-sft", "rl", "eval-rl", "report")
NODES = ("node1", "node2")
DEADLINE_S = 3000.0


@pytest.mark.thorough
@pytest.mark.timeout(DEADLINE_S + 100)
def test_the_job_file_trains_scores_and_reports_on_two_hosts(ascendrun: Any, cluster: Any) -> None:
    hosts = ascendrun.folder / "two.hosts"
    hosts.write_text(cluster.hostfile(slots=2, names=NODES))
    python = REPO / ".venv" / "bin" / "python"
    done = ascendrun(
        "submit", REPO / "jobs" / "nanochat.yaml", "-H", hosts, "--set", f"python={python}", timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(ascendrun("report", "nanochat", "-o", "json").stdout)["stages"]
    print(json.dumps(told))
    assert {row["stage"]: row["state"] for row in told} == dict.fromkeys(STAGES, "SUCCEEDED")
    rows = {row["stage"]: row for row in told}
    for stage in ("eval-base", "eval-sft", "eval-rl"):
        assert {"bits_per_byte", "sums", "spelling"} <= set(rows[stage]["scores"]), rows[stage]
    assert rows["eval-base"]["scores"]["bits_per_byte"] < 4
