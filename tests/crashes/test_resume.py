"""Trainings over two hosts die of everything and go on to the same bits; and what judges them can tell."""

import hashlib
import json
import random
from pathlib import Path

import pytest

from tests.cluster.conftest import start_cluster
from tests.crashes.hosts import Hosts
from tests.crashes.remains import difference, half_written, newest_common, read_story, wound
from tests.crashes.resume import DEATHS, DISK, Life, sweep
from tests.crashes.trainings import ALL
from tests.lib.vcluster.cluster import VirtualCluster


@pytest.mark.thorough
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", ALL)
def test_a_training_goes_on_to_the_same_bits_after_a_kill_a_stop_and_a_dead_node(tmp_path: Path, name: str) -> None:
    """The command `python -m tests.crashes.resume` tries more moments."""
    lives: list[Life] = []
    cluster: VirtualCluster = start_cluster(2, disk=DISK)
    with cluster:
        hosts = Hosts(cluster, tmp_path)
        try:
            sweep(hosts, [name], DEATHS, moments=1, seed=1, tell=lives.append)
        finally:
            hosts.close()
    assert {life.death for life in lives} >= set(DEATHS)


def save(node: Path, step: int, token: str = "a") -> Path:
    """A checkpoint as the trainer leaves it."""
    folder = node / f"step-{step:08d}"
    folder.mkdir(parents=True)
    (folder / "common.pt").write_bytes(b"weights" * step)
    digest = hashlib.sha256(b"weights" * step).hexdigest()
    manifest = {
        "step": step,
        "here": ["common.pt"],
        "parts": {"common.pt": {"sha256": digest}},
        "facts": {"save": token},
    }
    whole = {**manifest, "sha256": hashlib.sha256(json.dumps(manifest).encode()).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(whole))
    return folder


def test_only_what_all_nodes_have_whole_of_one_save_may_be_gone_on_from(tmp_path: Path) -> None:
    nodes = [tmp_path / "one", tmp_path / "two"]
    for node in nodes:
        save(node, 4)
    save(nodes[0], 6)
    save(nodes[0], 8, "b")
    save(nodes[1], 8, "c")
    assert newest_common(nodes, is_sharded=True) == 4
    assert newest_common(nodes, is_sharded=False) == 8
    assert newest_common([tmp_path / "none"], is_sharded=True) is None


@pytest.mark.parametrize("how", ["unnamed", "cut", "flip"])
def test_a_wounded_checkpoint_is_not_whole_any_more(tmp_path: Path, how: str) -> None:
    save(tmp_path, 4)
    save(tmp_path, 6)
    wound(tmp_path, how, random.Random(1))
    assert newest_common([tmp_path], is_sharded=False) == 4
    assert half_written([tmp_path]) == (how == "unnamed")


def test_one_bit_of_one_number_is_told(tmp_path: Path) -> None:
    for name, loss in (("straight", 0.1), ("other", 0.1 + 2**-56)):
        lines = [
            {"event": "resume", "step": 3},
            {"step": 4, "loss": 0.5, "step_s": len(name)},
            {"event": "end"},
            {"step": 1, "loss": loss},
        ]
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"cut')
    straight, other = (read_story([tmp_path / name]) for name in ("straight", "other"))
    assert difference(straight, straight) is None
    assert "training 2 step 1: loss is 0.1" in str(difference(other, straight))
    assert straight.resumed == [3] and straight.first == {0: 4, 1: 1}
