"""What a model writes, as text: replies in a chat, and a few samples while it is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from ascendrun.programs.generation.cache import of_model
from ascendrun.programs.generation.engine import Completion, Generator, generate
from ascendrun.programs.nanochat import conversations
from ascendrun.programs.nanochat import tokenizer as words
from ascendrun.programs.nanochat.calculator import TOOL, Tools
from ascendrun.programs.nanochat.sizes import SPECIAL
from ascendrun.programs.trainer.strategies.engine import Engine

SHOWN = dict(zip(TOOL, ("<<", "", "=", ">>")))
"""How a call of the calculator is shown: <<2+3=5>>, as GSM8K writes it."""
SAMPLE_TOKENS = 32


def stops_of(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the tokens that end a reply."""
    return frozenset(conversations.mark(tokenizer, name) for name in (words.BOS, words.PAD))


def decoded(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """Return the text of tokens, with calls of the calculator and without other marks."""
    marks = {conversations.mark(tokenizer, name): SHOWN.get(name, "") for name in SPECIAL}
    text, start = "", 0
    for at, token in enumerate(tokens):
        if token in marks:
            text += tokenizer.decode(tokens[start:at]) + marks[token]
            start = at + 1
    return text + str(tokenizer.decode(tokens[start:]))


@dataclass(frozen=True)
class Samples:
    """The likeliest texts after prompts, which are the starts of documents, or with `is_chat` messages of the user."""

    tokenizer: Tokenizer
    prompts: Sequence[str]
    context: int
    is_chat: bool

    def write(self, engine: Engine) -> list[tuple[str, str]]:
        """Return (prompt, reply) by the present weights, for each prompt that fits into the context."""
        call, tools = of_model(engine.module), Tools(self.tokenizer) if self.is_chat else None
        stop = stops_of(self.tokenizer)
        ids = {prompt: self.ids_of(prompt) for prompt in self.prompts}
        texts = {
            prompt: Completion(tokens, SAMPLE_TOKENS, stop=stop, hook=tools)
            for prompt, tokens in ids.items()
            if len(tokens) < self.context
        }
        generate(Generator.of(engine, call, context=self.context, rows=len(texts) or 1), list(texts.values()))
        return [(prompt, decoded(self.tokenizer, text.tokens)) for prompt, text in texts.items()]

    def ids_of(self, prompt: str) -> list[int]:
        if self.is_chat:
            return conversations.prompt(self.tokenizer, [{"role": "user", "content": prompt}])
        start = conversations.mark(self.tokenizer, words.BOS)
        return [start, *self.tokenizer.encode(prompt, add_special_tokens=False).ids]
