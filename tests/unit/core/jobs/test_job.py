"""What another version stored or sent is read: unknown keys are ignored, missing fields have their default."""

import json
from dataclasses import replace
from typing import Any

import pytest

from ascendrun.core.dataclass import load_dataclass
from ascendrun.core.errors import AscendrunError, PreflightError, Problem
from ascendrun.core.hosts import Host, load_hosts
from ascendrun.core.jobs.job import Exit, ForkedRank, Job, NodeProgress, Phase, Request, State, dump_job, load_job
from ascendrun.core.jobs.plan import Tree
from ascendrun.core.jobs.reasons import FirstFailure, because
from ascendrun.text import Text

NODE = NodeProgress(
    "n1",
    Phase.ENDED,
    ranks=(0,),
    pids={0: 5},
    exits={0: Exit(code=1, signal=None, at_ns=7)},
    forked={0: ForkedRank(12, Exit(None, 9, 4))},
)
JOB = replace(
    Job(id="j-0001", name="a", run="r", hosts=("n1",), grace_s=1.0, start_s=2.0, created_at_s=3.0),
    pool=("n1", "n2"),
    request=Request(1),
    state=State.FAILED,
    nodes=(NODE,),
    first_failure=FirstFailure(because("rank-exited", ["n1"], [0], code=1), "likely"),
)


def with_unknown(value: Any) -> Any:
    """The same JSON with a key in every object that this version does not know; not where keys are numbers."""
    if isinstance(value, dict) and not {"$text", "$reason"} & set(value):
        extra = {} if not value or any(key.isdigit() for key in value) else {"from_the_future": [1]}
        return {**{key: with_unknown(item) for key, item in value.items()}, **extra}
    return [with_unknown(item) for item in value] if isinstance(value, list) else value


def test_a_record_of_another_version_is_read() -> None:
    record = json.loads(json.dumps(dump_job(JOB)))
    assert load_job(with_unknown(record)) == load_job(record) == JOB
    del record["unconfirmed"], record["nodes"][0]["lingering"], record["nodes"][0]["exits"]["0"]["stopped"]
    assert load_job(record) == JOB


def test_an_error_a_host_and_a_directory_of_another_version_are_read() -> None:
    error = PreflightError(Text("t.a", "no"), problems=[Problem("n1", None, None, Text("t.b", "x"))])
    assert AscendrunError.from_json(with_unknown(error.to_json())).problems == error.problems
    assert load_hosts([with_unknown({"name": "n1", "devices": [1]})]) == (Host("n1", devices=(1,)),)
    assert load_dataclass(Tree, {"name": "a", "sha256": "b", "size_bytes": 1, "files": 1, "x": 2}).name == "a"


def test_a_field_without_a_default_must_be_there() -> None:
    with pytest.raises(TypeError):
        load_dataclass(Host, {"slots": 4})
