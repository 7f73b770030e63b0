"""Notifiers and the services that they ask, closed when a test is over."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def heads(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """heads(settings text): a notice_head.Head."""
    from notice_head import Head

    made: list[Head] = []

    def make(text: str, **options: Any) -> Head:
        (tmp_path / "config.yaml").write_text(text)
        made.append(Head(tmp_path, **options))
        return made[-1]

    yield make
    for head in made:
        head.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., Any]]:
    """serve(answer, …): a web service that answers so, then OK."""
    from notice_head import OK
    from web_service import Service

    made: list[Service] = []

    def make(*answers: Any, **options: Any) -> Service:
        made.append(Service(*answers, **{"default": OK, **options}))
        return made[-1]

    yield make
    for service in made:
        service.close()
