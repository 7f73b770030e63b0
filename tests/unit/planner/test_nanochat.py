"""The plan of jobs/nanochat-speedrun.yaml at full size, for eight 910B3 of one host: memory, hours and tokens/s."""

import json
from pathlib import Path
from typing import Any

import pytest

from ascendrun.cli import main
from ascendrun.core.settings import Settings
from tests.lib.plan_world import PlanCluster

JOB = Path(__file__).resolve().parents[3] / "jobs" / "nanochat-speedrun.yaml"
ROWS: dict[str, Any] = {
    "text/a.jsonl": {"text": "a"},
    "text/b.jsonl": {"text": "b"},
    "conversations.jsonl": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    "humaneval.jsonl": {"prompt": "def f():", "test": "def check(f): pass", "entry_point": "f"},
    **{f"gsm8k_{part}.jsonl": {"question": "a", "answer": "#### 1"} for part in ("train", "test")},
    **{
        f"{name}.jsonl": {"question": "a", "choices": ["b", "c"], "answer": "B"}
        for name in ("mmlu_auxiliary", "arc_train", "arc_test")
    },
}


def test_the_plan_has_memory_hours_and_speed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = PlanCluster(Settings(state_dir=tmp_path / "state"), tmp_path / "hosts")
    for name, row in ROWS.items():
        cluster.write("n1", f"/data/{name}", f"{json.dumps(row)}\n".encode() * 4)
    (tmp_path / "one.hosts").write_text("n1 addr=10.0.0.1 slots=8\n")
    argv = ["plan", str(JOB), "-H", str(tmp_path / "one.hosts"), "--set", "args.chip=910B3", "-o", "json"]
    assert main(argv, make_cluster=lambda settings: cluster) == 0
    stages = {each["stage"]: each for each in json.loads(capsys.readouterr().out)["stages"]}
    assert [each for stage in stages.values() for each in stage["problems"]] == []
    base = stages["base"]
    assert (base["work"]["samples_per_step"], base["ranks"], base["memory_bytes"]) == (128, 8, 64 << 30)
    for stage in map(stages.get, ("base", "mid", "sft", "rl")):
        option = stage["choice"]["chosen"]
        assert 0 < sum(option["memory"]["parts"].values()) < stage["memory_bytes"]
    cost = base["cost"]
    assert 0 < cost["tokens_per_s"]["low"] < cost["tokens_per_s"]["high"]
    tokens = base["work"]["steps"] * base["work"]["tokens_per_step"]
    for slow, fast in (("low", "high"), ("high", "low")):
        seconds = tokens / cost["tokens_per_s"][slow]
        assert cost["device_hours"][fast] == pytest.approx(8 * seconds / 3600, rel=0.01)
    assert base["speed_source"] == "assumed", "nobody has run it on an NPU"
