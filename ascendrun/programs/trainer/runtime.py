"""One rank from its first moment to an ending that does not hang: device, peers, signals, error file, exit code."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, NoReturn, TextIO

import torch
import torch.distributed as dist

from ascendrun.programs.trainer import errors
from ascendrun.programs.trainer.checkpoint import replace_text
from ascendrun.programs.trainer.devices.accelerator import Accelerator, choose_family, open_accelerator
from ascendrun.programs.trainer.distributed import Ranks, join
from ascendrun.text import Text

STOP_SIGNALS = ("TERM", "USR1", "INT")
DRAIN_S = 0.05
"""gloo's threads need a moment after the last collective: without it 7 of 12 runs hung in their destructors."""


@dataclass
class Runtime(Ranks):
    """This rank while it runs: its peers (see Ranks), device, metrics file, and whether it was asked to stop."""

    accelerator: Accelerator
    metrics: TextIO | None = None
    stop_asked: bool = False
    at_end: list[Callable[[], None]] = field(default_factory=list)
    """Called by `leave` before the ranks part: writers that must be joined."""
    last_words: dict[str, Any] | None = None

    @property
    def family(self) -> str:
        return self.accelerator.family

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    def record(self, **values: Any) -> None:
        """Appends one line to this rank's metrics file, with the time; does nothing where none is wanted.

        A line with `done` is kept for `leave`: the launcher ends a rank that lives on after it, and while a peer
        still writes its report this one has to wait for it.
        """
        if "done" in values:
            self.last_words = values
            return
        self.write(values)

    def write(self, values: dict[str, Any]) -> None:
        """One line, now."""
        if self.metrics is not None:
            self.metrics.write(json.dumps({"timestamp": round(time.time(), 3), **values}) + "\n")
            self.metrics.flush()


def start(*, family: str = "auto", timeout_s: float = 600.0) -> Runtime:
    """Joins the run that the environment describes; without RANK and WORLD_SIZE this process is alone."""
    environ = os.environ
    rank, world = int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1"))
    local_rank = int(environ.get("LOCAL_RANK", "0"))
    accelerator = open_accelerator(choose_family(family, environ), local_rank)
    # transformers 4 imports DeepSpeed with every model, which otherwise guesses a device, permanently, and prints it.
    environ.setdefault("DS_ACCELERATOR", accelerator.family)
    control = join(rank, world, accelerator.backend, timeout_s) if world > 1 else None
    path = environ.get("ASCENDRUN_METRICS_FILE")
    metrics = open(path, "a", encoding="utf-8") if path else None
    runtime = Runtime(rank, local_rank, world, control, accelerator, metrics)
    listen_for_stop(runtime)
    return runtime


def listen_for_stop(runtime: Runtime) -> None:
    """The checkpoint signal asks for a stop after the current step; a second ^C ends the process at once."""

    def note(number: int, frame: object) -> None:
        runtime.stop_asked = True
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    for number in stop_signals():
        signal.signal(number, note)


def stop_signals() -> list[int]:
    """Those that ask a training to save and end; the launcher may name one more."""
    own = os.environ.get("ASCENDRUN_CHECKPOINT_SIGNAL") or "TERM"
    names = {*STOP_SIGNALS, own[3:] if own.startswith("SIG") else own}
    return [getattr(signal, "SIG" + name) for name in sorted(names)]


def run(body: Callable[[Runtime], None], *, family: str = "auto", timeout_s: float = 600.0) -> NoReturn:
    """Runs `body` as this rank and ends the process: code 0, or 1 with the error written where torch elastic looks.

    A ProgramError and errors of the machine are printed in one line, others with their traceback. The error file has
    the traceback of each.
    """
    try:
        runtime = start(family=family, timeout_s=timeout_s)
        body(runtime)
        leave(runtime)
    except BaseException as error:  # whatever it was, the process must end here with the reason
        write_error_file(error)
        message = str(error) if isinstance(error, errors.ProgramError) else errors.in_words(error)
        if message is None:
            traceback.print_exc()
        else:
            print(Text("program.error", "error: {message}", message=message), file=sys.stderr)
        end_process(1)
    end_process(0)


def leave(runtime: Runtime) -> None:
    """The ending for a rank whose work is done: writers finish, everyone meets, the network drains, the groups go."""
    for finish in runtime.at_end:
        finish()
    if runtime.control is not None:
        dist.barrier(group=runtime.control)
    if runtime.last_words is not None:
        runtime.write(runtime.last_words)
    if runtime.metrics is not None:
        runtime.metrics.close()
    if runtime.control is None:
        return
    time.sleep(DRAIN_S)
    dist.destroy_process_group()


def end_process(code: int) -> NoReturn:
    """Past the interpreter's own teardown, where gloo and hccl threads can wait for each other for ever."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def write_error_file(error: BaseException) -> None:
    """Torch elastic's error file, so that the launcher can name this rank and its reason."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    stack = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    message = {
        "message": f"{type(error).__name__}: {error}",
        "extraInfo": {"py_callstack": stack, "timestamp": str(int(time.time()))},
    }
    try:
        replace_text(Path(path), json.dumps({"message": message}))
    except OSError as problem:
        print(Text("program.cannot-write", "cannot write {path}: {error}", path=path, error=problem), file=sys.stderr)


def checkpoint_folder(output: str) -> Path:
    """Where the launcher expects checkpoints, else in the program's output directory."""
    return Path(os.environ.get("ASCENDRUN_CHECKPOINT_DIR") or Path(output).absolute() / "checkpoints")
