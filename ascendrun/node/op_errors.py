"""How an operation says no: a stable code, the fact, the way out."""

from __future__ import annotations

import errno

TYPE_CHECKING = False
if TYPE_CHECKING:
    pass

_FULL = {errno.ENOSPC: "the disk is full (or has no free inodes)", errno.EDQUOT: "the disk quota is used up"}
_UNWRITABLE = {
    errno.EROFS: "the file system is mounted read-only",
    errno.EACCES: "permission denied",
    errno.EPERM: "not permitted",
    errno.ENOENT: "it does not exist",
    errno.ENOTDIR: "a part of the path is no folder",
    errno.ELOOP: "a part of the path is a symbolic link",
}


class OperationError(Exception):
    """An operation's "no". `code` is stable and for programs; `hint` is the way out, None when there is none."""

    def __init__(self, code: str, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint

    def as_json(self) -> dict[str, str | None]:
        return {"code": self.code, "message": self.message, "hint": self.hint}


def refusal_of(error: OSError, doing: str) -> OperationError:
    """The refusal that fits an operating system's error: disk-full, bad-folder or os-error.

    `doing` names the thing, such as "cannot write /home/x/.ascendrun".
    """
    if error.errno in _FULL:
        return OperationError("disk-full", f"{doing}: {_FULL[error.errno]}", "free some space there, then try again")
    if error.errno in _UNWRITABLE:
        return OperationError(
            "bad-folder", f"{doing}: {_UNWRITABLE[error.errno]}", "check the folder's owner, mode and mount"
        )
    return OperationError("os-error", f"{doing}: {error.strerror or error}", None)
