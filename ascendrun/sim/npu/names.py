"""Which functions torch_npu takes from CANN: those it is linked with, and those it looks up when it needs them."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from pathlib import Path

_DYNAMIC_SYMBOLS = 11
_LOOKED_UP = re.compile(rb"(?<=\0)acl[A-Za-z0-9]{3,60}(?=\0)")
_DECLARED = re.compile(r"\b(acl[A-Za-z0-9]+)\s*\(")
_OURS = re.compile(r"(?:acl|Msprof|rt[A-Z])[A-Za-z0-9]+\Z")


def undefined_symbols(library: Path) -> Iterator[str]:
    """The names that an ELF library (64 bit, little endian) wants of others."""
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
    """What the package in this folder wants of libascendcl and its kin. A name that is only looked up counts where the
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
    """C source in which each answers 0; weak, so that a function with a meaning takes its place."""
    head = "// Generated from the installed torch_npu: functions that need no behaviour in the simulator.\n"
    return head + "".join(f"__attribute__((weak)) long {name}(void) {{ return 0; }}\n" for name in sorted(names))
