"""Write tokens.json here: the ids of tiktoken for 2,000 strings, over merges that rustbpe learned.

    pip install tiktoken rustbpe
    PYTHONPATH=/tmp/upstream python tests/programs/nanochat/golden/make_tokens.py /tmp/upstream TEXT_FILE

The pattern and the order of the special tokens are read from upstream's nanochat/tokenizer.py (92d63d4). Ids are
stored for the first 60 strings; for each 100 the hash of all.
"""

import hashlib
import json
import sys
from pathlib import Path

from nanochat.tokenizer import RustBPETokenizer
from strings import KINDS, strings

HERE = Path(__file__).parent
SIZE = 800


def main() -> None:
    text = Path(sys.argv[2]).read_text(encoding="utf-8")[:300_000]
    theirs = RustBPETokenizer.train_from_iterator([text, *(kind * 40 for kind in KINDS)], SIZE)
    ids = [theirs.encode(each) for each in strings()]
    blocks = [ids[at : at + 100] for at in range(0, len(ids), 100)]
    golden = {
        "ranks": [token.hex() for token in theirs.enc._mergeable_ranks],
        "special": dict(sorted(theirs.enc._special_tokens.items(), key=lambda pair: pair[1])),
        "ids": ids[:60],
        "hashes": [hashlib.sha256(json.dumps(block).encode()).hexdigest() for block in blocks],
    }
    (HERE / "tokens.json").write_text(json.dumps(golden) + "\n")


main()
