"""The agent's archive, and its start through a login shell: a fixed line for the node, the head's side of the dialogue.

The line runs in sh, bash, dash, zsh, fish and csh. It finds a Python of 3.7 or newer and searches for the agent with
the given hash; if it is missing or altered, it prints NEED and only then reads: "<length> <sha256>\\n" and the bytes.
Then it becomes the agent, which prints wire.MAGIC. Each token is on a separate line with a newline before it, so that
output of the login's start-up files, with or without a newline, does not matter.
"""

from __future__ import annotations

import base64
import io
import os
import re
import zlib
from typing import Mapping, NamedTuple

from ascendrun.node import wire


class Step(NamedTuple):
    """State reached by the node: a kind of below, and its detail as text."""

    kind: str
    detail: str


NEED_AGENT = "need-agent"
"""Send `upload(...)` now."""
READY = "ready"
"""The agent runs: feed `Boot.leftover` and all that follows to a FrameReader."""
NO_PYTHON = "no-python"
"""The login's PATH has no Python of 3.7 or newer; the command exits with 97."""
FAILED = "failed"
"""The agent cannot be stored or started: `detail`: why; the command exits with 96."""

EXIT_FAILED, EXIT_NO_PYTHON = 96, 97

_NUMBERED = (f"python3.{minor}" for minor in range(13, 6, -1))
PYTHONS = ("python3", "/usr/bin/python3", "/usr/local/bin/python3", *_NUMBERED, "python")

NOISE_BYTES = 65536
MAX_UPLOADS = 3

# Runs on the node before the agent exists. Exit 0: the agent is stored; 96: failed, with a message; others: this Python
# is not usable, try the next.
_SCRIPT = """
import sys
if sys.version_info < (3, 7):
    sys.exit(9)
import os, hashlib
root, name = sys.argv[2:4]
path = os.path.join(root, "agent-" + name + ".pyz")
def emit(text):
    os.write(1, ("\\nASCENDRUN-" + text + "\\n").encode("utf-8", "replace"))
def fits(data):
    return hashlib.sha256(data).hexdigest().startswith(name)
def is_there():
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as f:
            return os.fstat(f.fileno()).st_uid == os.geteuid() and fits(f.read())
    except OSError:
        return False
def read(count):
    data = b""
    while len(data) < count:
        more = os.read(0, count - len(data))
        if not more:
            raise EOFError("the connection ended before the agent was here")
        data += more
    return data
def take():
    line = b""
    while line[-1:] != b"\\n":
        line += read(1)
    size, digest = line.decode().split()
    data = read(int(size))
    if hashlib.sha256(data).hexdigest() != digest or not fits(data):
        raise ValueError("the agent was damaged on the way")
    os.makedirs(root, 0o700, exist_ok=True)
    if os.stat(root).st_uid != os.geteuid():
        raise ValueError(root + " belongs to another user")
    os.chmod(root, 0o700)
    temp = path + ".tmp-" + os.urandom(8).hex()
    try:
        with open(os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.rename(temp, path)
    finally:
        if os.path.exists(temp):
            os.unlink(temp)
try:
    if not is_there():
        emit("NEED " + name)
        take()
    os.write(3, sys.executable.encode())
except Exception as e:
    emit("FAILED " + " ".join(str(e).split())[:1000])
    sys.exit(96)
"""

# First the fast path: the agent is unaltered, and its last interpreter on this host is kept; hosts may share a home.
# The record is emptied before use and rewritten by the started agent (agent/serve.py), so that an interpreter which
# has broken since costs one login.
# Otherwise the slow path, which starts one more Python (15 ms). The text must not contain a newline, backslash,
# exclamation mark or single quote: csh and fish interpret those within single quotes too. The script writes the
# interpreter's real path to descriptor 3 (python3 may be a slow shim), its dialogue uses 4, a copy of the standard
# output.
_SHELL = (
    'r="${ASCENDRUN_NODE_ROOT:-$HOME/.ascendrun}"; a="$r/agent-%(sha)s.pyz"; '
    '{ IFS= read -r h </proc/sys/kernel/hostname; } 2>/dev/null; i="$r/agent-%(sha)s.$h.python"; '
    'if [ -L "$a" ] || [ -L "$i" ]; then :; '
    'elif [ -O "$a" ] && [ -O "$i" ] && IFS= read -r e <"$i" && [ -x "$e" ]; then '
    'case $(sha256sum "$a" 2>/dev/null) in %(sha)s*) '
    'true 2>/dev/null >"$i" && exec "$e" -I -S "$a" serve;; esac; fi; '
    "exec 4>&1; for p in %(pythons)s; do "
    "command -v $p >/dev/null 2>&1 || continue; "
    'e=$($p -I -S -c "import sys,zlib,binascii;exec(zlib.decompress(binascii.a2b_base64(sys.argv[1])))" '
    '%(script)s "$r" %(sha)s 3>&1 >&4 4>&- 2>/dev/null); '
    'case $? in 0) exec "${e:-$p}" -I -S "$a" serve 4>&-;; %(failed)d) exit %(failed)d;; esac; '
    "done; echo; echo ASCENDRUN-NO-PYTHON; exit %(no_python)d"
)

