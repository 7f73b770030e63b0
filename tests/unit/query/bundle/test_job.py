"""The support archive of a job as the head has it: all that helps, nobody's secrets; and what Huawei's tool wants."""

from __future__ import annotations

import json
import struct
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from ascendrun.cluster import Cluster
from ascendrun.core.errors import NotFoundError
from ascendrun.core.events import Event
from ascendrun.core.jobs.job import Exit, NodeProgress, Phase, State
from ascendrun.core.jobs.reasons import FirstFailure, because
from ascendrun.core.notices import NoticeSettings, Target
from ascendrun.core.samples import DeviceSample
from ascendrun.head.state.sample_store import SampleStore
from ascendrun.head.state.store import Store
from ascendrun.query.bundle.archive import CannotWriteError
from ascendrun.query.bundle.job import Bundle, as_commands, bundle_job
from tests.lib.demo_jobs import store_job

PLANTED = {
    "env-from": "Pl4nted-env-from-value",
    "spec": "Pl4nted-spec-value",
    "webhook": "https://x.example/hook/Pl4nted-url",
    "own": "Pl4nted-own-variable",
    "form": "hf_Pl4ntedPl4ntedPl4nted",
}
PORTS = "@@ link 0\nlink status: DOWN\n\n@@= 0\n@@ link 1\nlink status: UP\n\n@@= 0\n"
CARDS = "@@ health 0\n\tHealth Status : Alarm\n\n@@= 0\n@@ ecc 0\n\tNPU ID : 0\n\n@@= 0\n"


