"""Files that a running agent stores next to its archive to speed up the next start.

agent-<hash>.<interpreter>.zip: compiled modules, made once per interpreter; Python compiles what it imports from an
archive again at every start (60 ms). agent-<hash>.<host name>.python: the path of the interpreter, for the login line
of node/loader.py, which empties it at each start. Hosts may share the directory.
"""

from __future__ import annotations

import contextlib
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    pass

PREFIX = "ascendrun/"


def sibling(agent_path: str) -> str | None:
    """Return the path of this interpreter's compiled modules; None: the interpreter stores none."""
    tag = sys.implementation.cache_tag
    return "{}.{}-{:x}.zip".format(agent_path[: -len(".pyz")], tag, sys.hexversion) if tag else None


def keep_compiled(agent_path: str) -> None:
    """Make the sibling unless it exists. Never raises: without it a start is only slower."""
    try:
        path = sibling(agent_path)
        if path is None or not agent_path.endswith(".pyz") or os.path.exists(path):
            return
        temp = "%s.tmp-%s" % (path, os.urandom(8).hex())
        try:
            _compile_archive(agent_path, temp)
            os.link(temp, path)  # never replaced: Python keeps the offsets of an archive that it reads
        finally:
            os.unlink(temp)
    except (OSError, ValueError, SyntaxError, ImportError):
        return


def keep_interpreter(agent_path: str) -> None:
    """Record the interpreter of this agent. Never raises: without it the next login searches for a Python again."""
    path = "%s.%s.python" % (agent_path[: -len(".pyz")], os.uname().nodename)
    temp = "%s.tmp-%s" % (path, os.urandom(8).hex())
    try:
        if not agent_path.endswith(".pyz") or not sys.executable:
            return
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(os.fsencode(sys.executable) + b"\n")
        os.replace(temp, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temp)


def _compile_archive(agent_path: str, target: str) -> None:
    import marshal
    import zipfile
    from importlib.util import MAGIC_NUMBER

    fd = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w+b") as file, zipfile.ZipFile(file, "w") as out, zipfile.ZipFile(agent_path) as source:
        for name in source.namelist():
            if name.startswith(PREFIX):
                code = compile(source.read(name), os.path.join(agent_path, name), "exec", dont_inherit=True)
                out.writestr(name + "c", MAGIC_NUMBER + b"\0" * 12 + marshal.dumps(code))
