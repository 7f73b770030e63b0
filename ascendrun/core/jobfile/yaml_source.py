"""YAML as a tree whose every piece knows its place, read event by event so that no file can make us build a bomb.

Only the plain part of YAML is read: mappings, lists and scalars. What YAML 1.1 and 1.2 understand differently is
refused with the way to write it, since the file's readers would not agree on it either.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Union

import yaml

from ascendrun.core.errors import Problem
from ascendrun.core.jobfile.source_text import decode_text
from ascendrun.core.message_format import MAX_PROBLEMS, shown
from ascendrun.text import Text

MAX_BYTES = 1_000_000
MAX_DEPTH = 32
MAX_NODES = 50_000

# The C parser is ten times faster; a Python without it still reads job files.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_NULL = frozenset(("", "~", "null", "Null", "NULL"))
_TRUE = frozenset(("true", "True", "TRUE"))
_FALSE = frozenset(("false", "False", "FALSE"))
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_BIDI = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")

_TRAPS: tuple[tuple[re.Pattern[str], str, str], ...] = (
    (re.compile(r"(?i:yes|on)"), "is true for YAML 1.1 and text for YAML 1.2", 'write true, or "{0}" for the text'),
    (re.compile(r"(?i:no|off)"), "is false for YAML 1.1 and text for YAML 1.2", 'write false, or "{0}" for the text'),
    (
        re.compile(r"[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?"),
        "is a number to base 60 for YAML 1.1",
        'write plain seconds, or "{0}" for the text',
    ),
    (
        re.compile(r"[-+]?0[0-9_]+"),
        "is an octal number for YAML 1.1 and a decimal one for YAML 1.2",
        'write it without the leading 0, or "{0}" for the text',
    ),
    (
        re.compile(r"[-+]?0(?:x[0-9a-fA-F_]+|o[0-7_]+|b[01_]+)"),
        "is a number only for some YAML readers",
        'write it in decimal, or "{0}" for the text',
    ),
    (
        re.compile(r"[-+]?[0-9][0-9_]*_[0-9_]*(?:\.[0-9_]*)?(?:[eE][-+]?[0-9]+)?"),
        "is a number for YAML 1.1 and text for YAML 1.2",
        'write it without _, or "{0}" for the text',
    ),
    (
        re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"),
        "is no number that can be used",
        'write a finite one, or "{0}" for the text',
    ),
)


@dataclass(frozen=True)
class Place:
    """Where a piece stands; `line` and `column` count from 1, None: not in a file (a `--set`)."""

    file: str
    line: int | None = None
    column: int | None = None

    def problem(self, message: Text | str, hint: Text | str | None = None) -> Problem:
        return Problem(self.file, self.line, self.column, message, hint)


@dataclass
class ScalarNode:
    """One value. `plain`: written without quotes, so that `text` may mean a number, a truth value or null."""

    place: Place
    text: str
    plain: bool


@dataclass
class ListNode:
    place: Place
    items: list[Node] = field(default_factory=list)


@dataclass
class MappingNode:
    """`keys` holds the place of each key."""

    place: Place
    entries: dict[str, Node] = field(default_factory=dict)
    keys: dict[str, Place] = field(default_factory=dict)


Node = Union[ScalarNode, ListNode, MappingNode]
Value = Union[None, bool, int, float, str]


@dataclass
class Source:
    """A file read: its tree (None: it is empty), what is wrong with it, and which nodes are spoilt: a problem of them
    was told, so that they need no second one. `is_whole`: reading reached the end of the file."""

    root: Node | None
    problems: list[Problem]
    spoilt: dict[int, Node]
    is_whole: bool

    def spoil(self, node: Node, problem: Problem) -> None:
        self.problems.append(problem)
        self.spoilt[id(node)] = node

    def is_spoilt(self, node: Node | None) -> bool:
        return node is not None and id(node) in self.spoilt


def read_yaml(data: str | bytes, file: str) -> Source:
    """Reads one document; never raises for what stands in it."""
    lines, problems = decode_text(data, file, max_bytes=MAX_BYTES)
    source = Source(None, problems, {}, is_whole=False)
    if problems and not lines:
        return source
    problems.extend(_bad_characters(lines, file))
    if any("\r" in line for line in lines):
        return source
    lines = [_BIDI.sub("\ufffd", _UNPRINTABLE.sub("\ufffd", line)) for line in lines]
    builder = _Builder(file, source)
    try:
        builder.build("\n".join(lines))
    except yaml.MarkedYAMLError as error:
        problems.append(_syntax_problem(error, file, lines))
    except yaml.YAMLError as error:
        problems.append(Problem(file, 1, 1, f"is not YAML: {shown(str(error))}"))
    return source


def read_value(text: str, place: Place) -> Source:
    """The value of a `--set`: a list, a mapping or a quoted text where it starts like one, else the text as it is."""
    if text[:1] in ("[", "{", '"', "'"):
        source = read_yaml(text, place.file)
        for node in walk(source.root):
            _move(node, place)
        source.problems[:] = [place.problem(problem.message, problem.hint) for problem in source.problems]
        return source
    node = ScalarNode(place, text, plain=text != "")
    source = Source(node, [], {}, is_whole=True)
    _check_scalar(node, source)
    return source


def scalar_value(node: ScalarNode) -> Value:
    """What the text means. Quoted text is text; so is plain text that is no null, truth value or number."""
    text = node.text
    if not node.plain:
        return text
    if text in _NULL:
        return None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    if len(text) <= 400 and _INT.fullmatch(text):
        return int(text)
    if len(text) <= 400 and _FLOAT.fullmatch(text):
        return float(text)
    return text


def walk(node: Node | None) -> Iterator[Node]:
    """The node and all below it."""
    stack = [node] if node is not None else []
    while stack:
        each = stack.pop()
        yield each
        if isinstance(each, MappingNode):
            stack.extend(each.entries.values())
        elif isinstance(each, ListNode):
            stack.extend(each.items)


def find(node: Node | None, path: tuple[str | int, ...]) -> Node | None:
    """The node at `path`; None when there is none."""
    for step in path:
        if isinstance(node, MappingNode) and isinstance(step, str):
            node = node.entries.get(step)
        elif isinstance(node, ListNode) and isinstance(step, int) and 0 <= step < len(node.items):
            node = node.items[step]
        else:
            return None
    return node


class _Builder:
    """Builds the tree from events. Holds the open collections, outermost first, each mapping with its waiting key."""

    def __init__(self, file: str, source: Source) -> None:
        self.file = file
        self.source = source
        self.open: list[ListNode | MappingNode] = []
        self.key: list[ScalarNode | None] = []
        self.nodes = 0

    def build(self, text: str) -> None:
        documents = 0
        for event in yaml.parse(text, Loader=_LOADER):
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents == 2:
                    self._tell(event, "a second document starts", "one job a file: delete from the line `---` on")
                    return
            elif isinstance(event, yaml.AliasEvent):
                self._add(self._alias(event))
            elif isinstance(event, yaml.ScalarEvent):
                self._scalar(event)
            elif isinstance(event, (yaml.SequenceStartEvent, yaml.MappingStartEvent)):
                if len(self.open) == MAX_DEPTH:
                    self._tell(event, f"is nested more than {MAX_DEPTH} levels deep", "is it the right file?")
                    return
                self._start(event)
            elif isinstance(event, (yaml.SequenceEndEvent, yaml.MappingEndEvent)):
                self.open.pop()
                self.key.pop()
            if self.nodes > MAX_NODES:
                self._tell(event, f"holds more than {MAX_NODES} values", "is it the right file?")
                return
            if len(self.source.problems) > MAX_PROBLEMS:
                return
        self.source.is_whole = True

    def _place(self, event: Any) -> Place:
        return Place(self.file, event.start_mark.line + 1, event.start_mark.column + 1)

    def _tell(self, event: Any, message: str, hint: str | None = None) -> None:
        self.source.problems.append(self._place(event).problem(message, hint))

    def _alias(self, event: Any) -> ScalarNode:
        node = ScalarNode(self._place(event), "", plain=True)
        self.source.spoil(node, node.place.problem(f"alias *{event.anchor}: aliases are not read", "write it out"))
        return node

    def _check_properties(self, event: Any, node: Node) -> None:
        if event.anchor is not None:
            self._tell(event, f"anchor &{event.anchor}: anchors are not read", "write it out where it is used")
        if event.tag is not None:
            self.source.spoil(
                node, node.place.problem(f"tag {shown(event.tag)}: tags are not read", "delete it; quotes make a text")
            )

    def _scalar(self, event: Any) -> None:
        node = ScalarNode(self._place(event), event.value, plain=not event.style)
        self._check_properties(event, node)
        is_key = bool(self.open) and isinstance(self.open[-1], MappingNode) and self.key[-1] is None
        if not is_key and not self.source.is_spoilt(node):
            _check_scalar(node, self.source)
        elif "\0" in node.text:
            self.source.spoil(node, node.place.problem("NUL character", "delete it"))
        self._add(node)

    def _start(self, event: Any) -> None:
        make = ListNode if isinstance(event, yaml.SequenceStartEvent) else MappingNode
        node = make(self._place(event))
        self._check_properties(event, node)
        self._add(node)
        self.open.append(node)
        self.key.append(None)

    def _add(self, node: Node) -> None:
        self.nodes += 1
        if not self.open:
            self.source.root = node
            return
        parent = self.open[-1]
        if isinstance(parent, ListNode):
            parent.items.append(node)
            return
        key = self.key[-1]
        if key is None:
            self.key[-1] = self._as_key(node)
            return
        self.key[-1] = None
        self._put(parent, key, node)

    def _as_key(self, node: Node) -> ScalarNode:
        if isinstance(node, ScalarNode):
            return node
        self.source.spoil(node, node.place.problem("a key must be a word", "write key: value"))
        stand_in = ScalarNode(node.place, "", plain=True)
        self.source.spoilt[id(stand_in)] = stand_in
        return stand_in

    def _put(self, parent: MappingNode, key: ScalarNode, node: Node) -> None:
        if self.source.is_spoilt(key):
            return
        if key.plain and key.text == "<<":
            self.source.problems.append(key.place.problem("merge key <<: merging is not read", "write it out"))
        elif key.text in parent.entries:
            first = parent.keys[key.text]
            self.source.problems.append(
                key.place.problem(f"{shown(key.text)} stands twice: first on line {first.line}", "leave one")
            )
        else:
            parent.entries[key.text] = node
            parent.keys[key.text] = key.place


def _check_scalar(node: ScalarNode, source: Source) -> None:
    text = node.text
    if "\0" in text:
        source.spoil(node, node.place.problem("NUL character: no argument or variable can hold it", "delete it"))
    elif any("\ud800" <= character <= "\udfff" for character in text):
        source.spoil(node, node.place.problem("half of a surrogate pair: no text", "write the character itself"))
    elif node.plain and len(text) <= 400:
        _check_plain(node, source)


def _check_plain(node: ScalarNode, source: Source) -> None:
    for pattern, why, hint in _TRAPS:
        if pattern.fullmatch(node.text):
            source.spoil(node, node.place.problem(f"{shown(node.text)} without quotes {why}", hint.format(node.text)))
            return
    value = scalar_value(node)
    is_huge = isinstance(value, float) and not math.isfinite(value)
    if is_huge or (type(value) is int and not -(2**63) <= value < 2**63):
        source.spoil(
            node, node.place.problem(f"{shown(node.text)} is too large a number", "put it in quotes if it is text")
        )


def _bad_characters(lines: list[str], file: str) -> Iterator[Problem]:
    """Characters that YAML forbids, and those that make a line look other than it is; at most one a line each."""
    for number, line in enumerate(lines, start=1):
        bad = _UNPRINTABLE.search(line)
        if bad:
            yield Problem(
                file,
                number,
                bad.start() + 1,
                f"character U+{ord(bad.group()):04X} cannot stand here",
                'inside "quotes" write it as an escape',
            )
        turned = _BIDI.search(line)
        if turned:
            yield Problem(
                file,
                number,
                turned.start() + 1,
                f"U+{ord(turned.group()):04X} turns the direction of writing: the line is not what it shows",
                f'delete it; meant as data, write "\\u{ord(turned.group()):04x}"',
            )
        if "\r" in line:
            yield Problem(
                file, number, line.index("\r") + 1, "carriage return inside a line", "save the file with Unix line ends"
            )


def _syntax_problem(error: yaml.MarkedYAMLError, file: str, lines: list[str]) -> Problem:
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)
    text = lines[line - 1] if line <= len(lines) else ""
    if text[column - 1 : column] == "\t" or (text[:column].strip(" ") == "\t" and not text[:column].strip()):
        return Problem(file, line, column, "a tab is no indentation in YAML", "use spaces")
    message = f"is not YAML: {error.problem or error.context}"
    return Problem(file, line, column, message, _syntax_hint(error))


def _syntax_hint(error: yaml.MarkedYAMLError) -> str | None:
    context, problem = error.context or "", error.problem or ""
    start = f" of line {error.context_mark.line + 1}" if error.context_mark is not None else ""
    if "flow" in context:
        return f"the bracket{start} is not closed, or a comma is missing"
    if "quoted" in context:
        return f"the quote{start} is not closed" if "end of stream" in problem else "write the text in 'single quotes'"
    if "block" in context:
        return f"indent it like line {error.context_mark.line + 1}" if error.context_mark is not None else None
    if "mapping values" in problem:
        return 'a text with ": " in it stands in "quotes"'
    if "cannot start" in problem:
        return 'a text that starts with this character stands in "quotes"'
    return context or None


def _move(node: Node, place: Place) -> None:
    node.place = place
    if isinstance(node, MappingNode):
        node.keys = dict.fromkeys(node.keys, place)


def to_plain(node: Node) -> Any:
    """The tree as dicts, tuples and values."""
    if isinstance(node, MappingNode):
        return {key: to_plain(value) for key, value in node.entries.items()}
    if isinstance(node, ListNode):
        return tuple(to_plain(item) for item in node.items)
    return scalar_value(node)
