"""The calculator that the model may call: sums of numbers, and how often a text has another one."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from tokenizers import Tokenizer

from ascendrun.programs.generation.engine import Completion

MOST_CHARACTERS, MOST_OPEN, MOST_POWERS, MOST_BITS, MOST_DIGITS = 256, 24, 4, 2048, 64
"""Limits of an expression, its nesting, its powers, a power's result and the result. With them none takes a
millisecond, so all ranks get the same result and no timer is needed."""
COUNT = re.compile(r"""(['"])([^'"\\]*)\1\s*\.count\s*\(\s*(['"])([^'"\\]*)\3\s*\)""")
TOOL = ("<|python_start|>", "<|python_end|>", "<|output_start|>", "<|output_end|>")


def calculate(text: str) -> str | None:
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
        result = calculate(self.tokenizer.decode(tokens[at + 1 : -1]))
        if result is None:
            return ()
        return [self.output_start, *self.tokenizer.encode(result, add_special_tokens=False).ids, self.output_end]
