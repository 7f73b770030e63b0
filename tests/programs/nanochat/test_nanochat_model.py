"""The model beside transformers' NanoChat and beside upstream's training, its own sizes, and cached generation."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from ascendrun.programs.generation.cache import of_model
from ascendrun.programs.generation.engine import Generator, generate
from ascendrun.programs.nanochat.export import our_name
from ascendrun.programs.nanochat.model import NanoChat, empty_model, make_model
from ascendrun.programs.nanochat.sizes import Sizes
from ascendrun.programs.nanochat.texts import of_characters
from tests.programs.conftest import alone
from tests.programs.generating import naive, texts_of
from tests.programs.nanochat import threesteps
from tests.programs.nanochat.golden.start import LENGTH, first_weight

GOLDEN = Path(__file__).with_name("golden")


def sizes_of(**given) -> Sizes:
    usual = {"layers": 3, "hidden": 48, "heads": 4, "kv_heads": 2, "vocabulary": 100, "context": 96}
    return Sizes(**{**usual, **given})


def lively(model: NanoChat) -> NanoChat:
    """Give the weights that start as zeros, and hide what is behind them, other values."""
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if not weight.any():
                weight.normal_(0, 0.1)
        model.lm_head.weight.mul_(200)
    return model.eval()


ALPHABET = "0123456789+-*/(). abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ#'=?\n"


def model_of(alphabet: str = ALPHABET, *, seed: int = 5, **sizes) -> tuple[NanoChat, Tokenizer]:
    """A model that says something, and the tokenizer of these characters."""
    tokenizer = of_characters([alphabet])
    return lively(make_model(sizes_of(vocabulary=tokenizer.get_vocab_size(), **sizes), seed=seed)), tokenizer


def classic_of(model: NanoChat):
    """Return transformers' model with the same weights."""
    from transformers import NanoChatConfig, NanoChatForCausalLM

    sizes = model.sizes
    config = NanoChatConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=4 * sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        max_position_embeddings=sizes.context,
    )
    theirs = NanoChatForCausalLM(config)
    named = {name if name.startswith("lm_head") else f"model.{name}": each for name, each in model.state_dict().items()}
    theirs.load_state_dict(named)
    return theirs.eval()


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_classic_model_is_that_of_transformers(kv_heads):
    pytest.importorskip("transformers.models.nanochat")
    ours = lively(make_model(sizes_of(preset="classic", kv_heads=kv_heads), seed=3))
    ids = torch.randint(0, 100, (2, 90), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted, found = classic_of(ours)(input_ids=ids).logits, ours(ids)
    assert wanted.std() > 0.1
    assert (found - wanted).abs().max() <= 1e-5


TERMS = 2 * 2 * LENGTH * threesteps.GOLDEN["sizes"]["n_embd"]
"""Of the longest sum, the gradient of a scale: micro-batches x rows x tokens x channels."""
ROUNDING = TERMS**0.5 * torch.finfo(torch.float32).eps
"""How far two orders of such a sum may be apart, relative to its terms. Every processor has an order of its own."""


def check_steps(weights, losses, golden):
    """Relative to where a weight began and how far it moved: for a scale that ends near 0 the two nearly cancel."""
    wanted = {our_name(name): each for name, each in load_file(GOLDEN / "training.safetensors").items()}
    assert losses == pytest.approx(golden, rel=ROUNDING)
    assert set(weights) == set(wanted)
    for number, name in enumerate(our_name(name) for name in threesteps.GOLDEN["weights"]):
        end, start = wanted[name], first_weight(number, wanted[name].shape)
        assert (weights[name] - end).norm() <= ROUNDING * (start.norm() + (end - start).norm()), name


def test_three_steps_are_those_of_upstream():
    """Losses of each micro-batch and all weights after three steps; every layer kind, window, gate and group."""
    model, losses = threesteps.train(alone())
    check_steps(dict(model.named_parameters()), losses, threesteps.GOLDEN["losses"])


def test_three_steps_on_two_ranks_are_those_of_upstream_on_two_ranks(launch):
    """Each rank has one micro-batch, and the optimizer's state of a part of the weights."""
    golden = json.loads((GOLDEN / "training.json").read_text())["two_ranks"]
    assert golden["difference"] <= 1e-6, "upstream ends with the weights of one rank"
    folder = launch("threesteps", [], ranks=2).succeed().folder
    losses = json.loads((folder / "losses.json").read_text())
    check_steps(load_file(folder / "weights.safetensors"), sum(losses, []), sum(golden["losses"], []))


@pytest.mark.parametrize("preset", ["current", "classic"])
def test_cached_texts_are_the_naive_ones(preset):
    """Windows, value embeddings and the smear see the same tokens, whatever the rows beside."""
    sizes = sizes_of(preset=preset, context=600, layers=5)
    call = of_model(lively(make_model(sizes, seed=5)))
    texts = texts_of(sizes.vocabulary, (3, 1, 170, 40))
    wanted = [naive(call, each) for each in texts]
    assert generate(Generator(call, torch.device("cpu"), context=600, rows=3), texts) == wanted


def test_a_window_ends_where_upstream_ends_it():
    """A quarter of the context, rounded up to 128, and the token itself."""
    model = lively(make_model(sizes_of(context=512, layers=2, window_pattern="S"), seed=2))
    assert model.sizes.window_sizes == (128, 512)
    ids = torch.randint(0, 100, (1, 200), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        shown = []
        model.layers[0].register_forward_hook(lambda *given: shown.append(given[2][0, -1].clone()))
        for place in (199, 199 - 128, 198 - 128 - 1):
            other = ids.clone()
            other[0, place] = (other[0, place] + 1) % 100
            model(ids), model(other)
    changes = [bool((shown[i] != shown[i + 1]).any()) for i in range(0, 6, 2)]
    assert changes == [True, True, False], "the smear shows one more token, at the start of the window"


@pytest.mark.parametrize("preset", ["current", "classic"])
def test_sizes_are_those_of_the_module(preset):
    sizes = sizes_of(preset=preset)
    model = empty_model(sizes)
    assert all(weight.is_meta for weight in model.parameters())
    assert sum(weight.numel() for weight in model.parameters()) == sizes.weights
    tables = sum(each.weight.numel() for each in model.modules() if isinstance(each, torch.nn.Embedding))
    assert tables == sizes.looked_up
    assert model.cache_bytes(3, 10, element_bytes=4) == 3 * 10 * 4 * (
        2 * 3 * 24 + (0 if sizes.is_classic else 2 * sizes.hidden)
    )


@torch.no_grad()
def test_a_new_model_has_the_weights_that_upstream_starts_with():
    model = make_model(sizes_of(hidden=256, heads=4, kv_heads=4, vocabulary=2000, layers=4), seed=1)
    bound = (3 / 256) ** 0.5
    first = model.layers[0]
    assert first.self_attn.q_proj.weight.abs().max() <= bound
    assert first.self_attn.q_proj.weight.std() == pytest.approx(256**-0.5, rel=0.02)
    assert first.mlp.fc1.weight.std() == pytest.approx(0.4 * 256**-0.5, rel=0.02)
    assert not first.self_attn.o_proj.weight.any() and not first.mlp.fc2.weight.any()
    assert model.embed_tokens.weight.std() == pytest.approx(0.8, rel=0.02)
    assert model.lm_head.weight.std() == pytest.approx(0.001, rel=0.02)
    assert model.value_embeds["3"].weight.std() == pytest.approx(256**-0.5, rel=0.02)
    assert 0 <= model.smear_gate.weight.min() and model.smear_gate.weight.max() <= 0.02
    assert model.resid_lambdas.tolist() == pytest.approx([1.15, 1.15 - 0.1 / 3, 1.15 - 0.2 / 3, 1.05])
    assert model.x0_lambdas.tolist() == pytest.approx([0.2, 0.15, 0.1, 0.05])
    assert (model.smear_lambda.item(), model.backout_lambda.item()) == (0.0, pytest.approx(0.2))
    again = make_model(model.sizes, seed=1)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), again.parameters()))


def test_recomputed_activations_change_no_gradient():
    ids = torch.randint(0, 100, (2, 20), generator=torch.Generator().manual_seed(0))
    gradients = []
    for recomputes in (False, True):
        model = lively(make_model(sizes_of(), seed=3, recomputes=recomputes)).train()
        model(ids).square().sum().backward()
        gradients.append([weight.grad for weight in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients))
