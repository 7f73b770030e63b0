"""Errors of operations on a node: a stable code, and a message as key and values that the head node renders."""

from __future__ import annotations

import errno

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict

    Message = Dict[str, Any]

_FULL = (errno.ENOSPC, errno.EDQUOT)
_UNUSABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def message(key: str, **values: Any) -> Message:
    """Return a message as data. Every key has its English template in core/node_messages.py; values: plain JSON."""
    return {"key": key, "values": values}


class OperationError(Exception):
    """An operation that failed. `code` is stable and for programs; several messages may have the same code."""

    def __init__(self, code: str, key: str, **values: Any) -> None:
        super().__init__("%s: %s %r" % (code, key, values))
        self.code = code
        self.message = message(key, **values)

    def as_json(self) -> dict[str, Any]:
        return {"code": self.code, "message": self.message}

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> OperationError:
        return cls(row["code"], row["message"]["key"], **row["message"]["values"])


def os_failure(error: OSError, doing: str, **values: Any) -> OperationError:
    """Return the error for an operating system error: disk-full, bad-directory or os-error.

    `doing` is the key of the failed operation, such as "write-in" with the value `path`.
    """
    what = message(doing, **values)
    reason = error.strerror or str(error)
    if error.errno in _FULL:
        return OperationError("disk-full", "disk-full", doing=what, error=reason)
    if error.errno in _UNUSABLE:
        return OperationError("bad-directory", "directory-unusable", doing=what, error=reason)
    return OperationError("os-error", "os-error", doing=what, error=reason)
