"""Hash of a directory's content: its entries, order and bytes. Head and node use this same file.

A tree is directories, plain files (content and the owner's exec bit) and symbolic links that stay inside. Times, owners
and other modes do not count. Paths are bytes, "/"-separated, relative.

Exclude patterns are a small subset of .gitignore's: "data/" omits directories of that name, "*.pt" files, directories
and links whose name matches (fnmatch, case matters), "/build" or "a/b" the entry at that path from the top.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import stat
from typing import NamedTuple

from ascendrun.node.files import hash_start
from ascendrun.node.op_errors import message

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import IO, Any, Iterator, Mapping, Sequence

    from ascendrun.node.op_errors import Message


class Entry(NamedTuple):
    """`kind`: "d", "f", "x" (a file with the exec bit) or "l". `digest`: the content's SHA-256 in hex, or the link's
    target; empty for directories. `size`: bytes of a file, else 0; not part of the hash."""

    path: bytes
    kind: str
    digest: bytes
    size: int


NAME_BYTES = 255
PATH_BYTES = 4000
MAX_ENTRIES = 200000
MAX_BYTES = 16 << 30
LINK_DEPTH = 40


class InvalidTreeError(ValueError):
    """The directory (or the archive) is not a valid tree. `message`: the rule and the entry, as a node message."""

    def __init__(self, key: str, **values: Any) -> None:
        super().__init__("%s %r" % (key, values))
        self.message = message(key, **values)


def list_tree(folder: str, exclude: Sequence[str] = ()) -> list[Entry]:
    """Return everything in `folder` that is not excluded, in canonical order, with its hash.

    Raises InvalidTreeError for invalid entries (a socket, a link that leads out), OSError for unreadable entries.
    """
    root = os.fsencode(folder)
    entries = [_entry(root, path, found) for path, found in _walk(root, b"", exclude)]
    entries.sort(key=lambda entry: entry.path)
    check_entries(entries)
    return entries


def canonical(entries: Sequence[Entry]) -> bytes:
    """Return the listing as bytes: kind, digest, path of each, separated by NUL, which is not valid in a path."""
    return b"".join(b"%s\0%s\0%s\0\n" % (entry.kind.encode("ascii"), entry.digest, entry.path) for entry in entries)


def hash_listing(entries: Sequence[Entry]) -> str:
    """Return the tree's name: 64 hex digits."""
    return hashlib.sha256(canonical(entries)).hexdigest()


def tree_hash(folder: str, exclude: Sequence[str] = ()) -> str:
    return hash_listing(list_tree(folder, exclude))


def parse_canonical(data: bytes) -> list[Entry]:
    """Return the entries of `canonical` bytes (sizes are 0). Raises InvalidTreeError."""
    parts = data.split(b"\0")
    if len(parts) % 3 != 1:
        raise InvalidTreeError("listing-damaged")
    return [
        Entry(parts[at + 2], parts[at].lstrip(b"\n").decode("ascii", "replace"), parts[at + 1], 0)
        for at in range(0, len(parts) - 1, 3)
    ]


def write_tar(folder: str, entries: Sequence[Entry], out: IO[bytes]) -> None:
    """Write the listed entries as an uncompressed tar. Raises InvalidTreeError when a file changed since."""
    import tarfile

    root = os.fsencode(folder)
    with tarfile.open(
        fileobj=out, mode="w|", format=tarfile.GNU_FORMAT, encoding="utf-8", errors="surrogateescape"
    ) as tar:
        for entry in entries:
            member = tarfile.TarInfo(entry.path.decode("utf-8", "surrogateescape"))
            member.mode = 0o444 if entry.kind == "f" else 0o555
            if entry.kind == "d":
                member.type = tarfile.DIRTYPE
            elif entry.kind == "l":
                member.type = tarfile.SYMTYPE
                member.linkname = entry.digest.decode("utf-8", "surrogateescape")
            if entry.kind not in "fx":
                tar.addfile(member)
                continue
            with open(os.path.join(root, entry.path), "rb") as file:
                member.size = entry.size
                if os.fstat(file.fileno()).st_size != entry.size:
                    raise InvalidTreeError("entry-changed-while-staged", path=show(entry.path))
                tar.addfile(member, file)
            tar.members = []  # type: ignore[attr-defined]  # not in typeshed; else every member is kept in memory


def first_difference(wanted: Sequence[Entry], found: Sequence[Entry]) -> Message | None:
    """Return a message about the first entry that differs; None: equal. Python's own caches do not count."""
    mine = {entry.path: entry for entry in wanted}
    theirs = {entry.path: entry for entry in found}
    for path in sorted(set(mine) | set(theirs)):
        if path not in theirs:
            return message("entry-missing", path=show(path))
        if path not in mine:
            if b"__pycache__" in path.split(b"/"):  # as root, Python writes it even into read-only directories
                continue
            return message("entry-unexpected", path=show(path))
        if (mine[path].kind, mine[path].digest) != (theirs[path].kind, theirs[path].digest):
            return message("entry-changed", path=show(path))
    return None


