"""The stages as ranks run them: from documents to a model, resumed to the bit, the same on one rank and two."""

import pytest
import torch
from safetensors.torch import load_file

from tests.programs.conftest import resharded

TOKENIZER = ("--mode=tokenizer", "--data_path=generated", "--synthetic_documents=120", "--vocab_size=300")
BASE = (
    "--mode=base",
    "--data_path=generated",
    "--synthetic_documents=120",
    "--depth=2",
    "--aspect_ratio=16",
    "--head_dim=16",
    "--max_seq_len=32",
    "--micro_batch_size=2",
    "--total_batch_size=256",
    "--max_steps=12",
    "--warmup_steps=2",
    "--matrix_lr=0.5",
    "--embedding_lr=6",
    "--unembedding_lr=0.3",
    "--logging_steps=1",
    "--eval_steps=6",
    "--eval_tokens=320",
    "--save_steps=4",
    "--dtype=float32",
)


@pytest.fixture
def tokens(launch):
    """The directory of a tokenizer."""
    return launch("nanochat", [*TOKENIZER, "--output_dir=tok"], name="tok").succeed().folder / "tok"


@pytest.fixture
def base(launch, tokens, tmp_path):
    """base(*options, name=…, ranks=1): a training of the base model."""
    own = (f"--tokenizer_dir={tokens}", f"--data_cache_dir={tmp_path / 'cache'}", "--output_dir=out")
    return lambda *options, **how: launch("nanochat", [*BASE, *own, *options], **how)


def test_a_training_killed_on_two_ranks_ends_with_the_same_bits_and_one_rank_is_near(base, tokens):
    """States of the optimizer are shared among the ranks; the second life continues from a checkpoint."""
    straight = base(ranks=2, name="straight").succeed()
    base(ranks=2, name="broken").killed_at(6, 1, 0)
    again = base(ranks=2, name="broken").succeed()
    assert again.losses() == straight.losses()
    assert again.weights() == straight.weights()
    single = base(ranks=1, name="single").succeed()
    assert list(single.losses().values()) == pytest.approx(list(straight.losses().values()), rel=1e-3)

    scores = straight.report()["evaluations"]
    assert [each["step"] for each in scores] == [6, 12]
    assert scores[1]["bits_per_byte"] < scores[0]["bits_per_byte"]
    assert straight.losses()[12] < straight.losses()[1] - 1
    mark = "step 12 sample: "
    shown = [line.partition(mark)[2] for line in straight.out[0].read_text().splitlines() if line.startswith(mark)]
    assert [line[:10] for line in shown] == ["'The ship'", "'In 1905' ", "'2 + 3 =' "] and all(map(len, shown))
    assert mark not in straight.out[1].read_text()
    numbers = load_file(straight.folder / "out" / "model.safetensors").values()
    assert sum(tensor.numel() for tensor in numbers) == straight.report()["model"]["weights"]
    assert (straight.folder / "out" / "tokenizer.json").read_text() == (tokens / "tokenizer.json").read_text()


def test_a_classic_model_is_read_by_transformers(base):
    pytest.importorskip("transformers.models.nanochat")
    from transformers import AutoModelForCausalLM

    run = base("--model_preset=classic", "--max_steps=2", "--eval_steps=2").succeed()
    model = AutoModelForCausalLM.from_pretrained(str(run.folder / "out"))
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    assert logits.shape == (1, 3, run.report()["model"]["vocabulary"])
    assert run.report()["evaluations"][-1]["bits_per_byte"] > 0


def test_stages_out_of_order_and_batches_that_ranks_cannot_share_are_one_error(base, launch):
    wrong = launch("nanochat", [*BASE, "--tokenizer_dir=missing"], name="early")
    uneven = base("--total_batch_size=200", name="uneven")
    for run in (wrong, uneven):
        assert run.wait() == [1]
        assert "Traceback" not in run.text()
    assert "192" in uneven.text() and "256" in uneven.text()


def test_a_training_that_continues_on_fewer_and_on_more_ranks_ends_with_the_same_weights(base):
    """2 ranks, 1 and 3, each from the checkpoint of the one before: all share the optimizer's state in another way."""
    # Of two layers the second is the middle one, and the loss does not depend on how much of it the end subtracts.
    how = ("--depth=3", "--matrix_lr=0.1", "--total_batch_size=384", "--save_total_limit=3", "--eval_steps=12")
    straight = base(*how, ranks=2, name="two").succeed()
    last = resharded(straight, lambda ranks, name: base(*how, ranks=ranks, name=name), {4: 1, 8: 3})
    stored = (load_file(run.folder / "out" / "model.safetensors").values() for run in (last, straight))
    found, wanted = (torch.cat([each.flatten() for each in weights]) for weights in stored)
    assert (found - wanted).norm() <= 1e-5 * wanted.norm()
