"""What is asked of an optimization, the problems of its options and proteins, and the rules of its plan.

No numpy: the head node checks the same as the program does on a rank.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ascendrun.facts.proteins import AMINO_ACIDS, PROTEIN_FILES, SHOWN_PLACES, form_of, odd_letters, residues_of
from ascendrun.planner import rules
from ascendrun.planner.training import PlanProblem, Raw, Training
from ascendrun.programs.codon import vocabulary as v
from ascendrun.programs.codon.constraints import Constraints, read_constraints
from ascendrun.programs.codon.vocabulary import MAX_RESIDUES, ORGANISMS, Organisms
from ascendrun.text import Text, listed

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
    problem = listed("program.codon-ambiguous-option", got=text)
    return Ambiguity(), [problem]


def problems_of(count: int, odd: Odd, ambiguity: Ambiguity, *, most: int = v.MAX_RESIDUES) -> list[Text]:
    """Return all problems of a protein. `count`: its residues with the stop; `most`: of those that the model reads."""
    if count <= 1:
        return [listed("program.codon-no-protein")]
    unknown = {letter: each for letter, each in odd.items() if letter != v.STOP and not ambiguity.replaces(letter)}
    problems = []
    if unknown:
        places = sorted((at, letter) for letter, (_, first) in unknown.items() for at in first)
        problems.append(
            listed(
                "program.codon-residues",
                count=sum(number for number, _ in unknown.values()),
                places=[f"{letter}{at}" for at, letter in places[:SHOWN_PLACES]],
            )
        )
    if AMBIGUOUS.keys() & unknown.keys():
        problems.append(listed("program.codon-ambiguous"))
    if v.STOP in odd:
        stops = list(odd[v.STOP][1])
        problems.append(listed("program.codon-inner-stops", places=stops))
    if count > most:
        problems.append(listed("program.codon-long", count=count, most=most))
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
        wrong.append(listed("program.codon-several", count=count))
    if Path(options["output"]).suffix not in ENDINGS:
        wrong.append(listed("program.codon-output", got=options["output"], forms=list(ENDINGS)))
    drawings: tuple[Drawing | None, ...] = (None,)
    if not options["deterministic"]:
        seeds = range(options["seed"], options["seed"] + count)
        drawings = tuple(Drawing(options["temperature"], options["top_p"], seed) for seed in seeds)
    return Asked(constraints, ambiguity, drawings), [*problems, *wrong]


OPTIMIZES = ("optimize", "serve")


def is_file(given: str) -> bool:
    """Return whether `input` is the path of a file, not a protein in letters."""
    return "." in given or "/" in given


def check_optimization(training: Training) -> Iterator[PlanProblem]:
    """Report all problems of options and proteins together."""
    if training.mode not in OPTIMIZES:
        return
    options = training.options
    yield from check_model(training, str(options["model_path"]))
    asked, problems = read_asked(options)
    for problem in problems:
        yield PlanProblem(code_of(problem), problem)
    organisms, given = organisms_of(training), str(options["organism"])
    if given and organisms is not None and organisms.find(given) is None:
        problem = organisms.unknown(given)
        yield PlanProblem(code_of(problem), at("args.organism", problem), None, "organism")
    if training.mode == "optimize" and options["input"]:
        yield from check_proteins(training, organisms, asked.ambiguity)


def check_model(training: Training, path: str) -> Iterator[PlanProblem]:
    for host, raw in training.found(path).items():
        if raw.get("kind") in ("folder", "prepared") or (raw.get("kind") == "model" and not raw.get("config")):
            best = listed("plan.model-required.hint")
            yield PlanProblem.of("no-config", "model_path", (host,), hint=best, path=path)


def code_of(problem: Text) -> str:
    return problem.key.partition(".")[2]


def check_proteins(training: Training, organisms: Organisms | None, ambiguity: Ambiguity) -> Iterator[PlanProblem]:
    path, most = str(training.options["input"]), positions_of(training)
    if not is_file(path):
        residues = residues_of(path)
        found = problems_of(len(residues), odd_letters(residues), ambiguity, most=most)
        if not training.options["organism"] and organisms is not None:
            found.append(organisms.unknown(""))
        for problem in found:
            yield PlanProblem(code_of(problem), at("args.input", problem), None, "input")
        return
    if form_of(path) not in PROTEIN_FILES:
        yield PlanProblem.of("codon-input-form", "input", path=path, forms=list(PROTEIN_FILES))
        return
    yield from rules.same_data(training, "input", path)
    for host, raw in training.found(path).items():
        for file in raw.get("files", ()):
            for problem in problems_of_file(path, file, training, organisms, ambiguity, most):
                yield PlanProblem(code_of(problem.values.get("problem", problem)), problem, None, "input", (host,))


def at(place: Any, problem: Text) -> Text:
    return listed("program.codon-protein", place=str(place), problem=problem)


def problems_of_file(
    path: str, file: Raw, training: Training, organisms: Organisms | None, ambiguity: Ambiguity, most: int
) -> Iterator[Text]:
    """Yield the problems of the rows of a file, each with its place. `organisms` None: not known."""
    if "error" in file:
        yield listed("plan.unreadable", option="input", path=path, reason=file["error"])
        return
    proteins = file.get("proteins")
    if proteins is None or not (proteins["count"] or proteins["lacking"]):
        yield listed("program.codon-no-proteins", input=path)
        return
    for place in proteins["lacking"]:
        yield at(f"{path}:{place}", listed("plan.codon-no-protein"))
    odd: dict[Any, tuple[int, Any]] = {place: (count, letters) for place, count, letters in proteins["odd"]}
    for count, place in proteins["longest"]:
        odd.setdefault(place, (count, {}))
    for place, (count, letters) in odd.items():
        for problem in problems_of(count, letters, ambiguity, most=most):
            yield at(f"{path}:{place}", problem)
    for name, place in proteins["organisms"].items():
        given = name or str(training.options["organism"])
        if organisms is not None and (name or not given) and organisms.find(given) is None:
            yield at(f"{path}:{place}", organisms.unknown(given))


# --- the model ---


def training_of_model(training: Training) -> Mapping[str, Any] | None:
    """Return the options of the earlier stage whose output has the model; None: none is known to."""
    path = posixpath.normpath(str(training.options["model_path"]))
    return training.stage_at(path) or training.stage_at(posixpath.dirname(path))


def organisms_of(training: Training) -> Organisms | None:
    """Return the organisms of the model; None: not known, as of a model that another one or prepared data decides."""
    path = str(training.options["model_path"])
    raw = training.first(path)
    if raw is not None:
        names = (raw.get("organisms") or {}).get("organisms")
        return Organisms(tuple(map(str, names))) if isinstance(names, list) and names else ORGANISMS
    if training_of_model(training) is None:
        return None
    stages = training.earlier.values()
    if any(stage["base_model"] or posixpath.isabs(str(stage["prepared_dir"])) for stage in stages):
        return None
    return ORGANISMS.with_new([str(name) for stage in stages for name in stage["new_organisms"]])


def positions_of(training: Training) -> int:
    """Return the number of residues with the stop that the model reads; where it is not known, the most of any."""
    raw = training.first(str(training.options["model_path"])) or {}
    config: Mapping[str, Any] = raw.get("config") or training_of_model(training) or {}
    positions = config.get("max_position_embeddings")
    return min(MAX_RESIDUES, int(positions) - 2) if isinstance(positions, int) else MAX_RESIDUES
