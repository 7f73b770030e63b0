"""Old logs of ended jobs go from the head node and the nodes; live jobs, outputs and checkpoints stay."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from test_controller_crashes import Head, await_that, head
from test_head_bad_days import HANG, await_state

from ascendrun.head.spool.collector import allocated_bytes
from ascendrun.head.state.store import Store
from ascendrun.node.layout import make_run

__all__ = ["head"]

WRITES = "import os\nprint('x' * 200_000)\nopen('model.bin', 'w').write('trained')\n"


def prune(head: Head, *options: str) -> dict[str | None, Any]:
    return {reply["host"]: reply for reply in head.ask("prune", *options)["hosts"]}


def ended(head: Head, script: str) -> str:
    (head.folder / "rank.py").write_text(script)
    job = head.submit()
    assert head.run("wait", job).returncode == 0
    await_that(lambda: (head.state_dir / "jobs" / job / "attempt-1" / "complete").exists())
    return job


def node_files(head: Head, job: str) -> list[Path]:
    return list((head.state_dir / "local").glob(f"*/nodes/*/runs/*-{job}/attempt-1"))


def test_old_logs_go_and_everything_else_stays(head: Head) -> None:
    old, kept, quiet = ended(head, WRITES), ended(head, WRITES), ended(head, "print('x' * 200_000)\n")
    (head.folder / "rank.py").write_text(HANG)
    live = head.submit()
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
    rows = head.ask("nodes", "-H", "two.hosts")["nodes"]
    assert len(rows) == 2 and all(row["used_bytes"] > 200_000 for row in rows), rows
    assert codes == ["outputs-fetched"] * 2 + ["outputs-missing"] * 2
    waiting = outputs.with_name(f"{job}.json")
    waiting.write_text('{"a": null}')  # as while a host is unreachable
    refused = head.run("rm", job)
    assert refused.returncode == 7 and f"ascendrun fetch {job}" in refused.stderr
    head.run("rm", job, "--force", code=0)
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
    live = head.submit()
    await_state(head, live, "RUNNING")
    trees = list((head.state_dir / "local").glob("*/trees/*"))
    assert trees and not any(reply["trees"] for reply in prune(head, "--older", "0.01s").values())
    assert head.run("stop", "--now", live).returncode == 0
    await_that(lambda: (head.state_dir / "jobs" / live / "attempt-1" / "complete").exists())
    freed = [prune(head, "--older", "0.01s") for _ in range(2)]
    assert all({None, "a", "b"} == set(replies) for replies in freed), freed
    assert not list((head.state_dir / "local").glob("*/trees/[0-9a-f]*")), freed


JOBS = 200
RECORD_BYTES = 16 << 10
"""Of each job, which stay: what it was, and when its files were removed."""


def copy_job(head: Head, job: str, count: int) -> list[str]:
    """Copies of an ended job under further ids: in the store, with its files on the head node and on both nodes."""
    assert head.run("controller", "stop").returncode == 0
    runs = list((head.state_dir / "local").glob(f"*/nodes/*/runs/*-{job}"))
    copies = []
    with Store.open(head.state_dir) as store:
        one = store.jobs.find(job)
        for number in range(count):
            copied = store.jobs.add(
                key=f"copy-{number}",
                make_job=lambda job_id, head_id: replace(one.job, id=job_id, run=make_run(head_id, job_id)),
                spec=one.spec,
                hosts=one.hosts,
                trees=one.trees,
                file=one.file,
                now_s=one.job.created_at_s,
            )
            store.jobs.mark_drained(copied.id)
            copies.append(copied.id)
    for name in copies:
        shutil.copytree(head.state_dir / "jobs" / job / "attempt-1", head.state_dir / "jobs" / name / "attempt-1")
        for run in runs:
            shutil.copytree(run, run.with_name(run.name.replace(job, name)), symlinks=True)
    return copies


def test_200_ended_jobs_free_what_was_printed(head: Head) -> None:
    job = ended(head, "print('x' * 100_000)\n")
    jobs = {job, *copy_job(head, job, JOBS - 1)}
    homes = {"a": "a", "b": "b"}
    used = {host: sum(map(allocated_bytes, (head.state_dir / "local").glob(f"{host}*/nodes/*/runs"))) for host in homes}
    used[None] = allocated_bytes(head.state_dir / "jobs")
    planned, done = prune(head, "--older", "0.01s", "--dry-run"), prune(head, "--older", "0.01s")
    for replies in (planned, done):
        assert {host: {one["name"] for one in replies[host]["jobs"]} for host in used} == dict.fromkeys(used, jobs)
    left = {host: sum(map(allocated_bytes, (head.state_dir / "local").glob(f"{host}*/nodes/*/runs"))) for host in homes}
    left[None] = allocated_bytes(head.state_dir / "jobs")
    for host, before in used.items():
        said = sum(one["size_bytes"] for one in done[host]["jobs"])
        assert said == sum(one["size_bytes"] for one in planned[host]["jobs"]) and said > JOBS * 100_000
        freed = before - left[host]
        assert abs(freed - said) <= JOBS * RECORD_BYTES, (host, freed, said)
    assert {*head.states()} == jobs
