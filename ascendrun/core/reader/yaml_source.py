"""YAML as a tree in which every node has its place, read event by event to limit time and memory for any file.

Only mappings, lists and scalars are read. Values that YAML 1.1 and 1.2 read differently are rejected with a hint: other
readers of the file would not agree on them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import field
from typing import Any, Union

import yaml

from ascendrun.core.dataclass import dataclass
from ascendrun.core.errors import Problem
from ascendrun.core.reader.source_text import MAX_PROBLEMS, NUL, REMOVE, decode_text
from ascendrun.text import Text, write

WRITE_OUT = Text("yaml.write-out", "write the value out where it is used")
KEY_VALUE = write("key: value")
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
_UNPRINTABLE = "[^\t\n\r\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]"
_BIDI = "[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
"""Compiled when a line needs them: that takes longer than the reading of most files."""

_TRAPS: tuple[tuple[str, Text, str], ...] = (
    (r"(?i:yes|on)", Text("yaml.trap-true", "true in YAML 1.1, a string in YAML 1.2"), "true"),
    (r"(?i:no|off)", Text("yaml.trap-false", "false in YAML 1.1, a string in YAML 1.2"), "false"),
    (r"[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?", Text("yaml.trap-base60", "a base-60 number in YAML 1.1"), ""),
    (r"[-+]?0[0-9_]+", Text("yaml.trap-octal", "octal in YAML 1.1, decimal in YAML 1.2"), ""),
    (r"[-+]?0(?:x[0-9a-fA-F_]+|o[0-7_]+|b[01_]+)", Text("yaml.trap-base", "a number only in some YAML versions"), ""),
    (
        r"[-+]?[0-9][0-9_]*_[0-9_]*(?:\.[0-9_]*)?(?:[eE][-+]?[0-9]+)?",
        Text("yaml.trap-underscore", "a number in YAML 1.1, a string in YAML 1.2"),
        "",
    ),
    (r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", Text("yaml.trap-infinite", "not a finite number"), ""),
)
"""Values that YAML versions read differently: the pattern, the reason, the replacement (empty: a plain number)."""
_TRAP_STARTS = tuple("+-.0123456789yYnNoO")


@dataclass(frozen=True)
class Place:
    """Location of a node; `line` and `column` count from 1, None: not in a file (a `--set`)."""

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
    """A parsed file: its tree (None: it is empty), its problems, and the invalid nodes, whose problem is already in
    `problems`. `is_complete`: the file was read to its end."""

    root: Node | None
    problems: list[Problem]
    invalid: dict[int, Node]
    is_complete: bool

    def mark_invalid(self, node: Node, problem: Problem) -> None:
        self.problems.append(problem)
        self.invalid[id(node)] = node

    def is_invalid(self, node: Node | None) -> bool:
        return node is not None and id(node) in self.invalid


def read_yaml(data: str | bytes, file: str, *, is_plain: bool = False) -> Source:
    """Parse one document; never raises for its contents. `is_plain`: all values are texts, and no YAML version reads
    another value."""
    lines, problems = decode_text(data, file, max_bytes=MAX_BYTES)
    source = Source(None, problems, {}, is_complete=False)
    if problems and not lines:
        return source
    problems.extend(_invalid_characters(lines, file))
    if any("\r" in line for line in lines):
        return source
    lines = [line if line.isprintable() else re.sub(f"{_BIDI}|{_UNPRINTABLE}", "\ufffd", line) for line in lines]
    builder = _Builder(file, source, is_plain=is_plain)
    try:
        builder.build("\n".join(lines))
    except yaml.MarkedYAMLError as error:
        problems.append(_syntax_problem(error, file, lines))
    except yaml.YAMLError as error:
        problems.append(Problem(file, 1, 1, _not_yaml(str(error))))
    return source


def read_value(text: str, place: Place) -> Source:
    """The value of a `--set`: list, mapping or quoted text where it starts as such, else the text unchanged."""
    if text[:1] in ("[", "{", '"', "'"):
        source = read_yaml(text, place.file)
        for node in walk(source.root):
            _move(node, place)
        source.problems[:] = [place.problem(problem.message, problem.hint) for problem in source.problems]
        return source
    node = ScalarNode(place, text, plain=text != "")
    source = Source(node, [], {}, is_complete=True)
    _check_scalar(node, source)
    return source


def scalar_value(node: ScalarNode) -> Value:
    """Return the value of a scalar. Text: quoted, or plain and not null, a truth value or a finite number."""
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
        number = float(text)
        return number if math.isfinite(number) else text  # 1E400 is text to other readers too; no field takes it
    return text


def walk(node: Node | None) -> Iterator[Node]:
    """Yield the node and all below it."""
    stack = [node] if node is not None else []
    while stack:
        each = stack.pop()
        yield each
        if isinstance(each, MappingNode):
            stack.extend(each.entries.values())
        elif isinstance(each, ListNode):
            stack.extend(each.items)


def find(node: Node | None, path: tuple[str | int, ...]) -> Node | None:
    """Return the node at `path`; None if not found."""
    for step in path:
        if isinstance(node, MappingNode) and isinstance(step, str):
            node = node.entries.get(step)
        elif isinstance(node, ListNode) and isinstance(step, int) and 0 <= step < len(node.items):
            node = node.items[step]
        else:
            return None
    return node


def texts(node: Node) -> Any:
    """Return a tree as dicts, tuples and texts; None for a null."""
    if isinstance(node, MappingNode):
        return {key: texts(value) for key, value in node.entries.items()}
    if isinstance(node, ListNode):
        return tuple(map(texts, node.items))
    return None if node.plain and node.text in ("", "~", "null") else node.text


def place_of(root: Node, path: Sequence[Any]) -> Place:
    """Return the location of the value at `path`; of a missing value, that of the nearest enclosing section."""
    steps: list[Any] = list(path)
    while steps:
        node = find(root, tuple(steps))
        if node is not None:
            return node.place
        steps.pop()
    return root.place


def key_place(root: Node, path: Sequence[Any]) -> Place:
    """Return the location of the key at `path`; of a list item, that of its value."""
    parent = find(root, tuple(path[:-1]))
    if isinstance(parent, MappingNode) and path and path[-1] in parent.keys:
        return parent.keys[path[-1]]
    return place_of(root, path)


class _Builder:
    """Builds the tree from events. Holds the open collections, outermost first, each mapping with its pending key."""

    def __init__(self, file: str, source: Source, *, is_plain: bool) -> None:
        self.file = file
        self.is_plain = is_plain
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
                    self._report(
                        event,
                        Text("yaml.documents", "second document in the file"),
                        Text("yaml.documents-hint", "remove the line --- and everything below it"),
                    )
                    return
            elif isinstance(event, yaml.AliasEvent):
                self._add(self._alias(event))
            elif isinstance(event, yaml.ScalarEvent):
                self._scalar(event)
            elif isinstance(event, (yaml.SequenceStartEvent, yaml.MappingStartEvent)):
                if len(self.open) == MAX_DEPTH:
                    self._report(event, Text("yaml.depth", "nested more than {limit} levels deep", limit=MAX_DEPTH))
                    return
                self._start(event)
            elif isinstance(event, (yaml.SequenceEndEvent, yaml.MappingEndEvent)):
                self.open.pop()
                self.key.pop()
            if self.nodes > MAX_NODES:
                self._report(event, Text("yaml.size", "more than {limit} values", limit=MAX_NODES))
                return
            if len(self.source.problems) > MAX_PROBLEMS:
                return
        self.source.is_complete = True

    def _place(self, event: Any) -> Place:
        return Place(self.file, event.start_mark.line + 1, event.start_mark.column + 1)

    def _report(self, event: Any, message: Text, hint: Text | None = None) -> None:
        self.source.problems.append(self._place(event).problem(message, hint))

    def _alias(self, event: Any) -> ScalarNode:
        node = ScalarNode(self._place(event), "", plain=True)
        text = Text("yaml.alias", "alias *{name}: aliases are not supported", name=event.anchor)
        self.source.mark_invalid(node, node.place.problem(text, WRITE_OUT))
        return node

    def _check_properties(self, event: Any, node: Node) -> None:
        if event.anchor is not None:
            self._report(
                event, Text("yaml.anchor", "anchor &{name}: anchors are not supported", name=event.anchor), WRITE_OUT
            )
        if event.tag is not None:
            text = Text("yaml.tag", "tag {tag:quote}: tags are not supported", tag=event.tag)
            hint = Text("yaml.tag-hint", "remove it; quote a value to make it a string")
            self.source.mark_invalid(node, node.place.problem(text, hint))

    def _scalar(self, event: Any) -> None:
        node = ScalarNode(self._place(event), event.value, plain=not event.style)
        self._check_properties(event, node)
        is_key = bool(self.open) and isinstance(self.open[-1], MappingNode) and self.key[-1] is None
        if not is_key and not self.source.is_invalid(node):
            _check_scalar(node, self.source, is_plain=self.is_plain)
        elif "\0" in node.text:
            self.source.mark_invalid(node, node.place.problem(NUL, REMOVE))
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
        text = Text("yaml.key", "a key must be a plain string")
        self.source.mark_invalid(node, node.place.problem(text, KEY_VALUE))
        stand_in = ScalarNode(node.place, "", plain=True)
        self.source.invalid[id(stand_in)] = stand_in
        return stand_in

    def _put(self, parent: MappingNode, key: ScalarNode, node: Node) -> None:
        if self.source.is_invalid(key):
            return
        if key.plain and key.text == "<<":
            text = Text("yaml.merge", "merge key <<: merging is not supported")
            self.source.problems.append(key.place.problem(text, WRITE_OUT))
        elif key.text in parent.entries:
            first = parent.keys[key.text]
            text = Text(
                "yaml.duplicate", "duplicate key {key:quote} (first at line {line})", key=key.text, line=first.line
            )
            self.source.problems.append(key.place.problem(text))
        else:
            parent.entries[key.text] = node
            parent.keys[key.text] = key.place


def _check_scalar(node: ScalarNode, source: Source, *, is_plain: bool = False) -> None:
    text = node.text
    if "\0" in text:
        source.mark_invalid(node, node.place.problem(NUL, REMOVE))
    elif any("\ud800" <= character <= "\udfff" for character in text):
        source.mark_invalid(
            node,
            node.place.problem(
                Text("yaml.surrogate", "incomplete surrogate pair"),
                Text("yaml.surrogate-hint", "write the character itself"),
            ),
        )
    elif node.plain and not is_plain and len(text) <= 400:
        _check_plain(node, source)


def _check_plain(node: ScalarNode, source: Source) -> None:
    for pattern, why, value in _TRAPS if node.text[:1] in _TRAP_STARTS else ():
        if re.fullmatch(pattern, node.text):
            text = Text("yaml.trap", "ambiguous value {value:quote} ({why})", value=node.text, why=why)
            hint = Text(
                "yaml.trap-hint",
                'write {value}, or "{text}" for the string',
                value=value or Text("yaml.plain-number", "a plain decimal number"),
                text=node.text,
            )
            source.mark_invalid(node, node.place.problem(text, hint))
            return
    number = scalar_value(node)
    if type(number) is int and not -(2**63) <= number < 2**63:
        text = Text("yaml.huge", "number {value:quote} is too large", value=node.text)
        hint = Text("yaml.huge-hint", "quote it to make it a string")
        source.mark_invalid(node, node.place.problem(text, hint))


def _invalid_characters(lines: list[str], file: str) -> Iterator[Problem]:
    """Yield characters that YAML forbids or that change the display of a line; at most one of each per line."""
    for number, line in enumerate(lines, start=1):
        if line.isprintable():
            continue
        forbidden = re.search(_UNPRINTABLE, line)
        if forbidden:
            text = Text("yaml.character", "character {code} not allowed", code=f"U+{ord(forbidden.group()):04X}")
            hint = Text("yaml.character-hint", "write it as an escape in double quotes")
            yield Problem(file, number, forbidden.start() + 1, text, hint)
        bidi = re.search(_BIDI, line)
        if bidi:
            code = ord(bidi.group())
            text = Text("yaml.bidi", "{code} changes the writing direction of the line", code=f"U+{code:04X}")
            hint = Text("yaml.bidi-hint", 'remove it, or write "{escape}"', escape=f"\\u{code:04x}")
            yield Problem(file, number, bidi.start() + 1, text, hint)
        if "\r" in line:
            text = Text("yaml.carriage-return", "carriage return inside a line")
            hint = Text("yaml.carriage-return-hint", "save the file with Unix line ends")
            yield Problem(file, number, line.index("\r") + 1, text, hint)


def _syntax_problem(error: yaml.MarkedYAMLError, file: str, lines: list[str]) -> Problem:
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)
    text = lines[line - 1] if line <= len(lines) else ""
    if text[column - 1 : column] == "\t" or (text[:column].strip(" ") == "\t" and not text[:column].strip()):
        message = Text("yaml.tab", "tab in the indentation")
        return Problem(file, line, column, message, Text("yaml.tab-hint", "indent with spaces"))
    return Problem(file, line, column, _not_yaml(error.problem or error.context or ""), _syntax_hint(error))


def _not_yaml(reason: str) -> Text:
    return Text("yaml.syntax", "invalid YAML: {reason}", reason=reason)


def _syntax_hint(error: yaml.MarkedYAMLError) -> Text | str | None:
    context, problem = error.context or "", error.problem or ""
    line = error.context_mark.line + 1 if error.context_mark is not None else None
    if "flow" in context:
        return Text("yaml.bracket", "close the bracket of line {line}, or add the missing comma", line=line)
    if "quoted" in context and "end of stream" in problem:
        return Text("yaml.quote", "close the quote of line {line}", line=line)
    if "quoted" in context:
        return Text("yaml.single-quotes", "write the value in 'single quotes'")
    if "block" in context:
        return Text("yaml.indent", "indent it like line {line}", line=line) if line is not None else None
    if "mapping values" in problem:
        return Text("yaml.colon", 'write a value that contains ": " in "quotes"')
    if "cannot start" in problem:
        return Text("yaml.start", 'write a value that starts with this character in "quotes"')
    return context or None


def _move(node: Node, place: Place) -> None:
    node.place = place
    if isinstance(node, MappingNode):
        node.keys = dict.fromkeys(node.keys, place)


def to_plain(node: Node) -> Any:
    """Return the tree as dicts, tuples and values."""
    if isinstance(node, MappingNode):
        return {key: to_plain(value) for key, value in node.entries.items()}
    if isinstance(node, ListNode):
        return tuple(to_plain(item) for item in node.items)
    return scalar_value(node)
