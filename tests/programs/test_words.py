"""Tokens of words that are looked up are those that the library gives for the whole text."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ascendrun.programs.qwen_lora import chat_template
from ascendrun.programs.qwen_lora.chat_template import MARKS, make_tokenizer
from ascendrun.programs.qwen_lora.dataset import make_conversations

QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA = QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|")
SPLIT = {"type": "Split", "pattern": {"Regex": QWEN}, "behavior": "Isolated", "invert": False}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
WAYS = {
    "gpt2": {**BYTES, "use_regex": True},
    "qwen": {"type": "Sequence", "pretokenizers": [SPLIT, BYTES]},
    "llama": {"type": "Sequence", "pretokenizers": [{**SPLIT, "pattern": {"Regex": LLAMA}}, BYTES]},
    "removed": {"type": "Sequence", "pretokenizers": [{**SPLIT, "behavior": "Removed", "invert": True}, BYTES]},
    "letters": {"type": "Sequence", "pretokenizers": [{**SPLIT, "pattern": {"Regex": r"\p{L}+"}}, BYTES]},
}
OTHERS = {
    "a space in front": {**BYTES, "use_regex": True, "add_prefix_space": True},
    "a class unknown in ASCII": {"type": "Sequence", "pretokenizers": [{**SPLIT, "pattern": {"Regex": r"\p{Lu}|."}}]},
    "words that look back": {
        "type": "Sequence",
        "pretokenizers": [{**SPLIT, "pattern": {"Regex": r"(?<=a)b+|\p{L}"}}, BYTES],
    },
    "two expressions": {"type": "Sequence", "pretokenizers": [SPLIT, SPLIT, BYTES]},
    "no words": BYTES,
    "sentencepiece": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True},
}
FACTS = json.loads(make_tokenizer(make_conversations(60, seed=1, system="Be kind."), words=400))
COMMON = st.sampled_from(["node", "switch", "Which", " ", "  ", "\n", "'s", " + ", "12"])
PIECES = COMMON | st.sampled_from(
    [*MARKS, "<|im_", "It's", "WE'LL", "node", " switch", "12345", " 7", "\n", "\r\n", "\t", "  ", "\x1c", "\x0b", "."]
    + ["--", " (a)", "é", "网络", "\u3000", "\x85", "e\u0301", "ſ", "²", "_", "\\", "'", "’s"]
)
TEXTS = st.lists(PIECES | st.text(max_size=8), max_size=12).map("".join)


def tokenizer_of(**changes):
    from tokenizers import Tokenizer

    return Tokenizer.from_str(json.dumps({**FACTS, **changes}))


@pytest.mark.parametrize("way", [*WAYS, *OTHERS])
@pytest.mark.parametrize("normalizer", [None, {"type": "NFC"}, {"type": "Lowercase"}])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(texts=st.lists(TEXTS, max_size=6))
def test_tokens_are_those_of_the_whole_text(way, normalizer, texts):
    fast = tokenizer_of(pre_tokenizer={**WAYS, **OTHERS}[way], normalizer=normalizer)
    encoder = chat_template.Words(fast)
    for _ in range(2):  # words that are new, and words that are known
        ids, counts = encoder.encode(texts)
        whole = [fast.encode(text, add_special_tokens=False).ids for text in texts]
        assert (ids.tolist(), counts.tolist()) == (sum(whole, []), [len(each) for each in whole])


@pytest.mark.parametrize("way", WAYS)
def test_known_tokenizers_have_their_words_looked_up(way):
    encoder = chat_template.Words(tokenizer_of(pre_tokenizer=WAYS[way]))
    assert encoder.words_of("It's 12 <|im_end|> now") != ["It's 12 <|im_end|> now"] or way == "letters"
    encoder.encode(["node switch node", "switch node"])
    known = len(encoder.numbers)
    encoder.encode(["node switch node"])
    assert len(encoder.numbers) == known


@pytest.mark.parametrize("way", OTHERS)
def test_other_tokenizers_read_whole_texts(way):
    assert chat_template.Words(tokenizer_of(pre_tokenizer=OTHERS[way])).findall is None


@pytest.mark.parametrize("mark", ["lstrip", "rstrip", "single_word"])
def test_added_tokens_that_depend_on_their_neighbours_are_left_to_the_library(mark):
    added = [{**each, mark: True} for each in FACTS["added_tokens"]]
    assert chat_template.Words(tokenizer_of(added_tokens=added)).findall is None


def test_words_are_forgotten_when_they_are_many(monkeypatch):
    monkeypatch.setattr(chat_template, "MOST_TOKENS", 4)
    encoder = chat_template.Words(tokenizer_of())
    for text in ("node switch router", "host rack port", "node host"):
        ids, _ = encoder.encode([text])
        assert ids.tolist() == encoder.fast.encode(text, add_special_tokens=False).ids
    assert " router" not in encoder.numbers and " host" in encoder.numbers
