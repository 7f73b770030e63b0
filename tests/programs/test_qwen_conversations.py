"""Rows of files as conversations, conversations as tokens, and which of these are learned."""

import json
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from ascendrun.facts.rows import Conversation
from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.qwen_lora import base, chat_template
from ascendrun.programs.qwen_lora.chat_template import MARKS, make_tokenizer
from ascendrun.programs.qwen_lora.dataset import make_conversations, make_lessons, read_conversations, read_texts, split
from ascendrun.programs.qwen_lora.modes import first_exchange
from ascendrun.programs.qwen_lora.sft_task import Rows, forward, read_questions
from ascendrun.programs.trainer.data import IGNORED
from tests.programs.conftest import options_of, tiny_qwen2

ROW = {"instruction": "Say it", "input": "twice", "output": "it it", "difficulty": "explain"}


def read(tmp_path, text):
    (tmp_path / "rows.json").write_text(text)
    return read_conversations(tmp_path / "rows.json", system="Be kind.")


@pytest.mark.parametrize(
    "text",
    [
        json.dumps([ROW], indent=1),
        json.dumps(ROW),
        json.dumps(ROW) + "\n\n",
        json.dumps({"data": [ROW]}),
        json.dumps([ROW]),
    ],
)
def test_a_list_lines_and_a_table_are_read_alike(tmp_path, text):
    turns = (("system", "Be kind."), ("user", "Say it\ntwice"), ("assistant", "it it"))
    assert read(tmp_path, text) == [Conversation(turns, "explain")]


@pytest.mark.parametrize(
    "row",
    [
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [{"type": "text", "text": "hello"}]}],
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
    ],
)
def test_chats_of_every_shape_are_read_alike(tmp_path, row):
    turns = (("system", "Be kind."), ("user", "hi"), ("assistant", "hello"))
    assert read(tmp_path, json.dumps(row) + "\n" + json.dumps(row)) == [Conversation(turns)] * 2


def test_all_bad_rows_are_named_with_their_places(tmp_path):
    rows = [
        json.dumps(ROW),
        "{",
        json.dumps({"instruction": "x"}),
        json.dumps([{"role": "boss", "content": "x"}]),
        json.dumps([{"role": [], "content": "x"}]),
        json.dumps({"instruction": "x", "output": " "}),
    ]
    with pytest.raises(InvalidDataError) as caught:
        read(tmp_path, "\n".join(rows))
    text = str(caught.value)
    assert all(
        says in text
        for says in (
            "line 2: not valid JSON",
            "line 3: output is missing",
            "line 4: message 1: unknown role 'boss'",
            "line 5: message 1: unknown role '[]'",
            "line 6: no reply of the assistant",
        )
    )


