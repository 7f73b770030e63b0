"""Conversations as tokens, with labels only for the assistant's text and its end mark.

`Words` looks up each different word once: a byte-level BPE first splits a text into words by a regular expression and
then encodes each word alone. Within ASCII the classes of that expression are known, so Python's `re` splits alike; the
library encodes the words that are new, and all other texts as a whole.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Callable

import numpy as np

from ascendrun.facts.rows import Conversation
from ascendrun.programs import errors
from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trainer.data import IGNORED
from ascendrun.programs.trainer.shards import Array, Encoded, EncodedRows
from ascendrun.text import listed

Findall = Callable[[str], list[str]]

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The expression of `tokenizers` where ByteLevel splits by itself."""
WAYS = {("Isolated", False), ("Removed", True)}
"""Behaviours of Split that make the words of the matches. What no match has is noticed by its length."""
PARTS = re.compile(
    r"(?P<class>\[\^?(?:\\p\{\w+\}|\\.|[^\[\]\\&])+\])|(?P<letters>\\p\{\w+\})|(?P<other>\\[rnstdSD]|\(\?!\\S\)|\(\?i?:|"
    r"[^\\\[\]($^.(])"
)
"""Parts of an expression that mean the same in Oniguruma and in `re`, within ASCII, whatever comes before them."""
MOST_TOKENS = 1 << 21
"""Tokens of the words that are kept."""


class Numbers(dict[str, int]):
    """Numbers in the order of the first request for them."""

    def __missing__(self, key: str) -> int:
        self[key] = number = len(self)
        return number


class Words:
    """Encodes texts with a tokenizer of `tokenizers`, without special tokens around them."""

    def __init__(self, fast: Any) -> None:
        fast.no_truncation()
        fast.no_padding()
        self.fast, facts = fast, json.loads(fast.to_str())
        self.findall, self.split = findall_of(facts), splitter([each["content"] for each in facts["added_tokens"]])
        self.clear()

    def clear(self) -> None:
        self.numbers, self.ids, self.starts = Numbers(), np.empty(0, np.int64), np.zeros(1, np.int64)

    def encode(self, texts: Sequence[str]) -> tuple[Array, Array]:
        """Return the tokens of all texts in one array, and the number of tokens of each text."""
        if len(self.ids) > MOST_TOKENS:
            self.clear()
        words = list(map(self.words_of, texts))
        every = list(chain.from_iterable(words))
        numbers = np.fromiter(map(self.numbers.__getitem__, every), np.int64, len(every))
        self.learn()
        counts = np.diff(self.starts)[numbers]
        ends = np.concatenate([[0], np.cumsum(counts)])
        places = np.arange(ends[-1]) + np.repeat(self.starts[numbers] - ends[:-1], counts)
        return self.ids[places], np.diff(ends[np.cumsum([0, *map(len, words)])])

    def words_of(self, text: str) -> list[str]:
        """Return parts of a text that have the same tokens alone."""
        if self.findall is None or not text.isascii():
            return [text]
        words: list[str] = []
        for number, part in enumerate(self.split(text)):  # every other one is an added token
            words += [part] if number % 2 else self.findall(part)
        return words if sum(map(len, words)) == len(text) else [text]

    def learn(self) -> None:
        """Encode the words that are new."""
        fresh = list(self.numbers)[len(self.starts) - 1 :]
        ids, counts = joined([each.ids for each in self.fast.encode_batch_fast(fresh, add_special_tokens=False)])
        self.ids = np.concatenate([self.ids, ids])
        self.starts = np.concatenate([self.starts, self.starts[-1] + np.cumsum(counts)])


def joined(rows: Sequence[Sequence[int]]) -> tuple[Array, Array]:
    """Return the numbers of all rows in one array, and how many each has."""
    counts = np.array([len(row) for row in rows], dtype=np.int64)
    return np.fromiter(chain.from_iterable(rows), np.int64, counts.sum()), counts


def splitter(added: Sequence[str]) -> Callable[[str], list[str]]:
    """Return what splits a text around the added tokens, which the library looks for first, the longest first."""
    if not added:
        return lambda text: [text]
    return re.compile(f"({'|'.join(map(re.escape, sorted(added, key=len, reverse=True)))})").split