def show(path: bytes) -> str:
    return path.decode("utf-8", "backslashreplace")


# --- rules ---


def check_entries(entries: Sequence[Entry]) -> None:
    """Raise InvalidTreeError unless every path, link and number is valid in a tree."""
    if len(entries) > MAX_ENTRIES:
        raise InvalidTreeError("too-many-entries", entries=len(entries), limit=MAX_ENTRIES)
    total = sum(entry.size for entry in entries)
    if total > MAX_BYTES:
        raise InvalidTreeError("too-many-bytes", bytes=total, limit=MAX_BYTES)
    links = {entry.path: entry.digest for entry in entries if entry.kind == "l"}
    for entry in entries:
        check_path(entry.path)
        check_folders(entry.path, links)
        if entry.kind == "l":
            check_link(entry.path, links)


def check_path(path: bytes) -> None:
    """Raise InvalidTreeError for a path that could lead elsewhere or exceeds file system limits."""
    parts = path.split(b"/")
    if not path or b"\0" in path or any(part in (b"", b".", b"..") for part in parts):
        raise InvalidTreeError("path-outside", path=show(path))
    if len(path) > PATH_BYTES or any(len(part) > NAME_BYTES for part in parts):
        raise InvalidTreeError("name-too-long", path=show(path[:80]))


def check_folders(path: bytes, links: Mapping[bytes, bytes]) -> None:
    """Raise InvalidTreeError for an entry below a link: it would be created at the link's target."""
    end = path.find(b"/")
    while links and end >= 0:
        if path[:end] in links:
            raise InvalidTreeError("entry-below-link", path=show(path), link=show(path[:end]))
        end = path.find(b"/", end + 1)


def check_link(path: bytes, links: Mapping[bytes, bytes]) -> None:
    """Raise InvalidTreeError unless the link, followed through all other links of the tree, stays inside."""
    check_folders(path, links)
    todo = path.split(b"/")
    here: list[bytes] = []
    depth = 0
    while todo:
        part = todo.pop(0)
        if part in (b"", b"."):
            continue
        if part == b"..":
            if not here:
                raise InvalidTreeError("link-outside", path=show(path))
            here.pop()
            continue
        here.append(part)
        target = links.get(b"/".join(here))
        if target is None:
            continue
        depth += 1
        if depth > LINK_DEPTH:
            raise InvalidTreeError("link-loop", path=show(path))
        if not target or target.startswith(b"/") or b"\0" in target:
            raise InvalidTreeError("link-outside", path=show(path), target=show(target))
        here.pop()
        todo = target.split(b"/") + todo


def is_excluded(path: bytes, patterns: Sequence[str], *, is_dir: bool) -> bool:
    """Return whether one of the patterns omits this entry (entries below an excluded directory are not tested)."""
    text = path.decode("utf-8", "surrogateescape")
    name = text.rsplit("/", 1)[-1]
    for pattern in patterns:
        if pattern.endswith("/") and not is_dir:
            continue
        bare = pattern.rstrip("/")
        if "/" in bare:
            if fnmatch.fnmatchcase(text, bare.lstrip("/")):
                return True
        elif fnmatch.fnmatchcase(name, bare):
            return True
    return False


# --- reading ---


def _walk(root: bytes, below: bytes, exclude: Sequence[str]) -> Iterator[tuple[bytes, os.stat_result]]:
    with os.scandir(os.path.join(root, below) if below else root) as found:
        names = sorted(entry.name for entry in found)
    for name in names:
        path = below + b"/" + name if below else name
        facts = os.lstat(os.path.join(root, path))
        is_dir = stat.S_ISDIR(facts.st_mode)
        if is_excluded(path, exclude, is_dir=is_dir):
            continue
        yield path, facts
        if is_dir:
            yield from _walk(root, path, exclude)


def _entry(root: bytes, path: bytes, facts: os.stat_result) -> Entry:
    full = os.path.join(root, path)
    if stat.S_ISDIR(facts.st_mode):
        return Entry(path, "d", b"", 0)
    if stat.S_ISLNK(facts.st_mode):
        return Entry(path, "l", os.readlink(full), 0)
    if stat.S_ISREG(facts.st_mode):
        fd = os.open(full, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size  # before: of a file that grows meanwhile `write_tar` sees another
            digest = hash_start(fd).hexdigest().encode("ascii")
        finally:
            os.close(fd)
        return Entry(path, "x" if facts.st_mode & 0o100 else "f", digest, size)
    raise InvalidTreeError("entry-unsupported", path=show(path))
