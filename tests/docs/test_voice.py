"""What a person reads is in the words of docs/style.md."""

import re
import subprocess
from collections import Counter

import pytest

from tests.docs.voice import CHECKOUT, allowed_lines, doc_lines, message_lines, table_lines

CEILINGS = {"messages": 0, "docs": 0, "tables": 0}
"""How many lines may match."""


@pytest.mark.parametrize("kind", CEILINGS)
def test_no_forbidden_word(kind: str) -> None:
    lines = {"messages": message_lines, "docs": doc_lines, "tables": table_lines}[kind]()
    assert len(lines) <= CEILINGS[kind], "\n".join(map(str, lines))


def test_few_lines_are_excused_and_each_names_its_reason() -> None:
    allowed = allowed_lines()
    assert len(allowed) <= 20, "\n".join(allowed)


def test_no_sentence_of_the_docs_is_longer_than_30_words() -> None:
    """The goal is 25; a sentence with a list in it may take more."""
    long = []
    for page in [CHECKOUT / "README.md", CHECKOUT / "CONTRIBUTING.md", *sorted((CHECKOUT / "docs").rglob("*.md"))]:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for paragraph in re.split(r"\n\s*\n|\n(?=[-|#>*\d])", text):
            if paragraph.startswith(("|", "    ", "#")):
                continue
            for sentence in re.split(r"(?<=[.!?:;])\s", re.sub(r"`[^`]*`|\([^)]*\)", "X", paragraph)):
                if len(sentence.split()) > 30:
                    long.append(f"{page.name}: {' '.join(sentence.split())[:120]}")
    assert not long, "\n".join(long)


LONG_SUBJECTS = {"signatures: English message, cause and hint next to the code, Chinese by key": 1}
"""How many commits have this subject; others build on them."""


def test_new_commit_subjects_are_short() -> None:
    """Since the tree was formatted; a shallow clone has nothing to check."""
    done = subprocess.run(
        ["git", "log", "--format=%s", "b87d4b6..HEAD"], cwd=CHECKOUT, text=True, capture_output=True, check=False
    )
    subjects = done.stdout.splitlines() if done.returncode == 0 else []
    long = Counter(line for line in subjects if len(line) > 72 or line.endswith("."))
    assert not long - Counter(LONG_SUBJECTS)
