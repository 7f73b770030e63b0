"""Conversations as tokens, the calculator that the model may call in them, and what a model writes as text.

A conversation is a list of messages {"role": "system" | "user" | "assistant", "content": a text, or parts
{"type": "text" | "python" | "python_output", "text": …}}. The user begins, and the roles take turns. Marks are around
every message; only what the assistant itself writes carries loss.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from tokenizers import Tokenizer

from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.generation.cache import of_model
from ascendrun.programs.generation.engine import Completion, Generator, generate
from ascendrun.programs.nanochat import conversations
from ascendrun.programs.nanochat import texts as words
from ascendrun.programs.nanochat.sizes import SPECIAL
from ascendrun.programs.nanochat.texts import BOS
from ascendrun.programs.trainer.strategies.engine import Engine
from ascendrun.text import listed

MOST_CHARACTERS, MOST_OPEN, MOST_POWERS, MOST_BITS, MOST_DIGITS = 256, 24, 4, 2048, 64
"""Limits of an expression, its nesting, its powers, a power's result and the result. With them none takes a
millisecond, so all ranks get the same result and no timer is needed."""
COUNT = re.compile(r"""(['"])([^'"\\]*)\1\s*\.count\s*\(\s*(['"])([^'"\\]*)\3\s*\)""")
TOOL = ("<|python_start|>", "<|python_end|>", "<|output_start|>", "<|output_end|>")


def use_calculator(text: str) -> str | None:
    """Return the value of an expression of numbers with + - * / ** ( ), and `'text'.count('x')`; None: it has none."""
    if len(text) > MOST_CHARACTERS or text.count("(") > MOST_OPEN or text.count("**") > MOST_POWERS:
        return None
    if "'" not in text and '"' not in text:
        text = re.sub(r"(?<=\d),(?=\d)", "", text)
    text = COUNT.sub(lambda found: f" {found[2].count(found[4])} ", text)
    text = re.sub(r"(?<![0-9.])0+(?=[0-9])", "", " ".join(text.split()))  # Python has no numbers such as 007
    if not re.fullmatch(r"[-+*/(). 0-9]*", text):
        return None
    try:
        value = value_of(ast.parse(text, mode="eval").body, text)
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError):
        return None
    if value.denominator == 1:
        digits = str(value.numerator)
        return digits if len(digits) <= MOST_DIGITS else None
    return repr(float(value))


def value_of(node: ast.AST, text: str) -> Fraction:
    """Return the value of a part of an expression. Raises ValueError for what is no sum, or beyond the limits."""
    if isinstance(node, ast.Constant):
        return Fraction(text[node.col_offset : node.end_col_offset])
    if isinstance(node, ast.UnaryOp):
        value = value_of(node.operand, text)
        return -value if isinstance(node.op, ast.USub) else value
    if not isinstance(node, ast.BinOp) or type(node.op) not in OPERATORS:
        raise ValueError(ast.dump(node))
    left, right = value_of(node.left, text), value_of(node.right, text)
    return OPERATORS[type(node.op)](left, right)  # type: ignore[no-any-return]


def power(base: Fraction, exponent: Fraction) -> Fraction:
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if exponent.denominator != 1 or bits * abs(exponent) > MOST_BITS:
        raise ValueError(exponent)
    return Fraction(base**exponent)


OPERATORS: dict[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: power,
}


class Tools:
    """A hook of completions: after a call of the calculator the tokens of its result come next.

    An expression without a value has no result; the model continues as it likes.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        marks: list[Any] = [tokenizer.token_to_id(name) for name in TOOL]  # `tokenizer.load` checks that it has them
        self.start, self.end, self.output_start, self.output_end = marks

    def __call__(self, text: Completion) -> Sequence[int]:
        tokens = text.tokens
        if tokens[-1] != self.end:
            return ()
        at = len(tokens) - 2
        while at >= 0 and tokens[at] not in (self.start, self.end):
            at -= 1
        if at < 0 or tokens[at] == self.end:
            return ()
        result = use_calculator(self.tokenizer.decode(tokens[at + 1 : -1]))
        if result is None:
            return ()
        return [self.output_start, *self.tokenizer.encode(result, add_special_tokens=False).ids, self.output_end]


Messages = Sequence[Mapping[str, Any]]
ROLES = ("user", "assistant")
PARTS: Mapping[str, tuple[str, bool]] = {
    "text": ("", True),
    "python": ("python", True),
    "python_output": ("output", False),
}
"""The name of the marks around a part of each type, and whether the assistant writes it."""


def checked(messages: Any) -> Messages:
    """Return the messages of the user and of the assistant, in turns; a system message is part of the first one.

    Raises InvalidDataError with the problem.
    """
    if not isinstance(messages, list) or not all(isinstance(each, Mapping) for each in messages):
        raise InvalidDataError(listed("program.no-messages"))
    system = ""
    if messages and messages[0].get("role") == "system":
        system, messages = f"{text_of(messages[0], 1)}\n\n", messages[1:]
    if not messages:
        raise InvalidDataError(listed("program.no-message"))
    found: list[Mapping[str, Any]] = []
    for number, message in enumerate(messages):
        expected, place = ROLES[number % 2], number + (2 if system else 1)
        if message.get("role") != expected:
            raise InvalidDataError(
                listed("program.roles-in-turn", number=place, expected=expected, role=str(message.get("role")))
            )
        if expected == "user":
            found.append({"role": "user", "content": (system if number == 0 else "") + text_of(message, place)})
        else:
            found.append({"role": "assistant", "content": parts_of(message, place)})
    return found


def parts_of(message: Mapping[str, Any], number: int) -> list[dict[str, str]]:
    content = message.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
        parts = [{}]
    for part in parts:
        if part.get("type") not in PARTS or not isinstance(part.get("text"), str):
            raise InvalidDataError(listed("program.message-parts", number=number, types=list(PARTS)))
    return [{"type": part["type"], "text": part["text"]} for part in parts]


def text_of(message: Mapping[str, Any], number: int) -> str:
    """Return the text of a message without tools."""
    parts = parts_of(message, number)
    if any(part["type"] != "text" for part in parts):
        raise InvalidDataError(listed("program.tool-of-user", number=number))
    return "".join(part["text"] for part in parts)


def render_conversation(tokenizer: Tokenizer, messages: Any, limit: int = 0) -> tuple[list[int], list[int]]:
    """Return the tokens of a conversation, and 1 for each that the assistant writes, else 0.

    Both are empty if there are more than `limit` tokens, 0: any number. Raises InvalidDataError.
    """
    ids, mask = [mark(tokenizer, BOS)], [0]
    for message in checked(messages):
        role = message["role"]
        pieces = [(f"<|{role}_start|>", "", 0)]
        if role == "user":
            pieces.append(("", message["content"], 0))
        else:
            for part in message["content"]:
                name, is_written = PARTS[part["type"]]
                start, end = (f"<|{name}_start|>", f"<|{name}_end|>") if name else ("", "")
                pieces += [(start, part["text"], int(is_written)), (end, "", int(is_written))]
        pieces.append((f"<|{role}_end|>", "", int(role == "assistant")))
        for special, text, learned in pieces:
            found = [mark(tokenizer, special)] if special else []
            found += tokenizer.encode(text, add_special_tokens=False).ids if text else []
            ids += found
            mask += [learned] * len(found)
    return ([], []) if 0 < limit < len(ids) else (ids, mask)


def render_for_completion(tokenizer: Tokenizer, messages: Any) -> list[int]:
    """Return the tokens up to the assistant's reply; a reply that is the last message is left out.

    Raises InvalidDataError.
    """
    given = checked(messages)
    asked = given[:-1] if len(given) % 2 == 0 else given
    return [*render_conversation(tokenizer, list(asked))[0], mark(tokenizer, "<|assistant_start|>")]


def mark(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    assert found is not None  # tokenizer.load refuses others
    return found


@dataclass(frozen=True)
class ConversationEncoder:
    """Encodes examples for the shards of `trainer.shards`."""

    tokenizer: Tokenizer

    def __call__(self, examples: Sequence[Any]) -> list[tuple[Any, Any]]:
        return [render_conversation(self.tokenizer, example.messages) for example in examples]


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
            return conversations.render_for_completion(self.tokenizer, [{"role": "user", "content": prompt}])
        start = conversations.mark(self.tokenizer, words.BOS)
        return [start, *self.tokenizer.encode(prompt, add_special_tokens=False).ids]
