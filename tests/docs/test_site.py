"""The documentation as a site: it builds without a network, in two languages, and loads nothing from elsewhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
MKDOCS = CHECKOUT / ".venv-docs" / "bin" / "mkdocs"
LOADED = re.compile(r"""<(?:script|img|link rel="(?:stylesheet|icon|preload)")[^>]*(?:src|href)="(?:https?:)?//""")


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_site_builds_strictly_without_a_network(tmp_path: Path) -> None:
    setup = [CHECKOUT / "bin/setup-env", "--venv", MKDOCS.parents[1], "docs"]
    assert subprocess.run(setup, stdin=subprocess.DEVNULL).returncode == 0
    build = ["unshare", "--net", MKDOCS, "build", "--strict", "-d", tmp_path / "site"]
    built = subprocess.run(build, cwd=CHECKOUT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    for page in ("", "zh/", "top/", "zh/top/", "failures/", "zh/commands/"):
        html = (tmp_path / "site" / page / "index.html").read_text(encoding="utf-8")
        assert LOADED.findall(html) == [] and f'lang="{"zh" if page.startswith("zh") else "en"}"' in html
    assert (tmp_path / "site" / "search" / "search_index.json").stat().st_size > 100_000


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_site_has_the_versions_that_were_deployed(tmp_path: Path) -> None:
    """After the other test, which makes the environment."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", CHECKOUT, clone], check=True)
    user = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
    path = {**os.environ, **user, "PATH": f"{MKDOCS.parent}:{os.environ['PATH']}"}
    for version in ("0.1", "0.2"):
        subprocess.run(["mike", "deploy", "--update-aliases", version, "latest"], cwd=clone, env=path, check=True)
    shown = subprocess.run(["git", "show", "gh-pages:versions.json"], cwd=clone, capture_output=True, check=True)
    found = [(one["version"], one["aliases"]) for one in json.loads(shown.stdout)]
    assert found == [("0.2", ["latest"]), ("0.1", [])]


def test_every_page_has_its_place_in_the_navigation() -> None:
    text = (CHECKOUT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [path.name for path in sorted((CHECKOUT / "docs").glob("*.md")) if "." not in path.stem]
    assert [name for name in pages if not re.search(rf"[\s\[]{name}", text)] == [], "mkdocs.yml, nav"
