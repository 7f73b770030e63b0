"""Two ranks: one has nothing more to do while the other still writes its report."""

import time
from pathlib import Path

from ascendrun.programs.trainer import runtime

DEADLINE_S = 60.0


def main(argv: list[str]) -> None:
    runtime.run(body, family="cpu", timeout_s=DEADLINE_S)


def body(here: runtime.Runtime) -> None:
    early = Path("rank-1-has-nothing-more-to-do")
    if here.rank == 1:
        here.record(done=True)
        early.touch()
        return
    deadline_s = time.monotonic() + DEADLINE_S
    while not early.exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    time.sleep(0.01)  # of another millisecond than rank 1's word, had it written one
    here.record(event="report")
    here.record(done=True)