class World:
    """A state folder with one failed job of two nodes, and secrets in every place where one may stand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state_dir = folder / "state"
        (folder / "secrets.env").write_text(f"# keys\nTOKEN={PLANTED['env-from']}\n")
        self.spec = {
            "name": "qwen",
            "env": {"WANDB_API_KEY": PLANTED["spec"], "LR": "1e-5"},
            "env_file": [str(folder / "secrets.env")],
            "command": ["x", "--token", PLANTED["spec"]],
        }
        store = Store.open(self.state_dir)
        nodes = tuple(
            NodeProgress(host, k, Phase.ENDED, (k,), exits={k: Exit(k, None, 1, False)}) for k, host in enumerate("ab")
        )
        failure = FirstFailure(because("rank-exited", ["b"], [1], code=1))
        times = {"created_at_s": 1000.0, "started_at_s": 1100.0, "ended_at_s": 2000.0}
        values = {**times, "name": "qwen", "state": State.FAILED, "nodes": nodes, "world_size": 2}
        self.job = store_job(store, spec=self.spec, now_s=1000.0, **values, first_failure=failure)
        said = Event("preflight-warning", {"warning": f"said {PLANTED['env-from']}"}, at_s=2000.0)
        failed = Event(
            "state-changed", {"state": "FAILED", "reason": because("rejected", why="rank 1 on b")}, at_s=2000.0
        )
        store.jobs.save(self.job, [said, failed], now_s=2000.0)
        store.close()
        for host, rank in (("a", 0), ("b", 1)):
            self._spool(host, rank)
        (self.state_dir / "controller.log").write_text(f"Traceback: {PLANTED['own']}\n")

    def _spool(self, host: str, rank: int) -> None:
        folder = self.state_dir / "jobs" / self.job.id / "attempt-1" / host
        folder.mkdir(parents=True)
        lines = [f"rank {rank} says {secret}\n" for secret in PLANTED.values()]
        text = "".join(lines).encode()
        half = len(lines[0]) // 2
        (folder / f"rank-{rank}.out.0").write_bytes(text[:half])
        (folder / f"rank-{rank}.out.1").write_bytes(text[half:])
        (folder / f"rank-{rank}.err.0").write_bytes(b"Traceback\n")
        stamp = 1_500_000_000_000_000_000
        (folder / f"rank-{rank}.err.times.0").write_bytes(struct.pack(">QQ", 10, stamp))
        (folder / f"rank-{rank}.metrics.0").write_text('{"step": 1}\n')
        (folder / "events.0").write_text("{}\n")
        gathered = folder / "gathered"
        files = {
            "plog/debug/plog/plog-11_2026.log": f"[ERROR] HCCL {PLANTED['form']}\n",
            "hccn/ports.txt": PORTS,
            "npu-smi/cards.txt": CARDS,
            "dmesg/excerpt.txt": "oom\n",
        }
        for name, content in files.items():
            (gathered / name).parent.mkdir(parents=True, exist_ok=True)
            (gathered / name).write_text(content)
        index = {
            "at_ns": 1,
            "start_ns": 1,
            "boot_ns": 1,
            "problems": [{"name": "device-log", "text": "no such folder"}],
            "files": [
                {"name": name.partition("/")[0], "file": name.partition("/")[2], "source": "x", "bytes": len(content)}
                for name, content in files.items()
            ],
        }
        (gathered / "index.json").write_text(json.dumps(index))

    def bundle(self, *, path: Path | None = None, **choice: Any) -> Bundle:
        notices = NoticeSettings((Target(name="t", type="generic", url=PLANTED["webhook"]),))
        environ = {"MY_TOKEN": PLANTED["own"], "HOME": "/root", "SHELL_KEY": "short"}
        usual = {"layout": "ascendrun", "with_logs": True, "is_dry": False, "max_bytes": 100 << 20}
        path = path or self.folder / "out.tar.gz"
        return bundle_job(self.state_dir, "qwen", path, notices=notices, environ=environ, **{**usual, **choice})

    def files(self, path: Path | None = None) -> dict[str, bytes]:
        found = {}
        with tarfile.open(path or self.folder / "out.tar.gz") as tar:
            for member in tar.getmembers():
                file = tar.extractfile(member)
                assert file is not None
                found[member.name.partition("/")[2]] = file.read()
        return found


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_everything_that_helps_is_in_it(world: World) -> None:
    world.bundle()
    files = world.files()
    assert set(
        """
    job.json spec.json hosts.json events.jsonl versions.json explain.json report.json MANIFEST.json
    head/controller.log attempt-1/a/rank-0.out attempt-1/b/rank-1.err attempt-1/b/rank-1.metrics
    attempt-1/b/events attempt-1/a/gathered/index.json attempt-1/a/gathered/plog/debug/plog/plog-11_2026.log
    """.split()
    ) <= set(files)
    assert json.loads(files["spec.json"])["env"]["LR"] == "1e-5"
    assert json.loads(files["job.json"])["first_failure"]["reason"]["$reason"]["hosts"] == ["b"]
    assert not any(name.endswith(".times") for name in files)


@pytest.mark.parametrize("layout", ["ascendrun", "ascend-fd"])
def test_no_planted_secret_leaves_the_house(world: World, layout: str) -> None:
    bundle = world.bundle(layout=layout)
    everything = b"\n".join(name.encode() + b"\n" + text for name, text in world.files().items())
    for secret in PLANTED.values():
        assert secret.encode() not in everything and secret[4:].encode() not in everything
    assert bundle.contents.secrets >= len(PLANTED) - 1


def test_the_same_job_gives_the_same_bytes(world: World) -> None:
    first, again = (world.bundle(path=world.folder / name) for name in ("one.tar.gz", "two.tar.gz"))
    assert first.sha256 == again.sha256
    assert (world.folder / "one.tar.gz").read_bytes() == (world.folder / "two.tar.gz").read_bytes()


def test_looking_first_lists_the_same_and_writes_nothing(world: World) -> None:
    before = sorted(world.folder.iterdir())
    dry = world.bundle(is_dry=True)
    assert dry.path is None and sorted(world.folder.iterdir()) == before
    assert dry.contents == world.bundle().contents


def test_logs_can_stay_at_home_and_that_is_said(world: World) -> None:
    bundle = world.bundle(with_logs=False)
    assert not any(name.endswith((".out", ".err")) for name in world.files())
    assert ("attempt-1/*.out, *.err (6)", "--no-logs") in bundle.contents.left_out


def test_when_the_file_of_secrets_is_gone_the_archive_says_what_that_means(world: World) -> None:
    (world.folder / "secrets.env").unlink()
    assert any(getattr(why, "key", "") == "bundle.env-file-unreadable" for _, why in world.bundle().contents.left_out)


def test_a_link_among_the_files_of_a_node_is_not_followed(world: World) -> None:
    (world.folder / "private").write_text("Pl4nted elsewhere")
    link = world.state_dir / "jobs" / world.job.id / "attempt-1" / "a" / "gathered" / "plog" / "link"
    link.symlink_to(world.folder / "private")
    world.bundle()
    assert not any(b"Pl4nted elsewhere" in text for text in world.files().values())


def test_a_place_that_cannot_be_written_is_named(world: World) -> None:
    with pytest.raises(CannotWriteError, match="nowhere"):
        world.bundle(path=world.folder / "nowhere" / "x.tar.gz")


def test_a_job_that_is_not_there(world: World, tmp_path: Path) -> None:
    for state_dir in (world.state_dir, tmp_path / "empty"):
        with pytest.raises(NotFoundError):
            Cluster(state_dir=state_dir).diagnosis.bundle("other", is_dry=True, environ={})


# ---------------------------------------------------------------- ascend-fd


def test_the_folders_are_those_that_the_tool_documents(world: World) -> None:
    store = SampleStore.open(world.state_dir)
    store.add(
        [
            DeviceSample(
                at_s=1500.0,
                host="a",
                device=3,
                device_type="npu",
                utilisation=91.0,
                memory_used_bytes=1,
                memory_total_bytes=2,
                power_w=301.5,
                temperature_c=61.0,
                frequency_mhz=1500.0,
            )
        ]
    )
    store.close()
    bundle = world.bundle(layout="ascend-fd")
    files = world.files()
    names = set(files) - {"MANIFEST.json"}
    for node, rank in (("a", 0), ("b", 1)):
        assert {
            f"{node}/rank-{rank}.txt",
            f"{node}/process_log/debug/plog/plog-11_2026.log",
            f"{node}/dmesg",
            f"{node}/environment_check/npu_info_after.txt",
        } <= names
    assert files["a/environment_check/npu_smi_3_details.csv"].decode().splitlines() == [
        "time,dev_id,hbm_rate,aicore_rate,rated_freq,freq,temp,power",
        "1500,3,50,91,,1500,61,301.5",
    ]
    check = files["a/environment_check/npu_info_after.txt"].decode()
    assert "/usr/local/Ascend/driver/tools/hccn_tool -i 0 -link -g\nlink status: DOWN\n\n" in check
    assert "/usr/local/bin/npu-smi info -i 0 -c 0 -t health\nHealth Status : Alarm\n" in check
    assert "Traceback" in files["b/rank-1.txt"].decode()
    assert ("a: device-log", "no such folder") in bundle.contents.left_out and bundle.parsed == ()


def test_an_answer_without_sections_is_the_table() -> None:
    assert as_commands("+---+\n", is_port=False) == "/usr/local/bin/npu-smi info\n+---+\n"
    assert as_commands("", is_port=True) == ""


FAKE_TOOL = """#!{python}
import os, sys
assert sys.argv[1:3] == ["parse", "-i"] and sys.argv[4] == "-o" and len(sys.argv) == 6, sys.argv
node = os.path.basename(sys.argv[3])
found = sorted(os.path.relpath(os.path.join(base, name), sys.argv[3])
               for base, _, names in os.walk(sys.argv[3]) for name in names)
