"""A large disk in little memory, for copies of a file that compresses to nothing: zram, a compressed disk of Linux.

Linux keeps a page that repeats one word of 8 bytes as this word. No tool that the benchmarks run compresses what it
sends, so all of them send and write such pages as any others.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CONTROL = Path("/sys/class/zram-control")
PAGES_A_MIB, WORDS_A_PAGE = 256, 512
RELEASE_S = 30.0


def pages(mebibytes: int) -> Iterator[bytes]:
    """Yield each MiB of a file whose pages repeat one random word each."""
    for _ in range(mebibytes):
        yield b"".join(os.urandom(8) * WORDS_A_PAGE for _ in range(PAGES_A_MIB))


@contextmanager
def ram_disk(mebibytes: int) -> Iterator[Path]:
    """Mount a disk of this size; it is gone at the end. Raises OSError where the kernel has no zram."""
    number = (CONTROL / "hot_add").read_text().strip()
    try:
        Path(f"/sys/block/zram{number}/disksize").write_text(f"{mebibytes}M")
        subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", f"/dev/zram{number}"], check=True)
        with tempfile.TemporaryDirectory(prefix="ascendrun-disk-") as folder:
            subprocess.run(["mount", f"/dev/zram{number}", folder], check=True)
            try:
                yield Path(folder)
            finally:
                subprocess.run(["umount", folder], check=True)
    finally:
        _remove(number)


def _remove(number: str) -> None:
    """The last process of a host, which has the disk mounted too, may still be ending."""
    until = time.monotonic() + RELEASE_S
    while True:
        try:
            (CONTROL / "hot_remove").write_text(number)
            return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)
