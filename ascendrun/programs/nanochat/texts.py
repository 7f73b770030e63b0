"""Documents to train on, and the tokenizer that is learned from them.

Documents are Parquet files with a column text, JSON lines with a key text, text files, or generated. The tokenizer has
byte pairs or characters, special tokens, a chat template, and counts of bytes.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Callable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from ascendrun.options import GENERATED
from ascendrun.programs import errors
from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.nanochat.data_rules import FORMS, few_documents
from ascendrun.programs.nanochat.sizes import SPECIAL
from ascendrun.programs.trainer.checkpoint import replace_json, replace_text
from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.text import listed

LINES = 512
"""Lines of a JSON file that are read together."""
HASHED_BYTES = 32 << 20
"""Of a larger file only the beginning and the end are hashed, with its size."""


@dataclass(frozen=True)
class Chunk:
    """Documents of a file that are read together. `place`: the row group of Parquet, else the first byte. `size`: bytes
    of the chunk, or the characters of each document of a text file."""

    path: Path
    place: int
    size: int
    documents: int

    def read(self) -> list[str]:
        """Raises InvalidDataError."""
        try:
            if self.path.suffix == ".parquet":
                import pyarrow.parquet as parquet

                return parquet.ParquetFile(self.path).read_row_group(self.place, ["text"]).column(0).to_pylist()  # type: ignore[no-any-return]
            if self.path.suffix == ".txt":
                whole = self.path.read_text(encoding="utf-8")
                return [whole[start : start + self.size] for start in range(0, len(whole), self.size)]
            with open(self.path, "rb") as file:
                file.seek(self.place)
                return [json.loads(line)["text"] for line in file.read(self.size).splitlines()]
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise unreadable(self.path, error) from error


class Documents(Sequence[str]):
    """Documents of files, which are read when they are iterated; slices are not read."""

    def __init__(self, chunks: Sequence[Chunk], start: int = 0, stop: int | None = None) -> None:
        self.chunks = chunks
        self.starts = [0, *accumulate(chunk.documents for chunk in chunks)]
        self.range = range(start, self.starts[-1] if stop is None else stop)

    def __len__(self) -> int:
        return len(self.range)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            found = self.range[place]
            return Documents(self.chunks, found.start, found.stop)
        return next(iter(self[place : place + 1]))

    def __iter__(self) -> Iterator[str]:
        first = bisect.bisect_right(self.starts, self.range.start) - 1
        for chunk, start in zip(self.chunks[first:], self.starts[first:]):
            if start >= self.range.stop:
                return
            texts = chunk.read()
            for text in texts[max(0, self.range.start - start) : self.range.stop - start]:
                if not isinstance(text, str):
                    raise unreadable(chunk.path, TypeError("text is not a string"))
                yield text


@dataclass(frozen=True)
class Corpus:
    """All documents; those from `first_val` on are for validation. `digest`: of the content."""

    documents: Sequence[str]
    first_val: int
    digest: str


def read_corpus(options: Mapping[str, Any]) -> Corpus:
    """Open the documents of `data_path`. With several files the last one is for validation, else the last part.

    Raises InvalidDataError.
    """
    form = listed("program.texts-form")
    errors.check_given(options["data_path"], form)
    if options["data_path"] == GENERATED:
        texts = generated(options["synthetic_documents"], seed=options["seed"])
        return Corpus(texts, first_val_of(len(texts), options), hashlib.sha256("\0".join(texts).encode()).hexdigest())
    files = files_of(Path(options["data_path"]))
    chunks = [chunks_of(file, options["document_chars"]) for file in files]
    documents = Documents([chunk for each in chunks for chunk in each])
    last = sum(chunk.documents for chunk in chunks[-1])
    first_val = len(documents) - last if len(files) > 1 else first_val_of(len(documents), options)
    if not 0 < first_val < len(documents):
        raise InvalidDataError(few_documents(options["data_path"], len(documents)))
    marks = [f"{file.name} {mark_of_file(file)}" for file in files]
    return Corpus(
        documents, first_val, hashlib.sha256("\0".join([*marks, str(options["document_chars"])]).encode()).hexdigest()
    )


def first_val_of(count: int, options: Mapping[str, Any]) -> int:
    return count - max(1, round(count * float(options["val_size"])))


def files_of(path: Path) -> list[Path]:
    """Return the files of a path in the order of their names. Raises InvalidDataError."""
    if path.is_dir():
        found = sorted(each for each in path.iterdir() if each.suffix in FORMS and not each.name.startswith("."))
        kinds = sorted({each.suffix for each in found if each.suffix != ".txt"} or {each.suffix for each in found})
        found = [each for each in found if each.suffix in kinds]  # notes next to the data are no data
    else:
        found = [path] if path.is_file() and path.suffix in FORMS else []
    if not found:
        raise InvalidDataError(listed("program.no-text-files", path=path, forms=list(FORMS)))
    return found


def chunks_of(file: Path, document_chars: int) -> list[Chunk]:
    """Return where the documents of a file are. Raises InvalidDataError."""
    try:
        if file.suffix == ".parquet":
            import pyarrow.parquet as parquet

            with parquet.ParquetFile(file) as table:
                if "text" not in table.schema_arrow.names:
                    raise InvalidDataError(
                        listed("program.no-text-column", path=file, columns=list(table.schema_arrow.names))
                    )
                groups = range(table.num_row_groups)
                return [Chunk(file, group, 0, table.metadata.row_group(group).num_rows) for group in groups]
        if file.suffix == ".txt":
            length = len(file.read_text(encoding="utf-8"))
            return [Chunk(file, 0, document_chars, -(-length // document_chars))] if length else []
        with open(file, "rb") as lines:
            sizes = [len(line) for line in lines]
        starts = [0, *accumulate(sizes)]
        return [
            Chunk(file, starts[at], sum(sizes[at : at + LINES]), len(sizes[at : at + LINES]))
            for at in range(0, len(sizes), LINES)
        ]
    except (ValueError, OSError) as error:
        raise unreadable(file, error) from error


def unreadable(path: Path, error: Exception) -> InvalidDataError:
    return InvalidDataError(listed("program.text-unreadable", path=path, reason=repr(error)))


def mark_of_file(file: Path) -> str:
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with open(file, "rb") as content:
        digest.update(content.read(HASHED_BYTES))
        if size > HASHED_BYTES:
            content.seek(max(HASHED_BYTES, size - HASHED_BYTES))
            digest.update(content.read())
    return digest.hexdigest()


# --- generated ---

WHO = ("Ada", "Bo", "Chen", "Dora", "Emil", "Fay", "Gus", "Hana", "Ivo", "June", "Kai", "Lin")
WHAT = ("apples", "books", "coins", "shells", "stamps", "tickets", "pencils", "stones")
WHERE = ("in the garden", "at school", "by the river", "on the train", "in the old house", "near the harbour")
DID = ("finds", "buys", "counts", "hides", "paints", "carries", "loses", "shares")
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def generated(count: int, *, seed: int) -> list[str]:
    """Return short texts with sums and spelled words, which a small model can learn to continue."""
    return [short_text(random.Random(f"{seed} {number}")) for number in range(count)]


def short_text(chance: random.Random) -> str:
    who, what, lines = chance.choice(WHO), chance.choice(WHAT), []
    for _ in range(chance.randint(2, 8)):
        kind = chance.random()
        if kind < 0.5:
            lines.append(f"{who} {chance.choice(DID)} {chance.choice(NUMBERS)} {what} {chance.choice(WHERE)}.")
        elif kind < 0.8:
            first, second = chance.randint(0, 5), chance.randint(0, 5)
            lines.append(f"{NUMBERS[first]} {what} and {NUMBERS[second]} {what} are {NUMBERS[first + second]} {what}.")
        else:
            lines.append(f"{what} is spelled {' '.join(what)}.")
    return " ".join(lines) + "\n"


BOS, PAD = SPECIAL[0], "<|assistant_end|>"
PIECES = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
"""Texts are cut into these before pairs are merged: GPT-4's pattern, with one or two digits."""
UNKNOWN = "\ufffd"
"""Of characters that the training texts did not have, with `chars`."""
TEMPLATE = (
    "{{ '<|bos|>' }}"
    "{% set first = messages[0].content + '\n\n' if messages and messages[0].role == 'system' else '' %}"
    "{% for message in messages if message.role != 'system' %}"
    "{{ '<|' + message.role + '_start|>' + (first if loop.first else '') + message.content "
    "+ '<|' + message.role + '_end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant_start|>' }}{% endif %}"
)
REPORTED_DOCUMENTS = 200
KINDS = {
    "english": "The weather had been fine all week, and few people in the village expected rain on Sunday. ",
    "korean": "어제 오후에 우리는 함께 도서관에 갔다. 돌아오는 길에 비가 많이 왔지만 아무도 우산이 없었다. ",
    "chinese": "昨天下午我们一起去图书馆看书，回来的时候下起了大雨，大家都没有带伞。",
    "code": "def total(prices):\n    return sum(price.value for price in prices if price.value > 0)\n\n",
    "science": "Light of 680 nm drives photosynthesis: 6 CO2 + 6 H2O -> C6H12O6 + 6 O2 in the chloroplasts of a leaf. ",
    "numbers": "In 1969 there were 3,724 of them; 12.5% more than in 1968, or 414 of 3310 (x = 0.12507). ",
}
"""Texts of which the report says the bytes a token."""


