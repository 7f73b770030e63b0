"""Genes to train on: tables, FASTA files or the lines of the guide, checked and encoded; or generated ones."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ascendrun.options import GENERATED
from ascendrun.programs import errors
from ascendrun.programs.codon import vocabulary as v
from ascendrun.programs.codon.sequences import Row, files_of, rows_of
from ascendrun.programs.codon.vocabulary import Organisms
from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.trainer.checkpoint import replace_json, replacing
from ascendrun.text import Text, listed

Array = Any
PREPARED = "prepared.json"
ARRAYS = ("tokens", "starts", "organisms", "is_val")
REASONS: Mapping[str, Text] = {
    "empty": listed("codon.empty"),
    "letters": listed("codon.letters"),
    "length": listed("codon.length"),
    "start": listed("codon.start"),
    "stop": listed("codon.stop"),
    "inner-stop": listed("codon.inner-stop"),
    "nucleotides": listed("codon.nucleotides"),
    "mismatch": listed("codon.mismatch"),
    "code": listed("codon.code"),
    "words": listed("codon.words"),
    "long": listed("codon.long", most=v.MAX_RESIDUES),
}
"""Why a sequence is skipped."""


@dataclass(frozen=True)
class Genes:
    """Encoded genes. `tokens`: of all genes, without [CLS] and [SEP]; `starts`: of each, and the last end.

    `organisms`: the number of each gene's organism among `names`. `is_val`: the gene is for validation, as all with the
    same protein. `skipped`: by reason, the number of sequences that are not used.
    """

    tokens: Array
    starts: Array
    organisms: Array
    is_val: Array
    names: Organisms
    skipped: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.organisms)

    def __getitem__(self, number: int) -> Array:
        """Return the tokens of a gene, with [CLS] and [SEP]."""
        own = self.tokens[self.starts[number] : self.starts[number + 1]]
        return np.concatenate([[v.CLS], own, [v.SEP]]).astype(np.int64)

    @property
    def lengths(self) -> Array:
        """With [CLS] and [SEP]."""
        return np.diff(self.starts) + 2

    @property
    def digest(self) -> str:
        found = hashlib.sha256(json.dumps(self.names.names).encode())
        for name in ARRAYS:
            found.update(np.ascontiguousarray(getattr(self, name)).tobytes())
        return found.hexdigest()

    def known_to(self, names: Organisms) -> Genes:
        """Return these genes with the organisms' numbers of a model; those that it does not have are added to it."""
        used = [self.names.names[number] for number in np.unique(self.organisms)]
        names = names.with_new(used)
        numbers = np.array([names.names.index(each) if each in used else 0 for each in self.names.names], np.int32)
        return replace(self, organisms=numbers[np.asarray(self.organisms)], names=names)

    def numbers(self, *, val: bool) -> Array:
        return np.flatnonzero(np.asarray(self.is_val) == val)


def read_genes(options: Mapping[str, Any], organisms: Organisms) -> Genes:
    """Return the genes of `prepared_dir` or `data_path`. Raises InvalidDataError with all problems of all files."""
    if options["prepared_dir"]:
        return load(Path(options["prepared_dir"]))
    errors.check_given(options["data_path"], listed("program.codon-form"))
    organisms = organisms.with_new(options["new_organisms"])
    if options["data_path"] == GENERATED:
        count, seed = options["synthetic_sequences"], options["seed"]
        return generated(count, seed=seed, names=organisms, val_size=options["val_size"])
    reading = Reading(organisms, options)
    for path in files_of(Path(options["data_path"])):
        reading.read(path)
    return reading.finish(val_size=options["val_size"])


