"""One rank from start to an end that does not hang: device, peers, signals, error file, exit code."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, NoReturn, TextIO

import torch
import torch.distributed as dist

from ascendrun.programs import errors
from ascendrun.programs.devices.accelerator import Accelerator, choose_family, open_accelerator
from ascendrun.programs.trainer.checkpoint import replace_text
from ascendrun.programs.trainer.distributed import Ranks, join
from ascendrun.text import listed

STACK_SIGNAL = 40
"""Equal to node/stacks.SIGNAL; a test compares them."""
STOP_SIGNALS = ("TERM", "USR1", "INT")
DRAIN_S = 0.05
"""Seconds that gloo's threads need after the last collective: without it 7 of 12 runs hung in their destructors."""


@dataclass
class Runtime(Ranks):
    """This rank while it runs: its peers (see Ranks), device, metrics file, and whether it received a stop signal."""

    accelerator: Accelerator
    metrics: TextIO | None = None
    stop_requested: bool = False
    at_end: list[Callable[[], None]] = field(default_factory=list)
    """Called by `leave` before the groups are destroyed: writers that must be joined."""
    last_words: dict[str, Any] | None = None
    announced: dict[str, Any] = field(default_factory=dict)
    """For the line of the start: how the launcher asks this process for its stacks."""
    trackers: list[Callable[[Mapping[str, Any]], None]] = field(default_factory=list)
    """Called with what is recorded (`trackers.tracking`)."""

    @property
    def family(self) -> str:
        return self.accelerator.family

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    def record(self, **values: Any) -> None:
        """Append one line to this rank's metrics file, with the time; no effect without a metrics file.

        A line with `done` is kept for `leave`: the launcher ends a rank that runs on after it, and this rank has to
        wait for a peer that still writes its report.
        """
        if "done" in values:
            self.last_words = values
            return
        self.write(values)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record that this rank does something that takes long without a step; else it may count as hung."""
        self.record(event="phase", phase=name, state="begin")
        try:
            yield
        finally:
            self.record(event="phase", phase=name, state="end")

    def write(self, values: dict[str, Any]) -> None:
        """Write one line immediately."""
        for log in self.trackers:
            log(values)
        if self.metrics is not None:
            self.metrics.write(json.dumps({"timestamp": round(time.time(), 3), **values}) + "\n")
            self.metrics.flush()


def start(*, family: str = "auto", timeout_s: float = 600.0) -> Runtime:
    """Join the run that the environment describes; without RANK and WORLD_SIZE this process is the only rank."""
    environ = os.environ
    rank, world = int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1"))
    local_rank = int(environ.get("LOCAL_RANK", "0"))
    accelerator = open_accelerator(choose_family(family, environ), local_rank)
    # transformers 4 imports DeepSpeed with every model, which otherwise selects a device, permanently, and prints it.
    environ.setdefault("DS_ACCELERATOR", accelerator.family)
    control = join(rank, world, accelerator.backend, timeout_s) if world > 1 else None
    path = environ.get("ASCENDRUN_METRICS_FILE")
    metrics = open(path, "a", encoding="utf-8") if path else None
    runtime = Runtime(rank, local_rank, world, control, accelerator, metrics)
    if path:
        print_stacks_on_signal(runtime, Path(path).with_name(f"rank-{rank}.stack.0"))
    listen_for_stop(runtime)
    return runtime


def print_stacks_on_signal(runtime: Runtime, path: Path) -> None:
    """Print the stacks of all threads to the file at signal STACK_SIGNAL, also while another thread has the
    interpreter; the launcher sends it only to a process that announced it."""
    try:
        faulthandler.register(STACK_SIGNAL, open(path, "ab"))
    except (OSError, RuntimeError, ValueError):  # without a file or such a signal: the launcher has other ways
        return
    runtime.announced = {"stack_signal": STACK_SIGNAL, "pid": os.getpid()}


def listen_for_stop(runtime: Runtime) -> None:
    """Handle stop signals: stop after the current step; a second ^C ends the process immediately."""

    def note(number: int, frame: object) -> None:
        runtime.stop_requested = True
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    for number in stop_signals():
        signal.signal(number, note)


def stop_signals() -> list[int]:
    """Return the signals that save and end a training; the launcher may add another."""
    own = os.environ.get("ASCENDRUN_CHECKPOINT_SIGNAL") or "TERM"
    names = {*STOP_SIGNALS, own[3:] if own.startswith("SIG") else own}
    return [getattr(signal, "SIG" + name) for name in sorted(names)]


def run(body: Callable[[Runtime], None], *, family: str = "auto", timeout_s: float = 600.0) -> NoReturn:
    """Run `body` as this rank and end the process: code 0, or that of the error with torch elastic's error file: 1, 75
    (superseded) or 78 (refused).

    A ProgramError and errors of the machine are printed in one line, others with their traceback. The error file has
    the traceback of each.
    """
    try:
        runtime = start(family=family, timeout_s=timeout_s)
        body(runtime)
        leave(runtime)
    except BaseException as error:  # any error: the process must end here with the reason
        write_error_file(error)
        message = str(error) if isinstance(error, errors.ProgramError) else errors.in_words(error)
        if message is None:
            traceback.print_exc()
        else:
            print(listed("program.error", message=message), file=sys.stderr)
        end_process(getattr(error, "exit_code", 1))
    end_process(0)


def leave(runtime: Runtime) -> None:
    """End a rank after its work: writers finish, ranks synchronize, the network drains, the groups are destroyed."""
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
    """Skip the interpreter's teardown, where gloo and hccl threads can wait for each other indefinitely."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def write_error_file(error: BaseException) -> None:
    """Write torch elastic's error file, so that the launcher can report this rank and its reason."""
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
        print(listed("program.cannot-write", path=path, error=problem), file=sys.stderr)


def checkpoint_folder(output: str) -> Path:
    """Return the launcher's checkpoint directory, else `checkpoints` in the program's output directory."""
    return Path(os.environ.get("ASCENDRUN_CHECKPOINT_DIR") or Path(output).absolute() / "checkpoints")
