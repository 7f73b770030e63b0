"""The Lightning plugin in a real Trainer on the CPU: ranks of one process tree, as a launcher would start them."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ascendrun.programs.trainer.options import read_table
from ascendrun.query.library import copy_library

if os.environ.get("CI") != "true":
    pytest.importorskip("pytorch_lightning", reason="bin/setup-env lightning")

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def lightning(launch):
    """lightning(ranks=1, name="run", hosts=1, option=value…): a training of `tinylightning`."""

    def begin(*, ranks=1, name="run", hosts=1, **options):
        local = ranks // hosts
        places = {
            rank: {
                "LOCAL_RANK": str(rank % local),
                "NODE_RANK": str(rank // local),
                "LOCAL_WORLD_SIZE": str(local),
                "GROUP_WORLD_SIZE": str(hosts),
            }
            for rank in range(ranks)
        }
        return launch("lightning", [json.dumps(options)], name=name, ranks=ranks, rank_env=places)

    return begin


def facts(run, rank=0):
    return json.loads((run.folder / f"facts-{rank}.json").read_text())


def test_a_killed_training_resumes_to_the_bit_with_validations_between(lightning):
    whole = lightning(name="whole").succeed()
    assert facts(whole)["steps"] == 12 and whole.losses().keys() == set(range(1, 13))
    assert lightning(name="cut", die_at=5).wait() == [9]  # in the first epoch; the newest checkpoint is of step 3
    again = lightning(name="cut").succeed()
    assert again.final() == whole.final()
    assert [batch[:2] for batch in facts(again)["seen"]][:2] == [[0, 3], [0, 4]]
    rows = [line for line in whole.metrics() if line.get("event") == "checkpoint"]
    assert [line["step"] for line in rows] == [3, 6, 9, 12]
    assert any("eval_loss" in line for line in whole.metrics())
    start = whole.metrics()[0]
    assert (start["event"], start["total_steps"]) == ("start", 12)


def test_hosts_have_their_ranks_read_each_row_once_and_stop_together(lightning):
    how = {"ranks": 4, "hosts": 2, "rows": 32, "validate_every": 1}
    whole = lightning(name="whole", **how).succeed()
    every = [facts(whole, rank) for rank in range(4)]
    assert [each["rank"] for each in every] == [0, 1, 2, 3] and {each["world"] for each in every} == {4}
    for epoch in (0, 1):
        rows = [row for each in every for at, _, rows, _ in each["seen"] if at == epoch for row in rows]
        assert sorted(rows) == list(range(32))
    stopped = lightning(name="cut", stop_at=2, **how)
    assert stopped.wait() == [0, 0, 0, 0], stopped.text()
    assert not (stopped.folder / "final.pt").exists()
    assert [len(facts(stopped, rank)["seen"]) for rank in range(4)] == [3] * 4
    assert lightning(name="cut", **how).succeed().final() == whole.final()


def test_fsdp_divides_the_weights_learns_the_same_and_resumes_as_ddp_or_itself(lightning):
    divided = {"ranks": 2, "epochs": 1, "strategy": "fsdp"}
    whole = lightning(name="whole", **divided).succeed()
    replicated = lightning(name="ddp", **{**divided, "strategy": "ddp"}).succeed()
    losses = [[loss for *_, loss in facts(run)["seen"]] for run in (whole, replicated)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and len(losses[0]) == 3
    assert facts(whole)["held"] < 0.6 * facts(replicated)["held"]
    assert lightning(name="cut", stop_at=1, **divided).wait() == [0, 0]
    assert lightning(name="cut", **divided).succeed().final() == whole.final()


@pytest.mark.thorough
@pytest.mark.parametrize("keeps_order", [True, False])
def test_ddp_on_four_ranks_resumes_to_the_bit_where_its_buckets_keep_their_order(lightning, keeps_order):
    """torch orders the buckets anew after the first step, and a sum of four depends on the place in its bucket."""
    how = {"ranks": 4, "rows": 64, "width": 700, "how": {"find_unused_parameters": True} if keeps_order else {}}
    whole = lightning(name="whole", **how).succeed()
    assert lightning(name="cut", stop_at=2, **how).wait() == [0, 0, 0, 0]
    again = lightning(name="cut", **how).succeed()
    one, other = (torch.load(run.folder / "final.pt") for run in (whole, again))
    apart = max(float((one[name] - other[name]).abs().max()) for name in one)
    assert apart == 0.0 if keeps_order else 0.0 < apart < 1e-5


def test_a_longer_training_continues_from_the_end_of_a_shorter_one(lightning):
    first = lightning(epochs=1).succeed()
    assert facts(first)["steps"] == 6
    assert facts(lightning(epochs=3).succeed())["steps"] == 18


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("die_at", range(3, 12))
def test_a_kill_at_any_step_resumes_to_the_bit(lightning, workers, die_at):
    whole = lightning(name="whole", workers=workers).succeed()
    assert lightning(name="cut", die_at=die_at, workers=workers).wait() == [9]
    assert lightning(name="cut", workers=workers).succeed().final() == whole.final()


def test_the_staged_library_has_the_plugin_and_all_that_it_imports(tmp_path):
    library = tmp_path / "library"
    copy_library(library)
    script = "import ascendrun.lightning as plugin; print(plugin.__file__, plugin.settings(device='cpu')['strategy'])"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = [{str(library)!r}] + "
         f"[each for each in sys.path if each != {str(REPO)!r}]; {script}"],
        env={**{name: value for name, value in os.environ.items() if name != "PYTHONPATH"}, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0 and str(library) in done.stdout and "OneDevice" in done.stdout, done.stderr


def test_arguments_that_cannot_work_are_refused_together():
    from ascendrun.lightning.setup import refuse
    from ascendrun.programs.errors import InvalidDataError

    with pytest.raises(InvalidDataError) as caught:
        refuse("zero", "many", 2)
    assert str(caught.value).count("hint:") == 1 and len(str(caught.value).splitlines()) == 3
    with pytest.raises(InvalidDataError):
        refuse("ddp", 4, 2)
    refuse("ddp", 2, 2)


def test_total_steps_count_accumulation_ranks_and_incomplete_batches():
    from ascendrun.lightning.setup import steps_of
    from ascendrun.programs.errors import InvalidDataError

    def trainer(**values):
        return SimpleNamespace(
            **{"max_epochs": 15, "max_steps": -1, "world_size": 1, "accumulate_grad_batches": 1, **values}
        )

    assert steps_of(trainer(), samples=102, batch_size=6) == 15 * 17
    assert steps_of(trainer(world_size=4, accumulate_grad_batches=2), samples=103, batch_size=6) == 15 * 3
    assert steps_of(trainer(max_steps=20), samples=102, batch_size=6) == 20
    assert steps_of(trainer(max_epochs=-1, max_steps=7), samples=102, batch_size=6) == 7
    for unknown in (float("inf"), -1):
        with pytest.raises(InvalidDataError):
            steps_of(trainer(estimated_stepping_batches=unknown))


SMALL = (
    "--data_path=generated --synthetic_sequences=100 --hidden_size=32 --num_hidden_layers=1 --num_attention_heads=2 "
    "--max_position_embeddings=128 --dropout=0 --learning_rate=0.005 --global_batch_size=12 --num_train_epochs=3 "
    "--logging_steps=1 --dtype=float32"
).split()


def test_the_template_has_the_losses_of_our_own_loop_on_the_same_batches(launch):
    ours = launch("codon", ["--mode=pretrain", "--device=cpu", *SMALL], name="ours").succeed().losses()
    script = str(REPO / "templates" / "lightning" / "train.py")
    run = launch("lightning-file", [script, "--device=cpu", *SMALL], name="theirs")
    run.wait()
    theirs = run.losses()
    assert (run.folder / "out" / "final" / "config.json").is_file(), run.text()
    assert len(ours) >= 20 and theirs == pytest.approx(ours, abs=1e-5)


def test_the_options_of_the_template_are_those_of_codon():
    codon = read_table(REPO / "ascendrun" / "programs" / "codon" / "options.json").options
    own = read_table(REPO / "templates" / "lightning" / "train.json").options
    assert {name: replace(codon[name], is_shared=False) for name in own} == own
