"""The rounds of small jobs, on a made-up cluster that answers through the spool as a real one does."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ascendrun.core.hosts import Host
from ascendrun.core.jobfile.model import Checks, JobSpec
from ascendrun.head.state.state_dir import SPOOL_COMPLETE, spool_dir
from ascendrun.head.survey.submission import Submission
from ascendrun.health.deep.measurements import DeepReport
from ascendrun.query import deep_check
from ascendrun.text import Text

OPTIONS = deep_check.DeepOptions(burn_s=1.0, sizes=(1024,), start_s=5.0, job_s=5.0)


class World:
    """Jobs that are over as soon as they are looked at. `speeds`: of a host's cable; `tflops`: one value a
    measurement, the last one for all that follow; `failing`, `stuck`: hosts on which jobs fail or never end."""

    def __init__(
        self,
        state_dir: Path,
        *,
        speeds: Mapping[str, float] | None = None,
        tflops: Mapping[str, list[float]] | None = None,
        failing: Sequence[str] = (),
        stuck: Sequence[str] = (),
    ) -> None:
        self.state_dir, self.speeds, self.tflops = state_dir, speeds or {}, dict(tflops or {})
        self.failing, self.stuck = set(failing), set(stuck)
        self.submitted: dict[str, Submission] = {}
        self.live: list[str] = []
        self.most_live_of: dict[str, int] = {}

    def submit_made(self, submission: Submission) -> str:
        job = f"j-{len(self.submitted) + 1:04d}"
        self.submitted[job] = submission
        self.live.append(job)
        for host in submission.hosts:
            now = sum(host in self.submitted[one].hosts for one in self.live)
            self.most_live_of[host.name] = max(now, self.most_live_of.get(host.name, 0))
        return job

    def await_ended(self, jobs: Sequence[str], *, timeout_s: float) -> tuple[str, ...]:
        left = tuple(job for job in jobs if self.names(job) & self.stuck)
        for job in jobs:
            if job not in left:
                self.finish(job)
        return left

    def outcome(self, job: str) -> tuple[str | None, int]:
        if self.names(job) & self.stuck:
            return "RUNNING", 1
        failed = sorted(self.names(job) & self.failing)
        return (f"rank 0 on {failed[0]} exited with code 1" if failed else None), 1

    def end(self, jobs: Sequence[str], *, timeout_s: float) -> None:
        self.live = [job for job in self.live if job not in jobs]

    def names(self, job: str) -> set[str]:
        return {host.name for host in self.submitted[job].hosts}

    def finish(self, job: str) -> None:
        self.live.remove(job)
        hosts = [host.name for host in self.submitted[job].hosts]
        folder = spool_dir(self.state_dir, job, 1)
        for host in self.failing.intersection(hosts):
            (folder / host).mkdir(parents=True)
            (folder / host / "rank-0.err.0").write_text("Traceback\nModuleNotFoundError: No module named 'torch'\n\n")
            (folder / SPOOL_COMPLETE).touch()
            return
        for host in hosts:
            lines = self.pair_lines(hosts) if len(hosts) > 1 else self.alone_lines(host)
            (folder / host).mkdir(parents=True)
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (folder / host / "rank-0.metrics.0").write_text("noise\n" + text + '{"torn')
        (folder / SPOOL_COMPLETE).touch()

    def alone_lines(self, host: str) -> list[dict[str, Any]]:
        values = self.tflops.setdefault(host, [300.0])
        tflops = values.pop(0) if len(values) > 1 else values[0]
        return [
            {
                "measured": "device",
                "device": "npu:0",
                "tflops": tflops,
                "tflops_slowest": tflops,
                "digest": "d",
                "wrong": 0,
            }
        ]

    def pair_lines(self, hosts: Sequence[str]) -> list[dict[str, Any]]:
        speed = min(self.speeds.get(host, 20e9) for host in hosts)
        return [{"measured": "mesh", "device": "npu:0", "latency_s": 2e-5, "bandwidth_bytes_per_s": {"1024": speed}}]


def look(
    world: World,
    count: int = 4,
    *,
    busy: Mapping[str, str] | None = None,
    unfit: Sequence[str] = (),
    said: list[str] | None = None,
) -> DeepReport:
    hosts = tuple(Host(f"n{k}", slots=8) for k in range(1, count + 1))
    said = [] if said is None else said
    return deep_check.run_deep_check(
        world,
        deep_check.make_base(None, device_type="npu"),
        hosts,
        OPTIONS,
        state_dir=world.state_dir,
        busy=busy or {},
        unfit=unfit,
        log=said.append,
    )


def test_a_host_that_fails_alone_is_told_and_never_paired(tmp_path: Path) -> None:
    world = World(tmp_path, failing=["n2"])
    report = look(world)
    why = str(report.hosts["n2"].why)
    assert "n2 exited with code 1" in why and "j-0002" in why
    assert "No module named 'torch'" in why
    assert "n2" not in {name for one in report.exchanges for name in one.pair} and len(report.rounds) >= 2
    assert not world.live


def keys_of(why: Any) -> list[str]:
    """The key of a text and those of the texts that are its values."""
    return [why.key, *(key for value in why.values.values() for key in keys_of(value))] if isinstance(why, Text) else []


def test_jobs_that_do_not_end_are_told_and_ended(tmp_path: Path) -> None:
    world = World(tmp_path, stuck=["n4"])
    report = look(world)
    assert "deep.late" in keys_of(report.hosts["n4"].why)
    assert not world.live


def test_no_host_is_in_two_jobs_at_once_and_a_slow_one_is_found(tmp_path: Path) -> None:
    world = World(tmp_path, speeds={"n5": 2e9})
    found = deep_check.evaluate_and_save(look(world, 9), tmp_path).findings
    assert [(one.code, one.hosts) for one in found] == [("deep-host-slow", ("n5",))]
    assert set(world.most_live_of.values()) == {1}


def test_a_host_that_runs_a_job_is_left_in_peace(tmp_path: Path) -> None:
    world = World(tmp_path)
    report = look(world, busy={"n1": "j-0001", "elsewhere": "j-0002"})
    assert report.busy == {"n1": "j-0001"}
    assert "n1" not in world.most_live_of
    assert not look(World(tmp_path / "b"), 1, busy={"n1": "j-0001"}).hosts


def test_a_host_that_is_not_fit_is_not_measured_and_told(tmp_path: Path) -> None:
    world = World(tmp_path)
    found = deep_check.evaluate_and_save(look(world, unfit=["n2"]), tmp_path).findings
    assert [(one.code, one.hosts) for one in found] == [("deep-host-not-ready", ("n2",))]
    assert "n2" not in world.most_live_of


def test_a_slow_device_is_measured_again_before_it_is_blamed(tmp_path: Path) -> None:
    said: list[str] = []
    forgiven = look(World(tmp_path / "a", tflops={"n3": [100.0, 299.0]}), said=said)
    assert deep_check.evaluate_and_save(forgiven, tmp_path / "a").findings == ()
    assert len(said) > len(look_said(tmp_path / "c"))
    blamed = look(World(tmp_path / "b", tflops={"n3": [100.0, 101.0]}))
    [found] = deep_check.evaluate_and_save(blamed, tmp_path / "b").findings
    assert (found.code, found.hosts) == ("deep-device-slow", ("n3",))


def look_said(folder: Path) -> list[str]:
    said: list[str] = []
    look(World(folder), said=said)
    return said


def test_what_was_started_is_ended_when_the_look_is_interrupted(tmp_path: Path) -> None:
    class Interrupted(World):
        def await_ended(self, jobs: Sequence[str], *, timeout_s: float) -> tuple[str, ...]:
            raise KeyboardInterrupt

    world = Interrupted(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        look(world)
    assert len(world.submitted) == 4 and not world.live


def test_each_run_is_kept_in_private_and_the_next_one_compared_with_it(tmp_path: Path) -> None:
    first = deep_check.evaluate_and_save(look(World(tmp_path / "1", tflops={"n2": [300.0]})), tmp_path)
    assert first.findings == () and os.stat(first.file).st_mode & 0o777 == 0o600
    (tmp_path / "deep" / "20990101T000000.000Z.json").write_text('{"at_s": 1, "torn')
    (tmp_path / "deep" / "20990102T000000.000Z.json").write_text("[]")
    second = deep_check.evaluate_and_save(look(World(tmp_path / "2", tflops={"n2": [177.0]})), tmp_path)
    compared = {one.code: one for one in second.findings}["deep-device-slower-than-before"]
    assert (compared.hosts, round(compared.values["below"].values["fraction"], 2)) == (("n2",), 0.41)
    assert [report.at_s for report in deep_check.earlier_reports(tmp_path)] == [second.report.at_s, first.report.at_s]


def test_the_small_jobs_get_the_jobs_own_shell_and_none_of_its_work(tmp_path: Path) -> None:
    job = JobSpec.model_validate_json(
        json.dumps(
            {
                "name": "train",
                "command": ["python", "train.py"],
                "python": "/opt/py",
                "setup": "source env.sh",
                "devices": {"type": "npu", "per_node": 8},
                "env": {"A": "b", "MASTER_PORT": "29500"},
                "nodes": 2,
                "checks": {"skip": ["tls"], "require": ["hccl_ping"]},
                "checkpoint": {"dir": "/ckpt"},
            }
        )
    )
    base = deep_check.make_base(job)
    assert (base.program, base.python, base.setup) == ("meshtest", "/opt/py", "source env.sh")
    assert base.devices == job.devices
    assert base.env == {"A": "b", "HCCL_CONNECT_TIMEOUT": "120", "HCCL_EXEC_TIMEOUT": "204"}
    assert (base.command, base.nodes) == (None, None)
    assert base.checks == Checks(skip=("tls",))
    assert JobSpec.model_validate_json(base.model_dump_json()) == base


def test_without_a_job_cpu_hosts_get_one_rank_and_others_all_their_devices() -> None:
    assert deep_check.make_base(None, device_type="cpu").devices.per_node == 1
    assert deep_check.make_base(None, device_type="npu").devices.per_node is None


def test_torn_and_foreign_lines_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "rank-0.metrics.0").write_bytes(b'{"measured": "mesh"}\n\xff\xfe\n[1]\nnull\n{"step": 1}\n{"torn')
    assert deep_check.read_lines(tmp_path) == [{"measured": "mesh"}, {"step": 1}]
    assert deep_check.read_lines(tmp_path / "nothing") == []
