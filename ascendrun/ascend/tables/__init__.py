"""Facts as data, one JSON file per table; every row names its source, and its caveat if it is not verified."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any


@cache
def load_table(name: str) -> Mapping[str, Any]:
    """Return the table `name`.json of this package. It is cached: callers must not change it."""
    text = resources.files(__name__).joinpath(f"{name}.json").read_text(encoding="utf-8")
    table: Mapping[str, Any] = json.loads(text)
    return table