_WORD = re.compile(rb"\nASCENDRUN-(?:(AGENT) 1|(NEED) ([0-9a-f]{16})|(NO-PYTHON)|(FAILED) ([^\n]*))\n")
_LONGEST_WORD = 4096


def login_command(sha256_16: str) -> str:
    """Return the fixed line, for the first 16 hex digits of the agent's hash. Raises ValueError otherwise."""
    if not re.match(r"^[0-9a-f]{16}\Z", sha256_16):
        raise ValueError(f"not the start of a hash: {sha256_16!r}")
    script = base64.b64encode(zlib.compress(_SCRIPT.strip().encode("ascii"), 9)).decode("ascii")
    return "sh -c '%s'" % (
        _SHELL
        % {
            "pythons": " ".join(PYTHONS),
            "script": script,
            "sha": sha256_16,
            "failed": EXIT_FAILED,
            "no_python": EXIT_NO_PYTHON,
        }
    )


def upload(pyz: bytes, sha256: str) -> bytes:
    """Return the bytes to send when the node needs the agent."""
    return b"%d %s\n" % (len(pyz), sha256.encode("ascii")) + pyz


class Boot:
    """The head's end of the dialogue, fed with the node's standard output in chunks of any size.

    `noise`: output outside the dialogue, its first 64 KiB. `leftover`: bytes after READY.
    """

    def __init__(self) -> None:
        self.noise = b""
        self.leftover = b""
        self.is_over = False
        self._buffer = bytearray()
        self._uploads = 0

    def feed(self, data: bytes) -> list[Step]:
        """Return the steps that `data` completes, in order; after READY, NO_PYTHON or FAILED no more follow."""
        if self.is_over:
            self.leftover += data
            return []
        self._buffer += data
        steps: list[Step] = []
        while True:
            match = _WORD.search(bytes(self._buffer))
            if match is None:
                self._keep_noise(len(self._buffer) - _LONGEST_WORD)
                return steps
            steps.append(self._step(match))
            self._keep_noise(match.start())
            del self._buffer[: match.end() - match.start()]
            if steps[-1].kind != NEED_AGENT:
                self.is_over = True
                self.leftover = bytes(self._buffer)
                self._buffer.clear()
                return steps

    def all_noise(self) -> bytes:
        """Return all output outside the dialogue so far, for the message when the stream ended early."""
        return (self.noise + bytes(self._buffer))[:NOISE_BYTES]

    def _step(self, match: re.Match[bytes]) -> Step:
        agent, need, name, no_python, _, why = (
            part.decode("utf-8", "replace") if part else "" for part in match.groups()
        )
        if agent:
            return Step(READY, "")
        if no_python:
            return Step(NO_PYTHON, "no Python of 3.7 or newer (tried {})".format(", ".join(PYTHONS)))
        if not need:
            return Step(FAILED, why)
        self._uploads += 1
        if self._uploads > MAX_UPLOADS:
            return Step(FAILED, "the node requests the agent repeatedly")
        return Step(NEED_AGENT, name)

    def _keep_noise(self, count: int) -> None:
        if count > 0:
            self.noise = (self.noise + bytes(self._buffer[:count]))[:NOISE_BYTES]
            del self._buffer[:count]


assert wire.MAGIC == b"\nASCENDRUN-AGENT 1\n"


# --- the archive: this package's own files as one .pyz, the same bytes for the same sources ---

PARTS = ("node", "facts")
LEFT_OUT = ("node/loader.py", "node/start.py", "facts/chips.py", "facts/columns.py")
"""Files for the head and the ranks only."""
_EPOCH = (1980, 1, 1, 0, 0, 0)


def pack_agent(files: Mapping[str, bytes]) -> tuple[bytes, str]:
    """Return (the archive, its SHA-256 in hex) of `files`, as read_sources returns them."""
    import hashlib  # here: 6 ms of the start of a controller that needs no agent
    import zipfile

    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name in sorted(files):
            member = zipfile.ZipInfo(name, _EPOCH)
            member.compress_type = zipfile.ZIP_DEFLATED
            member.create_system = 3
            member.external_attr = 0o100644 << 16
            archive.writestr(member, files[name])
    return out.getvalue(), hashlib.sha256(out.getvalue()).hexdigest()


def read_sources() -> dict[str, bytes]:
    """Return the files of the agent by name in its archive."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    files = {}
    for name, inside in (("__main__.py", "node/start.py"), ("ascendrun/__init__.py", "__init__.py")):
        with open(os.path.join(package, inside), "rb") as file:
            files[name] = file.read()
    for part in PARTS:
        for parent, _, names in os.walk(os.path.join(package, part)):
            for name in names:
                path = os.path.join(parent, name)
                inside = os.path.relpath(path, package)
                if name.endswith(".py") and inside not in LEFT_OUT:
                    with open(path, "rb") as file:
                        files["ascendrun/" + inside] = file.read()
    return files
