"""Texts generated with cached keys and values are those of a model that reads every text again for each token."""

import json

import pytest
import torch
from transformers import Qwen3Config

from ascendrun.programs.generation.cache import Cache, of_model, of_transformers
from ascendrun.programs.generation.engine import (
    NOT_FINITE,
    PREFILL_ROWS,
    Completion,
    Generator,
    Sampling,
    choose,
    generate,
)
from ascendrun.programs.qwen_lora import base
from tests.programs.generating import WORDS, Plain, naive, texts_of

CPU = torch.device("cpu")
LENGTHS = (3, 17, 64, 65, 1, 40, 40, 90)


@pytest.fixture(scope="module")
def plain():
    torch.manual_seed(0)
    return of_model(Plain().eval())


@pytest.fixture(scope="module", params=["plain", "qwen2", "qwen3"])
def model(request):
    """A model, and what it generates without a cache."""
    call = models()[request.param]
    return call, [naive(call, each) for each in texts_of(WORDS, LENGTHS)]


def models():
    torch.manual_seed(0)
    shared = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    qwen3 = Qwen3Config(**shared, num_key_value_heads=2, head_dim=16, vocab_size=WORDS, initializer_range=0.3)
    return {
        "plain": of_model(Plain().eval()),
        "qwen2": of_transformers(base.build(base.shape_config("tiny", vocab_size=WORDS)).eval()),
        "qwen3": of_transformers(base.build(qwen3).eval()),
    }


@pytest.mark.parametrize("rows", [1, 3, 32])
def test_cached_texts_are_the_naive_ones(model, rows):
    """Greedy and drawn ones, of all lengths, with fewer rows than texts: rows are freed and filled between tokens."""
    call, wanted = model
    texts = texts_of(WORDS, LENGTHS)
    found = generate(Generator(call, CPU, context=200, rows=rows), texts)
    assert found == wanted
    assert {each.ended for each in texts} <= {"stop", "length"} and len({tuple(each) for each in found}) > 4


@pytest.mark.parametrize("rows", [1, 32])
def test_padding_changes_no_text(model, rows):
    call, wanted = model
    assert generate(Generator(call, CPU, context=300, rows=rows, multiple=64), texts_of(WORDS, LENGTHS)) == wanted


@pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("zero3", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.thorough)])
def test_ranks_of_a_sharded_model_generate_different_texts_together(launch, strategy, ranks):
    """The last rank has none, the others end at different times."""
    run = launch("generating", [json.dumps({"strategy": strategy, "lengths": LENGTHS})], ranks=ranks).succeed()
    for rank in range(ranks):
        found = json.loads((run.folder / f"found-{rank}.json").read_text())
        assert found["found"] == found["wanted"] and bool(found["found"][0]) == (rank < ranks - 1)


def test_equal_prompts_are_read_once_and_drawn_apart():
    read = []
    call = models()["qwen2"]

    def counting(ids, positions, cache, keep):
        read.append(ids.numel())
        return call(ids, positions, cache, keep)

    prompt = [5, 6, 7, 8]
    texts = [Completion(prompt, 12, Sampling(1.0, seed=seed)) for seed in range(6)]
    found = generate(Generator(counting, CPU, context=64), texts)
    assert read[0] == len(prompt) and len({tuple(each) for each in found}) == 6
    assert found == [naive(call, each) for each in texts]


def test_a_text_does_not_depend_on_those_beside_it(plain):
    def alone(number):
        return generate(Generator(plain, CPU, context=200), [texts_of(WORDS, LENGTHS)[number]])[0]

    assert generate(Generator(plain, CPU, context=200), texts_of(WORDS, LENGTHS)) == [alone(i) for i in range(8)]


def test_a_hook_forces_tokens(plain):
    def calculator(text):
        return [7, 8, 9] if len(text.tokens) == 4 else []

    texts = [Completion([3, 4], 12, hook=calculator), Completion([3, 4], 12)]
    forced, free = generate(Generator(plain, CPU, context=64), texts)
    assert forced[4:7] == [7, 8, 9] and forced[:4] == free[:4] and len(forced) == 12
    assert forced == naive(plain, texts[0])


