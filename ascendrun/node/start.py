"""Start of the agent's archive, in which it is `__main__.py`: finds the modules, and keeps what it had to compile.

Python compiles what it imports from an archive again at every start. What a process of the agent has compiled is stored
in agent-<hash>.<interpreter>.code, for every later one: a node compiles only what it runs. Hosts may share the file.
"""

from __future__ import annotations

import gc
import marshal
import os
import sys
import zipimport
import zlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from typing import Any

CHECK_BYTES = 4
USAGE = (
    "python agent.pyz [warm] serve | [warm] supervise DIRECTORY | sample DIRECTORY | shell PID START | join COMMAND"
    " | grep | ray OPTIONS COMMAND | contain NAME [HOLDER PYTHON] | tie PID | enter CONTAINER SHELL | survey"
)


class Modules:
    """Finder and loader of the archive's modules. The file: CRC-32, and {name: (is a package, code)} by marshal."""

    def __init__(self, archive: str) -> None:
        self._archive, self._zip = archive, zipimport.zipimporter(archive)
        self._path = "%s.%s-%x.code" % (archive[: -len(".pyz")], sys.implementation.cache_tag, sys.hexversion)
        self._stored = self._read()
        self._new: dict[str, tuple[bool, bytes]] = {}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] != "ascendrun":
            return None
        inside = name.replace(".", os.sep)
        if name not in self._stored:
            for is_package, file in ((False, inside + ".py"), (True, os.path.join(inside, "__init__.py"))):
                try:
                    source = self._zip.get_data(file)
                except OSError:
                    continue
                code = compile(source, os.path.join(self._archive, file), "exec", dont_inherit=True)
                self._stored[name] = self._new[name] = is_package, marshal.dumps(code)
                break
            else:
                return None
        is_package, data = self._stored[name]
        spec: ModuleSpec = type(sys.__spec__)(name, self, is_package=is_package)  # type: ignore[arg-type]
        spec.loader_state = data
        if is_package:
            spec.submodule_search_locations = [os.path.join(self._archive, inside)]
        return spec

    def create_module(self, spec: ModuleSpec) -> None:
        """Return None: Python makes the module itself."""

    def exec_module(self, module: Any) -> None:
        exec(marshal.loads(module.__spec__.loader_state), module.__dict__)

    def keep(self) -> None:
        """Store what was compiled since. Never raises: without it a start is only slower."""
        new, self._new = self._new, {}
        temp = "%s.tmp-%s" % (self._path, os.urandom(8).hex())
        try:
            if not new or sys.implementation.cache_tag is None or not self._archive.endswith(".pyz"):
                return
            data = marshal.dumps({**self._read(), **new})
            fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(zlib.crc32(data).to_bytes(CHECK_BYTES, "big") + data)
            os.replace(temp, self._path)
        except OSError:
            try:
                os.unlink(temp)
            except OSError:
                pass

    def _read(self) -> dict[str, tuple[bool, bytes]]:
        try:
            with open(self._path, "rb") as file:
                check, data = file.read(CHECK_BYTES), file.read()
        except OSError:
            return {}
        if zlib.crc32(data).to_bytes(CHECK_BYTES, "big") != check:  # cut by a power failure
            return {}
        stored: dict[str, tuple[bool, bytes]] = marshal.loads(data)
        return stored


def serve_late(modules: Modules) -> int:
    """Serve the connection that comes, with all that its first job asks for imported before."""
    import ascendrun.node.agent.attempt.attempts
    import ascendrun.node.agent.survey  # noqa: F401
    from ascendrun.node.agent.serve import main as serve
    from ascendrun.node.hold import become_connected

    become_connected()
    return serve(keep=modules.keep)


def supervise_late(modules: Modules, folder: str) -> int:
    """Supervise the attempt from its GO, which brings the descriptors and the environment."""
    from ascendrun.node.hold import become_connected
    from ascendrun.node.supervisor.supervise import main as supervise

    modules.keep()
    become_connected()
    return supervise(folder)


def run(modules: Modules, role: str, words: list[str]) -> int:
    """Run a role of the agent, in this process, to its end."""
    if role == "serve":
        from ascendrun.node.agent.serve import main as serve

        return serve(keep=modules.keep)
    if role == "warm" and words == ["serve"]:
        return serve_late(modules)
    if role == "warm" and words[:-1] == ["supervise"]:
        return supervise_late(modules, words[-1])
    if role == "supervise" and len(words) == 1:
        from ascendrun.node.supervisor.supervise import main as supervise

        modules.keep()
        return supervise(words[0])
    if role == "sample" and len(words) == 1:
        from ascendrun.node.sampler.sample import main as sample

        modules.keep()
        return sample(words[0])
    if role == "shell" and len(words) in (2, 3):
        from ascendrun.node.stacks import main as shell

        return shell(words)
    if role == "enter" and len(words) > 4:
        from ascendrun.node.agent.containers import enter

        return enter(words)
    if role == "contain" and len(words) in (1, 3):
        from ascendrun.node.contain import main as contain

        modules.keep()
        return contain(*words)
    if role == "tie" and len(words) == 1:
        from ascendrun.node.contain import tie

        return tie(int(words[0]))
    if role == "survey" and not words:
        from ascendrun.node.agent.survey import main as survey

        modules.keep()
        return survey()
    if role == "join" and words:
        from ascendrun.node.join import main as join

        modules.keep()
        return join(words)
    if role == "ray" and words:
        from ascendrun.node.ray_node import main as ray

        modules.keep()
        return ray(words)
    if role == "grep" and not words:
        from ascendrun.node.agent.grep import main as grep

        modules.keep()
        return grep()
    sys.exit("usage: " + USAGE)


if __name__ == "__main__":
    gc.set_threshold(20000)  # imports make many objects that stay: a search for unused ones is in vain
    found = Modules(sys.argv[0])
    sys.meta_path.insert(0, found)
    sys.exit(run(found, "".join(sys.argv[1:2]), sys.argv[2:]))
