"""What optimised DNA must not have: forbidden sites, windows of other GC content, long homopolymers, repeats."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property

from ascendrun.programs.codon.vocabulary import CODONS, RESIDUES, STANDARD
from ascendrun.text import Text, listed

BASES = "ACGT"
IUPAC = {
    "A": "A", "C": "C", "G": "G", "T": "T", "R": "AG", "Y": "CT", "S": "CG", "W": "AT", "K": "GT", "M": "AC",
    "B": "CGT", "D": "AGT", "H": "ACT", "V": "ACG", "N": "ACGT",
}  # fmt: skip
COMPLEMENT = str.maketrans("ACGTRYSWKMBDHVN", "TGCAYRSWMKVHDBN")
MOST_STATES = 4096
"""Of the automaton of the sites: a site with many N needs a state for each set of places where it may have begun."""
SHORTEST_REPEAT, LONGEST_REPEAT = 6, 31
SHORTEST_WINDOW = 3


@dataclass(frozen=True)
class GCRange:
    """Each window of so many bases has a GC content from `low` to `high` percent; window 0: the whole sequence.

    A sequence that is shorter than the window is one window.
    """

    low: float
    high: float
    window: int = 0

    def bases(self, length: int) -> int:
        return min(self.window, length) if self.window else length

    def counts(self, length: int) -> tuple[int, int]:
        """Return the smallest and the largest number of G and C in a window of a sequence of this many bases."""
        bases = self.bases(length)
        return math.ceil(self.low * bases / 100 - 1e-9), math.floor(self.high * bases / 100 + 1e-9)


@dataclass(frozen=True)
class Constraints:
    """`avoid`: sites in IUPAC letters, which occur on neither strand. `longest_homopolymer`: equal bases in a row at
    most, 0: any. `repeat`: no stretch of this many bases occurs twice on the strand, 0: may."""

    avoid: tuple[str, ...] = ()
    gc: GCRange | None = None
    longest_homopolymer: int = 0
    repeat: int = 0

    @cached_property
    def words(self) -> Words:
        runs = [base * (self.longest_homopolymer + 1) for base in BASES] if self.longest_homopolymer else []
        both = [word for site in self.avoid for word in (site, site.translate(COMPLEMENT)[::-1])]
        return Words(tuple(dict.fromkeys([*both, *runs])))

    def problems(self) -> list[Text]:
        """Return what no protein can keep, and amino acids of which none is possible."""
        try:
            words = self.words
        except OverflowError:
            return [listed("program.codon-sites-large", sites=self.avoid)]
        return [
            listed(
                "program.codon-no-codon",
                residue=residue,
                sites=sorted({site for codon in own for site in words.completed(0, codon)}),
            )
            for residue in RESIDUES
            for own in [[number for number, codon in enumerate(CODONS) if STANDARD[codon] == residue]]
            if all(words.completed(0, codon) for codon in own)
        ]


NO_CONSTRAINTS = Constraints()


class Words:
    """A deterministic automaton that reads DNA: its state is the set of words that may be under way.

    `table[state][base]`: the next state, `dead` once a word is complete. State 0 is the start.
    Raises OverflowError for words that need more than MOST_STATES states.
    """

    def __init__(self, words: tuple[str, ...]) -> None:
        self.words = words
        first, self._starts, self._ends = 0, 0, 0
        self._letters = letters = dict.fromkeys(BASES, 0)
        for place, letter in enumerate("".join(words)):
            for base in IUPAC[letter]:
                letters[base] |= 1 << place
        self._end_of: list[int] = []
        for word in words:
            self._starts |= 1 << first
            first += len(word)
            self._end_of.append(1 << (first - 1))
            self._ends |= self._end_of[-1]
        self._sets = [0]
        numbers = {0: 0}
        self.table: list[list[int]] = []
        while len(self.table) < len(self._sets):
            row = []
            for base in BASES:
                state = self._step(self._sets[len(self.table)], base)
                if state & self._ends:
                    row.append(-1)
                    continue
                if state not in numbers:
                    if len(numbers) == MOST_STATES:
                        raise OverflowError
                    numbers[state] = len(self._sets)
                    self._sets.append(state)
                row.append(numbers[state])
            self.table.append(row)
        self.dead = len(self.table)
        self.table = [[self.dead if state < 0 else state for state in row] for row in [*self.table, [-1] * len(BASES)]]

    def _step(self, state: int, base: str) -> int:
        return ((state << 1) | self._starts) & self._letters[base]

    def completed(self, state: int, codon: int) -> list[str]:
        """Return the words that this codon completes after this state."""
        found, present = [], self._sets[state]
        for base in CODONS[codon]:
            present = self._step(present, base)
            found += [word for word, end in zip(self.words, self._end_of) if present & end]
        return found


def read_constraints(
    avoid: str = "", gc: str = "", longest_homopolymer: int = 0, repeat: int = 0
) -> tuple[Constraints, list[Text]]:
    """Return the constraints of the options as given, `GAATTC,GGTCTC` and `40-60/50`, and all problems of them."""
    problems: list[Text] = []
    sites = tuple(dict.fromkeys(word.strip().upper().replace("U", "T") for word in avoid.split(",") if word.strip()))
    for site in sites:
        wrong = sorted(set(site) - set(IUPAC))
        if wrong:
            problems.append(listed("program.codon-site", site=site, letters=wrong, known="".join(IUPAC)))
    range_of_gc = _read_gc(gc) if gc else None
    if isinstance(range_of_gc, Text):
        problems.append(range_of_gc)
        range_of_gc = None
    if repeat and not SHORTEST_REPEAT <= repeat <= LONGEST_REPEAT:
        problems.append(listed("program.codon-repeat", got=repeat, low=SHORTEST_REPEAT, high=LONGEST_REPEAT))
    if problems:
        return NO_CONSTRAINTS, problems
    constraints = Constraints(sites, range_of_gc, longest_homopolymer, repeat)
    return constraints, constraints.problems()


def _read_gc(text: str) -> GCRange | Text:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)-(\d+(?:\.\d+)?)(?:/(\d+))?", text.strip())
    if not found:
        return listed("program.codon-gc", got=text)
    gc = GCRange(float(found[1]), float(found[2]), int(found[3] or 0))
    if not gc.low <= gc.high <= 100 or (found[3] and gc.window < SHORTEST_WINDOW):
        return listed("program.codon-gc-range", got=text, least=SHORTEST_WINDOW)
    low, high = gc.counts(gc.window)
    if gc.window and low > high:
        return listed("program.codon-gc-empty", bases=gc.window, low=gc.low, high=gc.high)
    return gc