open(os.path.join(sys.argv[5], "ascend-kg-parser.json"), "w").write("\\n".join(found))
print("The parse job is complete.")
sys.exit(3 if node == {bad!r} else 0)
"""


@pytest.mark.parametrize("bad", ["", "b"])
def test_the_tool_parses_each_nodes_folder_by_itself(world: World, monkeypatch: Any, bad: str) -> None:
    tools = world.folder / "tools"
    tools.mkdir()
    (tools / "ascend-fd").write_text(FAKE_TOOL.format(python=sys.executable, bad=bad))
    (tools / "ascend-fd").chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=":")
    bundle = world.bundle(layout="ascend-fd")
    assert [(result.node, result.code) for result in bundle.parsed] == [("a", 0), ("b", 3 if bad else 0)]
    assert bundle.parsed_dir is not None and "complete" in bundle.parsed[0].output
    parsed = (bundle.parsed_dir / "b" / "ascend-kg-parser.json").read_text().splitlines()
    assert "rank-1.txt" in parsed and "process_log/debug/plog/plog-11_2026.log" in parsed


def test_packing_a_running_job_takes_what_is_there(world: World) -> None:
    store = Store.open(world.state_dir)
    from dataclasses import replace

    store.jobs.save(replace(world.job, state=State.RUNNING, ended_at_s=None), [], now_s=time.time())
    store.close()
    assert world.bundle().contents.packed
