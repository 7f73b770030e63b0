"""The part of ascendrun that scripts of the user import, for hosts where it is not installed."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import ascendrun

FOR_SCRIPTS = ("client.py", "lightning/*.py")
"""What scripts of the user import where ascendrun is not installed; they are staged with what they import."""
_IMPORT = re.compile(r"^[ \t]*from (ascendrun[\w.]*) import (\([^)]*\)|.*)", re.MULTILINE)
INSTALLED_TOO = """
from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)[::-1]  # an installed ascendrun has more than this directory
"""


def copy_library(folder: Path) -> None:
    """Copy what a script of the user imports where ascendrun is not installed. An installed one stays complete."""
    package = Path(ascendrun.__file__).resolve().parent
    imported = imported_files(package, [path for name in FOR_SCRIPTS for path in sorted(package.glob(name))])
    for source in (*imported, package / "text" / "en.json"):
        target = folder / "ascendrun" / source.relative_to(package)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    with open(folder / "ascendrun" / "__init__.py", "a", encoding="utf-8") as file:
        file.write(INSTALLED_TOO)


def imported_files(package: Path, roots: Sequence[Path]) -> set[Path]:
    """Return these files of a package and all of it that they import, with the `__init__.py` of every directory."""
    found: set[Path] = set()
    waiting = list(roots)
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        below = path.parent.relative_to(package).parts
        waiting += [package.joinpath(*below[:depth], "__init__.py") for depth in range(len(below) + 1)]
        if path == package / "__init__.py":
            continue  # it imports everything, by name and when it is used
        for module, names in _IMPORT.findall(path.read_text(encoding="utf-8")):
            place = package.joinpath(*module.split(".")[1:])
            places = [place, *(place / name for name in re.findall(r"\w+", names))]
            files = [file for at in places for file in (at.with_suffix(".py"), at / "__init__.py")]
            waiting += [file for file in files if file.is_file()]
    return found
