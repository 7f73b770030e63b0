"""The calculator that the model may call: sums of numbers, and how often a text has another one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from tokenizers import Tokenizer

from ascendrun.programs.generation.engine import Completion

MOST_CHARACTERS, MOST_OPEN, MOST_POWERS, MOST_BITS, MOST_DIGITS = 256, 24, 4, 2048, 64
"""Limits of an expression, its nesting, its powers, a power's result and the result. With them none takes a
millisecond, so all ranks get the same result and no timer is needed."""
PIECE = re.compile(
    r"\s*(?:(?P<number>[0-9]+\.?[0-9]*|\.[0-9]+)|(?P<quote>['\"])(?P<text>[^'\"\\]*)(?P=quote)|(?P<mark>\*\*|\.count|[-+*/()]))"
)
TOOL = ("<|python_start|>", "<|python_end|>", "<|output_start|>", "<|output_end|>")


class NotAnExpressionError(Exception):
    """The text is not an expression of the calculator, or beyond its limits."""


def calculate(text: str) -> str | None:
    """Return the value of an expression of numbers with + - * / ** ( ), and `'text'.count('x')`; None: it has none."""
    if len(text) > MOST_CHARACTERS or text.count("(") > MOST_OPEN or text.count("**") > MOST_POWERS:
        return None
    if "'" not in text and '"' not in text:
        text = re.sub(r"(?<=\d),(?=\d)", "", text)
    try:
        expression = Expression(text)
        value = expression.sum()
        if expression.pieces:
            return None
        return shown(value)
    except (NotAnExpressionError, ZeroDivisionError, OverflowError):
        return None


def shown(value: Fraction) -> str | None:
    if value.denominator == 1:
        digits = str(value.numerator)
        return digits if len(digits) <= MOST_DIGITS else None
    return repr(float(value))


class Expression:
    """The rest of a text in pieces; each method takes what it understands from its start."""

    def __init__(self, text: str) -> None:
        self.pieces: list[tuple[str, str]] = []
        text, at = text.strip(), 0
        while at < len(text):
            found = PIECE.match(text, at)
            if found is None:
                raise NotAnExpressionError
            kind = "number" if found["number"] else "mark" if found["mark"] else "text"
            self.pieces.append((kind, found[kind]))
            at = found.end()
        self.pieces.reverse()

    def next_is(self, *marks: str) -> str | None:
        """Take the next piece if it is one of these marks."""
        if self.pieces and self.pieces[-1][0] == "mark" and self.pieces[-1][1] in marks:
            return self.pieces.pop()[1]
        return None

    def take(self, kind: str) -> str:
        if not self.pieces or self.pieces[-1][0] != kind:
            raise NotAnExpressionError
        return self.pieces.pop()[1]

    def expect(self, mark: str) -> None:
        if self.next_is(mark) is None:
            raise NotAnExpressionError

    def sum(self) -> Fraction:
        value = self.product()
        while mark := self.next_is("+", "-"):
            other = self.product()
            value = value + other if mark == "+" else value - other
        return value

    def product(self) -> Fraction:
        value = self.signed()
        while mark := self.next_is("*", "/"):
            other = self.signed()
            value = value * other if mark == "*" else value / other
        return value

    def signed(self) -> Fraction:
        sign = 1
        while mark := self.next_is("+", "-"):
            sign = -sign if mark == "-" else sign
        return sign * self.power()

    def power(self) -> Fraction:
        base = self.single()
        if self.next_is("**") is None:
            return base
        exponent = self.signed()
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if exponent.denominator != 1 or bits * abs(exponent) > MOST_BITS:
            raise NotAnExpressionError
        return Fraction(base**exponent)

    def single(self) -> Fraction:
        if self.next_is("("):
            value = self.sum()
            self.expect(")")
            return value
        if self.pieces and self.pieces[-1][0] == "number":
            return Fraction(self.take("number"))
        text = self.take("text")
        self.expect(".count")
        self.expect("(")
        part = self.take("text")
        self.expect(")")
        return Fraction(text.count(part))


class Tools:
    """A hook of completions: after a call of the calculator the tokens of its result come next.

    An expression without a value has no result; the model continues as it likes.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.start, self.end, self.output_start, self.output_end = (number_of(tokenizer, mark) for mark in TOOL)

    def __call__(self, text: Completion) -> Sequence[int]:
        tokens = text.tokens
        if tokens[-1] != self.end:
            return ()
        at = len(tokens) - 2
        while at >= 0 and tokens[at] not in (self.start, self.end):
            at -= 1
        if at < 0 or tokens[at] == self.end:
            return ()
        result = calculate(self.tokenizer.decode(tokens[at + 1 : -1]))
        if result is None:
            return ()
        return [self.output_start, *self.tokenizer.encode(result, add_special_tokens=False).ids, self.output_end]


def number_of(tokenizer: Tokenizer, mark: str) -> int:
    return int(tokenizer.token_to_id(mark))  # type: ignore[arg-type]  # `tokenizer.load` checks that it has them
