"""The sampler process of a supervisor: started after the ranks, gone before the attempt has ended.

It has the attempt's tag, so that it is found after a supervisor was killed, and a separate mark, so that it never
counts as a remaining process of a rank.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time

from ascendrun.node import layout, procs, reap
from ascendrun.node.supervisor.rank_handle import read_some

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PRIORITY = 10
"""nice value: the ranks have priority."""
GONE_S = 1.0
"""Seconds that the end of an attempt waits for it; a tool that hangs in a driver outlives that."""


class SamplerProcess:
    """The sampler process. Its errors never affect the attempt."""

    def __init__(self, tag: str, folder: str) -> None:
        self._tag = tag
        self._folder = folder
        self._child: subprocess.Popen[bytes] | None = None
        self._unread = b""

    @property
    def is_on(self) -> bool:
        return self._child is not None

    def start(self, prepared: dict[str, Any]) -> None:
        """Start it, unless sampling is off for the attempt."""
        if not prepared.get("sampling"):
            return
        env = dict(os.environb)
        env.update(
            {
                layout.TAG_VARIABLE.encode(): self._tag.encode(),
                layout.SAMPLER_VARIABLE.encode(): b"1",
                layout.ROOT_VARIABLE.encode(): os.fsencode(layout.root_of(self._folder)),
            }
        )
        argv = [
            sys.executable or os.readlink("/proc/self/exe"),
            "-I",
            "-S",
            os.path.abspath(sys.argv[0]),
            "sample",
            self._folder,
        ]
        try:
            # Low priority from the first instruction: a starting interpreter must not slow down the starting ranks.
            self._child = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if any(map(layout.forks_ranks, prepared["ranks"])) else subprocess.DEVNULL,
                env=env,
                cwd="/",
                start_new_session=True,
                preexec_fn=lambda: os.nice(PRIORITY),
            )
        except (OSError, subprocess.SubprocessError) as error:
            sys.stderr.write(f"no samples of {self._tag}: {error}\n")
            return
        if self.fd is not None:
            os.set_blocking(self.fd, False)

    @property
    def fd(self) -> int | None:
        """Descriptor with data when there are `found_ranks`; None: there will be none."""
        return None if self._child is None or self._child.stdout is None else self._child.stdout.fileno()

    def found_ranks(self) -> list[dict[str, Any]] | None:
        """Return the ranks that it found, {rank, pid, start}, as far as they have arrived; None: no more come."""
        chunk = b"" if self.fd is None else read_some(self.fd)
        *lines, self._unread = (self._unread + (chunk or b"")).split(b"\n")
        return [json.loads(line.decode("ascii")) for line in lines] if lines or chunk != b"" else None

    def end(self) -> None:
        """Kill it and its tools; nothing needs saving, each of its lines is complete."""
        if self._child is None:
            return
        deadline = time.monotonic() + GONE_S
        found = self._find()
        while found and time.monotonic() < deadline:
            for pid, start in found:
                procs.send_signal(pid, start, 9)
            self._child.poll()
            select.select([], [], [], 0.01)  # time.sleep fails where a test shifts this host's clock
            found = self._find()

    def _find(self) -> Any:
        return reap.find_sampler(self._tag, root=layout.root_of(self._folder))
