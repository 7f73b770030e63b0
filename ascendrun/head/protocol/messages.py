"""Messages as dataclasses: the fields of a message are the JSON header of a frame of node/wire.py, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, field, fields, is_dataclass
from functools import cache, partial
from typing import Any, Callable, ClassVar, Generic, TypeVar, get_args

from ascendrun.core.dataclass import dataclass, dataclass_transform
from ascendrun.core.errors import InvalidInputError, Problem
from ascendrun.text import Rendered, Text, to_json

M = TypeVar("M", bound="Message")
R = TypeVar("R", bound="Message", covariant=True)


OTHER_VERSION_HINT = Text(
    "control.other-version.hint",
    "run `ascendrun controller stop`, then repeat the command; running jobs are not affected",
)


def converted(read: Callable[[Any], Any], *, write: Callable[[Any], Any] | None = None, **default: Any) -> Any:
    """Define a field that `write` converts to JSON and `read` converts back. None stays None if it is the default."""
    may_be_none = default.get("default", MISSING) is None
    return field(
        metadata={
            "read": lambda value: None if value is None and may_be_none else read(value),
            "write": write or _plain,
        },
        **default,
    )


@dataclass_transform(frozen_default=True, field_specifiers=(field, converted))
class Message:
    """Base class of messages, which makes each a frozen dataclass. A field with a default may be missing in a header.
    `op`: its name on the wire; a reply has that of its request."""

    OP: ClassVar[str]

    def __init_subclass__(cls, *, op: str | None = None) -> None:
        super().__init_subclass__()
        dataclass(frozen=True)(cls)
        if op is not None:
            cls.OP = op

    def to_header(self) -> dict[str, Any]:
        """Return the header, without fields that are None and have the default None."""
        header = {}
        for one in fields(self):  # type: ignore[arg-type]
            value = one.metadata.get("write", _plain)(getattr(self, one.name))
            if value is not None or one.default is not None:
                header[one.name] = value
        return header

    @classmethod
    def from_header(cls: type[M], header: Mapping[str, Any]) -> M:
        """Make a message; unknown fields are ignored. Raises InvalidInputError for a missing or unreadable field."""
        values: dict[str, Any] = {}
        for name, read, is_required in _readers(cls):  # type: ignore[arg-type]
            if name in header:
                try:
                    values[name] = read(header[name])
                except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
                    reason = Text("control.invalid-field", "invalid value ({error})", error=repr(error))
                    raise _invalid(cls, name, reason) from error
            elif is_required:
                raise _invalid(cls, name, Text("control.missing-field", "missing"))
        return cls(**values)


class Request(Message, Generic[R]):
    """Request to the other side. `REPLY`: the R of the class."""

    REPLY: ClassVar[type[Any]]

    def __init_subclass__(cls, *, op: str | None = None) -> None:
        super().__init_subclass__(op=op)
        if op is not None:
            (cls.REPLY,) = get_args(cls.__orig_bases__[0])  # type: ignore[attr-defined]
            if "OP" not in vars(cls.REPLY):
                cls.REPLY.OP = op


class Done(Message, op="done"):
    """The reply to a request without results."""


def _invalid(kind: type[Message], name: str, reason: Text) -> InvalidInputError:
    where = Text("control.field", "{op}: {field}: {reason}", op=kind.OP, field=name, reason=reason)
    return InvalidInputError([Problem(kind.OP, None, None, where)])


TYPES: Mapping[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "Mapping": (dict,),
}
"""Values in JSON of fields without a conversion, by the first word of their annotation."""


@cache
def _readers(kind: type[Message]) -> tuple[tuple[str, Callable[[Any], Any], bool], ...]:
    """Return (name, conversion, whether it is required) of each field."""
    return tuple(
        (
            one.name,
            one.metadata.get("read") or partial(_checked, *_types(str(one.type))),
            one.default is MISSING and one.default_factory is MISSING,
        )
        for one in fields(kind)  # type: ignore[arg-type]
    )


def _types(annotation: str) -> tuple[tuple[type, ...], bool]:
    """Return (possible types, () for any; whether None is allowed) of a field."""
    name, _, rest = annotation.partition(" | ")
    return TYPES.get(name.partition("[")[0], ()), rest == "None"


def _checked(types: tuple[type, ...], may_be_none: bool, value: Any) -> Any:
    if types and not isinstance(value, types) and not (value is None and may_be_none):
        raise TypeError(f"{type(value).__name__}")
    return value


def _plain(value: Any) -> Any:
    """Return a field's value for JSON. Mappings are raw data already, and may be large."""
    if isinstance(value, Rendered):
        return to_json(value)
    if hasattr(value, "to_json"):
        return value.to_json()
    if is_dataclass(value):
        return dict(vars(value))
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
