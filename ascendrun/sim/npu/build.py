"""Compiles the simulated CANN for one Python environment into a directory, once for the same sources and wheels."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ascendrun.core.errors import PreflightError
from ascendrun.text import Text

SOURCES = Path(__file__).with_name("cann")
COMPILER = "g++"
FLAGS = ("-O1", "-fPIC", "-Wall", "-Wextra", "-Wno-ignored-qualifiers", "-Wno-unused-parameter")
RUNTIME = ("settings", "plog", "faults", "devices", "memory", "streams", "compiler")
HCCL = ("hccl", "hccl_address", "hccl_group", "hccl_links", "hccl_reduce")
OPERATORS = ("operators", "fused")
EMPTY = ("acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel", "atb", "runtime")
"""Libraries that torch_npu is linked with and whose functions libascendcl has here."""
SETTINGS = {
    "ASCEND_TOOLKIT_HOME": "{home}",
    "ASCEND_HOME_PATH": "{home}",
    "ASCEND_OPP_PATH": "{home}/opp",
    "TASK_QUEUE_ENABLE": "0",
}
"""What a process needs to find the toolkit, next to LD_LIBRARY_PATH, which is added to."""

_DYNAMIC_SYMBOLS = 11
_LOOKED_UP = re.compile(rb"(?<=\0)acl[A-Za-z0-9]{3,60}(?=\0)")
_DECLARED = re.compile(r"\b(acl[A-Za-z0-9]+)\s*\(")
_OURS = re.compile(r"(?:acl|Msprof|rt[A-Z])[A-Za-z0-9]+\Z")


def cache_folder(target: Target) -> Path:
    """Inside the environment, whose wheels the result belongs to; ~/.cache where that cannot be written."""
    if os.access(target.prefix, os.W_OK) and target.prefix != Path("/usr"):
        return target.prefix / "simulated-cann"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ascendrun" / "simulated-cann"


def key_of(target: Target) -> str:
    """Changes with everything that the result depends on."""
    marks = [target.torch_version, target.torch_npu_version, str(target.torch), str(target.torch_npu), *FLAGS]
    for path in (*sorted(SOURCES.iterdir()), Path(__file__)):
        marks += [path.name, path.read_text()]
    return hashlib.sha256("\0".join(marks).encode()).hexdigest()[:16]


def build(target: Target) -> Path:
    """The toolkit directory, for ASCEND_HOME_PATH. Raises PreflightError with the compiler's output, OSError."""
    root = cache_folder(target)
    home = root / key_of(target)
    if home.is_dir():
        return home
    root.mkdir(parents=True, exist_ok=True)
    with open(root / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if home.is_dir():
            return home
        if shutil.which(COMPILER) is None:
            raise PreflightError.of(
                "sim.no-compiler",
                "{compiler} not found; it compiles the simulated CANN",
                "Debian: apt install g++; openEuler: dnf install gcc-c++",
                compiler=COMPILER,
            )
        with tempfile.TemporaryDirectory(dir=root, prefix="building-") as folder:
            made = Path(folder) / "toolkit"
            compile_all(target, made, Path(folder))
            write_tree(made, home)
            os.rename(made, home)
    return home


def compile_all(target: Target, home: Path, scratch: Path) -> None:
    (home / "lib64").mkdir(parents=True)
    (scratch / "names.c").write_text(table_of(wanted_names(target.torch_npu)))
    npu_headers = target.torch_npu / "include"
    plain = ["-std=c++17", f"-I{npu_headers}", f"-I{npu_headers}/third_party/hccl/inc"]
    torch_headers = target.torch / "include"
    with_torch = ["-std=c++20", f"-isystem{torch_headers}", f"-isystem{torch_headers}/torch/csrc/api/include"]
    jobs: list[tuple[str, Sequence[str]]] = [(name, with_torch) for name in OPERATORS]
    jobs += [(name, plain) for name in (*RUNTIME, *HCCL)]
    commands = [
        [COMPILER, *FLAGS, *flags, "-c", str(SOURCES / f"{name}.cpp"), "-o", str(scratch / f"{name}.o")]
        for name, flags in jobs
    ]
    commands.append(["gcc", "-O1", "-fPIC", "-w", "-c", str(scratch / "names.c"), "-o", str(scratch / "names.o")])
    with ThreadPoolExecutor(max_workers=max(2, len(os.sched_getaffinity(0)))) as pool:
        list(pool.map(run, commands))
    link(home, "ascendcl", objects(scratch, (*RUNTIME, "names")), "-ldl", "-pthread")
    link(home, "hccl", objects(scratch, HCCL), "-lascendcl", "-pthread")
    for name in EMPTY:
        link(home, name, [], "-Wl,--no-as-needed", "-lascendcl")
    torch_libraries = [f"-L{target.torch}/lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{target.torch}/lib"]
    link(home, "ascendrun_operators", objects(scratch, OPERATORS), *torch_libraries)


def objects(scratch: Path, names: Sequence[str]) -> list[str]:
    return [str(scratch / f"{name}.o") for name in names]


def link(home: Path, name: str, parts: Sequence[str], *libraries: str) -> None:
    file = f"lib{name}.so"
    paths = ["-o", str(home / "lib64" / file), *parts, f"-Wl,-soname,{file}", f"-L{home}/lib64", "-Wl,-rpath,$ORIGIN"]
    run([COMPILER, "-shared", *paths, *libraries])


def run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise PreflightError.of(
            "sim.compile-failed",
            "cannot compile {library} of the simulated CANN ({error})",
            "this torch_npu may be newer than the simulation; see docs/simulated-npu.md",
            library=command[-1],
            error=lines[0] if lines else f"exit code {done.returncode}",
        )


def write_tree(made: Path, home: Path) -> None:
    """What torch_npu and `doctor` look for next to the libraries; `home`: its final path."""
    for name in ("runtime", "compiler", "opp", "tools"):
        (made / name).mkdir()
    versions = "".join(f"{name}_running_version=[8.5.0]\n" for name in ("runtime", "compiler"))
    (made / "version.cfg").write_text(f"# simulated\n{versions}")
    lines = [f"export {name}={shlex.quote(value)}" for name, value in settings_of(home).items()]
    libraries = f"export LD_LIBRARY_PATH={shlex.quote(f'{home}/lib64')}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"
    head = "# The simulated CANN: source it as the real one's. Control flow and API only, never speed."
    (made / "set_env.sh").write_text("\n".join([head, *lines, libraries, ""]))


def settings_of(home: Path) -> dict[str, str]:
    return {name: value.format(home=home) for name, value in SETTINGS.items()}


def environment(home: Path, environ: dict[str, str]) -> dict[str, str]:
    """What set_env.sh does, for a process that ascendrun starts."""
    libraries = ":".join(filter(None, (f"{home}/lib64", environ.get("LD_LIBRARY_PATH"))))
    return {**environ, **settings_of(home), "LD_LIBRARY_PATH": libraries}


def undefined_symbols(library: Path) -> Iterator[str]:
    """The names that an ELF library (64 bit, little endian) imports from others."""
    data = library.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"{library}: no 64-bit little-endian ELF library")
    (table_at,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, table_at + i * size) for i in range(count)]
    for _, kind, _, _, at, length, link, _, _, entry in sections:
        if kind != _DYNAMIC_SYMBOLS:
            continue
        names_at = sections[link][4]
        for symbol_at in range(at, at + length, entry):
            name, _, _, section = struct.unpack_from("<IBBH", data, symbol_at)
            if section == 0 and name:
                yield data[names_at + name : data.index(b"\0", names_at + name)].decode()


