"""Whole runs of the trajectory program, tiny, on one to three ranks."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ascendrun.core.rank_env import NodeShare, rank_environments
from ascendrun.programs.trainer import checkpoint
from ascendrun.programs.trajectory.points.tracks import FEATURES, PLACE
from ascendrun.programs.trajectory.scores import VERDICTS
from ascendrun.programs.trajectory.store import load_trained


def last_state(folder: Path) -> dict[str, Any]:
    _, newest = checkpoint.directories(folder / "ckpt", "step")[0]
    assert checkpoint.fault(newest) is None
    state = checkpoint.load(newest)
    pieces = {key.partition("model/")[2]: piece for key, piece in state["pieces"].items() if key.startswith("model/")}
    return {**state, "model": {name: piece["data"].view(piece["shape"]) for name, piece in pieces.items()}}


def tensors(value: Any, path: str = "") -> list[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        return [(path, value)]
    if isinstance(value, dict):
        return [pair for key, item in value.items() for pair in tensors(item, f"{path}/{key}")]
    return []


def assert_same_bits(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["progress"] == other["progress"]
    pairs, others = tensors(one), dict(tensors(other))
    assert pairs and len(pairs) == len(others)
    differing = [name for name, tensor in pairs if not torch.equal(tensor, others[name])]
    assert not differing


def norms(run: Any) -> dict[int, float]:
    """Of the gradients: AdamW learns the same from any multiple of them, so losses do not tell."""
    return {line["step"]: line["grad_norm"] for line in run.metrics() if "loss" in line}


def test_a_rank_that_is_killed_ends_its_peers_with_an_error_instead_of_leaving_them_waiting(start):
    run = start("--num_train_epochs=200", ranks=2)
    assert run.killed_at(2, 1) == [1, -signal.SIGKILL]
    assert "message" in json.loads(run.error_files[0].read_text())


def test_no_rank_says_that_it_is_done_while_another_still_works(launch):
    """The launcher ends a rank some seconds after that word, and its peers would then find it gone."""
    run = launch("lastwords", [], ranks=2).succeed()
    first, second = run.metrics(0), run.metrics(1)
    assert [line.get("event") for line in first] == ["report", None] and first[-1]["done"]
    assert second[-1]["done"] and second[-1]["timestamp"] >= first[0]["timestamp"]


def test_a_sum_over_ranks_is_the_same_to_the_bit_on_every_rank(launch):
    assert "\n0 differ, 0 wrong\n" in launch("sums", [], ranks=4).succeed().text()


def test_data_that_is_missing_is_said_in_the_error_file_of_every_rank(start):
    run = start("--data_path=/nowhere/tracks.csv", ranks=2)
    assert run.wait() == [1, 1]
    for file in run.error_files:
        message = json.loads(file.read_text())["message"]
        assert "/nowhere/tracks.csv: file not found" in message["message"]
        assert "extraInfo" in message


def test_ranks_that_read_different_data_refuse_to_train(start, tmp_path):
    header = "ship,time,lat,lon,sog,cog,class\n"
    for rank in range(2):
        rows = [
            f"{ship},2022-01-01T00:{minute:02d}:00,{30 + ship},0.{minute:02d},{ship + rank},10,{'AB'[ship % 2] * 3}\n"
            for ship in range(40)
            for minute in range(12)
        ]
        (tmp_path / f"node{rank}").mkdir()
        (tmp_path / f"node{rank}" / "data.csv").write_text(header + "".join(rows))
    run = start("--data_path=data.csv", ranks=2, folders=[tmp_path / "node0", tmp_path / "node1"])
    assert run.wait() == [1, 1]
    assert "read other data than the rest" in run.text()


def test_a_training_of_uneven_shares_ends_on_both_ranks_its_loss_falls_and_rank_0_alone_tells(start):
    run = start(
        "--global_batch_size=7",
        "--num_train_epochs=12",
        "--learning_rate=0.01",
        "--dropout=0",
        "--token_mask_prob=0",
        ranks=2,
    ).succeed()
    losses = list(run.losses().values())
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    lines = run.metrics()
    assert lines[-1]["done"] and run.metrics(1)[-1]["done"]
    step = next(line for line in lines if "loss" in line)
    assert {"step", "total_steps", "epoch", "loss", "learning_rate", "tokens_per_s", "samples_per_s"} <= set(step)
    assert any("eval_macro_f1" in line and "eval_accuracy" in line for line in lines)
    assert "macro F1" in run.out[0].read_text()
    assert run.out[1].read_text() == ""


def test_a_process_without_launcher_trains_and_prints_the_table_with_the_baseline(start):
    run = start("--num_train_epochs=1", "--baselines=forest,tokens", "--boosted_trees=true").succeed()
    text = run.out[0].read_text()
    assert "majority class" in text and str(run.folder / "out") in text
    report = run.report()
    methods = {"model", "network", "no_place", "majority", "forest", "tokens"}  # generated tracks have no size
    assert set(report["comparison"]) == methods and report["comparison"]["forest"]["verdict"] in VERDICTS
    trees = load_trained(run.folder / "out" / "best").model.trees
    assert trees.weight == report["trees_weight"]
    place = [FEATURES.index(name) for name in PLACE]
    assert trees.expected[place].all() and len(trees.places) and not trees.elsewhere.expected[place].any()
    assert report["test"]["confusion"] and report["comparison"]["majority"]["pieces"]["accuracy"]["value"] > 0
    assert (run.folder / "out" / "report.txt").read_text().count("\n") > 10


def test_folds_test_each_ship_once_and_a_fold_that_is_complete_is_not_trained_again(start):
    given = ("--folds=2", "--max_steps=2", "--baselines=tokens")
    out = start(*given, "--fold=1", name="folds").succeed().folder / "out"
    assert not (out / "report.json").exists()
    trained = (out / "fold-1" / "best" / "model.pt").stat()
    run = start(*given, name="folds").succeed()
    assert (out / "fold-1" / "best" / "model.pt").stat().st_ino == trained.st_ino
    tested = [json.loads((out / f"fold-{number}" / "methods.json").read_text())["ships"] for number in range(2)]
    assert sorted(tested[0] + tested[1]) == [f"gen{number:06d}" for number in range(80)]
    counts = run.report()["test"]["confusion"]
    assert sum(map(sum, counts)) == 80 and run.report()["comparison"]["tokens"]["verdict"] in VERDICTS


def test_two_ranks_learn_what_one_rank_learns_from_the_same_global_batches(start):
    """S1-B5: a loss divided by the batches of one rank is none of all ranks."""
    options = ("--dropout=0", "--global_batch_size=9", "--num_train_epochs=3")
    alone = start(*options, name="alone").succeed()
    shared = start(*options, ranks=2, name="shared").succeed()
    assert alone.losses() == pytest.approx(shared.losses(), rel=2e-4)
    assert norms(alone) == pytest.approx(norms(shared), rel=2e-2)
    for (name, one), (_, other) in zip(
        tensors(last_state(alone.folder)["model"]), tensors(last_state(shared.folder)["model"])
    ):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-4, msg=name)


def test_accumulated_micro_batches_learn_what_whole_batches_learn(start):
    options = ("--dropout=0", "--global_batch_size=10")
    whole = start(*options, "--max_tokens_per_micro_batch=0", name="whole").succeed()
    pieces = start(
        *options, "--micro_batch_size=2", "--max_tokens_per_micro_batch=150", ranks=2, name="pieces"
    ).succeed()
    assert whole.losses() == pytest.approx(pieces.losses(), rel=2e-4)
    assert norms(whole) == pytest.approx(norms(pieces), rel=2e-2)


def test_ranks_without_the_checkpoint_folder_get_the_state_from_rank_0_and_keep_it_from_then_on(start):
    """Node-local folders: at first only rank 0's holds anything."""
    options = ("--num_train_epochs=30", "--eval_steps=45", "--save_steps=0")
    straight = start(*options, ranks=2, name="straight").succeed()
    first = start(*options, ranks=2, name="local", stop=(1, 3)).succeed()
    empty = first.folder / "empty"
    second = start(*options, ranks=2, name="local", rank_env={1: {"ASCENDRUN_CHECKPOINT_DIR": str(empty)}}).succeed()
    kept = [checkpoint.directories(each, "step")[0] for each in (first.folder / "ckpt", empty)]
    assert kept[0][0] == kept[1][0] and checkpoint.fault(kept[1][1]) is None
    assert_same_bits(last_state(straight.folder), last_state(second.folder))


