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


def read_pages(lang: str = "en") -> Mapping[str, Path]:
    """Return the pages of the documentation by name: recovery, guides/000; in this language where a page has it."""
    root = data_root() / PAGES
    own = {path: path.with_suffix(f".{lang}.md") for path in sorted(root.rglob("*.md")) if "." not in path.stem}
    return {
        path.relative_to(root).as_posix()[: -len(".md")]: translated if translated.exists() else path
        for path, translated in own.items()
    }


def title_of(page: Path) -> str:
    with page.open(encoding="utf-8") as file:
        return file.readline().lstrip("# ").strip()