@pytest.mark.parametrize(
    "content, words",
    [
        (b'[{"instruction": "Fran\xe7ois"}]', "not valid UTF-8 at byte 22"),
        (b"5", "got int"),
        (b'{"data": {"a": 1}}', "got dict"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_file_that_is_no_list_of_rows_is_told_as_what_it_is(tmp_path, content, words):
    path = tmp_path / "rows.json"
    path.write_bytes(content)
    with pytest.raises(InvalidDataError, match=words):
        read_conversations(path, system="")


def lessons_of(tokenizer, path, rows, *given):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    options = options_of("qwen_lora", f"--data_path={path}", f"--data_cache_dir={path.parent}/cache", *given)
    return make_lessons(read_texts(options), tokenizer, options)


def test_a_single_row_cannot_be_learned_and_validated_on(tokenizer, tmp_path):
    row = {"instruction": "a", "output": "b"}
    with pytest.raises(InvalidDataError, match="(?s)1 sample for training and validation.*--val_size=0"):
        lessons_of(tokenizer, tmp_path / "rows.json", [row], "--val_size=0.05")
    assert len(lessons_of(tokenizer, tmp_path / "rows.json", [row], "--val_size=0").train.samples) == 1


def test_only_the_assistants_words_and_their_end_are_learned(tokenizer):
    turns = (("system", "Be kind."), ("user", "A?"), ("assistant", "B."), ("user", "C?"), ("assistant", "D."))
    sample = chat_template.encode(tokenizer, Conversation(turns), cutoff=999)
    learned = tokenizer.decode([label for label in sample.labels if label != IGNORED])
    assert learned == "B.<|im_end|>D.<|im_end|>"
    whole = chat_template.render(
        tokenizer, [{"role": role, "content": text} for role, text in turns], add_generation_prompt=False
    )
    assert tokenizer.decode(sample.ids) == whole.rstrip("\n")
    assert len(chat_template.encode(tokenizer, Conversation(turns), cutoff=10).ids) == 10


def test_a_template_that_rewrites_what_was_said_is_refused(tokenizer):
    own, tokenizer.chat_template = tokenizer.chat_template, "{{ messages | length }}{{ messages[-1]['content'] }}"
    try:
        with pytest.raises(InvalidDataError, match="--template=chatml"):
            chat_template.encode(tokenizer, Conversation((("user", "A?"), ("assistant", "B."))), cutoff=99)
    finally:
        tokenizer.chat_template = own


def test_rows_whose_answers_are_cut_off_are_counted_and_left_out(tokenizer, tmp_path):
    long, short = ({"instruction": "A" * count, "output": "B."} for count in (500, 1))
    lessons = lessons_of(tokenizer, tmp_path / "rows.json", [long, short], "--cutoff_len=60", "--val_size=0")
    assert (len(lessons.train.samples), lessons.cut) == (1, 1)
    with pytest.raises(InvalidDataError, match="--cutoff_len=60"):
        lessons_of(tokenizer, tmp_path / "rows.json", [long], "--cutoff_len=60", "--val_size=0")


def test_encoded_rows_are_those_encoded_one_by_one_by_split_and_level(tokenizer, tmp_path):
    """The texts of a level, of either split, and their labels; also when the directory is there already."""
    rows = [
        {"instruction": f"{level} {number}?", "output": "B." * number, "difficulty": level}
        for number in range(1, 31)
        for level in ("explain", "topology")
    ]
    for _ in range(2):
        lessons = lessons_of(tokenizer, tmp_path / "rows.json", rows, "--val_size=0.1", "--curriculum=on")
        assert (len(lessons.train.samples), len(lessons.val.samples)) == (54, 6)
        texts, numbers = lessons.val_texts
        for number, sample in zip(numbers, lessons.val.samples):
            alone = chat_template.encode(tokenizer, texts.conversations[number], cutoff=2048)
            assert (list(sample.ids), list(sample.labels)) == (list(alone.ids), list(alone.labels))
        assert [len(each) for each in lessons.numbers] == [
            sum(row["difficulty"] == level for i, row in enumerate(rows) if i not in numbers)
            for level in ("explain", "topology")
        ]
        for level, name in enumerate(lessons.table.levels):
            for number in lessons.numbers[level]:
                sample = lessons.train.samples[number]
                assert name in tokenizer.decode(sample.ids) and sample.level == level


def test_the_split_of_earlier_runs_stays_and_takes_little_memory():
    """A run that resumes from an older checkpoint must find the same samples."""
    order = list(range(1000))
    random.Random(5).shuffle(order)
    found = split(1000, {"val_size": 0.05, "seed": 5})
    assert [each.tolist() for each in found] == [sorted(order[50:]), sorted(order[:50])]
    assert sum(each.nbytes for each in found) == 4 * 1000


def test_packed_rows_have_the_losses_of_their_samples_one_by_one(tokenizer):
    model = tiny_qwen2(vocab_size=len(tokenizer)).eval()
    conversations = make_conversations(10, seed=5, system="")
    levels = ("explain", "reasoning", "topology")
    samples = [
        replace(chat_template.encode(tokenizer, each, cutoff=200), level=levels.index(each.level))
        for each in conversations
    ]
    rows = Rows(samples, levels, 0, 8)
    with torch.no_grad():
        packed = rows.batch([(0, 3, 5), (1, 2), (4, 6, 7, 8, 9)])
        together = forward(model, packed.tensors)
        alone = [float(forward(model, rows.batch([(number,)]).tensors).sum()) for number in range(10)]
    assert float(together.sum()) == pytest.approx(sum(alone), rel=1e-5)
    assert packed.weight == sum(sample.learned for sample in samples) and packed.samples == 10
    of_levels = packed.tensors["target_levels"]
    for level in range(3):
        mine = sum(loss for loss, sample in zip(alone, samples) if sample.level == level)
        assert float(together[of_levels == level].sum()) == pytest.approx(mine, rel=1e-5)


@pytest.mark.parametrize(
    "roles, exchange",
    [("a", ("", "0")), ("sa", ("0", "1")), ("ua", ("0", "1")), ("uauau", ("0", "1")), ("suaua", ("1", "2"))],
)
def test_the_first_exchange_is_what_the_assistant_says_first_and_what_came_before(roles, exchange):
    names = {"s": "system", "u": "user", "a": "assistant"}
    assert first_exchange(Conversation(tuple((names[role], str(i)) for i, role in enumerate(roles)))) == exchange


QUESTION = {"question": "Which?\u2028This?", "choices": ["a", "b"], "answer": "B"}


def test_questions_are_read_to_the_limit_with_the_answer_as_letter_or_place(tmp_path):
    path = tmp_path / "mc.jsonl"
    rows = [QUESTION, {**QUESTION, "answer": 0}, QUESTION]
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    assert [(each.text, each.answer) for each in read_questions(path, 2)] == [
        (QUESTION["question"], 1),
        (QUESTION["question"], 0),
    ]


@pytest.mark.parametrize("rows", [[], [{**QUESTION, "answer": -1}], [{**QUESTION, "answer": "C"}], [[]]])
def test_a_file_without_questions_or_with_an_answer_that_is_no_choice_is_refused(tmp_path, rows):
    (tmp_path / "mc.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(InvalidDataError, match="question"):
        read_questions(tmp_path / "mc.jsonl", 9)


# --- tokens of words that are looked up are those that the library gives for the whole text ---


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


# --- a directory's tokenizer ---

SENTENCE = "It's 12 of 345 nodes\n\n now"


def written(folder, tokenizer):
    """A directory of a Qwen2 with this tokenizer: transformers 5 splits texts by the model's class, not by the file."""
    tokenizer.save_pretrained(folder)
    base.shape_config("tiny").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("way", [*WAYS, *OTHERS])
@pytest.mark.parametrize("normalizer", [None, {"type": "NFC"}])
def test_a_tokenizer_is_loaded_as_its_file_has_it(tmp_path, way, normalizer):
    stored = tokenizer_of(pre_tokenizer={**WAYS, **OTHERS}[way], normalizer=normalizer)
    home = written(tmp_path, chat_template.wrap_tokenizer(stored.to_str()))
    loaded = chat_template.load_tokenizer(home, template="auto")
    wanted = Tokenizer.from_file(str(home / "tokenizer.json"))
    for text in (SENTENCE, "e\u0301"):
        assert loaded(text, add_special_tokens=False)["input_ids"] == wanted.encode(text).ids
    assert (loaded.eos_token, loaded.pad_token, loaded.chat_template) == (MARKS[2], MARKS[0], chat_template.CHATML)
    loaded.save_pretrained(tmp_path / "adapter")
    again = AutoTokenizer.from_pretrained(tmp_path / "adapter")
    assert again(SENTENCE)["input_ids"] == wanted.encode(SENTENCE).ids