class Reading:
    """The sequences of all files so far, and all problems with them."""

    def __init__(self, organisms: Organisms, options: Mapping[str, Any]) -> None:
        self.organisms, self.options = organisms, options
        self.genes: list[Array] = []
        self.numbers: list[int] = []
        self.problems: list[Text] = []
        self.unknown: dict[str, tuple[Path, int, int]] = {}
        self.skipped: dict[str, list[str]] = {}
        self.strange = strange_codons(options["codon_table"])

    def read(self, path: Path) -> None:
        count = 0
        try:
            for row in rows_of(path, str(self.options["organism"])):
                count += 1
                if isinstance(row, Text):
                    self.problems.append(row)
                else:
                    self.take(path, row)
        except (OSError, UnicodeDecodeError, EOFError, csv.Error) as error:
            self.problems.append(listed("program.codon-unreadable", path=path, reason=str(error)))
            return
        if not count:
            self.problems.append(listed("program.codon-empty", path=path))

    def take(self, path: Path, row: Row) -> None:
        number = self.organisms.find(row.organism)
        if number is None:
            first, place, count = self.unknown.get(row.organism, (path, row.place, 0))
            self.unknown[row.organism] = first, place, count + 1
            return
        found = encode(row, self.strange)
        if isinstance(found, str):
            self.skipped.setdefault(found, []).append(f"{path}:{row.place}")
        else:
            self.genes.append(found)
            self.numbers.append(number)

    def finish(self, *, val_size: float) -> Genes:
        for organism, (path, place, count) in self.unknown.items():
            self.problems.append(
                listed("program.codon-unknown", path=path, place=place, organism=organism, count=count)
            )
        if self.skipped and (self.options["invalid_rows"] == "refuse" or not (self.genes or self.problems)):
            self.problems += [
                listed("program.codon-row", place=place, reason=REASONS[reason])
                for reason, places in self.skipped.items()
                for place in places
            ]
        if self.problems:
            raise InvalidDataError.of(self.problems)
        counts = {reason: len(places) for reason, places in sorted(self.skipped.items())}
        return assemble(self.genes, self.numbers, self.organisms, val_size=val_size, skipped=counts)


def assemble(
    genes: Sequence[Array],
    numbers: Sequence[int],
    names: Organisms,
    *,
    val_size: float,
    skipped: Mapping[str, int] | None = None,
) -> Genes:
    """Return genes with their split. Raises InvalidDataError if one of the two parts has none."""
    shares = [share_of(gene) for gene in genes]
    limit = max(val_size, min(shares, default=0.0))
    is_val = np.array([share <= limit for share in shares], dtype=bool)
    if is_val.all():
        raise InvalidDataError(listed("program.codon-few", count=len(genes), proteins=len(set(shares))))
    starts = np.cumsum([0, *map(len, genes)], dtype=np.int64)
    return Genes(np.concatenate(genes), starts, np.array(numbers, np.int32), is_val, names, skipped or {})


MASKS = np.array(v.MASK_OF, dtype=np.uint8)


def share_of(gene: Array) -> float:
    """Return a number from 0 to 1 that is equal for genes of the same protein, and for no others."""
    return int.from_bytes(hashlib.sha256(MASKS[gene].tobytes()).digest()[:8], "big") / 2**64


# --- one sequence ---


def encode(row: Row, strange: frozenset[str] = frozenset()) -> Array | str:
    """Return the tokens of a sequence, or the reason why it is skipped. `strange`: codons of another genetic code."""
    words = row.words
    if words is None:
        found = merged(row.dna, row.protein, strange)
        if isinstance(found, str):
            return found
        words = found
    ids = [v.IDS.get(word.lower(), v.UNK) for word in words]
    if not ids:
        return "empty"
    if min(ids) < v.FIRST_RESIDUE:
        return "words"
    stops = [place for place, word in enumerate(words) if word[0] == v.STOP]
    if not stops or stops[-1] != len(ids) - 1:
        return "stop"
    if len(stops) > 1:
        return "inner-stop"
    return "long" if len(ids) > v.MAX_RESIDUES else np.array(ids, dtype=np.uint8)


def merged(dna: str, protein: str | None, strange: frozenset[str] = frozenset()) -> list[str] | str:
    """Return the words of a coding sequence, or the reason why it is none.

    A start codon is read as itself, also where the protein has its M. Without a stop in both, `__UNK` is added.
    """
    dna = "".join(dna.split()).upper().replace("U", "T")
    if not dna:
        return "empty"
    if set(dna) - set("ACGT"):
        return "letters"
    if len(dna) % 3:
        return "length"
    own = v.translate(dna)
    wanted = own if protein is None else "".join(protein.split()).upper().replace("*", v.STOP)
    codons = [dna[place : place + 3] for place in range(0, len(dna), 3)]
    if protein is not None:
        wanted = wanted if wanted.endswith(v.STOP) else wanted + v.STOP
        if not own.endswith(v.STOP):
            own, codons = own + v.STOP, [*codons, "UNK"]
    if dna[:3] not in v.START_CODONS:
        return "start"
    if not own.endswith(v.STOP):
        return "stop"
    if v.STOP in own[:-1]:
        return "inner-stop"
    if len(set(dna)) < 4:
        return "nucleotides"
    if wanted != own and wanted != "M" + own[1:]:
        return "mismatch"
    if strange and not strange.isdisjoint(codons):
        return "code"
    return [f"{residue}_{codon}" for residue, codon in zip(own, codons)]


