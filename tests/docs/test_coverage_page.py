"""docs/coverage.md has a line for every row of the guides, and names only what exists."""

from __future__ import annotations

import re
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
PAGE = (CHECKOUT / "docs" / "coverage.md").read_text(encoding="utf-8")
ROWS = {
    "S0": (range(1, 59), range(1, 10)),
    "S1": (range(1, 39), (1, 2, 3, 5, 6, 7)),
    "S2": (range(1, 35), (1, 2, 3)),
    "N": (range(1, 82), ()),
    "S3": (range(1, 52), range(1, 11)),
    "S4": (range(1, 33), range(1, 9)),
    "C": ((*range(1, 8), *range(10, 33)), ()),
}
"""By guide: the numbers of its rows and of its bugs. C: of CodonTransformer itself."""
FOLDERS = (
    "tests",
    "docs",
    "jobs",
    "bin",
    "benchmarks",
    "templates",
    "hostfiles",
    *(path.name for path in (CHECKOUT / "ascendrun").iterdir() if path.is_dir()),
)


def wanted() -> list[str]:
    ids = [
        [f"{guide}-{number:02d}" for number in numbers] + [f"{guide}-B{bug}" for bug in bugs]
        for guide, (numbers, bugs) in ROWS.items()
    ]
    return [one for many in ids for one in many]


def rows() -> list[tuple[str, str, str]]:
    found = re.findall(r"^\| (S\d-\w+|[CN]-\d+) \| (.+?) \| (.+) \|$", PAGE, re.MULTILINE)
    return [(row, asks, where) for row, asks, where in found]


def paths_in(text: str) -> list[str]:
    return re.findall(rf"(?<![\w/.-])((?:{'|'.join(FOLDERS)})/[\w./-]*\w)", text)


def exists(path: str) -> bool:
    return (CHECKOUT / path).exists() or (CHECKOUT / "ascendrun" / path).exists()


def has_test(path: str, name: str) -> bool:
    return (
        re.search(rf"^(async )?def {name}\(", (CHECKOUT / path).read_text(encoding="utf-8"), re.MULTILINE) is not None
    )


SHOWS = re.compile(r"(?<![\w/])(tests|benchmarks)/|`bin/(check|test)")
ADMITS = re.compile(r"\bnot (shown|asked|included|required|run)\b")
OTHER_ROW = re.compile(r"\b(?:as|from) ((?:S\d|N|C)-B?\d+)")


def is_shown(row: str, text_of: dict[str, str]) -> bool:
    """Whether the row names a test or a benchmark, another row that does, or what is not shown."""
    text = text_of[row]
    if SHOWS.search(text) or ADMITS.search(text):
        return True
    return any(other != row and is_shown(other, text_of) for other in OTHER_ROW.findall(text))


def test_every_row_of_the_guides_stands_there_once_in_order() -> None:
    assert [row for row, _, _ in rows()] == wanted()


def test_every_file_and_folder_that_is_named_is_there() -> None:
    named = sorted(set(paths_in(PAGE)))
    assert len(named) > 40
    assert [path for path in named if not exists(path)] == []


def test_every_test_that_is_named_is_there() -> None:
    named = sorted(set(re.findall(r"(tests/[\w/.-]+\.py)::(\w+)", PAGE)))
    assert len(named) > 30
    assert [(path, name) for path, name in named if not has_test(path, name)] == []


def test_every_row_names_what_shows_it_or_what_is_not_shown() -> None:
    text_of = {row: where for row, _, where in rows()}
    assert [row for row in text_of if not is_shown(row, text_of)] == []


def test_every_bug_has_a_test_that_says_its_name() -> None:
    homes: dict[str, list[str]] = {
        row: [path for path in paths_in(where) if path.startswith("tests/")] for row, _, where in rows() if "-B" in row
    }
    silent = [
        (row, paths)
        for row, paths in homes.items()
        if not any(re.search(rf"{row}\b", (CHECKOUT / path).read_text(encoding="utf-8")) for path in paths)
    ]
    assert silent == []


def test_every_verb_that_is_named_exists() -> None:
    from ascendrun.cli.app import COMMANDS

    named = set(re.findall(r"`ascendrun ([a-z]+)", PAGE))
    assert named and named <= {verb.name for verb in COMMANDS}
