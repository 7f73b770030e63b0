"""Tokens equal those of tiktoken over the same merges, texts come back exactly; documents are read from all forms."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import models

from ascendrun.programs.errors import InvalidDataError
from ascendrun.programs.nanochat import guide, texts
from tests.programs.nanochat.golden.strings import strings

GOLDEN = json.loads(Path(__file__).with_name("golden").joinpath("tokens.json").read_text())
OPTIONS = {"document_chars": 10, "val_size": 0.25, "synthetic_documents": 40, "seed": 1}
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi"},
    {"role": "user", "content": "2+2?"},
]


def spelled() -> list[str]:
    """The character by which the library spells each byte."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte if byte in shown else 256 + hidden.index(byte)) for byte in range(256)]


def of_ranks(ranks: list[bytes]):
    """Return our tokenizer with the merges that these tokens, in order, were made by."""
    number, letters = {token: rank for rank, token in enumerate(ranks)}, spelled()
    merges = []
    for rank, token in enumerate(ranks[256:], start=256):
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            pairs = [number.get(one + other, rank) for one, other in zip(parts, parts[1:])]
            at = pairs.index(min(pairs))
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        merges.append(tuple("".join(letters[byte] for byte in part) for part in parts))
    vocabulary = {"".join(letters[byte] for byte in token): rank for token, rank in number.items()}
    return texts.with_special(texts.byte_pairs(models.BPE(vocab=vocabulary, merges=merges)))


@pytest.fixture(scope="module")
def golden():
    return of_ranks([bytes.fromhex(token) for token in GOLDEN["ranks"]])


@pytest.fixture(scope="module")
def learned():
    return texts.train_bpe(texts.generated(100, seed=1), 400)


def test_ids_are_those_of_tiktoken(golden):
    """CJK, emoji, digits, white space, code, special marks as text, and characters without a name."""
    given = strings()
    found = [each.ids for each in golden.encode_batch(given, add_special_tokens=False)]
    assert found[: len(GOLDEN["ids"])] == GOLDEN["ids"]
    blocks = [found[at : at + 100] for at in range(0, len(found), 100)]
    assert [hashlib.sha256(json.dumps(block).encode()).hexdigest() for block in blocks] == GOLDEN["hashes"]
    assert [golden.decode(ids, skip_special_tokens=False) for ids in found] == given
    sizes = texts.token_bytes(golden)
    assert [sum(sizes[one] for one in ids) for ids in found] == [len(text.encode()) for text in given]


def test_as_many_bytes_make_a_token_as_with_rustbpe():
    """English, Chinese and code of this checkout: our trainer's tokens next to rustbpe's, which tiktoken reads."""
    rustbpe, tiktoken = pytest.importorskip("rustbpe"), pytest.importorskip("tiktoken")
    root = Path(__file__).resolve().parents[3]
    files = [*sorted((root / "docs").glob("*.md")), root / "ascendrun" / "text" / "zh.json"]
    pieces = [text[at : at + 2000] for text in map(Path.read_text, files) for at in range(0, len(text), 2000)]
    learned, other = pieces[::2], pieces[1::2]
    size = 2048
    theirs = rustbpe.Tokenizer()
    theirs.train_from_iterator(iter(learned), size - len(texts.SPECIAL), pattern=texts.PIECES)
    ranks = {bytes(token): rank for token, rank in theirs.get_mergeable_ranks()}
    encoding = tiktoken.Encoding("rustbpe", pat_str=texts.PIECES, mergeable_ranks=ranks, special_tokens={})
    ours = texts.train_bpe(learned, size)
    assert ours.get_vocab_size() == len(ranks) + len(texts.SPECIAL) == size
    for texts_ in (learned, other):
        count = sum(map(len, encoding.encode_ordinary_batch(texts_)))
        assert texts.bytes_per_token(ours, texts_) == pytest.approx(texts.bytes_of(texts_) / count, rel=0.005)


