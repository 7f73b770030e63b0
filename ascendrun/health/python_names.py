"""Names of modules and classes, as tracebacks have them.

module_of(".../site-packages/h5py/_hl/files.py")    "h5py._hl.files"
"""

from __future__ import annotations

import re

from ascendrun.ascend.vocabularies import alike

_INSTALLED = re.compile(r"-packages/|lib/python3[\d.]*/|<frozen ")


def module_of(file: str) -> str:
    """Return the dotted name of a library's module by its file, such as "h5py._hl.files"."""
    *_, name = _INSTALLED.split(file)
    return name.strip("<>").rpartition(".")[0].replace("/", ".") if "." in name else name.strip("<>")


def is_class_name(name: str) -> bool:
    """Return whether it is written as a class, or is one of the exceptions that are not."""
    module, _, last = name.rpartition(".")
    return (last.lstrip("_")[:1].isupper() and any(letter.islower() for letter in last)) or (
        bool(module) and (last in ("error", "timeout", "gaierror", "herror") or last.endswith("Error"))
    )  # such as struct.error, socket.timeout


def is_of_helper(name: str, file: str, function: str) -> bool:
    """Return whether an exception tells that a helper process lost its parent, by its class and its first frame."""
    return name in alike("lost-parent") and "multiprocessing/" in file and function != "<module>"
