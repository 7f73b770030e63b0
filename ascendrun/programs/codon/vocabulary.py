"""The words of the model: 90 tokens, of an amino acid with its codon, and the organisms that it knows by number.

Tokens, their order and the organisms are those of CodonTransformer, whose weights can be used. A sequence of a protein
and its DNA is [CLS], one token for each residue, [SEP]: `M_ATG A_GCT __TAA`, lower case in the model; `M_UNK` is a
methionine whose codon is not known. The last residue is the stop, `_`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from ascendrun.facts import proteins
from ascendrun.text import Text, listed

UNK, CLS, SEP, PAD, MASK = range(5)
STOP = proteins.STOP
RESIDUES = proteins.AMINO_ACIDS + STOP
"""In the order of their mask tokens."""
FIRST_RESIDUE = 5
FIRST_CODON = FIRST_RESIDUE + len(RESIDUES)
CODONS = tuple("".join(codon) for codon in product("ACGT", repeat=3))
"""In the order of their tokens, the first of which is FIRST_CODON."""
STANDARD: Mapping[str, str] = dict(zip(CODONS, "KNKNTTTTRSRSIIMIQHQHPPPPRRRRLLLLEDEDAAAAGGGGVVVV_Y_YSSSS_CWCLFLF"))
"""The residue of each codon by the standard genetic code; table 11 of bacteria and plastids has the same."""
START_CODONS = ("ATG", "TTG", "CTG", "GTG")
STOP_CODONS = tuple(codon for codon in CODONS if STANDARD[codon] == STOP)
TOKENS = (
    "[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]",
    *(f"{residue}_unk".lower() for residue in RESIDUES),
    *(f"{STANDARD[codon]}_{codon}".lower() for codon in CODONS),
)  # fmt: skip
IDS: Mapping[str, int] = {token: number for number, token in enumerate(TOKENS)}
MASK_OF = (*range(FIRST_CODON), *(FIRST_RESIDUE + RESIDUES.index(STANDARD[codon]) for codon in CODONS))
"""By token: the one of the same residue without its codon; other tokens stay."""
LONGEST = 2048
MAX_RESIDUES = LONGEST - 2
"""Of a protein, its stop included."""

_CODONS_OF = {
    each: tuple(FIRST_CODON + i for i, codon in enumerate(CODONS) if STANDARD[codon] == each) for each in RESIDUES
}
EUKARYOTES = frozenset({
    "Arabidopsis thaliana", "Caenorhabditis elegans", "Chlamydomonas reinhardtii", "Saccharomyces cerevisiae",
    "Danio rerio", "Drosophila melanogaster", "Homo sapiens", "Mus musculus", "Nicotiana tabacum",
    "Solanum tuberosum", "Solanum lycopersicum", "Oryza sativa", "Glycine max", "Zea mays",
})  # fmt: skip
"""Organisms whose genes are read by NCBI's codon table 1; all others by table 11."""


def codons_of(residue: str) -> tuple[int, ...]:
    """Return the tokens of the codons of a residue, ascending. Raises KeyError for other letters than RESIDUES.

    `CODONS[token - FIRST_CODON]` is the DNA of one of them.
    """
    return _CODONS_OF[residue]


def merge(protein: str, dna: str = "") -> list[str]:
    """Return the words of a protein with its stop, as in `M_ATG`, and of its DNA, which may be missing."""
    codons = [dna[i : i + 3] for i in range(0, len(dna), 3)] or ["UNK"] * len(protein)
    if len(codons) != len(protein):
        raise ValueError(f"{len(protein)} residues, {len(codons)} codons")
    return [f"{residue}_{codon}" for residue, codon in zip(protein, codons)]


def ids_of(words: Iterable[str]) -> list[int]:
    """Return the tokens of a sequence, with [CLS] and [SEP]; a word that is not known is [UNK]."""
    return [CLS, *(IDS.get(word.lower(), UNK) for word in words), SEP]


def translate(dna: str) -> str:
    """Return the residues of whole codons by the standard table; X for a codon with other letters than ACGT."""
    return "".join(STANDARD.get(dna[i : i + 3], "X") for i in range(0, len(dna) - 2, 3))


def table_of(organism: str) -> int:
    """Return the number of NCBI's codon table for the genes of an organism."""
    return 1 if organism in EUKARYOTES else 11


# --- organisms ---


@dataclass(frozen=True)
class Organisms:
    """The organisms of a model: the place of a name is its number, which is the token type of all of its positions."""

    names: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> Organisms:
        """Raises OSError, ValueError or KeyError for a file of another form."""
        return cls(tuple(json.loads(path.read_text(encoding="utf-8"))["organisms"]))

    def __len__(self) -> int:
        return len(self.names)

    def with_new(self, names: Sequence[str]) -> Organisms:
        """Return these organisms and those of `names` that are missing, which get the next numbers."""
        return Organisms((*self.names, *(name for name in dict.fromkeys(names) if name not in self.names)))

    def find(self, organism: str | int) -> int | None:
        """Return the number of an organism by its name or number; None: there is none."""
        text = str(organism).strip()
        if text in self.names:
            return self.names.index(text)
        return int(text) if text.isdecimal() and int(text) < len(self.names) else None

    def unknown(self, organism: str | int) -> Text:
        """Return the problem of an organism that is not found, with similar names."""
        near = difflib.get_close_matches(str(organism), self.names, n=3, cutoff=0.5) or self.names[:3]
        return listed(
            "program.codon-organism",
            organism=str(organism),
            near=list(near),
            count=len(self.names),
            last=len(self.names) - 1,
        )


ORGANISMS = Organisms.read(Path(__file__).with_name("organisms.json"))
"""Those of CodonTransformer; the file has the source."""
