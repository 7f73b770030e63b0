"""The stages as ranks run them: prepared, trained, resumed to the bit, the same on one rank and two, evaluated."""

import json
import random
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from ascendrun.programs.codon import genes
from ascendrun.programs.codon.files import load_stored
from ascendrun.programs.codon.train import Scoring
from benchmarks.codon.tables import Seen, losses
from tests.programs.conftest import alone, resharded

SMALL = (
    "--mode=pretrain",
    "--hidden_size=16",
    "--num_hidden_layers=1",
    "--num_attention_heads=2",
    "--max_position_embeddings=128",
    "--learning_rate=0.01",
    "--global_batch_size=8",
    "--micro_batch_size=2",
    "--num_train_epochs=2",
    "--eval_steps=6",
    "--save_steps=4",
    "--logging_steps=1",
    "--val_size=0.2",
    "--dtype=float32",
    "--output_dir=out",
)
CONTEXT = (*SMALL, "--context_residues=1")


@pytest.fixture
def data(tmp_path):
    """Prepared genes: about 48 to train on, in 6 steps an epoch."""
    genes.save(genes.generated(60, seed=5, val_size=0.2), tmp_path / "data")
    return f"--prepared_dir={tmp_path / 'data'}"


def test_a_killed_training_ends_with_the_same_bits_and_two_ranks_are_near_one(launch, data):
    """S4-B3, S4-B5, S4-B7: ranks share the rows of a step, a training resumes, and it is validated by organism."""
    straight = launch("codon", [*CONTEXT, data], name="straight").succeed()
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    for step in sorted(random.Random(seed).sample(range(1, max(straight.losses())), 3)):
        launch("codon", [*CONTEXT, data], name="broken").killed_at(step, 0)
    again = launch("codon", [*CONTEXT, data], name="broken").succeed()
    for name in ("best", "final"):
        assert again.weights(name) == straight.weights(name)
    assert again.report() == straight.report() and straight.report()["training"]["best_step"] > 0
    losses = straight.losses()
    assert {step: losses[step] for step in again.losses()} == again.losses()

    single = launch("codon", [*SMALL, "--dropout=0", data], name="single").succeed()
    double = launch("codon", [*SMALL, "--dropout=0", data], name="double", ranks=2).succeed()
    assert list(double.losses().values()) == pytest.approx(list(single.losses().values()), abs=1e-4)

    report = straight.report()
    assert set(report["scores"]) == {"all", "Escherichia coli general", "Homo sapiens", "Saccharomyces cerevisiae"}
    every = report["scores"]["all"]
    assert every["uniform_loss"] > every["background_loss"] and every["codons"] > 100
    assert report["training"]["steps"] == max(losses) and losses.keys() == single.losses().keys()
    assert single.losses()[max(losses)] < single.losses()[1]

    model = straight.folder / "out" / "best"
    scored = launch(
        "codon", ["--mode=evaluate", f"--model_path={model}", data, "--output_dir=out"], name="scored", ranks=2
    )
    for organism, scores in scored.succeed().report()["scores"].items():
        for name in ("loss", "masked_loss", "background_loss", "codons"):
            assert scores[name] == pytest.approx(report["scores"][organism][name], rel=1e-4)

    tuned = launch(
        "codon", [*SMALL, "--mode=finetune", f"--base_model={model}", "--learning_rate=0", data], name="tuned"
    ).succeed()
    assert tuned.weights("best") == straight.weights("best")


def test_the_shipped_job_beats_both_tables_from_the_protein_alone(launch, tmp_path):
    """On genes of three organisms that it was not trained on, whose proteins tell of their style of codons."""
    job = yaml.safe_load((Path(__file__).parents[3] / "jobs" / "codon.yaml").read_text())
    args = {**job["args"], **next(stage["args"] for stage in job["stages"] if stage["name"] == "train")}
    data = genes.generated(args.pop("synthetic_sequences"), seed=23, val_size=0.1)
    genes.save(data, tmp_path / "data")
    args.update(prepared_dir=str(tmp_path / "data"), output_dir="out")
    del args["data_path"]
    scores = launch("codon", [f"--{name}={value}" for name, value in args.items()]).succeed().report()["scores"]
    numbers = data.numbers(val=True)
    train, val = (Seen.of(data, each) for each in (data.numbers(val=False), numbers))
    tables, _ = losses(train, val, val, len(data.names))
    assert len(scores) == 4
    for organism, found in scores.items():
        own = [at for at, number in enumerate(numbers) if data.names.names[data.organisms[number]] == organism or
               organism == "all"]  # fmt: skip
        codons = sum(int(data.lengths[numbers[at]]) - 2 for at in own)
        assert found["codons"] == codons
        for table, nats in tables.items():
            assert found["loss"] < nats[own].sum() / codons - 0.02, (organism, table)


