"""Staged trees on this node: received as a tar, checked, made read-only, checked before each use, linked."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import time

from ascendrun.node import layout, procs, tree_hash
from ascendrun.node.agent import transfer
from ascendrun.node.failpoint import failpoint
from ascendrun.node.files import BLOCK_BYTES, free_bytes, make_private_dir, remove_tree, write_all
from ascendrun.node.op_errors import OperationError, os_failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    import tarfile
    from typing import IO, Any, Callable

_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_TEMP = re.compile(r"^\.tmp-([0-9a-f]{12})-(\d+)-(\d+)-")
FOREIGN_S = 7 * 86400.0
"""Age at which the incomplete file of another machine with this home is removed: its owner cannot be asked."""


class Trees:
    """The trees directory. Several agents, also of several machines, may store the same tree in parallel: the first to
    finish wins."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._folder = os.path.join(root, "trees")

    def have(self, sha256: str) -> bool:
        """Return whether the tree exists; `verify` checks its content before every start."""
        with contextlib.suppress(FileNotFoundError):
            # Opening a directory makes NFS ask its server again: another machine may have stored the tree just now.
            os.close(os.open(self._folder, _DIR))
        found = os.path.isdir(layout.tree_dir(self._root, sha256)) and os.path.isfile(self._listing_path(sha256))
        if found:
            with contextlib.suppress(OSError):  # a tree that is about to be used is not removed as unused
                os.utime(layout.tree_dir(self._root, sha256))
        return found

    def put(self, sha256: str, request: dict[str, Any], body: bytes) -> dict[str, Any]:
        """{size_bytes, offset, sha256} -> transfer.take_block of the tar; the complete one becomes the tree.

        It replaces an altered one. A request without bytes and hash is done if the tree is there.

        Raises OperationError: tree-differs (the content has another hash), disk-full, bad-directory.
        """
        total = int(request["size_bytes"])
        part, complete = self.place(sha256, total)
        try:
            is_question = request.get("offset") is None and request.get("sha256") is None
            if is_question and self.have(sha256):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(part)  # another agent was faster
                return {"have": total, "done": True}
            if not os.path.exists(part):
                make_private_dir(self._folder)
                self._sweep_temps()
                if free_bytes(self._folder) < total * 2:  # a tar and its content
                    raise OSError(errno.ENOSPC, "no space", self._folder)
            return transfer.take_block(part, request, body, complete)
        except OSError as error:
            raise os_failure(error, "store-tree", path=self._folder) from error

    def place(self, sha256: str, size: int) -> tuple[str, Callable[[int], bool]]:
        """Return the part of a tar, and what makes a complete one the tree; see transfer.take_block."""
        layout.tree_dir(self._root, sha256)  # refuses what is no hash
        part = os.path.join(self._folder, ".tmp-" + transfer.part_name(sha256, size))
        return part, lambda fd: self._unpack(sha256, part, fd)

    def verify(self, sha256: str) -> None:
        """Read every byte again. Raises OperationError: tree-missing, or tree-differs with the file."""
        if not self.have(sha256):
            raise OperationError("tree-missing", "tree-missing", tree=sha256[:12])
        try:
            with open(self._listing_path(sha256), "rb") as file:
                wanted = tree_hash.parse_canonical(file.read())
            if tree_hash.hash_listing(wanted) != sha256:
                raise tree_hash.InvalidTreeError("listing-changed")
            difference = tree_hash.first_difference(wanted, tree_hash.list_tree(layout.tree_dir(self._root, sha256)))
        except tree_hash.InvalidTreeError as error:
            difference = error.message
        except OSError as error:
            raise os_failure(error, "read-tree", tree=sha256[:12]) from error
        if difference is not None:
            path = layout.tree_dir(self._root, sha256)
            raise OperationError("tree-differs", "tree-changed", path=path, difference=difference)

    # --- receiving ---

    def _unpack(self, sha256: str, part: str, fd: int) -> bool:
        temp = self._temp_path("tree")
        with contextlib.suppress(FileNotFoundError):  # another agent unpacks it too
            os.unlink(part)
        try:
            with os.fdopen(os.dup(fd), "rb") as upload:
                upload.seek(0)
                os.mkdir(temp, 0o700)
                unpack_tar(upload, temp)
            entries = tree_hash.list_tree(temp)
            found = tree_hash.hash_listing(entries)
            if found != sha256:
                raise tree_hash.InvalidTreeError("other-content", tree=found[:12])
            failpoint("stage.before_rename")
            self._settle(temp, sha256, tree_hash.canonical(entries))
            failpoint("stage.after_rename")
        except tree_hash.InvalidTreeError as error:
            raise OperationError(
                "tree-differs", "tree-received-differs", tree=sha256[:12], difference=error.message
            ) from error
        finally:
            remove_tree(temp)
        return True

    def _settle(self, temp: str, sha256: str, listing: bytes) -> None:
        make_read_only(temp)
        target = layout.tree_dir(self._root, sha256)
        note = self._temp_path("listing")
        fd = os.open(note, _NEW, 0o600)
        try:
            write_all(fd, listing)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(note, self._listing_path(sha256))
        try:
            os.rename(temp, target)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            self._replace_if_altered(temp, target, sha256)
        os.chmod(target, 0o555)

    def _replace_if_altered(self, temp: str, target: str, sha256: str) -> None:
        try:
            self.verify(sha256)
        except OperationError:
            aside = self._temp_path("altered")
            os.rename(target, aside)
            os.rename(temp, target)
            remove_tree(aside)

    # --- names ---

    def _listing_path(self, sha256: str) -> str:
        return layout.tree_dir(self._root, sha256) + ".listing"

    def _temp_path(self, what: str) -> str:
        identity = procs.identify(os.getpid())
        owner = layout.machine_key(), identity["pid"], identity["start"]
        return os.path.join(self._folder, ".tmp-%s-%d-%d-%s-%s" % (*owner, what, os.urandom(4).hex()))

    def _sweep_temps(self) -> None:
        """Remove incomplete files of agents that are gone."""
        for name in os.listdir(self._folder):
            path = os.path.join(self._folder, name)
            if name.startswith(".tmp-") and self._is_abandoned(path, _TEMP.match(name)):
                remove_tree(path)

    def _is_abandoned(self, path: str, match: re.Match[str] | None) -> bool:
        if match is None or match.group(1) != layout.machine_key():
            try:
                return time.time() - os.lstat(path).st_mtime > FOREIGN_S
            except FileNotFoundError:
                return False
        owner = procs.read_stat(int(match.group(2)))
        return owner is None or owner.start != int(match.group(3))


