"""Facts as data, one JSON file a table; every row names its source, and its doubt where it is not verified."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any


@cache
def load_table(name: str) -> Mapping[str, Any]:
    """The table `name`.json of this package; read once, not to be changed by who reads it."""
    text = resources.files(__name__).joinpath(f"{name}.json").read_text(encoding="utf-8")
    table: Mapping[str, Any] = json.loads(text)
    return table
