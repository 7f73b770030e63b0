"""The speed of replies by batch size: the last line is JSON, ranks add up, and impossible lengths are errors."""

import json

import pytest

from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.nanochat import inference
from ascendrun.programs.nanochat.base import save_model
from tests.programs.nanochat.test_nanochat_model import model_of


@pytest.fixture
def model(tmp_path):
    made = model_of(layers=2, hidden=32, heads=2, kv_heads=2, context=40)
    save_model(*made, tmp_path / "model", training={"max_seq_len": 40})
    return tmp_path / "model"


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_last_line_has_every_batch_size(model, launch, ranks):
    options = (
        "--mode=infer_bench",
        f"--model_dir={model}",
        "--batch_sizes=9,1",
        "--decode-tokens=5",
        "--output_dir=out",
    )
    run = launch("nanochat", options, ranks=ranks).succeed()
    report = json.loads(run.out[0].read_text().splitlines()[-1])
    assert report == json.loads((run.folder / "out" / "infer_bench.json").read_text())
    assert (report["prompt_tokens"], report["decode_tokens"], report["ranks"]) == (20, 5, ranks)
    assert [row["batch_size"] for row in report["sweep"]] == [1, 9]
    for row in report["sweep"]:
        assert all(value > 0 for value in row.values())
        assert row["cache_bytes"] == row["batch_size"] * 25 * 4 * (2 * 2 * 32 + 2 * 32)
    if ranks == 1:
        row = report["sweep"][1]
        assert row["prefill_tokens_per_s"] == pytest.approx(9 * 20 / row["prefill_s"])
        assert row["decode_tokens_per_s"] == pytest.approx(9 / row["decode_s_per_token"])


def test_prompts_and_replies_fit_into_the_context():
    assert inference.lengths({"prompt_tokens": 0, "max_new_tokens": 256}, 40) == (20, 19)
    assert inference.lengths({"prompt_tokens": 38, "max_new_tokens": 0}, 40) == (38, 1)
    for prompt in (39, 100):
        with pytest.raises(InvalidDataError):
            inference.lengths({"prompt_tokens": prompt, "max_new_tokens": 1}, 40)
    for sizes in ((), ("0",), ("two",)):
        with pytest.raises(InvalidDataError):
            inference.batch_sizes({"batch_sizes": sizes})
