"""An adapter that is saved is whole, and peft reads it; a merged model says what base and adapter say."""

import json

import pytest
import torch

from ascendrun.programs.devices.accelerator import Precision
from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.qwen_lora import base, lora
from ascendrun.programs.qwen_lora.lora import IncompleteAdapterError, merge
from tests.programs.conftest import alone

FLOAT = Precision(torch.float32, torch.float32, False, "")
OPTIONS = {
    "lora_r": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.0,
    "target_modules": ["q_proj", "up_proj", "down_proj"],
    "use_dora": False,
    "use_rslora": False,
}


@pytest.fixture(scope="module")
def here():
    return alone()


@pytest.fixture(scope="module")
def home(tmp_path_factory, here, tokenizer):
    folder = tmp_path_factory.mktemp("made") / "base"
    base.make_base(folder, base.shape_config("tiny", vocab_size=len(tokenizer)), tokenizer, seed=1, here=here)
    return folder


def make(home, here, **changes):
    model = lora.add_lora(base.empty_model(base.folder_config(home)), {**OPTIONS, **changes})
    with base.weights_of(home) as read:
        values = lora.first_values(model, seed=3, read=read, here=here)
    lora.put_values(model, values)
    expected = lora.trained_shapes(model)
    base.load_whole(model, home, here, FLOAT)
    return model.eval(), expected


def trained(model):
    """As after some steps: no matrix is zero any more."""
    torch.manual_seed(5)
    return {
        name: weight.detach() + 0.05 * torch.randn_like(weight)
        for name, weight in model.named_parameters()
        if weight.requires_grad
    }


@pytest.mark.parametrize("changes", [{}, {"use_rslora": True}, {"use_dora": True}])
def test_peft_and_the_merged_model_say_what_the_trained_model_says(home, here, tokenizer, tmp_path, changes):
    """S3-47, S3-48."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model, expected = make(home, here, **changes)
    values = trained(model)
    model.load_state_dict(values, strict=False)
    lora.save_adapter(values, expected, model, tmp_path / "adapter", tokenizer)
    merge(home, tmp_path / "adapter", tmp_path / "merged")
    ids = torch.arange(20)[None] + 5
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        plain = AutoModelForCausalLM.from_pretrained(home)
        assert not torch.allclose(plain(input_ids=ids).logits, wanted, atol=1e-2)
        read = PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
        torch.testing.assert_close(read(input_ids=ids).logits, wanted, rtol=1e-4, atol=1e-5)
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
        torch.testing.assert_close(merged(input_ids=ids).logits, wanted, rtol=1e-3, atol=1e-4)
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer_config.json"} <= {
        each.name for each in (tmp_path / "adapter").iterdir()
    }


def test_a_new_adapter_changes_nothing(home, here):
    from transformers import AutoModelForCausalLM

    ids = torch.arange(20)[None]
    plain = AutoModelForCausalLM.from_pretrained(home)
    for changes in ({}, {"use_dora": True}):
        model, _ = make(home, here, **changes)
        with torch.no_grad():
            torch.testing.assert_close(model(input_ids=ids).logits, plain(input_ids=ids).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "spoil, says",
    [
        (lambda values, name: values.pop(name), "is missing"),
        (lambda values, name: values.update({name: torch.empty(0)}), r"has shape \[0\], not"),
        (lambda values, name: values.update({name: values[name] * float("nan")}), "has values that are not finite"),
        (lambda values, name: values.update(other=values[name]), "other is not part of the adapter"),
    ],
)
def test_an_adapter_with_an_empty_matrix_is_refused_and_the_old_one_stays(home, here, tokenizer, tmp_path, spoil, says):
    """S3-B5: saved without gathering, partitioned matrices go out empty."""
    model, expected = make(home, here)
    values = trained(model)
    lora.save_adapter(values, expected, model, tmp_path / "adapter", tokenizer)
    before = (tmp_path / "adapter" / lora.ADAPTER_FILE).read_bytes()
    spoil(values, next(name for name in values if "down_proj.lora_A" in name))
    with pytest.raises(IncompleteAdapterError, match=says):
        lora.save_adapter(values, expected, model, tmp_path / "adapter", tokenizer)
    assert (tmp_path / "adapter" / lora.ADAPTER_FILE).read_bytes() == before


def test_the_adapter_names_its_rank_and_scale(home, here, tokenizer, tmp_path):
    model, expected = make(home, here)
    lora.save_adapter(trained(model), expected, model, tmp_path / "adapter", tokenizer)
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["peft_type"]) == (4, 8, "LORA")


def test_targets_that_the_model_lacks_are_named_with_those_it_has(home, here):
    with pytest.raises(InvalidDataError, match="no linear layer c_attn; it has down_proj, gate_proj, k_proj"):
        make(home, here, target_modules=["q_proj", "c_attn"])


def test_the_adapter_drops_out_in_training_as_asked(home, here):
    ids = torch.arange(20)[None]
    for rate in (0.0, 0.5):
        model, _ = make(home, here, lora_dropout=rate)
        model.load_state_dict(trained(model), strict=False)
        with torch.no_grad():
            one, other = (model.train()(input_ids=ids).logits for _ in range(2))
        assert torch.equal(one, other) == (rate == 0)


def test_a_base_is_read_to_its_place_without_a_second_copy(home, here):
    """S3-B4: weights go from the file to where they stay; nothing is made first."""
    model = lora.add_lora(base.empty_model(base.folder_config(home)), OPTIONS)
    assert all(weight.is_meta for name, weight in model.named_parameters() if "lora" not in name)
    with base.weights_of(home) as read:
        lora.put_values(model, lora.first_values(model, seed=3, read=read, here=here))
        base.load_whole(model, home, here, FLOAT)
        name = "model.layers.1.mlp.gate_proj.weight"
        assert torch.equal(model.get_parameter(f"base_model.model.{name}"), read(name))
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