def test_cancelled_texts_leave_their_rows_to_others(plain):
    texts = texts_of(WORDS, LENGTHS)
    for each in texts:
        each.stop = frozenset()
    generator = Generator(plain, CPU, context=200, rows=2)
    for each in texts:
        generator.add(each)
    generator.step()
    for number in (0, 5):
        generator.cancel(texts[number])
    while generator.step():
        pass
    assert [each.ended for each in texts] == [*("cancelled",), *["length"] * 4, "cancelled", *["length"] * 2]
    assert not texts[5].tokens and [each.tokens for each in texts[1:5]] == [naive(plain, each) for each in texts[1:5]]


def test_new_texts_join_between_two_tokens(plain):
    first, second = texts_of(WORDS, (40, 9), limit=30)
    generator = Generator(plain, CPU, context=200)
    generator.add(first)
    for _ in range(4):
        generator.step()
    generator.add(second)
    assert generate(generator, []) == [] and [first.tokens, second.tokens] == [
        naive(plain, first),
        naive(plain, second),
    ]


def test_texts_end_at_the_context_and_longer_prompts_are_refused(plain):
    generator = Generator(plain, CPU, context=20)
    (found,) = generate(generator, [Completion([4] * 15, 100)])
    assert len(found) == 5
    for prompt in ([], [4] * 20):
        with pytest.raises(ValueError, match="prompt of"):
            generator.add(Completion(prompt, 4))
    text = Completion([4], 0)
    generator.add(text)
    assert text.ended == "length" and not generator.step()


def test_a_model_whose_numbers_are_not_finite_ends_only_that_text(plain):
    def broken(ids, positions, cache, keep):
        logits = plain(ids, positions, cache, keep).clone()
        logits[(ids == 9).any(1)] = float("nan")
        return logits

    texts = [Completion([3, 9, 4], 5), Completion([3, 8, 4], 5)]
    found = generate(Generator(broken, CPU, context=64), texts)
    assert texts[0].ended == "error" and not found[0]
    assert texts[1].ended == "length" and found[1] == naive(plain, texts[1])[: len(found[1])]


def test_many_texts_take_few_passes(plain):
    """32 texts of 20 tokens: one pass for each token, and one for each group of prompts."""
    texts = [Completion([3 + i, 4], 20) for i in range(32)]
    generator = Generator(plain, CPU, context=64, rows=32)
    generate(generator, texts)
    assert generator.passes <= 20 + 2 * 32 / PREFILL_ROWS


def test_the_cache_grows_with_its_texts_and_keeps_them():
    cache = Cache()
    keys, _ = cache.of_layer(0, torch.ones(2, 1, 3, 4))
    assert keys.shape == (1, 3, 64, 4)
    keys += 1
    cache.reserve(3, 65)
    grown, _ = cache.of_layer(0, keys)
    assert grown.shape == (3, 3, 128, 4) and grown[0, :, :64].eq(1).all() and grown[1:].eq(0).all()


# --- sampling ---


def drawn(logits, setting, count=4000):
    chances = (torch.arange(count) + 0.5) / count
    rows = choose(torch.tensor(logits).expand(count, -1), [setting] * count, chances.tolist())
    return (torch.bincount(rows, minlength=len(logits)) / count).tolist()


LOGITS = [1.0, 3.0, -1.0, 2.0, float("-inf")]


@pytest.mark.parametrize(
    "setting, kept",
    [
        (Sampling(1.0), (0, 1, 2, 3)),
        (Sampling(0.5), (0, 1, 2, 3)),
        (Sampling(2.0, top_k=2), (1, 3)),
        (Sampling(1.0, top_k=99), (0, 1, 2, 3)),
        (Sampling(1.0, top_p=0.7), (1, 3)),
        (Sampling(1.0, top_p=0.0), (1,)),
        (Sampling(1.0, top_k=3, top_p=0.95), (0, 1, 3)),
    ],
)
def test_tokens_are_drawn_by_their_probability(setting, kept):
    each = torch.tensor([LOGITS[i] if i in kept else float("-inf") for i in range(5)])
    wanted = torch.softmax(each / setting.temperature, 0)
    assert drawn([-30.0 if value == float("-inf") else value for value in LOGITS], setting) == pytest.approx(
        wanted.tolist(), abs=1e-3
    )


def test_the_ends_of_chance_draw_tokens_that_have_some():
    logits = torch.tensor([[-1e9, 0.0, 0.0, -1e9]])
    for chance, token in ((0.0, 1), (1.0, 2), (0.999999999, 2)):
        assert int(choose(logits, [Sampling(1.0)], [chance])[0]) == token
    assert int(choose(torch.tensor([[float("nan"), 1.0]]), [Sampling(1.0)], [0.5])[0]) == NOT_FINITE
