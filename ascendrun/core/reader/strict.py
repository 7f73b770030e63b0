"""Base of the models that files are read as, and what these models have in common."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field

from ascendrun.text import Text

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
NAME_HINT = Text("jobfile.name-hint", "use letters, digits, '.', '_' and '-'; start with a letter or digit; at most 63")
MOUNT_PATTERN = r"^/[^:]*:/[^:]*(:ro|:rw)?$"
"""A mount of a container: SOURCE:TARGET[:ro]."""
Name = Annotated[str, Field(pattern=NAME_PATTERN)]

_NO_PLUGINS = ModuleType("pydantic.plugin._loader")
vars(_NO_PLUGINS)["get_plugins"] = tuple


class _WithoutPlugins:
    """Base of models for which pydantic looks for no plugins: it would import importlib.metadata, and with it `email`
    and `zipfile`, a sixth of the time of these models. If others have made models, the plugins are known already.
    Another thread may make models too, and remove the stand-in first."""

    def __init_subclass__(cls, **options: object) -> None:
        sys.modules.setdefault(_NO_PLUGINS.__name__, _NO_PLUGINS)

    @classmethod
    def __pydantic_init_subclass__(cls, **options: object) -> None:  # when the model is complete
        if sys.modules.get(_NO_PLUGINS.__name__) is _NO_PLUGINS:
            sys.modules.pop(_NO_PLUGINS.__name__, None)


class Strict(_WithoutPlugins, BaseModel):
    """No unknown keys, no conversions, no changes after reading. A field with `repr=False` may hold a credential: its
    value is in no message."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class Texts(Strict):
    """A block of settings: its values are texts, as those of all settings."""

    model_config = ConfigDict(strict=False)


def model_below(field: Any) -> type[BaseModel] | None:
    """Return the model of a field, or of the items of its list; None: its values are no models."""
    kinds = (field.annotation, *get_args(field.annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def sections_of(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """Return the fields that are models, in their order."""
    below = {name: (field, model_below(field)) for name, field in model.model_fields.items()}
    return {name: kind for name, (field, kind) in below.items() if kind and get_origin(field.annotation) is not tuple}