def strange_codons(table: int) -> frozenset[str]:
    """Return the codons that NCBI's table reads differently from the tokens; 0, 1 and 11: none."""
    if table in (0, 1, 11):
        return frozenset()
    try:
        from Bio.Data import CodonTable
    except ImportError as error:
        raise InvalidDataError(listed("program.codon-biopython", use="--codon_table")) from error

    if table not in CodonTable.unambiguous_dna_by_id:
        known = sorted(CodonTable.unambiguous_dna_by_id)
        raise InvalidDataError(listed("program.codon-table", table=table, known=known))
    code = CodonTable.unambiguous_dna_by_id[table]
    reads = {**code.forward_table, **dict.fromkeys(code.stop_codons, v.STOP)}
    return frozenset(codon for codon in v.CODONS if reads.get(codon) != v.STANDARD[codon])


# --- prepared ---


def save(genes: Genes, folder: Path) -> None:
    """Write the genes; the description last."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ARRAYS:
        with replacing(folder / f"{name}.npy") as fresh, open(fresh, "wb") as file:
            np.save(file, getattr(genes, name))
    replace_json(folder / PREPARED, facts_of(genes))


def facts_of(genes: Genes) -> dict[str, Any]:
    used, counts = np.unique(genes.organisms, return_counts=True)
    return {
        "program": "codon",
        "sequences": {"train": len(genes.numbers(val=False)), "val": len(genes.numbers(val=True))},
        "mean_tokens": float(genes.lengths.mean()),
        "longest": int(genes.lengths.max()),
        "skipped": dict(genes.skipped),
        "by_organism": {genes.names.names[int(each)]: int(count) for each, count in zip(used, counts)},
        "organisms": list(genes.names.names),
        "digest": genes.digest,
    }


def load(folder: Path) -> Genes:
    """Open what `save` wrote. Raises InvalidDataError if it is missing or damaged."""
    try:
        facts = json.loads((folder / PREPARED).read_text(encoding="utf-8"))
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ARRAYS}
        genes = Genes(**arrays, names=Organisms(tuple(facts["organisms"])), skipped=facts["skipped"])
        if facts["digest"] != genes.digest:
            raise ValueError("digest")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidDataError(listed("program.codon-not-prepared", directory=folder)) from error
    return genes


# --- generated ---

GENERATED_ORGANISMS = (51, 59, 120)
"""Numbers of the organisms of generated genes."""
STYLES = 2


def frequencies(organism: int) -> Array:
    """Return the frequencies of codons of generated genes: STYLES x RESIDUES x 64, those of a residue add up to 1.

    A gene has one style throughout, each as likely, so the codons of a gene tell of its other codons. Half of the
    residues are twice as frequent in the proteins of a style, so the protein tells of them too.
    """
    rng = np.random.default_rng([11, organism])
    found = np.zeros((STYLES, len(v.RESIDUES), len(v.CODONS)))
    for place, residue in enumerate(v.RESIDUES):
        codons = [token - v.FIRST_CODON for token in v.codons_of(residue)]
        for style in range(STYLES):
            found[style, place, codons] = rng.dirichlet(np.full(len(codons), 0.6))
    return found


def generated(count: int, *, seed: int, val_size: float, names: Organisms = v.ORGANISMS) -> Genes:
    """Return genes of random proteins of 20 to 120 residues, whose codons have the `frequencies` of their organism."""
    sums = {organism: frequencies(organism).cumsum(-1) for organism in GENERATED_ORGANISMS}
    genes, numbers = [], []
    for number in range(count):
        rng = np.random.default_rng([12, seed, number])
        organism = GENERATED_ORGANISMS[number % len(GENERATED_ORGANISMS)]
        style = int(rng.integers(STYLES))
        common = np.concatenate([np.arange(len(v.RESIDUES) - 1), np.arange(style, len(v.RESIDUES) - 1, STYLES)])
        inner = rng.choice(common, size=int(rng.integers(18, 119)))
        protein = np.concatenate([[v.RESIDUES.index("M")], inner, [len(v.RESIDUES) - 1]])
        own = sums[organism][style][protein]
        draws = rng.uniform(size=(len(protein), 1)) * own[:, -1:]
        genes.append((v.FIRST_CODON + (own <= draws).sum(-1)).astype(np.uint8))
        numbers.append(organism)
    return assemble(genes, numbers, names, val_size=val_size)
