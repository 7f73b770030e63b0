"""Training on conversations: which tokens carry loss, what is packed and left out, resumed to the bit."""

import json
import shutil
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.nanochat import sft
from ascendrun.programs.nanochat import texts as tokenizer
from ascendrun.programs.nanochat.conversations import render_conversation
from ascendrun.programs.nanochat.inference import read_model
from ascendrun.programs.nanochat.sizes import settled
from ascendrun.programs.trainer.data import IGNORED
from tests.programs.nanochat.test_nanochat_stages import BASE as SMALL
from tests.programs.nanochat.test_nanochat_stages import TOKENIZER

WORDS = tokenizer.of_characters(["abcdefghijklmnopqrstuvwxyz ABCDHISW.?'#()0123456789+=\n"])
MIXTURE = [{"kind": "sums", "rows": 60, "epochs": 2}, {"kind": "spelling", "rows": 40}]
BASE = (*SMALL, "--synthetic_documents=60", "--max_seq_len=64", "--max_steps=4", "--eval_steps=0")
SFT = (
    "--mode=sft", f"--mixture={json.dumps(MIXTURE)}", "--micro_batch_size=2", "--max_steps=10", "--save_steps=4",
    "--logging_steps=1", "--eval_steps=5", "--eval_tokens=500", "--dtype=float32",
)  # fmt: skip


def packed(tmp_path, *, seq_len=64, mixture=MIXTURE, **given):
    options = {"mode": "sft", "mixture": mixture, "val_size": 0.1, "seed": 7, "max_seq_len": seq_len,
               "total_batch_size": 2 * seq_len, "data_cache_dir": str(tmp_path / "cache"), **given}  # fmt: skip
    found = sft.read_mixture(options)
    here = SimpleNamespace(family="cpu", log=lambda *line, **values: None)
    return found, *sft.make_rows(found, tokenizer.mark_of(WORDS), WORDS, settled(options), here)


def pieces_of(rows, number):
    """The conversations of a row, as (ids, labels)."""
    ids, labels = rows.read([(number,)])
    found, start = [], 0
    for _, take in rows.documents(number):
        part = slice(start, start + take)
        found.append((ids[0, part].tolist(), labels[0, part].tolist()))
        start += take
    assert set(labels[0, start:].tolist()) <= {IGNORED}
    return found


def test_rows_have_whole_conversations_and_loss_on_the_assistant_alone(tmp_path):
    mixture, train, val, facts = packed(tmp_path)
    known = {}
    for example in mixture.examples:
        ids, mask = render_conversation(WORDS, example.messages)
        known[tuple(ids)] = [token if learned else IGNORED for token, learned in zip(ids, mask)]
    seen = [piece for rows in (train, val) for number in range(rows.count) for piece in pieces_of(rows, number)]
    assert all(known[tuple(ids)] == labels for ids, labels in seen)
    lengths = [len(render_conversation(WORDS, example.messages)[0]) for example in mixture.examples]
    assert facts["too_long"] == sum(length > 65 for length in lengths) > 0
    # The first 54 sums twice and the first 36 words once, without those that are too long; 6 and 4 for validation.
    fits = [length <= 65 for length in lengths]
    assert facts["conversations"] == 2 * sum(fits[:54]) + sum(fits[60:96]) == len(seen) - facts["val"]
    assert facts["val"] == sum(fits[54:60]) + sum(fits[96:])
    assert max(len(pieces_of(train, number)) for number in range(train.count)) > 1


def test_a_mixture_follows_from_its_tasks_and_the_seed(tmp_path):
    first, again = packed(tmp_path / "a"), packed(tmp_path / "b")
    other = packed(tmp_path / "c", seed=8)
    rows = [[found[1].read([unit])[0].tolist() for unit in found[1].units(0)] for found in (first, again, other)]
    assert rows[0] == rows[1] != rows[2]
    assert first[0].digest == again[0].digest != other[0].digest
    shorter = packed(tmp_path / "d", mixture=[{"kind": "sums", "rows": 59, "epochs": 2}, MIXTURE[1]])
    assert shorter[0].digest != first[0].digest


