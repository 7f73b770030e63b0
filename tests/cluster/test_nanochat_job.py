"""jobs/nanochat.yaml as it is shipped, on two virtual hosts: from generated texts to a report, each stage over both."""

import json
from typing import Any

import pytest

from tests.programs.conftest import REPO

STAGES = ("tokenizer", "base", "eval-base", "mid", "sft", "eval-sft", "rl", "eval-rl", "report")
DEADLINE_S = 3000.0


@pytest.mark.thorough
@pytest.mark.timeout(DEADLINE_S + 100)
def test_the_job_file_trains_scores_and_reports_on_two_hosts(ascendrun: Any, cluster_of: Any) -> None:
    cluster = cluster_of(2, disk="1G")
    on = ascendrun.on(cluster)
    hosts = ascendrun.folder / "two.hosts"
    hosts.write_text(cluster.hostfile(slots=2))
    python = REPO / ".venv" / "bin" / "python"
    on("submit", REPO / "jobs" / "nanochat.yaml", "-H", hosts, "--set", f"python={python}", timeout=DEADLINE_S, code=0)
    found = json.loads(on("report", "nanochat", "-o", "json").stdout)["stages"]
    print(json.dumps(found))
    assert {row["stage"]: row["state"] for row in found} == dict.fromkeys(STAGES, "SUCCEEDED")
    rows = {row["stage"]: row for row in found}
    for stage in ("eval-base", "eval-sft", "eval-rl"):
        assert {"bits_per_byte", "sums", "spelling"} <= set(rows[stage]["scores"]), rows[stage]
    assert rows["eval-base"]["scores"]["bits_per_byte"] < 4
    assert rows["base"]["tokens_per_s"] > 0
    (page,) = (on.state_dir / "outputs").glob("**/out/report/report.md")
    assert "4 x " in page.read_text(), "the ranks of a stage, over both hosts"