def findall_of(facts: Mapping[str, Any]) -> Findall | None:
    """Return what splits an ASCII text into words as this tokenizer does. None: a tokenizer of another kind."""
    is_plain = all(not (each["lstrip"] or each["rstrip"] or each["single_word"]) for each in facts["added_tokens"])
    normalizer, pattern = facts["normalizer"] or {"type": "NFC"}, pattern_of(facts["pre_tokenizer"])
    if facts["model"]["type"] != "BPE" or facts["model"].get("dropout") or normalizer["type"] not in ("NFC", "NFKC"):
        return None
    if pattern is None or not is_plain:
        return None
    pattern = in_ascii(pattern)
    with contextlib.suppress(re.error):  # of another class of characters, or of an older Python
        return None if pattern is None else re.compile(pattern, re.ASCII).findall
    return None


def pattern_of(steps: Any) -> str | None:
    """Return the expression whose matches are the words."""
    steps = (steps or {}).get("pretokenizers", [steps])
    last = steps[-1] or {}
    if last.get("type") != "ByteLevel" or last["add_prefix_space"]:
        return None
    if len(steps) == 1:
        return GPT2 if last["use_regex"] else None
    first, way = steps[0], (steps[0].get("behavior"), steps[0].get("invert"))
    if len(steps) > 2 or last["use_regex"] or first["type"] != "Split" or way not in WAYS:
        return None
    return first["pattern"].get("Regex")  # type: ignore[no-any-return]


def in_ascii(pattern: str) -> str | None:
    """Write the classes of letters and digits for ASCII. None: parts of the expression may mean something else here."""
    found, end = "", 0
    while part := PARTS.match(pattern, end):
        text, end = part.group(), part.end()
        inside = text.replace(r"\p{L}", "A-Za-z").replace(r"\p{N}", "0-9")
        found += f"[{inside}]" if part["letters"] else inside
    return found if end == len(pattern) else None


CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MADE_WORDS = 2000
Encode = Callable[[Sequence[str]], tuple[Array, Array]]
"""From texts to the tokens of all in one array, and the number of tokens of each."""


def encode(tokenizer: Any, conversation: Conversation, *, cutoff: int) -> Encoded:
    """Encode a conversation, truncated at the end to `cutoff` tokens. Raises InvalidDataError if the template does not
    separate the turns."""
    ((ids, bits),) = encode_rows(tokenizer, [conversation], cutoff=cutoff, encode=encode_of(tokenizer))
    return Encoded(ids, np.where(bits, ids, IGNORED), 0)


BLOCK = 512
"""Conversations that are rendered at once: the collector of garbage visits all that are there, again and again."""


class ChatEncoder:
    """Encoder of shards. A sample whose reply is truncated away has no tokens."""

    def __init__(self, tokenizer: Any, cutoff: int) -> None:
        self.tokenizer, self.cutoff = tokenizer, cutoff

    def __reduce__(self) -> Any:
        return type(self), (self.tokenizer, self.cutoff)

    @cached_property
    def encode(self) -> Encode:
        return encode_of(self.tokenizer)

    def __call__(self, rows: Sequence[Conversation]) -> EncodedRows:
        found = []
        for start in range(0, len(rows), BLOCK):
            block = rows[start : start + BLOCK]
            found += encode_rows(self.tokenizer, block, cutoff=self.cutoff, encode=self.encode)
        return [(ids, bits) if bits[1:].any() else ((), ()) for ids, bits in found]


def encode_rows(
    tokenizer: Any, rows: Sequence[Conversation], *, cutoff: int, encode: Encode
) -> list[tuple[Array, Array]]:
    """Encode many conversations: their tokens, and whether each is of a reply."""
    turns = [
        (row, at) for row, each in enumerate(rows) for at, (role, _) in enumerate(each.turns) if role == "assistant"
    ]
    messages = [[{"role": role, "content": text} for role, text in each.turns] for each in rows]
    starts = render_all(tokenizer, [messages[row][:at] for row, at in turns], add_generation_prompt=True)
    ends = render_all(tokenizer, [messages[row][: at + 1] for row, at in turns], add_generation_prompt=False)
    pieces: list[str] = []
    done = [""] * len(rows)
    for (row, _), before, after in zip(turns, starts, ends):
        if not before.startswith(done[row]) or not after.startswith(before):
            raise InvalidDataError(listed("program.template-rewrites"))
        reply = after[len(before) :].rstrip("\n")
        pieces += [before[len(done[row]) :], reply]
        done[row] = before + reply
    ids, counts = encode(pieces)  # prompt, reply, prompt, reply …
    bits = np.repeat(np.arange(len(pieces)) % 2 == 1, counts)
    last = np.cumsum([0, *np.bincount(np.repeat([row for row, _ in turns], 2), counts, len(rows)).astype(int)])
    parts = [slice(start, min(end, start + cutoff)) for start, end in zip(last[:-1], last[1:])]
    return [(ids[part], bits[part]) for part in parts]


