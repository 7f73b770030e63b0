"""Links, holes and names of files that move: nothing leads out of a directory, and nothing grows on its way."""

import os
from collections import Counter
from pathlib import Path

import pytest

from ascendrun.head.protocol.file_messages import OutputsReply
from ascendrun.head.protocol.remote import Reply
from ascendrun.head.spool.transfer import TransferError, fetch_files
from ascendrun.node.agent import transfer
from ascendrun.node.files import BLOCK_BYTES
from tests.lib.transfer_node import RUN, Node, names


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "node")


def test_holes_of_a_sparse_file_are_neither_sent_nor_stored(node: Node, tmp_path: Path) -> None:
    data, hole_bytes = os.urandom(3 * BLOCK_BYTES), 60 * BLOCK_BYTES
    source = tmp_path / "sparse.bin"
    with open(source, "wb") as file:
        file.seek(hole_bytes)
        file.write(data)
        file.truncate(2 * hole_bytes)
    node.cuts = {2}
    with pytest.raises(TransferError):
        node.send("in", source)
    node.send("in", source)
    there = node.work / "in/sparse.bin"
    assert there.read_bytes() == source.read_bytes() and there.stat().st_blocks * 512 < 2 * len(data)
    node.cuts, node.sent = {3}, Counter()
    with pytest.raises(TransferError):
        node.fetch(tmp_path / "into", "in")
    progress = node.fetch(tmp_path / "into", "in")
    here = tmp_path / "into/in/sparse.bin"
    assert here.read_bytes() == source.read_bytes() and here.stat().st_blocks * 512 < 2 * len(data)
    assert sum(node.sent.values()) < 10 and progress.done_bytes == source.stat().st_size
    admitted: list[tuple[int, int]] = []
    fetch_files(node.ask, RUN, ["in"], tmp_path / "other", admit=lambda *sizes: admitted.append(sizes))
    assert max(admitted[0]) < 2 * len(data), "what a disk must hold, not what the file seems to have"


def with_links(folder: Path) -> None:
    (folder / "step-5").mkdir(parents=True)
    (folder / "step-5/model.bin").write_bytes(b"weights")
    (folder / "step-5/near.bin").symlink_to("model.bin")
    for name, target in LINKS.items():
        (folder / name).symlink_to(target)


LINKS = {"latest": "step-5", "best.bin": "latest/model.bin", "pw": "/etc/passwd", "up": "../..", "gone": "none"}


@pytest.mark.parametrize("pattern", ["out", "out/*", "out/**"])
def test_links_of_an_output_directory_are_links_or_refused_and_never_followed_out_of_it(
    node: Node, tmp_path: Path, pattern: str
) -> None:
    with_links(node.work / "out")
    progress = node.fetch(tmp_path / "into", pattern)
    into = tmp_path / "into/out"
    kept = {path.name: os.readlink(path) for path in into.rglob("*") if path.is_symlink()}
    assert kept == {"latest": "step-5", "best.bin": "step-5/model.bin", "near.bin": "model.bin"}
    assert (into / "best.bin").read_bytes() == b"weights" and progress.files == 1
    assert progress.refused == ("out/gone", "out/pw", "out/up")
    assert sorted(os.listdir(into)) == ["best.bin", "latest", "step-5"]
    assert node.fetch(tmp_path / "into", pattern).refused == progress.refused


def test_a_link_that_a_path_names_is_followed_and_one_whose_file_is_not_fetched_is_a_file(
    node: Node, tmp_path: Path
) -> None:
    with_links(node.work / "out")
    node.fetch(tmp_path / "one", "out/latest", "out/best.bin")
    assert names(tmp_path / "one") == ["out/best.bin", "out/latest/model.bin", "out/latest/near.bin"]
    assert not (tmp_path / "one/out/latest").is_symlink() and not (tmp_path / "one/out/best.bin").is_symlink()
    node.fetch(tmp_path / "two", "out/b*")
    assert (tmp_path / "two/out/best.bin").read_bytes() == b"weights"
    node.fetch(tmp_path / "three", "out")
    (node.work / "out/latest").unlink()
    node.write("out/latest/model.bin", b"others!")
    node.fetch(tmp_path / "three", "out")
    assert (tmp_path / "three/out/step-5/model.bin").read_bytes() == b"weights", "not written through the old link"
    assert (tmp_path / "three/out/latest/model.bin").read_bytes() == b"others!"


@pytest.mark.parametrize("text", ["/etc", "../../x", "b/../../../x", ""])
def test_a_node_cannot_have_the_head_make_a_link_out_of_the_directory(tmp_path: Path, text: str) -> None:
    evil = OutputsReply(folder="", files=(), links=(("sub/link", text),), missing=())
    with pytest.raises(TransferError, match="invalid path"):
        fetch_files(lambda request, *, deadline_s: Reply(evil), RUN, ["x"], tmp_path / "into")  # type: ignore[arg-type]
    assert not (tmp_path / "into").exists()


def test_links_of_a_directory_that_is_sent_are_links_or_refused(node: Node, tmp_path: Path) -> None:
    with_links(tmp_path / "model")
    progress = node.send("in", tmp_path / "model", tmp_path / "model/best.bin")
    into = node.work / "in"
    assert os.readlink(into / "model/latest") == "step-5" and os.readlink(into / "model/step-5/near.bin") == "model.bin"
    assert (into / "best.bin").read_bytes() == b"weights" and not (into / "best.bin").is_symlink()
    assert progress.refused == ("model/gone", "model/pw", "model/up")
    assert sorted(os.listdir(into / "model")) == ["best.bin", "latest", "step-5"]
    assert node.send("in", tmp_path / "model").refused == progress.refused


def test_control_characters_of_a_name_are_escaped_here_and_two_names_never_become_one(
    node: Node, tmp_path: Path
) -> None:
    raw = ["a\x1b[2J\rb", "a\\x1b[2J\\rb", "plain 95% ü", "new\nline\x9b"]
    for name in raw:
        node.write(f"out/{name}", name.encode())
    (node.work / "out/link").symlink_to(raw[0])
    node.fetch(tmp_path / "into", "out")
    found = {path.name: path.read_bytes() for path in (tmp_path / "into/out").iterdir() if not path.is_symlink()}
    assert found == {
        "a\\x1b[2J\\x0db": raw[0].encode(),
        "a\\\\x1b[2J\\\\rb": raw[1].encode(),
        "plain 95% ü": raw[2].encode(),
        "new\\x0aline\\x9b": raw[3].encode(),
    }
    assert (tmp_path / "into/out/link").read_bytes() == raw[0].encode()


def test_a_pattern_of_too_many_files_is_refused_before_all_are_looked_at(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "MAX_FILES", 5)
    for number in range(9):
        node.write(f"out/{number}", b"x")
    with pytest.raises(TransferError) as error:
        node.fetch(tmp_path / "into", "out")
    assert error.value.failure.code == "too-many-files"
