"""The stages of the trajectory pipeline, tiny: what one leaves the next one finds, stopped ones go on to the bit."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trainer import checkpoint
from ascendrun.programs.trajectory.api import Classifier
from ascendrun.programs.trajectory.data import Record, Samples, load_prepared, save_prepared
from ascendrun.programs.trajectory.model import Sizes, config_of_sizes, make_guesser, make_model, take_words
from ascendrun.programs.trajectory.stages.common import start_with
from ascendrun.programs.trajectory.store import save_pretrained
from ascendrun.programs.trajectory.tokens import SPECIAL, Words, encode
from tests.programs.conftest import alone, options_of
from tests.programs.test_training import assert_same_bits, last_state


@pytest.fixture
def prepared(start: Any) -> Path:
    return start("--mode=prepare", "--output_dir=prepared", name="prepared").succeed().folder / "prepared"  # type: ignore[no-any-return]


def test_the_stages_hand_their_work_on_and_the_report_holds_what_it_promises(start, prepared):
    given = f"--prepared_dir={prepared}"
    first = start("--mode=pretrain", given, "--output_dir=out", ranks=2, name="pretrain").succeed()
    assert [(line["phase"], line["state"]) for line in first.metrics()[:2]] == [("data", "begin"), ("data", "end")]
    asked = [line["eval_mask_ratio"] for line in first.metrics() if "eval_mask_ratio" in line]
    assert asked and all(0.1 < share < 0.16 for share in asked), "S0-B4"
    second = start(
        "--mode=finetune",
        given,
        f"--base_model={first.folder / 'out'}",
        "--freeze_backbone_epochs=1",
        ranks=2,
        name="finetune",
    ).succeed()
    assert "starting from" in second.text() and "val split" in second.text()
    frozen, whole = (line for line in second.metrics() if line.get("event") == "start")
    assert 0 < frozen["parameters"] < whole["parameters"] and 2 * frozen["total_steps"] == whole["total_steps"]
    assert "test" not in second.report(), "test ships are looked at once, by evaluate"
    members = ",".join(str(second.folder / "out" / name) for name in ("best", "final"))
    third = start(
        "--mode=evaluate", given, f"--model_path={members}", "--calibration=prior", ranks=2, name="evaluate"
    ).succeed()
    report = third.report()
    assert set(report["calibration"]) == {"ece", "nll", "brier", "bins"}
    assert len(report["members"]) == 2 and report["adjustment"]["chosen_on"] == "val"
    assert report["adjustment"]["temperature"] != 1
    assert len(report["test"]["confusion"]) == len(report["test"]["classes"])
    assert "calibration: ECE" in (third.folder / "out" / "report.txt").read_text()
    last = start("--mode=predict", given, f"--model_path={third.folder / 'out'}", ranks=2, name="predict").succeed()
    assert "tracks/s" in last.text() and "warm-up" in last.text()
    said = [json.loads(line) for line in (last.folder / "out" / "predictions.jsonl").read_text().splitlines()]
    judged = [json.loads(line) for line in (third.folder / "out" / "predictions.jsonl").read_text().splitlines()]
    assert [line["class_name"] for line in said] == [line["class_name"] for line in judged]
    assert [line["confidence"] for line in said] == pytest.approx([line["confidence"] for line in judged], abs=2e-4)


def test_pretraining_is_compared_with_a_new_model_and_the_better_on_validation_ships_is_kept(start, prepared, tmp_path):
    given = f"--prepared_dir={prepared}"
    first = start("--mode=pretrain", given, "--output_dir=out", name="pretrain").succeed().folder / "out"
    tuned = start("--mode=finetune", given, f"--base_model={first}", name="tuned").succeed()
    plain = start("--mode=finetune", given, f"--base_model={first}", "--pretraining=never", name="plain").succeed()
    assert "starting from" in tuned.text() and "starting from" not in plain.text()
    best = {name: run.folder / "out" / "best" for name, run in (("tuned", tuned), ("plain", plain))}
    kept = {}
    for name, other in (("tuned", "plain"), ("plain", "tuned")):  # whichever is named first, the same is kept
        run = start(
            *("--mode=evaluate", given, "--pretraining=auto", "--baselines="),
            *(f"--model_path={best[name]}", f"--compare_with={best[other]}"),
            name=f"evaluate-{name}",
        ).succeed()
        report = run.report()
        chosen = json.loads((run.folder / "out" / "classifier.json").read_text())["members"][0]
        kept[name] = Path(run.folder / "out" / chosen).resolve()
        losses = report["validation"]["nll"]
        assert (kept[name] == best[name].resolve()) == (losses["model_path"] <= losses["compare_with"])
        assert "ahead" in report["comparison"]["other"], "what it brought, with the interval"
    assert kept["tuned"] == kept["plain"]


def test_a_pretraining_that_was_skipped_is_compared_with_nothing(start, prepared):
    given = f"--prepared_dir={prepared}"
    first = start("--mode=pretrain", given, "--pretraining=auto", name="pretrain").succeed().folder / "out"
    tuned = start("--mode=finetune", given, f"--base_model={first}", "--max_steps=2", name="tuned").succeed()
    plain = start("--mode=finetune", given, f"--base_model={first}", "--pretraining=never", name="plain").succeed()
    assert not (plain.folder / "out" / "best").exists() and "not pretrained" in plain.text()
    run = start(
        *("--mode=evaluate", given, "--pretraining=auto", "--baselines="),
        *(f"--model_path={tuned.folder / 'out' / 'best'}", f"--compare_with={plain.folder / 'out' / 'best'}"),
        name="evaluate",
    ).succeed()
    assert "other" not in run.report()["comparison"]


def test_pretraining_is_judged_alike_by_one_rank_and_by_three(start, prepared):
    """S1-B5, S1-B6: of the words that are asked none is left to another rank and none counted twice."""
    told = []
    for ranks in (1, 3):
        run = start(
            "--mode=pretrain",
            f"--prepared_dir={prepared}",
            "--max_steps=1",
            "--learning_rate=0",
            "--val_size=0.3",
            ranks=ranks,
            name=f"on-{ranks}",
        ).succeed()
        told.append(next(line for line in run.metrics() if "eval_loss" in line))
    for name in ("eval_loss", "eval_masked_accuracy", "eval_mask_ratio"):
        assert told[0][name] == pytest.approx(told[1][name], rel=1e-5), name


@pytest.mark.parametrize(
    "mode, more", [("pretrain", ()), ("pretrain", ("--objective=clm",)), ("finetune", ("--freeze_backbone_epochs=6",))]
)
def test_a_killed_rank_and_a_stopped_one_go_on_to_the_same_bits(start, prepared, mode, more):
    """S0-B8 and S1-B1: nothing could be resumed."""
    options = (
        f"--mode={mode}",
        f"--prepared_dir={prepared}",
        "--num_train_epochs=12",
        "--dropout=0.2",
        "--eval_steps=40",
        "--save_steps=5",
        *more,
    )
    straight = start(*options, ranks=2, name="straight").succeed()
    start(*options, ranks=2, name="broken").killed_at(9, 1)
    start(*options, ranks=2, name="broken", stop=(0, 22)).succeed()
    third = start(*options, ranks=2, name="broken").succeed()
    assert "resumed at step" in third.text()
    assert_same_bits(last_state(straight.folder), last_state(third.folder))
    assert straight.losses().keys() and {step: loss for step, loss in third.losses().items() if step > 60} == {
        step: loss for step, loss in straight.losses().items() if step > 60
    }


def test_pretrained_layers_arrive_and_frozen_ones_stay_as_they_came(start, prepared):
    given = f"--prepared_dir={prepared}"
    base = start("--mode=pretrain", given, "--num_train_epochs=1", name="base").succeed().folder / "out"
    tuned = start(
        "--mode=finetune", given, f"--base_model={base}", "--learning_rate=0", "--num_train_epochs=1", name="tuned"
    ).succeed()
    one = torch.load(base / "best" / "pretrained.pt", weights_only=True)["weights"]
    other = torch.load(tuned.folder / "out" / "best" / "model.pt", weights_only=True)["weights"]
    shared = [name for name in one if name.startswith("backbone.")]
    assert len(shared) > 8 and all(torch.equal(one[name], other[name]) for name in shared)
    wrong = start("--mode=finetune", f"--base_model={base}", "--grammar=guide", name="wrong")
    assert wrong.wait() == [1] and "use the same grammar" in wrong.text()


def test_pretrained_words_are_known_by_their_names_whatever_their_numbers():
    config = config_of_sizes(words=6, hidden=8, layers=1, heads=2, max_length=8)
    sizes = Sizes(config, 2, 0.0, "mean", "causal")
    pretrained, fresh = make_guesser(sizes, seed=1), make_model(sizes, seed=2)
    theirs, ours = {word: i for i, word in enumerate("abcdef")}, {word: i for i, word in enumerate("fxabcy")}
    own = fresh.backbone.embed_tokens.weight.detach().clone()
    assert take_words(fresh, pretrained.state_dict(), theirs, ours) == 4
    table, known = fresh.backbone.embed_tokens.weight, pretrained.backbone.embed_tokens.weight
    assert all(torch.equal(table[i], known[theirs[word]] if word in theirs else own[i]) for word, i in ours.items())


def test_a_base_that_was_pretrained_on_other_tokens_is_refused(tmp_path):
    config = config_of_sizes(words=5, hidden=8, layers=1, heads=2, max_length=8)
    sizes, text = Sizes(config, 2, 0.0, "mean", "causal"), {"grammar": "texts", "resolution": 0}
    weights = make_guesser(sizes, seed=1).state_dict()
    save_pretrained(weights, sizes, {word: i for i, word in enumerate([*SPECIAL, "a", "b"])}, text, tmp_path)
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, "a", "other"])}
    rows = {"train": [encode(Words((), (("a", "other", "other"),)), vocabulary, 0)]}
    samples = Samples({}, vocabulary, {"names": ["Tug", "Ferry"], "text": text})
    vars(samples)["encoded"] = rows
    options = options_of("trajectory", f"--base_model={tmp_path}")
    with pytest.raises(InvalidDataError, match="33%"):
        start_with(options, samples, alone())


def test_an_early_stop_leaves_the_best_and_the_last_model(start, prepared):
    """S0-B8: an early stop left no final model. A learning rate as large as this one soon does more harm than good."""
    for mode, file in (("pretrain", "pretrained.pt"), ("finetune", "model.pt")):
        run = start(
            f"--mode={mode}",
            f"--prepared_dir={prepared}",
            "--learning_rate=0.3",
            "--num_train_epochs=40",
            "--early_stopping_patience=2",
            "--metric_for_best_model=loss",
            name=mode,
        ).succeed()
        assert run.report()["training"]["steps"] < 240
        last = last_state(run.folder)["model"]
        best = checkpoint.load(next((run.folder / "ckpt").glob("best-*")))["model"]
        for name, wanted in (("final", last), ("best", best)):
            saved = torch.load(run.folder / "out" / name / file, weights_only=True)["weights"]
            assert all(torch.equal(saved[weight], tensor) for weight, tensor in wanted.items()), (mode, name)
        assert any(not torch.equal(tensor, best[name]) for name, tensor in last.items())


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_a_checkpoint_folder_of_transformers_is_a_base(start, prepared, tmp_path, kind):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        kind,
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=512,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "base")
    run = start(
        "--mode=finetune",
        f"--prepared_dir={prepared}",
        f"--base_model={tmp_path / 'base'}",
        "--learning_rate=0",
        "--num_train_epochs=1",
        name="tuned",
    ).succeed()
    assert "layers from" in run.text()
    saved = torch.load(run.folder / "out" / "best" / "model.pt", weights_only=True)["weights"]
    name = "layers.0.mlp.down_proj.weight"
    assert torch.equal(saved[f"backbone.{name}"], model.model.state_dict()[name])


def test_prepared_data_that_was_changed_is_refused(start, prepared):
    with gzip.open(prepared / "samples.jsonl.gz", "at") as file:
        file.write("{}\n")
    run = start("--mode=finetune", f"--prepared_dir={prepared}")
    assert run.wait() == [1] and "run --mode=prepare again" in run.text()


def test_a_ship_whose_name_holds_another_system_s_line_end_is_read_back_whole(tmp_path):
    record = Record("1", "SEA\u2028STAR\x85", "Cargo", "train", Words(("a",), (("b", "c"),)), "mark")
    save_prepared(Samples({"train": [record]}, {"a": 0}, {}), tmp_path)
    assert load_prepared(tmp_path).records == {"train": [record]}
    (tmp_path / "samples.jsonl.gz").unlink()
    with pytest.raises(InvalidDataError, match="--mode=prepare"):
        load_prepared(tmp_path)


def test_the_vocabulary_is_that_of_the_training_ships(prepared):
    found = load_prepared(prepared)
    words = {word for record in found.records["train"] for word in record.words.all()}
    assert set(found.vocabulary) - {"[PAD]", "[UNK]", "[MASK]"} <= words
    assert {word for record in found.records["test"] for word in record.words.all()} - set(found.vocabulary)


def guide_lines(*, leaks: bool) -> str:
    """Twelve ships of two classes; `leaks`: the class word stands where nobody takes it out."""
    rows = []
    for ship in range(40):
        name = ("Bulk_Carrier", "Oil_Tanker")[ship % 2]
        point = f"HOUR_{ship} SPD_{'SLOW' if ship % 2 else 'FAST'}{'_' + name if leaks else ''} COG_{ship % 7}"
        rows.append(
            {"text": f"{point} {name} POINT_END " * 12, "label": (0, 6)[ship % 2], "source_file": f"{ship}.csv"}
        )
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_the_guide_s_texts_lose_their_class_words_and_a_word_that_still_tells_stops_the_run(start, tmp_path):
    """S0-B1, S0-B9."""
    (tmp_path / "good.jsonl").write_text(guide_lines(leaks=False))
    (tmp_path / "bad.jsonl").write_text(guide_lines(leaks=True))
    bad = start("--mode=prepare", f"--data_path={tmp_path / 'bad.jsonl'}", name="bad")
    assert bad.wait() == [1] and "names the class" in bad.text()
    folder = tmp_path / "again"
    # Every class still has a word of its own, SPD_SLOW and SPD_FAST: the check says so too.
    own = start("--mode=prepare", f"--data_path={tmp_path / 'good.jsonl'}", f"--output_dir={folder}", name="own")
    assert own.wait() == [1] and "tokens identify the class of a ship" in own.text() and not folder.exists()
    mixed = guide_lines(leaks=False).replace("SPD_SLOW", "SPD_FAST", 12 * 12)
    (tmp_path / "mixed.jsonl").write_text(mixed)
    fine = start(
        "--mode=prepare", f"--data_path={tmp_path / 'mixed.jsonl'}", f"--output_dir={folder}", name="fine"
    ).succeed()
    assert "removed 480 class tokens" in fine.text()
    assert load_prepared(folder).names == ["Bulk_Carrier", "Oil_Tanker"]


def test_a_model_folder_that_is_not_there_is_told(tmp_path):
    with pytest.raises(InvalidDataError, match="no trained model found"):
        Classifier(tmp_path)