def test_a_finished_training_that_is_started_again_only_reports_and_another_is_refused_with_what_differs(start):
    first = start().succeed()
    second = start().succeed()
    assert second.report()["test"] == first.report()["test"]
    steps = [line["step"] for line in second.metrics() if "loss" in line]
    assert len(steps) == len(set(steps)), "no step was trained twice"
    other = start("--learning_rate=0.5")
    assert other.wait() == [78]
    assert "learning_rate was 0.002, is 0.5" in other.text()


def test_every_test_track_is_predicted_once_over_uneven_ranks_and_a_saved_model_says_the_same(start, tmp_path):
    """S1-B6: a sampler that pads counted samples twice. S0-B7: what finetuning saved could not be loaded to predict.
    S0-B9: what is told by name is what was judged by number."""
    trained = start(ranks=3, name="trained").succeed()
    lines = [json.loads(line) for line in (trained.folder / "out" / "predictions.jsonl").read_text().splitlines()]
    assert len({line["track"] for line in lines}) == len(lines) == trained.report()["data"]["tracks"]["test"]
    assert {"class_name", "confidence", "truth"} <= set(lines[0])
    judged = trained.report()["test"]
    names = [row["name"] for row in judged["classes"]]
    assert judged["confusion"] == [
        [sum(line["truth"] == truth and line["class_name"] == said for line in lines) for said in names]
        for truth in names
    ]
    again = start(
        "--mode=predict", f"--model_path={trained.folder / 'out' / 'best'}", ranks=2, name="predicted"
    ).succeed()
    said = {line["track"]: line for line in map(json.loads, (again.folder / "out" / "predictions.jsonl").open())}
    assert len(said) == 80
    for line in lines:
        assert said[line["track"]]["class_name"] == line["class_name"]
        assert said[line["track"]]["confidence"] == pytest.approx(line["confidence"], abs=2e-4)


