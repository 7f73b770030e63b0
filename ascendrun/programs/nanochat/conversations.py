"""Conversations as tokens: marks around every message; only what the assistant itself writes carries loss.

A conversation is a list of messages {"role": "system" | "user" | "assistant", "content": a text, or parts
{"type": "text" | "python" | "python_output", "text": …}}. The user begins, and the roles take turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.nanochat.tokenizer import BOS

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
        raise InvalidDataError("program.no-messages", "expected a list of messages with role and content")
    system = ""
    if messages and messages[0].get("role") == "system":
        system, messages = f"{text_of(messages[0], 1)}\n\n", messages[1:]
    if not messages:
        raise InvalidDataError("program.no-message", "the conversation has no message of the user")
    found: list[Mapping[str, Any]] = []
    for number, message in enumerate(messages):
        expected, place = ROLES[number % 2], number + (2 if system else 1)
        if message.get("role") != expected:
            raise InvalidDataError(
                "program.roles-in-turn",
                "message {number}: expected the role {expected}, got {role:quote}; the user begins, and the roles take "
                "turns",
                number=place,
                expected=expected,
                role=str(message.get("role")),
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
            raise InvalidDataError(
                "program.message-parts",
                "message {number}: expected a text, or parts with a text and one of the types {types}",
                number=number,
                types=list(PARTS),
            )
    return [{"type": part["type"], "text": part["text"]} for part in parts]


def text_of(message: Mapping[str, Any], number: int) -> str:
    """Return the text of a message without tools."""
    parts = parts_of(message, number)
    if any(part["type"] != "text" for part in parts):
        raise InvalidDataError(
            "program.tool-of-user", "message {number}: only the assistant can use python", number=number
        )
    return "".join(part["text"] for part in parts)


def render(tokenizer: Tokenizer, messages: Any, limit: int = 0) -> tuple[list[int], list[int]]:
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


def prompt(tokenizer: Tokenizer, messages: Any) -> list[int]:
    """Return the tokens up to the assistant's reply; a reply that is the last message is left out.

    Raises InvalidDataError.
    """
    given = checked(messages)
    asked = given[:-1] if len(given) % 2 == 0 else given
    return [*render(tokenizer, list(asked))[0], mark(tokenizer, "<|assistant_start|>")]


def mark(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    assert found is not None  # tokenizer.load refuses others
    return found


@dataclass(frozen=True)
class ConversationEncoder:
    """Encodes examples for the shards of `trainer.shards`."""

    tokenizer: Tokenizer

    def __call__(self, examples: Sequence[Any]) -> list[tuple[Any, Any]]:
        return [render(self.tokenizer, example.messages) for example in examples]
