"""Files that the package carries: docs/, jobs/, hostfiles/ and templates/ of the checkout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

PAGES = "docs"


def data_root() -> Path:
    """Return the directory with docs/, jobs/, hostfiles/, templates/: inside the installed package, or the checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "data"
    return installed if installed.is_dir() else package.parent


def read_pages() -> Mapping[str, Path]:
    """Return the pages of the documentation by name, without `.md`: recovery, guides/000."""
    root = data_root() / PAGES
    return {path.relative_to(root).as_posix()[: -len(".md")]: path for path in sorted(root.rglob("*.md"))}


def title_of(page: Path) -> str:
    with page.open(encoding="utf-8") as file:
        return file.readline().lstrip("# ").strip()
