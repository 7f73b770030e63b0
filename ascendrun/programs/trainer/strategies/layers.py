"""The layers that a model is divided by."""

from __future__ import annotations

from torch import nn


def repeated_layers(module: nn.Module) -> list[nn.Module]:
    """Return the layers of a transformer: the children of each outermost module list with a single class."""
    found: list[nn.Module] = []
    for child in module.children():
        members = list(child.children())
        if isinstance(child, nn.ModuleList) and len({type(member) for member in members}) == 1:
            found += members
        else:
            found += repeated_layers(child)
    return found
