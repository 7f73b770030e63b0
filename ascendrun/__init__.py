"""ascendrun: launch and monitor distributed training on Ascend NPU clusters over SSH."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ascendrun.client import callback, log
    from ascendrun.cluster import Cluster

__version__ = "0.1.0"
__all__ = ["Cluster", "__version__", "callback", "log"]


def __getattr__(name: str) -> Any:
    """`ascendrun.Cluster`, `ascendrun.log` and `ascendrun.callback`, imported when they are used."""
    if name == "Cluster":
        from ascendrun.cluster import Cluster

        return Cluster
    if name in ("callback", "log"):
        from ascendrun import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
