"""What is asked of an optimization, and the problems of its options and proteins.

No numpy: the head node checks the same as the program does on a rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ascendrun.facts.proteins import AMINO_ACIDS, SHOWN_PLACES
from ascendrun.programs.codon import vocabulary as v
from ascendrun.programs.codon.constraints import Constraints, read_constraints
from ascendrun.text import Text

AMBIGUOUS: Mapping[str, str] = {"B": "ND", "Z": "QE", "X": "A", "J": "LI", "U": "C", "O": "K"}
"""Letters that stand for one of several amino acids, or for a rare one, and what may take their place."""
WAYS = ("error", "deterministic", "random")
ENDINGS = (".csv", ".fasta", ".jsonl")
"""Of the file of the DNA."""
Odd = Mapping[str, tuple[int, Sequence[int]]]
"""Letters that are not amino acids, or a stop before the end: how many, and the first positions from 1."""


@dataclass(frozen=True)
class Drawing:
    """The likeliest codons that together have the probability `top_p` are drawn, after division by `temperature`."""

    temperature: float = 0.2
    top_p: float = 0.95
    seed: int = 0


@dataclass(frozen=True)
class Ambiguity:
    """What becomes of B, Z, X, J, U and O: `error`, `deterministic` (the first of AMBIGUOUS), `random` by the seed and
    the protein, or the letters of `table`; one that it lacks is an error."""

    way: str = "error"
    table: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0

    def replaces(self, letter: str) -> bool:
        return letter in (AMBIGUOUS if self.way != "error" else self.table)


def read_ambiguity(text: str, *, seed: int = 0) -> tuple[Ambiguity, list[Text]]:
    """Return the option as given, a way or a table such as X=A,B=N, and its problem."""
    if text in WAYS:
        return Ambiguity(text, seed=seed), []
    pairs = dict(pair.strip().upper().partition("=")[::2] for pair in text.split(","))
    if all(letter in AMBIGUOUS and to in AMINO_ACIDS for letter, to in pairs.items()):
        return Ambiguity(table=pairs), []
    problem = Text(
        "program.codon-ambiguous-option",
        "ambiguous: {got:quote} (expected error, deterministic, random, or a table such as X=A,B=N)",
        got=text,
    )
    return Ambiguity(), [problem]


def problems_of(count: int, odd: Odd, ambiguity: Ambiguity, *, most: int = v.MAX_RESIDUES) -> list[Text]:
    """Return all problems of a protein. `count`: its residues with the stop; `most`: of those that the model reads."""
    if count <= 1:
        return [Text("program.codon-no-protein", "the protein is empty")]
    unknown = {letter: each for letter, each in odd.items() if letter != v.STOP and not ambiguity.replaces(letter)}
    problems = []
    if unknown:
        places = sorted((at, letter) for letter, (_, first) in unknown.items() for at in first)
        problems.append(
            Text(
                "program.codon-residues",
                "{count:plural letter letters} other than the 20 amino acids: {places}",
                count=sum(number for number, _ in unknown.values()),
                places=[f"{letter}{at}" for at, letter in places[:SHOWN_PLACES]],
            )
        )
    if AMBIGUOUS.keys() & unknown.keys():
        problems.append(
            Text(
                "program.codon-ambiguous",
                "ambiguous residues; set ambiguous to deterministic, random, or a table such as X=A",
            )
        )
    if v.STOP in odd:
        stops = list(odd[v.STOP][1])
        problems.append(Text("program.codon-inner-stops", "a stop before the end, at {places}", places=stops))
    if count > most:
        problems.append(
            Text(
                "program.codon-long", "{count} residues with the stop (expected at most {most})", count=count, most=most
            )
        )
    return problems


# --- what is asked of them ---


@dataclass(frozen=True)
class Asked:
    """The options of an optimization. `drawings`: of each protein, one sequence each; None: the likeliest."""

    constraints: Constraints
    ambiguity: Ambiguity
    drawings: tuple[Drawing | None, ...]


def read_asked(options: Mapping[str, Any]) -> tuple[Asked, list[Text]]:
    """Return what the options of the program ask for, and all problems of them."""
    constraints, problems = read_constraints(
        ",".join(options["avoid"]), options["gc"], options["max_homopolymer"], options["no_repeat_bases"]
    )
    ambiguity, wrong = read_ambiguity(options["ambiguous"], seed=options["seed"])
    count = options["num_sequences"]
    if options["deterministic"] and count > 1:
        wrong.append(Text("program.codon-several", "num_sequences: {count} requires deterministic: false", count=count))
    if Path(options["output"]).suffix not in ENDINGS:
        wrong.append(
            Text(
                "program.codon-output",
                "output: {got:quote} (expected a name that ends in {forms})",
                got=options["output"],
                forms=list(ENDINGS),
            )
        )
    drawings: tuple[Drawing | None, ...] = (None,)
    if not options["deterministic"]:
        seeds = range(options["seed"], options["seed"] + count)
        drawings = tuple(Drawing(options["temperature"], options["top_p"], seed) for seed in seeds)
    return Asked(constraints, ambiguity, drawings), [*problems, *wrong]
