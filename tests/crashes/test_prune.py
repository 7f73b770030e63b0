"""Old logs of ended jobs go from the head node and the nodes; live jobs, outputs and checkpoints stay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from test_controller_crashes import Head, await_that, head
from test_head_bad_days import HANG, await_state, submit

__all__ = ["head"]

WRITES = "import os\nprint('x' * 200_000)\nopen('model.bin', 'w').write('trained')\n"


def prune(head: Head, *options: str) -> dict[str | None, Any]:
    done = head.run("prune", "-o", "json", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return {reply["host"]: reply for reply in json.loads(done.stdout)["hosts"]}


def ended(head: Head, script: str) -> str:
    (head.folder / "rank.py").write_text(script)
    job = submit(head)
    assert head.run("wait", job).returncode == 0
    await_that(lambda: (head.state_dir / "jobs" / job / "attempt-1" / "complete").exists())
    return job


def node_files(head: Head, job: str) -> list[Path]:
    return list((head.state_dir / "local").glob(f"*/nodes/*/runs/*-{job}/attempt-1"))


def test_old_logs_go_and_everything_else_stays(head: Head) -> None:
    old, kept, quiet = ended(head, WRITES), ended(head, WRITES), ended(head, "print('x' * 200_000)\n")
    (head.folder / "rank.py").write_text(HANG)
    live = submit(head)
    await_state(head, live, "RUNNING")
    planned = prune(head, "--older", "0.01s", "--keep", kept, "--dry-run")
    assert all(node_files(head, job) for job in (old, kept, quiet, live))
    done = prune(head, "--older", "0.01s", "--keep", kept)
    for replies in (planned, done):
        assert {one["name"] for reply in replies.values() for one in reply["jobs"]} == {old, quiet}
        assert set(replies) == {None, "a", "b"}
    assert not node_files(head, old) and not node_files(head, quiet)
    assert len(node_files(head, kept)) == len(node_files(head, live)) == 2
    works = list((head.state_dir / "local").glob(f"*/nodes/*/runs/*-{old}/work/model.bin"))
    assert len(works) == 2, "what a rank wrote stays"
    assert not list((head.state_dir / "local").glob(f"*/nodes/*/runs/*-{quiet}/work"))
    (head.state_dir / "jobs" / old / "attempt-1").mkdir()  # as a removal that was interrupted leaves it
    assert {one["name"] for one in prune(head, "--older", "0.01s", "--keep", kept)[None]["jobs"]} == {old}
    logs = head.run("logs", old)
    assert logs.returncode == 4 and "removed" in logs.stderr
    assert head.run("logs", kept).stdout.count("x" * 1000) and head.show(old)["job"]["state"] == "SUCCEEDED"
    again = prune(head, "--older", "0.01s", "--keep", kept)
    assert not any(reply["jobs"] for reply in again.values())
    assert head.run("rm", live).returncode == 7
    head.run("stop", "--now", live)


def test_a_job_is_removed_with_its_files_and_not_while_its_outputs_are_only_on_a_node(head: Head) -> None:
    text = (head.folder / "job.yaml").read_text()
    (head.folder / "job.yaml").write_text(text + "outputs: [model.bin, none]\noutputs_from: all\n")
    job = ended(head, WRITES)
    fetched = head.run("fetch", job)
    assert fetched.returncode == 0 and fetched.stderr.count("no file matches none") == 1, fetched.stderr
    outputs = head.state_dir / "outputs" / job
    assert sorted(path.read_text() for path in outputs.glob("*/model.bin")) == ["trained"] * 2
    codes = sorted(event["code"] for event in head.show(job)["events"] if event["code"].startswith("outputs-"))
    rows = json.loads(head.run("nodes", "-H", "two.hosts", "-o", "json").stdout)["nodes"]
    assert len(rows) == 2 and all(row["used_bytes"] > 200_000 for row in rows), rows
    assert codes == ["outputs-fetched"] * 2 + ["outputs-missing"] * 2
    waiting = outputs.with_name(f"{job}.json")
    waiting.write_text('{"a": null}')  # as while a host is unreachable
    refused = head.run("rm", job)
    assert refused.returncode == 7 and f"ascendrun fetch {job}" in refused.stderr
    done = head.run("rm", job, "--force")
    assert done.returncode == 0, done.stderr
    assert head.run("show", job).returncode == 4
    assert not node_files(head, job) and not list((head.state_dir / "local").glob(f"*/nodes/*/runs/*-{job}"))
    assert not any(path.exists() for path in (outputs, waiting, head.state_dir / "jobs" / job))


def test_a_tree_that_a_live_job_uses_stays_however_old_it_is(head: Head) -> None:
    (head.folder / "code").mkdir()
    (head.folder / "code" / "rank.py").write_text(HANG)
    text = (head.folder / "job.yaml").read_text()
    command = [json.loads(text.split("command: ")[1].splitlines()[0])[0], "rank.py"]
    (head.folder / "job.yaml").write_text(
        f"name: staged\ncommand: {json.dumps(command)}\nhostfile: two.hosts\nworkdir: {{path: code}}\n"
    )
    live = submit(head)
    await_state(head, live, "RUNNING")
    trees = list((head.state_dir / "local").glob("*/trees/*"))
    assert trees and not any(reply["trees"] for reply in prune(head, "--older", "0.01s").values())
    assert head.run("stop", "--now", live).returncode == 0
    await_that(lambda: (head.state_dir / "jobs" / live / "attempt-1" / "complete").exists())
    freed = [prune(head, "--older", "0.01s") for _ in range(2)]
    assert all({None, "a", "b"} == set(replies) for replies in freed), freed
    assert not list((head.state_dir / "local").glob("*/trees/[0-9a-f]*")), freed