@pytest.mark.skipif("AIS_DATA" not in os.environ, reason="AIS_DATA names no file of real AIS tracks")
def test_real_tracks_beat_the_majority_class_within_an_epoch_or_two(start):
    run = start(
        f"--data_path={os.environ['AIS_DATA']}",
        "--hidden_size=32",
        "--num_train_epochs=2",
        "--global_batch_size=64",
        ranks=2,
    ).succeed()
    assert run.report()["test"]["macro_f1"] > run.report()["comparison"]["majority"]["pieces"]["macro_f1"]["value"]


# --- under other launchers, and killed ---


MUON = {"muon": True, "cut_elements": 64, "shard": True}
WAYS = {
    "none": (1, {"strategy": "none"}),
    "ddp": (2, {"strategy": "ddp"}),
    "ddp, sharded Muon and AdamW": (2, {"strategy": "ddp", **MUON}),
    "fsdp2": (2, {"strategy": "fsdp2"}),
    "fsdp2, Muon": (2, {"strategy": "fsdp2", **MUON}),
    "hsdp": (4, {"strategy": "hsdp", "shard_size": 2}),
    "hsdp, Muon": (4, {"strategy": "hsdp", "shard_size": 2, **MUON}),
    "zero3": (2, {"strategy": "zero3"}),
}
SOURCES = {"planned": {}, "on policy": {"rollouts": 1}}
STEPS, SAVE_STEPS = 16, 3
QUICK = {("planned", "none"), ("on policy", "ddp, sharded Muon and AdamW"), ("planned", "fsdp2, Muon")}


@pytest.mark.parametrize(
    "source, way",
    [
        pytest.param(source, way, marks=() if (source, way) in QUICK else pytest.mark.thorough)
        for source in SOURCES
        for way in WAYS
    ],
)
def test_killed_at_three_steps_and_started_again_no_bit_differs(tiny, fork_server, source, way):
    ranks, options = WAYS[way]
    if way == "zero3":
        fork_server.ask({"import": "deepspeed"})
    chosen = {"ranks": ranks, "max_steps": STEPS, "save_steps": SAVE_STEPS, **options, **SOURCES[source]}
    straight = tiny(name="straight", **chosen).succeed()
    lot = random.Random(f"{source} {way}")
    for step in sorted(lot.sample(range(1, STEPS), 3)):
        # The write of the newest checkpoint may be cut as well; a life that resumes behind this step is not killed.
        tiny(name="broken", kill=[step, lot.randrange(ranks)], **chosen).wait()
    again = tiny(name="broken", **chosen).succeed()
    assert again.losses() == straight.losses()
    assert again.final() == straight.final()


# --- the environment of a rank that the agent starts, held against the one that this machine's torchrun gives ---


FROM_THE_LOGIN = {"PATH", "HOME", "LC_CTYPE", "PWD", "SHLVL", "_"}
FROM_THE_AGENT = {"MASTER_PORT"}
TOLD_TO_TORCHRUN_ITSELF = {"TORCHELASTIC_SIGNALS_TO_HANDLE"}


def test_torchrun_sets_nothing_that_we_forget(tmp_path):
    script = tmp_path / "show.py"
    script.write_text("import json, os\nprint('ENV' + json.dumps(dict(os.environ)))\n")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes=1",
            "--nproc-per-node=1",
            "--master-addr=127.0.0.1",
            "--master-port=0",
            str(script),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
    )
    line = next(line for line in done.stdout.splitlines() if line.startswith("ENV"))
    theirs = {name for name in json.loads(line[3:]) if not name.startswith("KMP_")}
    node = NodeShare(
        job="j",
        attempt=1,
        run_id="j.1",
        signal="TERM",
        env={},
        node_rank=0,
        nodes=1,
        world_size=1,
        local_world_size=1,
        ranks_before=0,
        interface="lo",
        master_address="127.0.0.1",
        device_type="cpu",
        device_ids=(0,),
        threads=1,
        attempt_folder="/a",
        checkpoint_folder="/c",
    )
    ours = set(rank_environments(node)[0])
    assert theirs - FROM_THE_LOGIN - FROM_THE_AGENT - TOLD_TO_TORCHRUN_ITSELF <= ours
    assert {"RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"} <= theirs, "this is torchrun's environment"
