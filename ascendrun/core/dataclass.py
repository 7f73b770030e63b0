"""Dataclasses that are made when they are first used, and read by the types of their fields from JSON.

`dataclass` is that of the standard library, but makes the methods of a class when the class is first used, and compiles
one of them, `__init__`, in place of six. The messages alone are a hundred classes, of which a command uses ten. Options
are `frozen` and `eq`, those of a field its default, `repr`, `compare` and `metadata`.
"""

from __future__ import annotations

import ast
import sys
import threading
from collections import abc
from collections.abc import Mapping
from dataclasses import MISSING, Field, FrozenInstanceError, fields
from dataclasses import dataclass as find_fields
from enum import Enum
from functools import cache, partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Callable, TypeVar, Union, get_args, get_origin

from ascendrun.text import Rendered, from_json

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass

    from typing_extensions import dataclass_transform as dataclass_transform
else:

    def dataclass_transform(**options: Any) -> Any:
        return lambda kind: kind

    def dataclass(kind: type | None = None, /, **options: Any) -> Any:
        if kind is None:
            return lambda kind: dataclass(kind, **options)
        _Unmade(kind, options)
        return kind


T = TypeVar("T")
FIELDS = "__dataclass_fields__"
"""What the functions of the standard library's module read first of a dataclass."""
PARSING = threading.Lock()
"""Python 3.11 fails to parse in two threads at once (python/cpython#106905)."""
_making = threading.RLock()


