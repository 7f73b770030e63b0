"""The only importer of paramiko: without its unused parts and their imports, and without its logging."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import ModuleType


def _version(name: str) -> str:
    """Return a version as importlib.metadata.version would; "0" if no directory on the path has it."""
    for folder in sys.path:
        for found in Path(folder).glob(f"{name}-*.dist-info"):
            return found.name[len(name) + 1 : -len(".dist-info")]
    return "0"


def _stand_ins() -> dict[str, ModuleType | None]:
    """Return modules that paramiko imports but does not need.

    `invoke` runs local commands for its ssh config (45 ms; the import is guarded). importlib.metadata gives its version
    for the SSH banner, and reads mail (`email`) to do so (20 ms).
    """
    metadata = ModuleType("importlib.metadata")
    vars(metadata)["version"] = _version
    wanted: dict[str, ModuleType | None] = {"invoke": None, "importlib.metadata": metadata}
    return {name: module for name, module in wanted.items() if name not in sys.modules}


_added = _stand_ins()
sys.modules.update(_added)  # type: ignore[arg-type]  # typeshed allows no None there; it makes an import fail
try:
    import paramiko
    from paramiko import common
    from paramiko.packet import NeedRekeyException
    from paramiko.ssh_exception import PartialAuthentication
finally:
    for _name in _added:
        sys.modules.pop(_name, None)

# Its threads log tracebacks of every refused connection; relevant failures reach the user as ascendrun errors.
logging.getLogger("paramiko").addHandler(logging.NullHandler())
logging.getLogger("paramiko").propagate = False
logging.getLogger("paramiko").setLevel(logging.CRITICAL + 1)

__all__ = ["NeedRekeyException", "PartialAuthentication", "common", "paramiko"]
