"""Report the progress of a training: `ascendrun.log` and `ascendrun.callback`. Outside ascendrun they do nothing.

Ranks find this module in the agent's archive, which is on their PYTHONPATH. Python 3.7, standard library only.
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
_TRACKER_BASE = "accelerate.tracking"
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


def callback() -> Any:
    """Return an object for `Trainer(callbacks=[...])` of transformers, or `Accelerator(log_with=[...])` of accelerate.

    accelerate must be imported before the call.
    """
    tracking = sys.modules.get(_TRACKER_BASE)
    bases = (_Callback,) if tracking is None else (_Callback, tracking.GeneralTracker)
    return type("Callback", bases, {})()


class _Callback:
    """The events of both: `on_log` and others of a Trainer, `log` of an Accelerator."""

    name = "ascendrun"
    requires_logging_directory = False
    main_process_only = True
    tracker = None

    def __init__(self) -> None:
        """Replaces the constructor of GeneralTracker, which only checks the attributes above."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_"):
            return lambda *args, **kwargs: None
        raise AttributeError(name)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        _write({"timestamp": time.time(), "event": "start", "total_steps": _number(getattr(state, "max_steps", None))})

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        log(state.global_step, **{"total_steps": state.max_steps, **(logs or {})})

    def store_init_configuration(self, values: Any) -> None:
        pass

    def log(self, values: Any, step: int | None = None, **kwargs: Any) -> None:
        log(step, **{str(name): value for name, value in values.items() if name != "step"})

    def finish(self) -> None:
        pass


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
