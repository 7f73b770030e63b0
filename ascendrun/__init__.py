"""ascendrun: launch and monitor distributed training on Ascend NPU clusters over SSH."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

    from ascendrun.client import callback as callback
    from ascendrun.client import log as log
    from ascendrun.cluster.api import Cluster as Cluster
    from ascendrun.cluster.api import connect as connect

__version__ = "0.2.0"


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package whose names are imported when they are first used.

    Its names are the imports `from ascendrun.… import X as X` that it has for type checkers: there is no second list.
    """
    modules: dict[str, str] = {}

    def read() -> dict[str, str]:
        if not modules:
            import ast
            import sys

            loader: Any = sys.modules[package].__loader__
            for node in ast.walk(ast.parse(loader.get_source(package))):
                if isinstance(node, ast.ImportFrom):
                    modules.update({alias.asname: str(node.module) for alias in node.names if alias.asname})
        return modules

    def find(name: str) -> Any:
        if name.startswith("__") or name not in read():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(read()[name]), name)

    return find, lambda: sorted(read())


if not TYPE_CHECKING:  # a type checker reports names that do not exist
    __getattr__, __dir__ = lazy_names(__name__)
