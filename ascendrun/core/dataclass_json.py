"""Dataclasses from JSON that another version of ascendrun may have written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Callable, TypeVar

T = TypeVar("T")


def load_dataclass(kind: type[T], row: Mapping[str, Any], /, **read: Callable[[Any], Any]) -> T:
    """Return `kind` from its fields in `row`: unknown keys are ignored, missing fields get their default.

    `read`: by field, makes its value of the JSON value; None stays None. Raises TypeError for a missing field without
    a default.
    """
    names = [one.name for one in fields(kind) if one.init]  # type: ignore[arg-type]
    values = {name: row[name] for name in names if name in row}
    for name, convert in read.items():
        if values.get(name) is not None:
            values[name] = convert(values[name])
    return kind(**values)
