"""Lines of generated genes, and the hash of their token ids by a tokenizer file of CodonTransformer.

    python tests/programs/codonlines.py CodonTransformerTokenizer.json

prints IDS of test_codon_vocabulary.py. The file is `src/CodonTransformerTokenizer.json` of CodonTransformer at commit
4a447b01, read by transformers. Nothing of ascendrun is imported here: the lines come from SHA-256 and the
genetic code as it is written below.
"""

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence

COUNT = 10_000
LONGEST = 120
BASES = "TCAG"
CODE = "FFLLSSSSYY__CC_WLLLLPPPPHHQQRRRRIIIMTTTTNNKKSSRRVVVVAAAADDEEGGGG"
"""The standard genetic code in the order of NCBI's tables, bases T, C, A, G."""
WORDS = [
    f"{residue}_{first}{second}{third}"
    for residue, (first, second, third) in zip(CODE, ((a, b, c) for a in BASES for b in BASES for c in BASES))
]
STOPS = [word for word in WORDS if word.startswith("__")]
INNER = [word for word in WORDS if not word.startswith("__")]


def lines() -> Iterator[str]:
    """Yield the words of each gene, joined by spaces: every codon occurs, and every second line has masked ones."""
    for number in range(COUNT):
        seed = f"codon {number}".encode()
        draws = b"".join(hashlib.sha256(seed + bytes([part])).digest() for part in range(4))
        length = 1 + draws[0] % LONGEST
        inner = [INNER[draw % len(INNER)] for draw in draws[1 : 1 + length]]
        if number % 2:
            inner = [f"{word[0]}_UNK" if draw % 5 == 0 else word for word, draw in zip(inner, draws[2:])]
        yield " ".join([*inner, STOPS[draws[-1] % len(STOPS)]])


def digest(rows: Iterable[Sequence[int]]) -> str:
    """Return a hash of the ids of all lines in their order."""
    found = hashlib.sha256()
    for row in rows:
        found.update(json.dumps(list(row)).encode() + b"\n")
    return found.hexdigest()


def main() -> None:
    from transformers import PreTrainedTokenizerFast

    words = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=sys.argv[1], mask_token="[MASK]", **words)
    print(digest(tokenizer(list(lines()))["input_ids"]))


if __name__ == "__main__":
    main()