def train_bpe(texts: Iterable[str], size: int) -> Tokenizer:
    """Learn byte pairs. `size`: tokens with the special ones; fewer if the texts have fewer pairs."""
    tokenizer = byte_pairs(models.BPE())
    trainer: Any = trainers.BpeTrainer(
        vocab_size=size - len(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        special_tokens=[],
    )
    tokenizer.train_from_iterator(texts, trainer)
    return with_special(tokenizer)


def byte_pairs(model: Any) -> Tokenizer:
    tokenizer: Any = Tokenizer(model)
    cut = pre_tokenizers.Split(Regex(PIECES), "isolated")
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, spell])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer  # type: ignore[no-any-return]


def of_characters(texts: Iterable[str]) -> Tokenizer:
    found = sorted({character for text in texts for character in text} - {UNKNOWN})
    vocabulary = {character: number for number, character in enumerate([*found, UNKNOWN])}
    tokenizer: Any = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return with_special(tokenizer)


def with_special(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.encode_special_tokens = True  # in a text they are ordinary characters
    return tokenizer


def load(folder: Path) -> Tokenizer:
    """Raises InvalidDataError."""
    file = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library has no class of its own for a missing or damaged file
        raise InvalidDataError(listed("program.no-tokenizer", file=file, reason=error)) from error
    missing = [token for token in SPECIAL if tokenizer.token_to_id(token) is None]
    if missing:
        raise InvalidDataError(listed("program.other-tokenizer", file=file, missing=missing))
    tokenizer.encode_special_tokens = True
    return tokenizer


def mark_of(tokenizer: Tokenizer) -> str:
    return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()


def token_bytes(tokenizer: Tokenizer) -> list[int]:
    """Return the bytes of text of each token; 0: a special token."""
    is_bytes = isinstance(tokenizer.model, models.BPE)
    count = tokenizer.get_vocab_size()
    texts = [str(tokenizer.id_to_token(number)) for number in range(count)]
    return [0 if text in SPECIAL else len(text) if is_bytes else len(text.encode()) for text in texts]


@dataclass(frozen=True)
class TextEncoder:
    """Encodes documents; each begins with BOS."""

    tokenizer: Tokenizer

    def __call__(self, texts: Sequence[Any]) -> list[tuple[Any, Any]]:
        first = self.tokenizer.token_to_id(BOS)
        found = self.tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [([first, *each.ids], [True] * (1 + len(each.ids))) for each in found]


def bytes_per_token(tokenizer: Tokenizer, texts: Sequence[str]) -> float:
    tokens = sum(len(each.ids) for each in tokenizer.encode_batch(list(texts), add_special_tokens=False))
    return bytes_of(texts) / max(1, tokens)


def bytes_of(texts: Sequence[str]) -> int:
    return sum(len(text.encode()) for text in texts)


# --- the stage ---


def tokenizer_stage(options: Mapping[str, Any], here: Runtime) -> None:
    """Learn a tokenizer on rank 0, and write it to `output_dir` on every node."""
    corpus = read_corpus(options)
    here.check_same(corpus.digest)
    folder = Path(options["output_dir"]).absolute()
    errors.check_writable(folder)
    text, report = here.share(learn(corpus, options) if here.is_first else ("", {}))
    if here.local_rank == 0:
        replace_json(folder / "report.json", report)
        save_files(folder, text)
    here.log(
        listed(
            "program.tokenizer",
            count=report["tokens"],
            train=report["bytes_per_token"]["train"],
            val=report["bytes_per_token"]["val"],
            directory=folder,
        )
    )
    here.record(done=True, tokens=report["tokens"], final_bytes_per_token=report["bytes_per_token"]["val"])


def learn(corpus: Corpus, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the tokenizer's file and its report."""
    train, val = corpus.documents[: corpus.first_val], corpus.documents[corpus.first_val :]
    texts = shortened(train, doc_cap=options["doc_cap"], max_chars=options["max_chars"])
    tokenizer = of_characters(texts) if options["tokenizer"] == "chars" else train_bpe(texts, options["vocab_size"])
    measured = {"train": list(train[:REPORTED_DOCUMENTS]), "val": list(val[:REPORTED_DOCUMENTS])}
    measured.update({kind: [text] for kind, text in KINDS.items()})
    found = {name: round(bytes_per_token(tokenizer, texts), 4) for name, texts in measured.items()}
    report = {"tokens": tokenizer.get_vocab_size(), "data": corpus.digest, "bytes_per_token": found}
    others = {
        name: {kind: round(bytes_of(texts) / len(encode(texts)), 4) for kind, texts in measured.items() if any(texts)}
        for name, encode in tiktoken_encodings().items()
    }
    return tokenizer.to_str(), {**report, "tiktoken": others}


def tiktoken_encodings() -> dict[str, Callable[[Sequence[str]], list[int]]]:
    """Return tiktoken's encodings by name, each as a function from texts to all their tokens, to compare with: those
    whose files are in its cache (TIKTOKEN_CACHE_DIR). Nothing is downloaded; without tiktoken there are none."""
    try:
        import tiktoken.load
    except ImportError:
        return {}

    def refuse(blobpath: str) -> bytes:
        raise FileNotFoundError(blobpath)

    found: dict[str, Callable[[Sequence[str]], list[int]]] = {}
    read_file = tiktoken.load.read_file
    tiktoken.load.read_file = refuse  # called for files that the cache does not have
    try:
        for name in tiktoken.list_encoding_names():
            try:
                encoding = tiktoken.get_encoding(name)
            except OSError:
                continue
            encode = encoding.encode_ordinary_batch
            found[name] = lambda texts, encode=encode: [token for ids in encode(list(texts)) for token in ids]  # type: ignore[misc]
    finally:
        tiktoken.load.read_file = read_file
    return found


def shortened(texts: Iterable[str], *, doc_cap: int, max_chars: int) -> Iterator[str]:
    """Yield the beginning of each document until there are `max_chars` characters."""
    left = max_chars
    for text in texts:
        if left <= 0:
            return
        text = text[: min(doc_cap, left)]
        left -= len(text)
        yield text


def save_files(folder: Path, text: str) -> None:
    """Write the files that AutoTokenizer reads. `text`: of the tokenizer itself."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": PAD,
        "pad_token": PAD,
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    replace_json(folder / "tokenizer_config.json", settings)
    replace_text(folder / "tokenizer.json", text)
