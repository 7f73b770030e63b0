"""ascendrun: launch and monitor distributed training on Ascend NPU clusters over SSH."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ascendrun.cluster import Cluster

__version__ = "0.1.0"
__all__ = ["Cluster", "__version__"]


def __getattr__(name: str) -> Any:
    """`ascendrun.Cluster`, imported when it is used."""
    if name == "Cluster":
        from ascendrun.cluster import Cluster

        return Cluster
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
