"""Conversations as tokens, with labels only for the assistant's text and its end mark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Callable

import numpy as np

from ascendrun.facts.rows import Conversation
from ascendrun.programs import errors
from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.qwen_lora.words import Words, joined
from ascendrun.programs.trainer.packing import IGNORED
from ascendrun.programs.trainer.shards import Array, Encoded, Rows

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

    def __call__(self, rows: Sequence[Conversation]) -> Rows:
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
            raise InvalidDataError(
                "program.template-rewrites",
                "the chat template of the tokenizer rewrites earlier turns, so the replies of the assistant "
                "cannot be located\n"
                "hint: set --template=chatml",
            )
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
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # various types; `tokenizers` raises Exception itself
        raise InvalidDataError(
            "program.tokenizer-unreadable",
            "{directory}/tokenizer.json: transformers cannot read the tokenizer ({error})\nhint: copy the base again",
            directory=folder,
            error=errors.in_a_line(error),
        ) from error
    if template == "chatml" or not tokenizer.chat_template:
        tokenizer.chat_template = CHATML
    return tokenizer


def pad_id_of(tokenizer: Any) -> int:
    """Return the id for padding: any token, because padding is neither trained on nor attended to."""
    return int(next((each for each in (tokenizer.pad_token_id, tokenizer.eos_token_id) if each is not None), 0))