def wanted_names(torch_npu: Path) -> set[str]:
    """The names that the package imports from libascendcl and its libraries. A name that is only looked up counts
    where the
    package's own headers declare it: the rest are messages that look like names."""
    linked = {
        name
        for library in (*torch_npu.glob("_C.*.so"), *torch_npu.glob("lib/*.so"))
        for name in undefined_symbols(library)
        if _OURS.match(name)
    }
    text = (torch_npu / "lib" / "libtorch_npu.so").read_bytes()
    looked_up = {found.decode() for found in _LOOKED_UP.findall(text)}
    declared = {
        name
        for header in torch_npu.glob("include/acl/*.h")
        for name in _DECLARED.findall(header.read_text(errors="replace"))
    }
    return linked | (looked_up & declared)


def table_of(names: set[str]) -> str:
    """Return C source in which each function returns 0; weak, so that an implemented function overrides it."""
    head = "// Generated from the installed torch_npu: functions that need no behaviour in the simulator.\n"
    return head + "".join(f"__attribute__((weak)) long {name}(void) {{ return 0; }}\n" for name in sorted(names))


_QUESTION = """
import importlib.metadata, importlib.util, json, sys
def find(name):
    spec = importlib.util.find_spec(name)
    places = spec and spec.submodule_search_locations
    return places and [places[0], importlib.metadata.version(name)]
print(json.dumps({"prefix": sys.prefix, "version": "%d.%d" % sys.version_info[:2], "torch": find("torch"),
                  "torch_npu": find("torch_npu")}))
"""
KNOWN_VERSION = "2.13"
INSTALL_HINT = Text(
    "sim.install",
    "create an environment with both (Python 3.10 or 3.11): bin/setup-env --venv .venv-npu --over .venv npu-sim",
)


@dataclass(frozen=True)
class Target:
    """`prefix`: the environment's own directory."""

    python: str
    prefix: Path
    torch: Path
    torch_version: str
    torch_npu: Path
    torch_npu_version: str


def find_target(python: str) -> Target:
    """Return the environment. Raises PreflightError with the reason why this Python cannot run torch_npu."""
    if platform.machine() != "x86_64":
        machine = platform.machine()
        raise PreflightError.of("sim.machine", "the simulated CANN requires x86_64, got {machine}", machine=machine)
    try:
        text = subprocess.run([python, "-c", _QUESTION], capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise PreflightError.of(
            "sim.python-fails",
            "cannot run {python} ({error})",
            "name another Python: --python PATH",
            python=python,
            error=getattr(error, "strerror", None) or error,
        ) from error
    found = json.loads(text)
    lacks = [name for name in ("torch", "torch_npu") if not found[name]]
    if lacks:
        raise PreflightError(
            Text(
                "sim.no-torch",
                "{python} (Python {version}): {modules} not found",
                python=python,
                version=found["version"],
                modules=lacks,
            ),
            hint=INSTALL_HINT,
        )
    torch_npu, version = found["torch_npu"]
    if not version.startswith(KNOWN_VERSION):
        raise PreflightError(
            Text(
                "sim.other-torch-npu",
                "{python}: the simulated CANN requires torch_npu {known}, got {version}",
                python=python,
                known=KNOWN_VERSION,
                version=version,
            ),
            hint=INSTALL_HINT,
        )
    return Target(python, Path(found["prefix"]), Path(found["torch"][0]), found["torch"][1], Path(torch_npu), version)
