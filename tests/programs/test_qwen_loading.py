"""What it takes a rank to hold its share of a base, beside transformers' from_pretrained on every rank."""

from __future__ import annotations

import json

import pytest


def make(folder, **sizes):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=True, **sizes)
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder, max_shard_size="12MB")
    return 4 * model.num_parameters()


@pytest.fixture
def hold(launch, tmp_path):
    """hold(strategy, ranks=2): what each rank found; hold.whole_bytes of a base in several files."""

    def run(strategy, *, ranks=2):
        asked = {"strategy": strategy, "home": str(tmp_path / "home"), "tiny": str(tmp_path / "tiny")}
        run = launch("loading", [json.dumps(asked)], ranks=ranks, name=strategy).succeed()
        return [json.loads((run.folder / f"found-{rank}.json").read_text()) for rank in range(ranks)]

    make(tmp_path / "tiny", vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1)
    run.whole_bytes = make(
        tmp_path / "home", vocab_size=3000, hidden_size=512, intermediate_size=1408, num_hidden_layers=11
    )
    assert len(list((tmp_path / "home").glob("*.safetensors"))) > 5
    return run


def test_a_rank_of_a_shared_base_never_has_a_whole_copy_of_it_and_every_byte_is_read_once(hold):
    """S3-B4: each rank loaded all of it before anything was shared, 512 GB a node."""
    plain = hold("plain", ranks=1)[0]["peak"]
    assert plain > 0.9 * hold.whole_bytes
    for strategy in ("fsdp2", "zero3"):
        ranks = hold(strategy)
        assert sum(each["read"] for each in ranks) == hold.whole_bytes
        assert all(each["peak"] < 0.8 * plain for each in ranks), (strategy, plain, ranks)