def test_special_tokens_are_the_last_ones_in_upstreams_order(golden):
    assert {token: golden.token_to_id(token) for token in texts.SPECIAL} == GOLDEN["special"]
    assert list(texts.SPECIAL) == list(GOLDEN["special"])


def test_equal_texts_make_equal_tokenizers(learned):
    assert texts.train_bpe(texts.generated(100, seed=1), 400).to_str() == learned.to_str()
    assert learned.get_vocab_size() == 400


def test_the_written_files_are_read_by_transformers_with_the_template(learned, tmp_path):
    from transformers import AutoTokenizer

    texts.save_files(tmp_path, learned.to_str())
    theirs = AutoTokenizer.from_pretrained(str(tmp_path))
    asked = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert asked == (
        "<|bos|><|user_start|>Be brief.\n\nHello<|user_end|><|assistant_start|>Hi<|assistant_end|>"
        "<|user_start|>2+2?<|user_end|><|assistant_start|>"
    )
    ids = theirs.encode(asked, add_special_tokens=False)
    assert theirs.decode(ids, skip_special_tokens=False) == asked
    assert [each for each in ids if each >= learned.get_vocab_size() - 9] == [
        learned.token_to_id(f"<|{name}|>")
        for name in ("bos", "user_start", "user_end", "assistant_start", "assistant_end", "user_start", "user_end",
                     "assistant_start")
    ]  # fmt: skip
    assert texts.load(tmp_path).to_str() == learned.to_str()


def test_a_missing_or_foreign_tokenizer_is_one_error(tmp_path, learned):
    with pytest.raises(InvalidDataError):
        texts.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidDataError):
        texts.load(tmp_path)
    texts.byte_pairs(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InvalidDataError):
        texts.load(tmp_path)


def test_characters_are_tokens_and_new_ones_are_unknown():
    made = texts.of_characters(["ab\n c", "é中"])
    ids = made.encode("a\n中 b", add_special_tokens=False).ids
    assert made.decode(ids, skip_special_tokens=False) == "a\n中 b"
    assert made.decode(made.encode("aZ", add_special_tokens=False).ids, skip_special_tokens=False) == "a\ufffd"
    sizes = texts.token_bytes(made)
    assert sum(sizes[one] for one in ids) == len("a\n中 b".encode())
    assert sizes[-9:] == [0] * 9 and made.get_vocab_size() == 8 + 9


def test_documents_begin_with_bos_and_are_cut_for_learning_only(learned):
    (ids, kept), *_ = texts.TextEncoder(learned)(["Ada finds", ""])
    assert ids[0] == learned.token_to_id("<|bos|>") and kept == [True] * len(ids)
    assert list(texts.shortened(["abcdef", "ghijkl", "mnopqr"], doc_cap=4, max_chars=6)) == ["abcd", "gh"]


# --- documents ---


def write_parquet(path, rows, *, group=2, column="text"):
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    parquet.write_table(arrow.table({column: rows}), path, row_group_size=group)


def corpus_of(path):
    return texts.read_corpus({**OPTIONS, "data_path": str(path)})


def test_all_forms_have_the_same_documents_and_the_last_file_is_for_validation(tmp_path):
    rows = [f"document {number}" for number in range(7)]
    for form in ("parquet", "jsonl"):
        (tmp_path / form).mkdir()
        (tmp_path / form / "SOURCE.txt").write_text("a note")
        for name, part in (("a", rows[:5]), ("b", rows[5:])):
            path = tmp_path / form / f"{name}.{form}"
            if form == "parquet":
                write_parquet(path, part)
            else:
                path.write_text("".join(json.dumps({"text": row}) + "\n" for row in part))
        found = corpus_of(tmp_path / form)
        assert (list(found.documents), found.first_val) == (rows, 5)
        assert list(found.documents[3:6]) == rows[3:6] and found.documents[6] == rows[6]
        assert list(found.documents[3:6][1:]) == rows[4:6]
    digest = found.digest
    (tmp_path / "jsonl" / "b.jsonl").write_text('{"text": "other"}\n')
    assert corpus_of(tmp_path / "jsonl").digest != digest


