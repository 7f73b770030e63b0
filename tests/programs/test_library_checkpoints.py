"""Checkpoints of transformers, DeepSpeed and torch, as they wrote them and torn at every file: never taken as whole."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ascendrun.node.agent.attempt.checkpoints import listing
from tests.ports import free_port

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1800)]
FORMATS = {"dcp": "torch-dcp", "zero2": "deepspeed", "zero3": "deepspeed", "transformers": "transformers"}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints of steps 10 and 20 of each library."""
    folder = tmp_path_factory.mktemp("libraries")
    port = str(free_port())
    base = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": "2"}
    base.update(LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    ranks = [{**base, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.programs.librarycheckpoints", str(folder)]
    root = Path(__file__).parents[2]
    with open(folder / "log", "w") as log:
        running = [subprocess.Popen(command, env=env, cwd=root, stdout=log, stderr=log) for env in (*ranks, alone)]
        try:
            codes = [each.wait() for each in running]
        finally:
            for each in running:
                each.kill()
    assert codes == [0, 0, 0], (folder / "log").read_text()[-3000:]
    return folder


def newest(folder: Path) -> list[tuple[int, bool]]:
    return [(each["step"], each["whole"]) for each in listing({"folder": str(folder)})["checkpoints"]]


@pytest.mark.parametrize("library", FORMATS)
def test_what_a_library_wrote_is_whole_and_with_any_file_torn_or_gone_it_is_not(
    written: Path, tmp_path: Path, library: str
) -> None:
    folder = tmp_path / "ckpt"
    shutil.copytree(written / library, folder)
    first = listing({"folder": str(folder)})["checkpoints"][0]
    assert (first["format"], newest(folder)) == (FORMATS[library], [(20, True), (10, True)])
    files = [path for path in sorted(Path(first["path"]).rglob("*")) if path.is_file()]
    assert len(files) > 2
    for file in files:
        content = file.read_bytes()
        for torn in (content[:-2], content[: len(content) // 2], b"", bytes(len(content))):
            file.write_bytes(torn)
            assert newest(folder) == [(20, False), (10, True)], f"{file.name} torn"
        file.unlink()
        assert newest(folder) == [(20, False), (10, True)], f"{file.name} gone"
        file.write_bytes(content)
    assert newest(folder) == [(20, True), (10, True)]


def test_a_deepspeed_checkpoint_lists_the_parts_of_all_ranks_and_those_here(written: Path, tmp_path: Path) -> None:
    shutil.copytree(written / "zero3" / "global_step20", tmp_path / "global_step20")
    for name in ("optim", "model"):
        (tmp_path / "global_step20" / f"zero_pp_rank_1_mp_rank_00_{name}_states.pt").unlink()
    (entry,) = listing({"folder": str(tmp_path)})["checkpoints"]
    assert entry["whole"] and len(entry["of"]) == 4
    assert sorted(entry["parts"]) == [part for part in sorted(entry["of"]) if "rank_0_mp" in part]


def test_a_distributed_checkpoint_under_megatrons_name_needs_its_metadata(written: Path, tmp_path: Path) -> None:
    """The layout is taken from the source of Megatron-LM (megatron/training/checkpointing.py), not from a run."""
    step = tmp_path / "iter_0000020"
    shutil.copytree(written / "dcp" / "step_20", step)
    assert newest(tmp_path) == [(20, False)]
    (step / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    shutil.copy(written / "transformers" / "checkpoint-20" / "optimizer.pt", step / "common.pt")
    assert newest(tmp_path) == [(20, True)]
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
    assert newest(tmp_path) == [(20, False)], "the tracker is written last"
