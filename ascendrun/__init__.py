"""ascendrun: launch and monitor distributed training on Ascend NPU clusters over SSH."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ascendrun.client import callback, log
    from ascendrun.cluster import Cluster, connect

__version__ = "0.1.0"
__all__ = ["Cluster", "__version__", "callback", "connect", "log"]


def __getattr__(name: str) -> Any:
    """The names above, imported when they are used."""
    if name in ("Cluster", "connect"):
        from ascendrun import cluster

        return getattr(cluster, name)
    if name in ("callback", "log"):
        from ascendrun import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