def test_a_text_file_is_cut_and_its_end_is_for_validation(tmp_path):
    (tmp_path / "book.txt").write_text("0123456789" * 7 + "end")
    found = corpus_of(tmp_path / "book.txt")
    assert (list(found.documents), found.first_val) == (["0123456789"] * 7 + ["end"], 6)


@pytest.mark.parametrize("content", ['{"body": "x"}\n' * 9, '{"text": 3}\n' * 9, "not JSON\n" * 9, "[1]\n" * 9])
def test_rows_without_a_text_are_one_error(tmp_path, content):
    (tmp_path / "data.jsonl").write_text(content)
    with pytest.raises(InvalidDataError):
        list(corpus_of(tmp_path / "data.jsonl").documents)


def test_paths_without_documents_are_one_error(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    write_parquet(tmp_path / "other.parquet", ["a"], column="body")
    (tmp_path / "broken.parquet").write_text("PAR1")
    (tmp_path / "table.csv").write_text("text\na\n")
    for name in ("empty.txt", "other.parquet", "broken.parquet", "table.csv", "missing.txt"):
        with pytest.raises(InvalidDataError):
            corpus_of(tmp_path / name)
    with pytest.raises(InvalidDataError):
        texts.read_corpus({**OPTIONS, "data_path": ""})


def test_generated_documents_follow_from_the_seed():
    first = texts.read_corpus({**OPTIONS, "data_path": "generated"})
    assert len(first.documents) == 40 and first.first_val == 30 and len(set(first.documents)) > 30
    assert texts.read_corpus({**OPTIONS, "data_path": "generated"}).digest == first.digest
    assert texts.read_corpus({**OPTIONS, "data_path": "generated", "seed": 2}).digest != first.digest


def test_the_report_has_the_bytes_of_a_token_in_each_kind_of_text():
    options = {**OPTIONS, "data_path": "generated", "tokenizer": "bpe", "vocab_size": 300}
    _, report = texts.learn(texts.read_corpus(options), {**options, "doc_cap": 1000, "max_chars": 10000})
    found = report["bytes_per_token"]
    assert {*found} == {"train", "val", "english", "korean", "chinese", "code", "science", "numbers"}
    assert 1 <= found["korean"] < found["english"] < found["train"], "it learned English texts"


def test_other_encodings_are_compared_with_where_their_files_are_here(tmp_path):
    """One that needs no file is there; those whose files the cache does not have are not, and nothing is fetched."""
    plugin = tmp_path / "path" / "tiktoken_ext"
    plugin.mkdir(parents=True)
    (plugin / "single_bytes.py").write_text(
        "def make():\n"
        "    ranks = {bytes([byte]): byte for byte in range(256)}\n"
        "    return {'name': 'single', 'pat_str': r'\\w+|\\W+', 'mergeable_ranks': ranks, 'special_tokens': {}}\n"
        "ENCODING_CONSTRUCTORS = {'single': make}\n"
    )
    program = (
        "import json; from ascendrun.programs.nanochat.texts import tiktoken_encodings\n"
        "print(json.dumps({name: len(encode(['ab c', 'é'])) for name, encode in tiktoken_encodings().items()}))"
    )
    root = str(Path(__file__).resolve().parents[3])
    environ = {**os.environ, "TIKTOKEN_CACHE_DIR": str(tmp_path), "PYTHONPATH": f"{plugin.parent}:{root}"}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"single": 6}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["path"]


def test_tok_eval_prints_a_column_for_each_encoding(tmp_path, monkeypatch, capsys):
    (tmp_path / "tokenizer").mkdir()
    report = {"bytes_per_token": {"val": 4.25, "code": 2.5}, "tiktoken": {"gpt2": {"val": 3.5}}}
    (tmp_path / "tokenizer" / "report.json").write_text(json.dumps(report))
    monkeypatch.setenv(guide.BASE_DIR, str(tmp_path))
    guide.tok_eval()
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["gpt2"],
        ["val", "4.250", "3.500"],
        ["code", "2.500"],
    ]