@pytest.fixture
def base(launch):
    """The directory of a base model, trained for four steps."""
    launch("nanochat", [*TOKENIZER, "--output_dir=tok"], name="job").succeed()
    options = [*BASE, "--tokenizer_dir=tok", "--output_dir=base", "--data_cache_dir=cache"]
    return launch("nanochat", options, name="job").succeed().folder / "base"


def nodes(base, tmp_path):
    """Folders of two nodes; each has the model, and its checkpoints at a path of its own."""
    found = [tmp_path / "one", tmp_path / "two"]
    for folder in found:
        shutil.copytree(base, folder / "model")
        config = json.loads((base / "config.json").read_text())
        shutil.copytree(config["training"]["checkpoints"], folder / "kept")
        config["training"]["checkpoints"] = str(folder / "kept")
        (folder / "model" / "config.json").write_text(json.dumps(config))
    return found


def test_a_killed_training_on_conversations_ends_with_the_same_bits(base, launch, tmp_path):
    """On two ranks, which share the optimizer's state; that of the base model is inherited once, not again."""
    own = (f"--model_dir={base}", f"--data_cache_dir={tmp_path / 'cache'}", "--output_dir=out")
    folders = nodes(base, tmp_path)
    options = [*SFT, *own, "--model_dir=model"]
    straight = launch("nanochat", options, name="straight", ranks=2, folders=folders).succeed()
    broken = launch("nanochat", [*SFT, *own], name="broken", ranks=2)
    broken.killed_at(5, 1, 0)
    again = launch("nanochat", [*SFT, *own], name="broken", ranks=2).succeed()
    assert again.losses() == straight.losses()
    found = load_file(folders[0] / "out" / "model.safetensors")
    assert again.weights() == {name: tensor.tolist() for name, tensor in found.items()}
    assert straight.losses()[10] < straight.losses()[1] - 0.3
    samples = [line for line in straight.text().splitlines() if "step 10 sample: " in line]
    assert len(samples) == 3, "of each prompt one, by rank 0"

    trained = json.loads((folders[0] / "out" / "config.json").read_text())
    before, model = read_model(str(base), recomputes=False)
    assert (before["training"]["total_batch_size"], model.sizes.context) == (256, 64)
    assert all(weight.requires_grad for weight in model.parameters())
    assert {**trained["training"], "checkpoints": ""} == {**before["training"], "checkpoints": ""}
    fresh = launch("nanochat", [*SFT, *own, "--load_optimizer=false"], name="fresh").succeed()
    checkpoints = before["training"]["checkpoints"]
    shutil.rmtree(checkpoints)
    single = launch("nanochat", [*SFT, *own, "--max_steps=1"], name="single").succeed()
    assert [checkpoints in run.text() for run in (broken, fresh, single)] == [True, False, True]
    assert single.losses()[1] == fresh.losses()[1]
    assert fresh.losses()[1] == pytest.approx(straight.losses()[1], rel=1e-4)  # the same weights and rows
    assert fresh.losses()[10] != pytest.approx(straight.losses()[10], rel=1e-4)


def test_a_folder_without_a_model_and_data_without_tasks_are_errors(tmp_path):
    for path in ("", str(tmp_path)):
        with pytest.raises(InvalidDataError):
            read_model(path, recomputes=False)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(InvalidDataError):
        read_model(str(tmp_path), recomputes=False)
    for mixture in ([{"kind": "sums", "rows": 1}], [{"kind": "gsm8k", "file": str(tmp_path / "none")}]):
        with pytest.raises(InvalidDataError):
            packed(tmp_path, mixture=mixture)
    with pytest.raises(InvalidDataError) as caught:
        packed(tmp_path, seq_len=8)
    assert caught.value.args[0].key == "program.few-rows"
