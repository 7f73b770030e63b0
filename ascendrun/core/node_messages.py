"""Messages that nodes send as key and values: conversion of the data to a text of text/en.json (`node.KEY`).

Nodes run their own standard-library code without templates: node/op_errors.py makes the data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ascendrun.core.dataclass import dataclass
from ascendrun.core.errors import AscendrunError, Problem
from ascendrun.text import Text, from_json, listed, to_json, translations


@dataclass(frozen=True)
class Failure:
    """Reason why a node, or the connection to it, gave no result. `code`: of a node's error or an AscendrunError.
    `owner`: the run that holds what was requested, None: unknown, or nothing is held. `host`: the one that the message
    names, None: none."""

    code: str
    message: Text | str
    hint: Text | str | None = None
    owner: str | None = None
    host: str | None = None

    @classmethod
    def of(cls, error: AscendrunError, code: str | None = None) -> Failure:
        """`code` None: that of the error."""
        return cls(code or error.code, error.message, error.hint, host=error.host)

    @classmethod
    def of_node(cls, row: Mapping[str, Any]) -> Failure:
        """Create it from an agent's error: {"code", "message": {"key", "values"}}."""
        code, data = str(row.get("code", "internal")), row.get("message")
        owner = _values(data).get("tag") if code == "held" and isinstance(data, Mapping) else None
        return cls(code, node_text(data), node_hint(data), None if owner is None else str(owner))

    def to_json(self) -> dict[str, Any]:
        return {"code": self.code, "message": to_json(self.message), "hint": to_json(self.hint), "host": self.host}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Failure:
        message, hint = from_json(row.get("message") or ""), from_json(row.get("hint"))
        return cls(str(row.get("code")), message, hint, host=row.get("host"))

    def problem_of(self, host: str) -> Problem:
        """Return it as the problem of this host."""
        return Problem(host, None, None, self.message, self.hint, named=self.host)

    def line(self) -> Text:
        """Return message and hint in one line, for a table cell or an event."""
        if self.hint is None:
            return Text("node.failure", "{message}", message=self.message)
        return Text("node.failure-and-hint", "{message} ({hint})", message=self.message, hint=self.hint)


def node_text(data: Any) -> Text | str:
    """Return the text of a node's message. Other data (an older agent's sentence) stays unchanged."""
    if not isinstance(data, Mapping):
        return str(data)
    key = f"node.{data.get('key')}"
    return Text(key, translations("en").get(key, str(data.get("key"))), **_values(data))


def node_hint(data: Any) -> Text | None:
    key = f"node.{data.get('key')}.hint" if isinstance(data, Mapping) else ""
    return listed(key, **_values(data)) if key in translations("en") else None


def with_texts(value: Any) -> Any:
    """Return a raw reply of a node with its messages as texts."""
    if isinstance(value, Mapping):
        if set(value) == {"key", "values"} and f"node.{value['key']}" in translations("en"):
            return node_text(value)
        return {name: with_texts(item) for name, item in value.items()}
    return [with_texts(item) for item in value] if isinstance(value, list) else value


def _values(data: Mapping[str, Any]) -> dict[str, Any]:
    values = with_texts(data.get("values") or {})
    return dict(values) if isinstance(values, Mapping) else {}