def encode_of(tokenizer: Any) -> Encode:
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is not None and hasattr(fast, "encode_batch_fast"):
        return Words(fast).encode
    return lambda texts: joined(tokenizer(texts, add_special_tokens=False)["input_ids"])


def mark_of(tokenizer: Any) -> str:
    """Return a text that is equal for tokenizers that give the same tokens and the same conversations."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        return f"{type(tokenizer).__name__}{sorted(tokenizer.get_vocab().items())}{tokenizer.chat_template}"
    fast.no_truncation()
    fast.no_padding()
    return f"{fast.to_str()}{tokenizer.chat_template}"


def render(tokenizer: Any, messages: Sequence[Any], *, add_generation_prompt: bool) -> str:
    """Apply the template. `add_generation_prompt`: add the start of the assistant's reply."""
    return render_all(tokenizer, [messages], add_generation_prompt=add_generation_prompt)[0]


def render_all(tokenizer: Any, every: Sequence[Sequence[Any]], *, add_generation_prompt: bool) -> list[str]:
    if not every:
        return []
    rows = [list(messages) for messages in every]
    return list(tokenizer.apply_chat_template(rows, tokenize=False, add_generation_prompt=add_generation_prompt))


def prompt_of(tokenizer: Any, messages: Sequence[Any]) -> list[int]:
    """Return the tokens of a conversation up to the start of the assistant's reply."""
    text = render(tokenizer, messages, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def ends_of(tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end a reply."""
    known = tokenizer.get_vocab()
    marks = (tokenizer.eos_token_id, *(known.get(mark) for mark in (MARKS[0], MARKS[2])))
    return frozenset(each for each in marks if each is not None)


def make_tokenizer(conversations: Sequence[Conversation], *, words: int = MADE_WORDS) -> str:
    """Train a byte-level BPE on these texts and return it as JSON for `tokenizers`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    maker = Tokenizer(models.BPE())
    maker.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    maker.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=words,
        special_tokens=list(MARKS),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    maker.train_from_iterator(texts_of(conversations), trainer)
    return str(maker.to_str())


def texts_of(conversations: Sequence[Conversation]) -> Iterator[str]:
    for each in conversations:
        for role, text in each.turns:
            yield f"{role}\n{text}\n"


def wrap_tokenizer(text: str) -> Any:
    """Wrap such JSON in a tokenizer of transformers, with the built-in template."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    make: Any = PreTrainedTokenizerFast
    tokenizer = make(
        tokenizer_object=Tokenizer.from_str(text),
        eos_token=MARKS[2],
        pad_token=MARKS[0],
        additional_special_tokens=[MARKS[1]],
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def load_tokenizer(folder: Path, *, template: str) -> Any:
    """Load a tokenizer. `template`: auto (the tokenizer's own, else ChatML) or chatml. Raises InvalidDataError."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        fast, path = getattr(tokenizer, "backend_tokenizer", None), folder / "tokenizer.json"
        if fast and path.is_file() and splitting(fast.to_str()) != splitting(path.read_text(encoding="utf-8")):
            tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # various types; `tokenizers` raises Exception itself
        raise InvalidDataError(
            listed("program.tokenizer-unreadable", directory=folder, error=errors.in_a_line(error))
        ) from error
    if template == "chatml" or not tokenizer.chat_template:
        tokenizer.chat_template = CHATML
    return tokenizer


def splitting(text: str) -> tuple[str | None, object]:
    """Return how a tokenizer with this JSON splits texts. Classes of transformers 5 do it their way, not the file's."""
    facts = json.loads(text)
    return pattern_of(facts.get("pre_tokenizer")), facts.get("normalizer")


def pad_id_of(tokenizer: Any) -> int:
    """Return the id for padding: any token, because padding is neither trained on nor attended to."""
    return int(next((each for each in (tokenizer.pad_token_id, tokenizer.eos_token_id) if each is not None), 0))
