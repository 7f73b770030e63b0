"""Build of the agent: this package's own files as one .pyz, the same bytes for the same sources. Used by the head."""

from __future__ import annotations

import functools
import io
import os
from typing import Mapping

PARTS = ("node", "facts")
LEFT_OUT = ("node/pack.py", "node/loader.py", "facts/chips.py", "facts/columns.py")
"""Files for the head and the ranks only."""
MAIN = b"""import gc
import os
import sys

gc.set_threshold(20000)  # imports make many objects that stay: a search for unused ones is in vain
# Modules that node/agent/bytecode.py compiled for this very interpreter, if it has.
compiled = "%s.%s-%x.zip" % (sys.argv[0][:-4], sys.implementation.cache_tag, sys.hexversion)
if os.path.exists(compiled):
    sys.path.insert(0, compiled)

if sys.argv[1:2] == ["serve"]:
    from ascendrun.node.agent.serve import main
    sys.exit(main())
elif sys.argv[1:2] == ["supervise"] and len(sys.argv) == 3:
    from ascendrun.node.supervisor.supervise import main
    sys.exit(main(sys.argv[2]))
elif sys.argv[1:2] == ["sample"] and len(sys.argv) == 3:
    from ascendrun.node.sampler.sample import main
    sys.exit(main(sys.argv[2]))
elif sys.argv[1:2] == ["shell"] and len(sys.argv) in (4, 5):
    from ascendrun.node.shell import main
    sys.exit(main(sys.argv[2:]))
elif sys.argv[1:2] == ["join"] and len(sys.argv) > 2:
    from ascendrun.node.join import main
    sys.exit(main(sys.argv[2:]))
elif sys.argv[1:] == ["grep"]:
    from ascendrun.node.agent.grep import main
    sys.exit(main())
else:
    sys.exit("usage: python agent.pyz serve | supervise FOLDER | sample FOLDER | shell PID START | join COMMAND | grep")
"""

_EPOCH = (1980, 1, 1, 0, 0, 0)


@functools.lru_cache(maxsize=1)
def agent_pyz() -> tuple[bytes, str]:
    """Return (the archive, its SHA-256 in hex) of the files on disk."""
    return pack_agent(read_sources())


def pack_agent(files: Mapping[str, bytes]) -> tuple[bytes, str]:
    """Return (the archive, its SHA-256 in hex) of `files`, as read_sources returns them."""
    import hashlib  # here, as zipfile: 6 ms of the start of a controller that needs no agent

    data = pack_files(files)
    return data, hashlib.sha256(data).hexdigest()


def pack_files(files: Mapping[str, bytes]) -> bytes:
    """Return a zip archive that depends on names and contents only."""
    import zipfile

    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name in sorted(files):
            member = zipfile.ZipInfo(name, _EPOCH)
            member.compress_type = zipfile.ZIP_DEFLATED
            member.create_system = 3
            member.external_attr = 0o100644 << 16
            archive.writestr(member, files[name])
    return out.getvalue()


def read_sources() -> dict[str, bytes]:
    """Return the files of the agent by name in its archive."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    files = {"__main__.py": MAIN}
    with open(os.path.join(package, "__init__.py"), "rb") as file:
        files["ascendrun/__init__.py"] = file.read()
    for part in PARTS:
        for parent, _, names in os.walk(os.path.join(package, part)):
            for name in names:
                path = os.path.join(parent, name)
                inside = os.path.relpath(path, package)
                if name.endswith(".py") and inside not in LEFT_OUT:
                    with open(path, "rb") as file:
                        files["ascendrun/" + inside] = file.read()
    return files
