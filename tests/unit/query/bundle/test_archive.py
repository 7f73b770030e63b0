"""An archive holds what it says, fits its bound, gives nobody's secret away, and is the same every time."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascendrun.core.logs.redaction import Redactor
from ascendrun.query.bundle import archive

BIG = 100 << 20


def pack(pieces: list[archive.Piece], *, known: dict[str, str] | None = None, max_bytes: int = BIG) -> bytes:
    out = io.BytesIO()
    archive.make_archive(
        pieces,
        Redactor(known or {}),
        root="r",
        facts={"job": "j-0001"},
        max_bytes=max_bytes,
        out=out,
        mtime_s=7,
        left_out=[("x", "why")],
    )
    return out.getvalue()


def unpack(data: bytes) -> dict[str, bytes]:
    found = {}
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for member in tar.getmembers():
            assert member.isreg() and member.name.startswith("r/") and (member.mtime, member.uid) == (7, 0)
            file = tar.extractfile(member)
            assert file is not None
            found[member.name[2:]] = file.read()
    return found


def test_the_manifest_tells_the_truth_of_every_file() -> None:
    files = unpack(
        pack([archive.text_piece("b", "PASSWORD=q1w2e3r4\n"), archive.text_piece("a", "x" * 50_000)], max_bytes=20_000)
    )
    manifest = json.loads(files.pop(archive.MANIFEST))
    assert manifest["job"] == "j-0001" and manifest["left_out"] == [{"what": "x", "why": "why"}]
    assert [one["name"] for one in manifest["files"]] == sorted(files) == ["a", "b"]
    for one in manifest["files"]:
        data = files[one["name"]]
        assert one["bytes"] == len(data) and one["sha256"] == hashlib.sha256(data).hexdigest()
    first, second = manifest["files"]
    assert first["is_cut"] and first["of_bytes"] == 50_000 and not second["is_cut"]
    assert second["redactions"] == 1 and manifest["secrets"] == 1


def test_the_same_input_gives_the_same_bytes_in_whatever_order_it_comes() -> None:
    pieces = [archive.text_piece(name, f"HF_TOKEN=hf_{name * 20}") for name in "cab"]
    assert pack(pieces) == pack(list(reversed(pieces)))


def test_a_long_file_keeps_its_beginning_and_its_end_in_whole_lines() -> None:
    lines = [f"line {number:07d}\n" for number in range(100_000)]
    data = unpack(pack([archive.text_piece("a", "".join(lines))], max_bytes=200_000))["a"].decode()
    assert data.startswith("line 0000000\n") and data.endswith("line 0099999\n") and len(data) < 210_000
    kept = [line for line in data.splitlines() if line and not line.startswith("[...")]
    assert set(kept) <= {line.strip() for line in lines} and "bytes omitted" in data


@settings(max_examples=25)
@given(st.data())
def test_a_secret_across_a_cut_leaves_no_half(data: st.DataObject) -> None:
    secret = "s3cr3t-" + data.draw(st.text("abcdefXYZ0123", min_size=30, max_size=300))
    cuts = (int(60_000 * archive.HEAD_SHARE), 400_000 - 60_000 + int(60_000 * archive.HEAD_SHARE))
    where = data.draw(st.sampled_from(cuts)) - data.draw(st.integers(0, len(secret)))
    newlines = data.draw(st.booleans())
    filler = ("." * 79 + "\n" if newlines else "." * 80) * 5000
    text = filler[:where] + secret + filler[where + len(secret) :]
    clean = unpack(pack([archive.text_piece("a", text)], known={secret: "known"}, max_bytes=60_000))["a"].decode()
    assert not any(secret[at : at + 8] in clean for at in range(len(secret) - 7))


@settings(max_examples=60)
@given(st.data())
def test_a_planted_secret_is_in_no_file_of_the_archive(data: st.DataObject) -> None:
    secret = data.draw(st.text("abcdefghXYZ0123456789!#%&*+,-./:;<=>?@^_{|}~", min_size=8, max_size=60)) + "7Q"
    texts = data.draw(st.lists(st.binary(max_size=200), min_size=1, max_size=5))
    dress = data.draw(st.sampled_from(["plain", "json", "middle"]))
    worn = json.dumps(secret) if dress == "json" else secret
    at = data.draw(st.integers(0, len(texts) - 1))
    texts[at] += worn.encode() + (b"tail" if dress == "middle" else b"\n")
    pieces = [archive.text_piece(f"{secret}-{number}", text) for number, text in enumerate(texts)]
    raw = pack(pieces, known={secret: "known"})
    assert not any(secret.encode() in name.encode() + text for name, text in unpack(raw).items())


def test_a_secret_that_shows_its_name_in_one_file_is_taken_out_of_all() -> None:
    pieces = [archive.text_piece("a", "connecting with q1w2e3r4t5"), archive.text_piece("b", "DB_PASSWORD=q1w2e3r4t5")]
    assert not any(b"q1w2e3r4t5" in text for text in unpack(pack(pieces)).values())


def test_generations_of_a_file_are_one_text_and_a_secret_across_them_is_found(tmp_path: Path) -> None:
    for number, text in enumerate(["begin q1w2e3", "r4t5y6 end\n"]):
        (tmp_path / f"rank-0.out.{number}").write_text(text)
    piece = archive.file_piece("a", sorted(tmp_path.iterdir()))
    assert unpack(pack([piece], known={"q1w2e3r4t5y6": "known"}))["a"] == b"begin [redacted 1: known] end\n"
    assert [piece.read(offset, 5) for offset in (0, 10, 20)] == [b"begin", b"e3r4t", b"nd\n"]


def test_what_grows_meanwhile_is_packed_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"old")
    piece = archive.file_piece("a", [path])
    path.write_bytes(b"old and new")
    assert unpack(pack([piece]))["a"] == b"old"


@given(
    st.lists(st.integers(0, 10 * archive.MOST_BYTES), max_size=40),
    st.integers(archive.LEAST_BYTES, 50 * archive.MOST_BYTES),
)
def test_the_whole_fits_and_nothing_small_is_cut_for_nothing(sizes: list[int], budget: int) -> None:
    level = archive.water_level(sizes, budget)
    assert archive.LEAST_BYTES <= level <= archive.MOST_BYTES
    if level > archive.LEAST_BYTES:
        assert sum(min(size, level) for size in sizes) <= budget
    if sum(sizes) <= budget:
        assert level >= min(archive.MOST_BYTES, max(sizes, default=0))


def test_a_file_is_private_whole_or_not_there(tmp_path: Path) -> None:
    def fail(out: object) -> archive.Contents:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError):
        archive.write_archive(tmp_path / "x.tar.gz", fail)
    assert list(tmp_path.iterdir()) == []
    _, digest = archive.write_archive(
        tmp_path / "x.tar.gz",
        lambda out: archive.make_archive(
            [archive.text_piece("a", "b")], Redactor(), root="r", facts={}, max_bytes=BIG, out=out
        ),
    )
    assert (tmp_path / "x.tar.gz").stat().st_mode & 0o777 == 0o600
    assert hashlib.sha256((tmp_path / "x.tar.gz").read_bytes()).hexdigest() == digest
