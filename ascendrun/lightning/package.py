"""The Lightning package that the script uses, checked against the versions that are supported."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from ascendrun.programs.errors import ProgramError
from ascendrun.text import Text, listed

PACKAGES = {"pytorch_lightning": "lightning_fabric", "lightning.pytorch": "lightning.fabric"}
"""Names of Lightning, each with the lower package that has its environments and checkpoint plugins."""


class UnsupportedLightningError(ProgramError, ImportError):
    """Lightning is not installed, or its version is refused."""


@dataclass(frozen=True)
class Versions:
    """Versions from `first` (included) to `end` (excluded; None: no end). `reason` None: they are supported."""

    first: tuple[int, ...]
    end: tuple[int, ...] | None
    reason: Text | None = None


OLDER = listed("lightning.older")
BETWEEN = listed("lightning.between")
TABLE = (
    Versions((0,), (1, 9, 5), OLDER),
    Versions((1, 9, 5), (1, 10)),
    Versions((1, 10), (2, 2), BETWEEN),
    Versions((2, 2), (3,)),
    Versions((3,), None, listed("lightning.newer")),
)
"""All versions. docs/lightning.md names those that the tests ran with."""


def numbers_of(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (2, 6, 0) of "2.6.0.post1"."""
    found: list[int] = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        found.append(int(part))
    return tuple(found)


def reason_against(version: str) -> Text | None:
    """Return why a version is refused; None: it is supported."""
    numbers = numbers_of(version)
    row = next(row for row in TABLE if numbers >= row.first and (row.end is None or numbers < row.end))
    return row.reason


def find() -> str:
    """Return the name of the package: the one that is imported already, else one that is installed."""
    for is_there in (sys.modules.__contains__, is_installed):
        for name in PACKAGES:
            if is_there(name):
                return name
    raise UnsupportedLightningError(listed("lightning.missing"))


def is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def load() -> tuple[Any, Any]:
    """Import (the package, its lower package). Raises UnsupportedLightningError."""
    name = find()
    package = importlib.import_module(name)
    reason = reason_against(package.__version__)
    if reason is not None:
        raise UnsupportedLightningError(
            listed("lightning.version", package=name, version=package.__version__, reason=reason)
        )
    return package, importlib.import_module(PACKAGES[name])


pl, fabric = load()
IS_OLD = numbers_of(pl.__version__) < (2,)
"""Whether this is 1.9: other names of precision plugins, and another wrapper under DDP."""


def part(path: str) -> Any:
    """Return a public class of the package: part("strategies.DDPStrategy")."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"{pl.__name__}.{module}" if module else pl.__name__), name)
