"""Conversations as tokens, with labels only for the assistant's text and its end mark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascendrun.programs.qwen_lora.conversations import Conversation
from ascendrun.programs.trainer import errors
from ascendrun.programs.trainer.errors import InvalidDataError
from ascendrun.programs.trainer.packing import IGNORED

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MADE_WORDS = 2000


@dataclass(frozen=True)
class Encoded:
    """One sample. `labels`: the token where it is trained on, else IGNORED. `level`: an index into Table.levels."""

    ids: tuple[int, ...]
    labels: tuple[int, ...]
    level: int

    @property
    def learned(self) -> int:
        return sum(label != IGNORED for label in self.labels[1:])


def encode(tokenizer: Any, conversation: Conversation, level: int, *, cutoff: int) -> Encoded:
    """Encode a conversation, truncated at the end to `cutoff` tokens. Raises InvalidDataError if the template does not
    separate the turns."""
    messages = [{"role": role, "content": text} for role, text in conversation.turns]
    ids: list[int] = []
    labels: list[int] = []
    done = ""

    def add(text: str, *, is_learned: bool) -> None:
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids.extend(tokens)
        labels.extend(tokens if is_learned else [IGNORED] * len(tokens))

    for turn, (role, _) in enumerate(conversation.turns):
        if role != "assistant":
            continue
        before = render(tokenizer, messages[:turn], add_generation_prompt=True)
        after = render(tokenizer, messages[: turn + 1], add_generation_prompt=False)
        if not before.startswith(done) or not after.startswith(before):
            raise InvalidDataError(
                "program.template-rewrites",
                "the chat template of the tokenizer rewrites earlier turns, so the replies of the assistant "
                "cannot be located\n"
                "hint: set --template=chatml",
            )
        add(before[len(done) :], is_learned=False)
        reply = after[len(before) :]
        mark = reply.rstrip("\n")
        add(mark, is_learned=True)
        done = before + mark
    return Encoded(tuple(ids[:cutoff]), tuple(labels[:cutoff]), level)


def render(tokenizer: Any, messages: Sequence[Any], *, add_generation_prompt: bool) -> str:
    """Apply the template. `add_generation_prompt`: add the start of the assistant's reply."""
    if not messages and not add_generation_prompt:
        return ""
    return str(
        tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=add_generation_prompt)
    )


def encode_all(
    tokenizer: Any, conversations: Sequence[Conversation], levels: Sequence[str], *, cutoff: int
) -> tuple[list[Encoded], int]:
    """Return (samples, number of samples without a label after truncation). With one level, all samples have it."""
    number = {name: i for i, name in enumerate(levels)} if len(levels) > 1 else {}
    every = [encode(tokenizer, each, number.get(str(each.level), 0), cutoff=cutoff) for each in conversations]
    kept = [each for each in every if each.learned]
    if not kept:
        raise InvalidDataError(
            "program.all-cut",
            "--cutoff_len={cutoff} tokens: every sample is truncated before the reply of the assistant\nhint: raise it",
            cutoff=cutoff,
        )
    return kept, len(every) - len(kept)


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
