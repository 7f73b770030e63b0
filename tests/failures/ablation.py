"""How well a failure is understood without the catalogue: the corpus with some rows or one vocabulary left out.

python -m tests.failures.ablation    one line for each share of rows, each vocabulary and each family; half an hour
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Callable, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from corpus import Case, case_files, load

from ascendrun.ascend import signatures, vocabularies
from ascendrun.ascend.signatures import Signature
from ascendrun.ascend.vocabularies import read_table
from ascendrun.health.diagnosis import Confidence, Diagnosis, diagnose

FILES = sorted(Path(vocabularies.__file__).parent.glob("*.toml"))
TABLES = [path.stem for path in FILES if "values" in read_table(path.stem) and path.stem not in ("conclusions", "rows")]
"""The vocabularies; the two others have the codes of the rows and of the rules themselves."""


class Score(NamedTuple):
    """Of the cases with a domain: the shares of right ranks, domains and scopes, and what was wrong and certain."""

    rank: float
    domain: float
    scope: float
    wrong: tuple[str, ...]


def score(cases: Sequence[Case], found_of: Callable[[Case], Diagnosis] | None = None) -> Score:
    told = [(case, (found_of or (lambda one: diagnose(one.evidence)))(case)) for case in cases if case.expected.domain]

    def share(is_right: Callable[[Case, Diagnosis], bool]) -> float:
        return sum(is_right(case, found) for case, found in told) / len(told)

    wrong = (
        f"{case.name}: {found.domain}, not {case.expected.domain}"
        for case, found in told
        if found.reason_grade is Confidence.CERTAIN and found.domain != case.expected.domain
    )
    return Score(
        share(lambda case, found: case.expected.first in (None, found.ranks)),
        share(lambda case, found: found.domain == case.expected.domain),
        share(lambda case, found: found.scope == case.expected.scope),
        tuple(wrong),
    )


@contextmanager
def rows(keep: Callable[[Signature], bool]) -> Iterator[None]:
    """The catalogue has these rows only."""
    whole = signatures._catalogue
    fewer = signatures._Catalogue([row for row in whole().rows if keep(row)])
    signatures._catalogue = lambda: fewer  # type: ignore[assignment]
    try:
        yield
    finally:
        signatures._catalogue = whole


@contextmanager
def share_of_rows(share: float, seed: int) -> Iterator[None]:
    chance = random.Random(seed)
    kept = {row.code for row in signatures.signatures() if chance.random() < share}
    with rows(lambda row: row.code in kept):
        yield


@contextmanager
def without_vocabulary(name: str) -> Iterator[None]:
    whole = vocabularies.vocabulary

    def fewer(one: str) -> Mapping[str, vocabularies.Value]:
        return {} if one == name else whole(one)

    vocabularies.vocabulary = fewer  # type: ignore[assignment]
    vocabularies._phrases.cache_clear()
    try:
        yield
    finally:
        vocabularies.vocabulary = whole
        vocabularies._phrases.cache_clear()


def main() -> None:
    cases = [load(path) for path in case_files()]
    families = {row.code: row.family for row in signatures.signatures()}

    def show(name: str, some: Sequence[Case]) -> None:
        one = score(some)
        print(f"{name:24} {one.rank:6.1%} {one.domain:6.1%} {one.scope:6.1%} {len(one.wrong)}", flush=True)

    for share in (1.0, 0.5, 0.0):
        with share_of_rows(share, seed=1):
            show(f"rows {share:.0%}", cases)
    with share_of_rows(0.0, seed=1):
        for name in TABLES:
            with without_vocabulary(name):
                show(f"no rows, without {name}", cases)
    for family in sorted(set(families.values())):
        own = [case for case in cases if families.get(case.expected.codes[0]) == family]
        if any(case.expected.domain for case in own):
            with rows(lambda row, family=family: row.family != family):  # type: ignore[misc]
                show(f"without {family}", own)


if __name__ == "__main__":
    main()
