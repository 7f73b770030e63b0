"""The sampler as its supervisor keeps it: started after the ranks, gone before the attempt has ended.

It bears the attempt's tag, so that it is found after a supervisor was killed, and a mark of its
own, so that it never counts as something a rank has left behind.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time

from ascendrun.node import layout, procs, reap

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PRIORITY = 10
"""nice: the ranks come first."""
GONE_S = 1.0
"""How long the end of an attempt waits for it; a tool that hangs in a driver outlives that."""


class SamplerProcess:
    """Nothing that goes wrong here harms the attempt."""

    def __init__(self, tag: str, folder: str) -> None:
        self._tag = tag
        self._folder = folder
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def is_on(self) -> bool:
        return self._child is not None

    def start(self, prepared: dict[str, Any]) -> None:
        """Does nothing for an attempt that is not to be sampled."""
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
            # Low from its first instruction: an interpreter that comes up must not slow down the ranks that do.
            self._child = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env=env,
                cwd="/",
                start_new_session=True,
                preexec_fn=lambda: os.nice(PRIORITY),
            )
        except (OSError, subprocess.SubprocessError) as error:
            sys.stderr.write(f"no samples of {self._tag}: {error}\n")

    def end(self) -> None:
        """Kills it and its tools; there is nothing to save, each of its lines is whole."""
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
