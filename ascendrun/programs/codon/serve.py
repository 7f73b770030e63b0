"""HTTP service of a model of codons: POST /optimize and GET /health, on loopback by default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ascendrun.options import Notation, ProgramOptions, check_arguments
from ascendrun.programs.codon.asked import Asked, read_asked
from ascendrun.programs.codon.decoding import InfeasibleError
from ascendrun.programs.codon.files import load_stored
from ascendrun.programs.codon.optimize import Optimizer, most_residues
from ascendrun.programs.codon.sequences import Protein, complete
from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.generation.requests import Reply, RequestRefusedError, read_json
from ascendrun.programs.generation.server import RankService
from ascendrun.programs.trainer.options import read_table
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.text import Text, listed

OPTIONS = Path(__file__).with_name("options.json")
ASKABLE = (
    "organism", "avoid", "gc", "max_homopolymer", "no_repeat_bases", "deterministic", "temperature", "top_p",
    "num_sequences", "seed", "ambiguous",
)  # fmt: skip
"""Options of the program that a request may set; those of the stage are the defaults."""
DRAWS = ("temperature", "top_p")
BODY = Notation("", '"{name}": {value}')
MOST_PROTEINS, MOST_SEQUENCES = 64, 256


@dataclass(frozen=True)
class Question:
    """The proteins of a request, and what of each is made."""

    proteins: list[Protein]
    asked: Asked


@dataclass(frozen=True)
class Service:
    """An optimizer and the options of its stage. `most`: residues with the stop that the model reads."""

    optimizer: Optimizer
    options: Mapping[str, Any]
    table: ProgramOptions
    most: int

    @classmethod
    def of(cls, options: Mapping[str, Any], here: Runtime) -> Service:
        """Raises InvalidDataError for options that no request can keep."""
        problems = read_asked(options)[1]
        stored = load_stored(Path(options["model_path"]))
        if options["organism"] and stored.organisms.find(options["organism"]) is None:
            problems.append(stored.organisms.unknown(options["organism"]))
        if problems:
            raise InvalidDataError.of(problems)
        table = read_table(OPTIONS)
        table = replace(table, options={name: table.options[name] for name in ASKABLE})
        return cls(Optimizer.of(stored, options, here), options, table, most_residues(stored))

    def on_rank(self) -> RankService:
        device = str(self.optimizer.accelerator.device)
        facts = {"organisms": len(self.optimizer.organisms), "device": device}
        return RankService("/optimize", self.read, self.answer, facts)

    def read(self, body: bytes) -> Question:
        """Read {"protein"} or {"proteins": […]}, and options. Raises RequestRefusedError with all problems."""
        given = read_json(body)
        many = given.pop("proteins", None)
        if ("protein" in given) == (many is not None):
            keys = ["protein", "proteins"]
            raise RequestRefusedError(400, listed("program.body-keys", keys=keys))
        texts = [given.pop("protein")] if many is None else many
        if not isinstance(texts, list) or not texts or not all(isinstance(each, str) for each in texts):
            raise RequestRefusedError(400, listed("program.codon-body-proteins"))
        given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
        numbers = {name: str(value) for name, value in given.items() if type(value) is int}
        values, wrong = check_arguments(self.table, given, BODY, texts=numbers)
        if wrong:
            raise refused(400, [problem(each.message) for each in wrong])
        if any(values.get(name) is not None for name in DRAWS):
            values.setdefault("deterministic", False)
        options = {**self.options, **{name: value for name, value in values.items() if value is not None}}
        if len(texts) > MOST_PROTEINS or len(texts) * options["num_sequences"] > MOST_SEQUENCES:
            raise RequestRefusedError(
                413, listed("program.codon-body-size", proteins=MOST_PROTEINS, sequences=MOST_SEQUENCES)
            )
        asked, found = read_asked(options)
        problems = [problem(each) for each in found]
        organisms, organism = self.optimizer.organisms, options["organism"]
        known = organisms.find(organism)
        if known is None:
            problems.append(problem(organisms.unknown(organism)))
        proteins = []
        for number, text in enumerate(texts, start=1):
            residues, found = complete(text, asked.ambiguity, most=self.most)
            problems += [problem(each, protein=number) for each in found]
            proteins.append(Protein(str(number), residues, known or 0))
        if problems:
            raise refused(422, problems)
        return Question(proteins, asked)

    def answer(self, questions: Sequence[Question]) -> list[Reply]:
        """Return the sequences of several requests, whose proteins are computed together, or why there are none."""
        proteins = [protein for question in questions for protein in question.proteins]
        log_probs = dict(self.optimizer.log_probs_of(proteins))
        replies: list[Reply] = []
        place = 0
        for question in questions:
            rows, problems = [], []
            for number, protein in enumerate(question.proteins, start=1):
                try:
                    rows += self.optimizer.sequences_of(protein, log_probs[place], question.asked)
                except InfeasibleError as error:
                    where = {"position": error.position, "residue": error.residue, "is_certain": error.is_certain}
                    problems.append(problem(error.message, protein=number, **where))
                place += 1
            sequences = [{name: value for name, value in row.items() if name != "error"} for row in rows]
            replies.append(refused(422, problems) if problems else {"sequences": sequences})
        return replies


def problem(message: Text, **where: Any) -> dict[str, Any]:
    """Return a problem for a reply. `protein`: its number in the request, from 1; none: of the options."""
    return {**where, "code": message.key.partition(".")[2], "message": str(message)}


def refused(status: int, problems: list[dict[str, Any]]) -> RequestRefusedError:
    """Return the refusal of a request; `problems` of the reply has each with its place."""
    lines = [
        listed("program.codon-body-problem", number=each["protein"], message=each["message"])
        if "protein" in each
        else each["message"]
        for each in problems
    ]
    return RequestRefusedError(status, "\n".join(map(str, lines)), problems=problems)


def serve_stage(options: Mapping[str, Any], here: Runtime) -> None:
    """Serve until the stop signal. Every rank serves at --port plus its local rank, each with its own device."""
    service = Service.of(options, here)
    here.log(service.optimizer.precision.reason)
    service.on_rank().serve(options, here)
