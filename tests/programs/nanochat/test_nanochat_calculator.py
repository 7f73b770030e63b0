"""The calculator refuses what is not a sum, and its results are forced into the texts that called it."""

import pytest
import torch

from ascendrun.programs.generation.cache import of_model
from ascendrun.programs.generation.engine import Completion, Generator, Sampling, generate
from ascendrun.programs.nanochat.conversations import TOOL, Tools, use_calculator
from ascendrun.programs.nanochat.texts import of_characters
from tests.programs.generating import WORDS, Plain, naive

CPU = torch.device("cpu")
ALPHABET = "0123456789+-*/(). abcount'"


@pytest.mark.parametrize(
    "text, value",
    [
        ("48/2", "24"),
        ("48 / 5", "9.6"),
        ("0.1+0.2", "0.3"),
        ("1,200*3", "3600"),
        ("-(2 - 5) * .5", "1.5"),
        ("2+3*4-1", "13"),
        ("2**10", "1024"),
        ("2**-1", "0.5"),
        ("-2**2", "-4"),
        ("2**3**2", "512"),
        ("10/3*3", "10"),
        ("'strawberry'.count('r')", "3"),
        ('"a,b,c".count(",")', "2"),
        ("'it'.count('t') + 1", "2"),
    ],
)
def test_sums_and_counts_have_a_value(text, value):
    assert use_calculator(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "1/0", "1+", "(1", "1)", "1 2", "a", "1//2", "1%2", "0x1", "1e5", "1_0", "[1]", "1 if 1 else 2", "1==",
        "__import__('os').system('true')", "().__class__", "'a'", "'a'*3", "'a'.upper()", "'a'.count", "'a'.count(1)",
        "'a'.count('a').real", "f'{1}'", "'\\x41'.count('A')", "print(1)", "1;2", "lambda: 1", "９+１", "0**-1",
        "9**9**9", "9**9999", "(9**60)**60", "2**.5", "(-8)**(1/3)", "9" * 200, "1" * 300, "(" * 25 + "1" + ")" * 25,
        "1+" * 127 + "1**1**1**1**1**1",
    ],
)  # fmt: skip
def test_anything_else_has_none(text):
    assert use_calculator(text) is None


class Scripted:
    """A model that chooses the tokens of a script, by the number of tokens so far, or any token at random."""

    def __init__(self, vocabulary, script=()):
        self.vocabulary, self.script = vocabulary, dict(script)

    def __call__(self, ids, positions, cache, keep):
        found = torch.zeros(len(ids), len(keep), self.vocabulary)
        for row in range(len(ids)):
            for number, at in enumerate(keep.tolist()):
                place = int(positions[row, at])
                chance = torch.Generator().manual_seed(place * 1009 + int(ids[row, at]))
                found[row, number] = torch.randn(self.vocabulary, generator=chance)
                if place in self.script:
                    found[row, number, self.script[place]] += 100
        return found


@pytest.fixture(scope="module")
def tokenizer():
    return of_characters([ALPHABET])


def ids_of(tokenizer, *parts):
    """Tokens of texts and marks."""
    return [
        each
        for part in parts
        for each in ([tokenizer.token_to_id(part)] if part in TOOL else tokenizer.encode(part).ids)
    ]


def test_a_call_is_followed_by_its_result_and_other_marks_by_none(tokenizer):
    start, end, output, ended = TOOL
    tools = Tools(tokenizer)

    def after(*parts):
        return list(tools(Completion([0], 99, tokens=ids_of(tokenizer, *parts))))

    assert after("is ", start, "12*3", end) == ids_of(tokenizer, output, "36", ended)
    assert after(start, "'abab'.count('ab')", end) == ids_of(tokenizer, output, "2", ended)
    assert after(start, "1", end, "b", start, "2+2", end) == ids_of(tokenizer, output, "4", ended)
    for parts in ((end,), ("12*3", end), (start, end), (start, "ab", end), (start, "1", end, "2", end), (start, "1")):
        assert after(*parts) == []


@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(1.0, top_k=20, seed=3)])
def test_results_are_forced_alike_with_a_cache_without_and_beside_others(tokenizer, sampling):
    start, end, output, ended = TOOL
    count = tokenizer.get_vocab_size()
    call = ids_of(tokenizer, "ab", start, "12*3", end)
    model = Scripted(count, {3 + number: token for number, token in enumerate(call, start=-1)})
    tools = Tools(tokenizer)

    def texts():
        return [Completion([1, 2, 3], 24, sampling, hook=tools), Completion([1, 2, 3, 4, 5], 9, Sampling(1.0, seed=8))]

    text = texts()[0]
    (alone,) = generate(Generator(model, CPU, context=64), [text])
    both = generate(Generator(model, CPU, context=64), texts()[::-1])
    assert alone == naive(model, texts()[0]) == both[1]
    result = ids_of(tokenizer, output, "36", ended)
    assert alone[: len(call)] == call and alone[len(call) : len(call) + len(result)] == result
    assert text.given == set(range(len(call), len(call) + len(result)))
    free = generate(Generator(model, CPU, context=64), [Completion([1, 2, 3], 24, sampling)])[0]
    assert free[: len(call)] == call and free[len(call) : len(call) + 4] != result


def test_calls_at_random_are_the_naive_ones(tokenizer):
    """A model that mostly calls: forced tokens at other places of each text, rows that are freed and filled."""
    torch.manual_seed(0)
    plain, often = of_model(Plain().eval()), torch.zeros(WORDS)
    often[ids_of(tokenizer, *TOOL[:2], "1+")] = 14.0
    tools = Tools(tokenizer)

    def call(*given):
        return plain(*given) * 0.2 + often

    def texts():
        return [
            Completion(
                [number + 1] * (number % 5 + 1), 30, Sampling(1.0 if number % 4 else 0.0, seed=number), hook=tools
            )
            for number in range(12)
        ]

    wanted, given = [naive(call, each) for each in texts()], texts()
    assert generate(Generator(call, CPU, context=64, rows=5), given) == wanted
    assert len({tuple(sorted(each.given)) for each in given}) > 2
