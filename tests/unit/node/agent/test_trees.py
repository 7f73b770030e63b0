"""Trees: what may be in one, what it is called, and archives that want out."""

import io
import os
import tarfile

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ascendrun.node import tree_hash
from ascendrun.node.agent import prune, trees
from ascendrun.node.agent.trees import link_tree
from ascendrun.node.op_errors import message
from ascendrun.node.tree_hash import Entry, InvalidTreeError


def archive(*members):
    """A tar of (name, changes to the TarInfo, content)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:", format=tarfile.PAX_FORMAT) as tar:
        for name, changes, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            for key, value in changes.items():
                setattr(info, key, value)
            tar.addfile(info, io.BytesIO(content))
    out.seek(0)
    return out


LINK, HARD, DIR = {"type": tarfile.SYMTYPE}, {"type": tarfile.LNKTYPE}, {"type": tarfile.DIRTYPE}
EVIL = {
    "absolute": [("/etc/x", {}, b"")],
    "up": [("../x", {}, b"")],
    "up within": [("a", DIR, b""), ("a/../../x", {}, b"")],
    "dot": [("./x", {}, b"")],
    "empty part": [("a", DIR, b""), ("a//x", {}, b"")],
    "absolute link": [("l", {**LINK, "linkname": "/etc"}, b"")],
    "link up": [("l", {**LINK, "linkname": "../x"}, b"")],
    "link up through links": [
        ("a", DIR, b""),
        ("a/b", DIR, b""),
        ("a/b/top", {**LINK, "linkname": "../.."}, b""),
        ("a/b/out", {**LINK, "linkname": "top/../x"}, b""),
    ],
    "link to itself": [("l", {**LINK, "linkname": "l"}, b"")],
    "file through a link": [("d", DIR, b""), ("l", {**LINK, "linkname": "d"}, b""), ("l/x", {}, b"")],
    "file over a link": [("l", {**LINK, "linkname": "d"}, b""), ("l", {}, b"x")],
    "hard link": [("a", {}, b""), ("h", {**HARD, "linkname": "a"}, b"")],
    "hard link out": [("h", {**HARD, "linkname": "/etc/passwd"}, b"")],
    "device": [("d", {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 3}, b"")],
    "block device": [("d", {"type": tarfile.BLKTYPE}, b"")],
    "fifo": [("f", {"type": tarfile.FIFOTYPE}, b"")],
    "setuid": [("s", {"mode": 0o4755}, b"")],
    "setgid": [("s", {"mode": 0o2755}, b"")],
    "twice": [("a", {}, b"1"), ("a", {}, b"2")],
    "file as folder": [("a", {}, b""), ("a/b", {}, b"")],
    "no folder above": [("a/b", {}, b"")],
    "long name": [("x" * 300, {}, b"")],
    "long path": [("/".join(["y" * 200] * 30), {}, b"")],
    "NUL": [("a", {"pax_headers": {"path": "a\0b"}}, b"")],
    "sparse": [
        (
            "a",
            {
                "pax_headers": {
                    "GNU.sparse.major": "1",
                    "GNU.sparse.minor": "0",
                    "GNU.sparse.realsize": "9",
                    "GNU.sparse.name": "a",
                }
            },
            b"1\n0\n0\n" + b"\0" * 506,
        )
    ],
}


@pytest.mark.parametrize("name", EVIL)
def test_an_evil_archive_is_refused_and_nothing_lies_outside(name, tmp_path):
    inside = tmp_path / "in" / "side"
    inside.mkdir(parents=True)
    with pytest.raises(InvalidTreeError):
        trees.unpack_tar(archive(*EVIL[name]), str(inside))
        tree_hash.list_tree(str(inside))
    assert os.listdir(tmp_path) == ["in"] and os.listdir(tmp_path / "in") == ["side"]


@pytest.mark.parametrize("cut", [1, 100, 511, 513, 700])
def test_a_cut_or_garbled_archive_is_refused(cut, tmp_path):
    data = archive(("a", {}, b"x" * 1000)).getvalue()
    (tmp_path / "t").mkdir()
    with pytest.raises(InvalidTreeError):
        trees.unpack_tar(io.BytesIO(data[:cut]), str(tmp_path / "t"))
        raise (
            InvalidTreeError("nothing came")
            if not os.listdir(tmp_path / "t")
            else AssertionError("a cut archive was taken")
        )


def fill(folder):
    (folder / "sub" / "deep").mkdir(parents=True)
    (folder / "sub" / "run").write_text("x")
    (folder / "sub" / "run").chmod(0o755)
    (folder / "plain\nname ünï").write_bytes(b"\0\xff")
    (folder / "\nstarts with a newline").mkdir()
    os.close(os.open(os.fsencode(folder) + b"/\xff\xfe", os.O_CREAT | os.O_WRONLY))
    (folder / "link").symlink_to("sub/../sub/run")
    (folder / "dangling").symlink_to("not/here")
    return folder


def pack(folder, entries):
    out = io.BytesIO()
    tree_hash.write_tar(str(folder), entries, out)
    out.seek(0)
    return out


def test_a_tree_comes_out_of_its_archive_with_the_same_name(tmp_path):
    source, copy = tmp_path / "source", tmp_path / "copy"
    source.mkdir()
    copy.mkdir()
    entries = tree_hash.list_tree(str(fill(source)))
    trees.unpack_tar(pack(source, entries), str(copy))
    assert tree_hash.list_tree(str(copy)) == entries
    assert [entry._replace(size=0) for entry in entries] == tree_hash.parse_canonical(tree_hash.canonical(entries))


@pytest.mark.parametrize(
    "change",
    [
        lambda f: (f / "sub" / "run").chmod(0o644),
        lambda f: (f / "sub" / "run").write_text("y"),
        lambda f: (f / "new").mkdir(),
        lambda f: (f / "sub" / "deep").rmdir(),
        lambda f: ((f / "link").unlink(), (f / "link").symlink_to("sub")),
        lambda f: (f / "link").rename(f / "lynk"),
    ],
)
def test_every_change_that_counts_changes_the_name(change, tmp_path):
    before = tree_hash.tree_hash(str(fill(tmp_path)))
    change(tmp_path)
    assert tree_hash.tree_hash(str(tmp_path)) != before


def test_times_and_other_modes_do_not_count(tmp_path):
    before = tree_hash.tree_hash(str(fill(tmp_path)))
    os.utime(tmp_path / "sub" / "run", (1, 1))
    (tmp_path / "sub").chmod(0o700)
    (tmp_path / "sub" / "run").chmod(0o500)
    assert tree_hash.tree_hash(str(tmp_path)) == before


def test_sockets_and_pipes_are_refused_by_name(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidTreeError, match="entry-unsupported.*pipe"):
        tree_hash.list_tree(str(tmp_path))
    assert tree_hash.list_tree(str(tmp_path), ["pipe"]) == []


@pytest.mark.parametrize(
    "pattern, path, is_dir, out",
    [
        ("data/", b"data", True, True),
        ("data/", b"a/data", True, True),
        ("data/", b"data", False, False),
        ("*.pt", b"a/b.pt", False, True),
        ("*.pt", b"a.ptx", False, False),
        ("/build", b"build", True, True),
        ("/build", b"a/build", True, False),
        ("a/b", b"a/b", False, True),
        ("a/b", b"x/a/b", False, False),
        (".git/", b".git", True, True),
        ("*.PT", b"a.pt", False, False),
    ],
)
def test_exclude_patterns(pattern, path, is_dir, out):
    assert tree_hash.is_excluded(path, [pattern], is_dir=is_dir) is out


def test_what_differs_is_named_and_pythons_caches_do_not_count(tmp_path):
    wanted = tree_hash.list_tree(str(fill(tmp_path)))
    (tmp_path / "sub" / "__pycache__").mkdir()
    (tmp_path / "sub" / "__pycache__" / "a.pyc").write_bytes(b"")
    assert tree_hash.first_difference(wanted, tree_hash.list_tree(str(tmp_path))) is None
    (tmp_path / "sub" / "run").write_text("other")
    assert tree_hash.first_difference(wanted, tree_hash.list_tree(str(tmp_path))) == message(
        "entry-changed", path="sub/run"
    )


def test_a_file_that_grows_while_it_is_packed_is_told(tmp_path):
    (tmp_path / "a").write_text("1")
    entries = tree_hash.list_tree(str(tmp_path))
    (tmp_path / "a").write_text("12")
    with pytest.raises(InvalidTreeError, match="changed"):
        pack(tmp_path, entries)


names = st.lists(st.sampled_from([b"a", b"b", b"..", b"c"]), min_size=1, max_size=4).map(b"/".join)


@given(st.dictionaries(names.filter(lambda n: b".." not in n), names, max_size=4))
@example({b"a/b": b"..", b"a/b/b": b"..", b"b/a": b"b"})
def test_a_link_that_is_allowed_never_leads_out_of_a_real_tree(links):
    import tempfile

    with tempfile.TemporaryDirectory() as base:
        tree = os.path.join(os.path.realpath(base), "tree").encode()
        os.makedirs(tree)
        made = {}
        for path, target in links.items():
            full = os.path.join(tree, path)
            try:
                os.makedirs(os.path.dirname(full), exist_ok=True)
                if os.path.realpath(os.path.dirname(full)) != os.path.dirname(full):
                    continue  # below a link, where no tree has anything
                os.symlink(target, full)
            except OSError:
                continue
            made[path] = target
        for path in made:
            try:
                tree_hash.check_link(path, made)
            except InvalidTreeError:
                continue
            real = os.path.realpath(os.path.join(tree, path))
            assert real == os.path.realpath(tree) or real.startswith(os.path.realpath(tree) + b"/")


def test_what_lies_below_a_link_is_refused_before_anything_is_made():
    with pytest.raises(InvalidTreeError, match="entry-below-link.*data/train.txt"):
        tree_hash.check_entries([Entry(b"data", "l", b"sets", 0), Entry(b"data/train.txt", "f", b"", 1)])


def test_limits_are_told(monkeypatch):
    big = [Entry(b"a", "f", b"", tree_hash.MAX_BYTES), Entry(b"b", "f", b"", 1)]
    with pytest.raises(InvalidTreeError, match="too-large|too-many"):
        tree_hash.check_entries(big)


def test_links_that_are_right_are_left_alone_while_others_may_be_using_them(tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    for tree, names in (("one", ["train.py", "gone.py"]), ("two", ["train.py", "new.py"])):
        (tmp_path / "trees" / tree).mkdir(parents=True)
        for name in names:
            (tmp_path / "trees" / tree / name).write_text(tree)
    (work / "new.py").write_text("the user's own")

    def link(tree):
        return link_tree(str(tmp_path / "trees" / tree), str(work), trees=str(tmp_path / "trees"))

    assert link("one") == []
    before = {name: os.lstat(str(work / name)) for name in os.listdir(str(work))}
    assert link("one") == []
    now = {name: os.lstat(str(work / name)) for name in os.listdir(str(work))}
    assert {name: (facts.st_ino, facts.st_ctime_ns) for name, facts in before.items()} == {
        name: (facts.st_ino, facts.st_ctime_ns) for name, facts in now.items()
    }

    assert link("two") == ["new.py"]
    assert (work / "train.py").read_text() == "two" and (work / "new.py").read_text() == "the user's own"
    assert sorted(os.listdir(str(work))) == ["new.py", "train.py"]


def test_a_tree_that_a_start_asked_for_after_the_list_was_made_stays(tmp_path):
    root = str(tmp_path)
    old, asked = ("a" * 64, "b" * 64)
    for sha256 in (old, asked):
        folder = tmp_path / "trees" / sha256
        folder.mkdir(parents=True)
        (tmp_path / "trees" / f"{sha256}.listing").write_bytes(b"")
        os.utime(folder, (1e9, 1e9))
    unused = {sha256: seconds for sha256, (_, seconds) in prune.usage(root, "head")["trees"].items()}
    assert set(unused) == {old, asked} and trees.Trees(root).have(asked)
    done = prune.prune(root, {"trees": unused}, forget=lambda tag: None)
    assert set(done["removed"]) == {old} and trees.Trees(root).have(asked)