class _Unmade:
    """FIELDS and `__init__` of a class until one of them is used."""

    def __init__(self, kind: type, options: dict[str, Any]) -> None:
        self._kind, self._options = kind, options
        setattr(kind, FIELDS, self)
        kind.__init__ = lambda instance, /, *values, **named: self._init(instance, values, named)  # type: ignore[misc]

    def __get__(self, instance: object, owner: type) -> Any:
        self._make()
        return getattr(owner, FIELDS)

    def _init(self, instance: Any, values: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._make()
        vars(self._kind)["__init__"](instance, *values, **named)

    def _make(self) -> None:
        """Make the methods, `__init__` last: another thread waits in the old one until the class is complete."""
        kind = self._kind
        with _making:
            if vars(kind)[FIELDS] is self:  # else another thread was first
                kind.__doc__ = kind.__doc__ or kind.__name__  # the default takes longer than the methods
                find_fields(init=False, repr=False, eq=False)(kind)  # compiles nothing
                for name, method in _methods(kind, **self._options).items():
                    if vars(kind).get(name) is None:
                        setattr(kind, name, method)
                kind.__init__ = _compiled_init(kind, **self._options)  # type: ignore[misc]


def _methods(kind: type, *, frozen: bool = False, eq: bool = True) -> dict[str, Any]:
    """Return what the standard library compiles for each class, as functions that know the fields of this one."""
    read = attrgetter("__class__", *(one.name for one in fields(kind) if one.compare))
    shown = [one.name for one in fields(kind) if one.repr]

    def is_equal(self: object, other: object) -> bool:
        return read(self) == read(other) if other.__class__ is self.__class__ else NotImplemented

    def show(self: object) -> str:
        return f"{self.__class__.__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def refuse(self: object, name: str, *value: object) -> None:
        raise FrozenInstanceError(f"cannot change field {name!r}")

    methods: dict[str, Any] = {"__repr__": show}
    if eq:
        methods.update(__eq__=is_equal, __hash__=(lambda self: hash(read(self))) if frozen else None)
    return {**methods, "__setattr__": refuse, "__delattr__": refuse} if frozen else methods


def _compiled_init(kind: type, *, frozen: bool = False, eq: bool = True) -> object:
    """Return `__init__` with a parameter for each field, by its name and with its default."""
    known: dict[str, Any] = {"__name__": kind.__module__, "_set": object.__setattr__, "_MISSING": MISSING}
    parameters, lines = ["self"], []
    one: Field[Any]
    for one in fields(kind):
        name = value = parameter = one.name
        if one.default_factory is not MISSING:
            known[f"_{name}"], parameter = one.default_factory, f"{name}=_MISSING"
            value = f"_{name}() if {name} is _MISSING else {name}"
        elif one.default is not MISSING:
            known[f"_{name}"], parameter = one.default, f"{name}=_{name}"
        parameters.append(parameter)
        lines.append(f" _set(self, {name!r}, {value})" if frozen else f" self.{name} = {value}")
    lines.append(" self.__post_init__()" if hasattr(kind, "__post_init__") else " pass")
    exec("\n".join([f"def __init__({', '.join(parameters)}):", *lines]), known)
    known["__init__"].__annotations__ = {one.name: one.type for one in fields(kind)}
    return known["__init__"]


def load_dataclass(kind: type[T], row: Mapping[str, Any], /) -> T:
    """Return `kind` from its fields in `row`, as `ascendrun.text.to_json` writes them. Unknown keys are ignored,
    missing fields get their default, None stays None. Whole numbers and strings are not checked.

    Raises AttributeError, TypeError or ValueError for unreadable values and for a missing field without a default.
    """
    values = {}
    for name, read in _readers(kind).items():  # type: ignore[arg-type]
        if name in row:
            value = row[name]
            values[name] = value if value is None or read is None else read(value)
    return kind(**values)


Read = Callable[[Any], Any]


@cache
def _readers(kind: type[Any]) -> Mapping[str, Read | None]:
    """Return how the value of each field is made of its JSON value: by `read` of its metadata, else by its type."""
    names: dict[str, Any] = {}
    for owner in reversed(kind.__mro__):
        names.update(vars(sys.modules[owner.__module__]))
    names["Union"] = Union
    return {
        one.name: one.metadata["read"] if "read" in one.metadata else reader_of(_resolved(str(one.type), names))
        for one in fields(kind)
        if one.init
    }


class _Unions(ast.NodeTransformer):
    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:  # Python 3.9 cannot evaluate `X | None`
        self.generic_visit(node)
        either = ast.Tuple([node.left, node.right], ast.Load())
        return ast.Subscript(ast.Name("Union", ast.Load()), either, ast.Load())


def _resolved(annotation: str, names: dict[str, Any]) -> Any:
    """Return the type that a module writes as text. `names`: of the modules of its class."""
    with PARSING:
        parsed = ast.parse(annotation, mode="eval")
    tree = _Unions().visit(parsed)
    return eval(compile(ast.fix_missing_locations(tree), "<annotation>", "eval"), names)


def reader_of(kind: Any) -> Read | None:
    """Return what makes a value of this type of its JSON value; None: it is the JSON value itself."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Union:
        if any(isinstance(part, type) and issubclass(part, Rendered) for part in parts):
            return from_json
        kinds = [part for part in parts if part is not type(None)]
        return reader_of(kinds[0]) if len(kinds) == 1 else None
    if origin in (tuple, frozenset):
        reads = [reader_of(part) or _same for part in parts if part is not ...]
        if origin is tuple and parts[-1] is not ...:
            return lambda values: tuple(read(value) for read, value in zip(reads, values))
        return origin if reads == [_same] else lambda values: origin(map(reads[0], values))
    if origin is abc.Mapping:
        read_key, read = int if parts[0] is int else _same, reader_of(parts[1]) or _same
        if (read_key, read) != (_same, _same):
            return lambda values: {read_key(key): read(value) for key, value in values.items()}
    if not isinstance(kind, type) or origin is not None:
        return None
    if issubclass(kind, Rendered):
        return from_json
    if issubclass(kind, Enum):
        return kind
    return _number if kind is float else partial(load_dataclass, kind) if hasattr(kind, FIELDS) else None


def _same(value: object) -> object:
    return value


def _number(value: object) -> object:
    if not isinstance(value, (int, float)):
        raise TypeError(f"expected a number, got {type(value).__name__}")
    return value
