"""Report the progress of a training: `ascendrun.log` and `ascendrun.callback`. Outside ascendrun they do nothing.

Ranks find this module on their PYTHONPATH: it is staged with each job. Python 3.7, standard library only.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

METRICS_VARIABLE = "ASCENDRUN_METRICS_FILE"
_NUMBERED = re.compile(r"rank-(\d+)\.metrics\.\d+$")
_BASES = (
    ("lightning.pytorch.callbacks", "Callback"),
    ("pytorch_lightning.callbacks", "Callback"),
    ("accelerate.tracking", "GeneralTracker"),
)
"""Classes that a library requires of an object that it calls, if the library is imported."""
_QUIET_S = 1.0
"""A line about a step may follow the last one after so many seconds; reading a loss waits for the device."""
_last_step = [0]


def log(step: int | None = None, **values: Any) -> None:
    """Record the values of a completed step: numbers, NumPy scalars or tensors with one element.

    `step` None: the one after that of the last call. The names that ascendrun shows are in docs/metrics.md; others are
    stored. Of the ranks below one torchrun only the first of each node writes. Never raises.
    """
    step = _last_step[0] + 1 if step is None else step
    number = _number(step)
    if number is not None:
        _last_step[0] = int(number)
        numbers = {name: _number(value) for name, value in values.items()}
        _write({"timestamp": time.time(), **numbers, "step": _last_step[0]})


def record(**values: Any) -> None:
    """Record an event, such as event="checkpoint", as `log` does. Never raises."""
    _write({"timestamp": time.time(), **values})


def callback() -> Any:
    """Return an object for `Trainer(callbacks=[...])` of transformers or of Lightning, or `Accelerator(log_with=[...])`
    of accelerate.

    Lightning and accelerate must be imported before the call.
    """
    bases = [getattr(sys.modules[name], base) for name, base in _BASES if name in sys.modules]
    return type("Callback", (Callback, *bases), {})()


class Callback:
    """The events of all: `on_log` and others of transformers' Trainer, `log` of an Accelerator, `on_train_batch_end`
    and others of Lightning's Trainer."""

    name = "ascendrun"
    requires_logging_directory = False
    main_process_only = True
    tracker = None
    step_logged = (0, 0.0)
    """Of Lightning: the last step with a line, and when it was written."""

    def __init__(self) -> None:
        """Replaces the constructor of GeneralTracker, which only checks the attributes above."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_"):
            return lambda *args, **kwargs: None
        raise AttributeError(name)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        _start(args, "world_size", total_steps=_number(getattr(state, "max_steps", None)))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        log(state.global_step, **{"total_steps": state.max_steps, **(logs or {})})

    # Lightning: (trainer, module, …)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        total = trainer.estimated_stepping_batches
        _start(trainer, "world_size", total_steps=total if total != float("inf") else None)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Record a step: each that Lightning logs, and others at most once a second."""
        step, (last, written_s) = trainer.global_step, self.step_logged
        is_logged = step % max(1, trainer.log_every_n_steps) == 0
        if step == last or not (is_logged or time.monotonic() - written_s >= _QUIET_S):
            return
        self.step_logged = step, time.monotonic()
        values = {"loss": outputs.get("loss") if isinstance(outputs, dict) else outputs}
        if trainer.optimizers:
            values["learning_rate"] = trainer.optimizers[0].param_groups[0]["lr"]
        log(step, epoch=trainer.current_epoch, **values)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking and trainer.callback_metrics.get("val_loss") is not None:
            log(trainer.global_step, eval_loss=trainer.callback_metrics["val_loss"])

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Of transformers too, with other arguments."""

    def store_init_configuration(self, values: Any) -> None:
        if "accelerate.state" in sys.modules:
            _start(sys.modules["accelerate.state"].PartialState(), "num_processes")

    def log(self, values: Any, step: int | None = None, **kwargs: Any) -> None:
        log(step, **{str(name): value for name, value in values.items() if name != "step"})

    def finish(self) -> None:
        pass


def _start(state: object, attribute: str, **values: object) -> None:
    """Record the start with the ranks that the framework trains with: fewer than those of the job train separately."""
    record(event="start", world_size=_number(getattr(state, attribute, None)), **values)


def _number(value: Any) -> float | int | None:
    """Return a JSON number; None: it is not one."""
    try:
        if isinstance(value, bool) or value is None or isinstance(value, str):
            return None
        return value if isinstance(value, int) else float(value)
    except Exception:  # a tensor with several elements, or any object: a metric must not end a training
        return None


def _write(line: dict[str, Any]) -> None:
    path = os.environ.get(METRICS_VARIABLE)
    if not path or not _is_writer(path):
        return
    try:
        data = json.dumps({name: value for name, value in line.items() if value is not None}) + "\n"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0), 0o600)
        try:
            os.write(fd, data.encode())
        finally:
            os.close(fd)
    except (OSError, ValueError):
        pass  # a full disk must not end a training


def _is_writer(path: str) -> bool:
    """Return whether the file is this rank's own, or that of its launcher, for which the first rank writes."""
    match = _NUMBERED.search(path)
    rank, local_rank = os.environ.get("RANK"), os.environ.get("LOCAL_RANK")
    return match is None or rank is None or match.group(1) == rank or local_rank in (None, "0")