def test_a_training_ends_when_the_validation_loss_does_not_fall_and_keeps_the_best_model(launch, data, tmp_path):
    """The same command afterwards does not train."""
    how = "--learning_rate=0.3 --num_train_epochs=20 --eval_steps=2 --early_stopping_patience=3"
    options = [*SMALL, data, *how.split()]
    first = launch("codon", options, name="early").succeed()
    report, last = first.report(), max(first.losses())
    assert report["training"]["steps"] == last < 20 * 6
    steps, losses = zip(*((each["step"], each["loss"]) for each in report["evaluations"]))
    assert report["training"]["best_step"] == steps[losses.index(min(losses))] == steps[-4] and steps[-1] == last
    found = genes.load(tmp_path / "data")
    model = load_stored(first.folder / "out" / "best").make().eval()
    here = alone()
    scores = Scoring(model, here, torch.float32, 16, seed=23, rate=0.15).table(found, found.numbers(val=True))
    assert scores["all"]["loss"] == pytest.approx(min(losses), rel=1e-5)
    kept = first.weights("best"), first.weights("final")
    again = launch("codon", options, name="early").succeed()
    assert again.losses() == first.losses() and again.report() == report
    assert (again.weights("best"), again.weights("final")) == kept


def test_a_training_that_continues_on_fewer_and_on_more_ranks_ends_with_the_same_weights(launch, data):
    """2 ranks, 1 and 3, each from the checkpoint of the one before."""
    how = "--dropout=0 --global_batch_size=6 --micro_batch_size=1 --max_steps=12 --eval_steps=12 --save_total_limit=9"
    options = [*CONTEXT, data, *how.split()]
    straight = launch("codon", options, name="two", ranks=2).succeed()
    last = resharded(straight, lambda ranks, name: launch("codon", options, name=name, ranks=ranks), {4: 1, 8: 3})
    found, wanted = (load_file(run.folder / "out" / "final" / "model.safetensors") for run in (last, straight))
    for name, weight in wanted.items():
        assert (found[name] - weight).abs().max() <= 1e-5, name


def test_a_table_is_prepared_and_bad_starts_are_one_error(launch, tmp_path):
    (tmp_path / "a.csv").write_text("dna,protein\nATG,M\n")
    (tmp_path / "empty").mkdir()
    starts = {
        "columns": ["--mode=prepare", f"--data_path={tmp_path / 'a.csv'}"],
        "none": ["--mode=prepare"],
        "base": ["--mode=finetune", "--data_path=generated"],
        "heads": [*SMALL, "--data_path=generated", "--num_attention_heads=3"],
        "short": [*SMALL, "--data_path=generated", "--max_position_embeddings=16"],
        "model": ["--mode=evaluate", "--data_path=generated", f"--model_path={tmp_path / 'empty'}"],
    }
    runs = {name: launch("codon", options, name=name) for name, options in starts.items()}
    for name, run in runs.items():
        assert run.wait() == [1], run.text()
        assert "Traceback" not in run.text(), name
    assert "a.csv:1" in runs["columns"].text()
    assert "16" in runs["short"].text() and "mode: pretrain" in runs["base"].text()

    run = launch("codon", ["--mode=prepare", "--data_path=generated", "--output_dir=out"], name="prepare").succeed()
    facts = json.loads((run.folder / "out" / "prepared.json").read_text())
    assert facts["sequences"]["train"] + facts["sequences"]["val"] == 600 and facts["longest"] <= 122
