"""Dataclasses that are made when they are first used, and read from JSON that another version may have written.

`dataclass` is that of the standard library, but makes the methods of a class when the class is first used: it compiles
up to six, in about 1 ms. The messages alone are a hundred classes, of which a command uses ten. Classes with slots are
not supported.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Callable, TypeVar

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(kind: type | None = None, /, **options: Any) -> Any:
        if kind is None:
            return lambda kind: dataclass(kind, **options)
        _Unmade(kind, options)
        return kind


T = TypeVar("T")
FIELDS = "__dataclass_fields__"
"""What the functions of the standard library's module read first of a dataclass."""
_making = threading.RLock()


class _Unmade:
    """FIELDS and `__init__` of a class until one of them is used."""

    def __init__(self, kind: type, options: dict[str, Any]) -> None:
        self._kind, self._options = kind, options
        setattr(kind, FIELDS, self)
        kind.__init__ = lambda instance, *values, **named: self._init(instance, values, named)  # type: ignore[misc]

    def __get__(self, instance: object, owner: type) -> Any:
        self._make()
        return getattr(owner, FIELDS)

    def _init(self, instance: Any, values: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._make()
        vars(self._kind)["__init__"](instance, *values, **named)

    def _make(self) -> None:
        """Make the methods, `__init__` last: another thread waits in the old one until the class is complete."""
        from dataclasses import dataclass as make

        kind, options = self._kind, self._options
        with _making:
            if vars(kind)[FIELDS] is self:  # else another thread was first
                kind.__doc__ = kind.__doc__ or kind.__name__  # the default takes longer than the methods
                make(init=False, **options)(kind)
                heir = type(kind.__name__, (kind,), {"__doc__": kind.__doc__})
                make(repr=False, eq=False, frozen=options.get("frozen", False))(heir)
                kind.__init__ = heir.__init__  # type: ignore[misc]


def load_dataclass(kind: type[T], row: Mapping[str, Any], /, **read: Callable[[Any], Any]) -> T:
    """Return `kind` from its fields in `row`: unknown keys are ignored, missing fields get their default.

    `read`: by field, makes its value of the JSON value; None stays None. Raises TypeError for a missing field without
    a default.
    """
    from dataclasses import fields

    names = [one.name for one in fields(kind) if one.init]  # type: ignore[arg-type]
    values = {name: row[name] for name in names if name in row}
    for name, convert in read.items():
        if values.get(name) is not None:
            values[name] = convert(values[name])
    return kind(**values)