def unpack_tar(archive: IO[bytes], folder: str) -> None:
    """Unpack into the empty `folder`. Never follows a link, never replaces anything, keeps to tree_hash's rules.

    Raises InvalidTreeError naming the member, OSError.
    """
    import tarfile

    count = total = 0
    root = os.open(folder, _DIR)
    try:
        with tarfile.open(fileobj=archive, mode="r:", encoding="utf-8", errors="surrogateescape") as tar:
            for member in tar:
                count += 1
                total += member.size
                if count > tree_hash.MAX_ENTRIES or total > tree_hash.MAX_BYTES:
                    raise tree_hash.InvalidTreeError("archive-too-large", entries=count, bytes=total)
                _unpack_member(tar, member, root)
                tar.members = []  # type: ignore[attr-defined]  # not in typeshed; else every member is kept in memory
                failpoint("stage.mid_file")
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise tree_hash.InvalidTreeError("archive-damaged", error=str(error)) from error
    finally:
        os.close(root)


def _unpack_member(tar: tarfile.TarFile, member: tarfile.TarInfo, root: int) -> None:
    path = member.name.encode("utf-8", "surrogateescape")
    tree_hash.check_path(path)
    if member.mode & 0o7000:
        raise tree_hash.InvalidTreeError("entry-special-bits", path=tree_hash.show(path))
    parts = path.split(b"/")
    parent = _enter(root, parts[:-1])
    try:
        if member.isdir():
            os.mkdir(parts[-1], 0o700, dir_fd=parent)
        elif member.issym():
            os.symlink(member.linkname.encode("utf-8", "surrogateescape"), parts[-1], dir_fd=parent)
        elif member.type in (b"0", b"\0") and not member.issparse():
            _unpack_file(tar, member, parts[-1], parent)
        else:
            raise tree_hash.InvalidTreeError("entry-unsupported", path=tree_hash.show(path))
    except FileExistsError:
        raise tree_hash.InvalidTreeError("entry-twice", path=tree_hash.show(path)) from None
    finally:
        os.close(parent)


def _enter(root: int, parts: list[bytes]) -> int:
    """Open the directory, one real directory after the other. Raises InvalidTreeError when one is missing or a link."""
    here = os.dup(root)
    for part in parts:
        try:
            deeper = os.open(part, _DIR, dir_fd=here)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                raise
            raise tree_hash.InvalidTreeError("entry-without-parent", path=tree_hash.show(b"/".join(parts))) from error
        finally:
            os.close(here)
        here = deeper
    return here


def _unpack_file(tar: tarfile.TarFile, member: tarfile.TarInfo, name: bytes, parent: int) -> None:
    source = tar.extractfile(member)
    assert source is not None
    fd = os.open(name, _NEW, 0o700 if member.mode & 0o100 else 0o600, dir_fd=parent)
    try:
        left = member.size
        while left:
            chunk = source.read(min(BLOCK_BYTES, left))
            if not chunk:
                raise tree_hash.InvalidTreeError("archive-truncated", path=tree_hash.show(name))
            write_all(fd, chunk)
            left -= len(chunk)
    finally:
        os.close(fd)


def make_read_only(folder: str) -> None:
    """Set files to 0444 or 0555, directories to 0555: against accidental changes."""
    for base, _, files in os.walk(os.fsencode(folder), topdown=False):
        for name in files:
            path = os.path.join(base, name)
            mode = os.lstat(path).st_mode
            if stat.S_ISREG(mode):
                os.chmod(path, 0o555 if mode & 0o100 else 0o444)
        if base != os.fsencode(folder):
            os.chmod(base, 0o555)
    # The top stays writable until it is renamed to its final path: renaming a directory needs write permission on it.
    os.chmod(folder, 0o755)


def link_tree(tree: str, work: str, *, trees: str) -> list[str]:
    """Link the tree's top-level entries into the working directory; return the names that stay the user's own.

    Own links into another tree are replaced or removed; correct links are left alone, since another stage of a pipeline
    may be running in this directory. Nothing else is changed.
    """
    prefix = os.fsencode(trees) + b"/"
    base = os.fsencode(work)
    wanted = {name: os.path.join(os.fsencode(tree), name) for name in os.listdir(os.fsencode(tree))}
    kept = []
    for name in os.listdir(base):
        path = os.path.join(base, name)
        if os.path.islink(path) and os.readlink(path).startswith(prefix) and os.readlink(path) != wanted.get(name):
            os.unlink(path)
    for name, target in sorted(wanted.items()):
        path = os.path.join(base, name)
        try:
            os.symlink(target, path)
        except FileExistsError:
            if not (os.path.islink(path) and os.readlink(path) == target):
                kept.append(name.decode("utf-8", "surrogateescape"))
    return kept
