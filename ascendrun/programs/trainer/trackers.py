"""Copies of rank 0's metrics in TensorBoard, SwanLab, W&B and MLflow (`report_to`), through accelerate's trackers.

They write to `output_dir` and need no network unless the environment names a service. Their failures are printed once
and never end a training.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ascendrun.programs.trainer.runtime import Runtime
from ascendrun.text import listed

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

NOT_CURVES = frozenset({"step", "total_steps"})


def defaults_of(folder: Path, run: str) -> dict[str, str]:
    """Return the variables that keep the libraries offline and join the attempts of a job; set ones take precedence."""
    return {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_DIR": str(folder),
        "SWANLAB_MODE": "offline",
        "SWANLAB_LOG_DIR": str(folder / "swanlog"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder.absolute()}/mlflow.db",
        **({"WANDB_RUN_ID": run, "WANDB_RESUME": "allow"} if run else {}),
    }


@contextmanager
def tracking(here: Runtime, program: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Give what rank 0 records to the trackers that the option `report_to` names."""
    names: Sequence[str] = options.get("report_to") or ()
    if not names or not here.is_first:
        yield
        return
    folder = Path(options.get("output_dir") or ".")
    folder.mkdir(parents=True, exist_ok=True)
    run = os.environ.get("ASCENDRUN_JOB_ID", "")
    for name, value in defaults_of(folder, run).items():
        os.environ.setdefault(name, value)
    trackers = [Tracker(here, name, lambda name=name: open_tracker(name, program, options, run)) for name in names]  # type: ignore[misc]
    here.trackers += [tracker.log for tracker in trackers]
    try:
        yield
    finally:
        for tracker in trackers:
            tracker.finish()


class Tracker:
    """A tracker that is opened at the first step and given up at its first failure."""

    def __init__(self, here: Runtime, name: str, make: Callable[[], Any]) -> None:
        self._here, self._name, self._make = here, name, make
        self._tracker: Any = None
        self._has_failed = False

    def log(self, values: Mapping[str, Any]) -> None:
        curves = {
            name: float(value)
            for name, value in values.items()
            if name not in NOT_CURVES and isinstance(value, (int, float))
        }
        if "step" in values and "event" not in values and curves:
            self._attempt(lambda tracker: tracker.log(curves, step=values["step"]))

    def finish(self) -> None:
        if self._tracker is not None:
            self._attempt(lambda tracker: tracker.finish())

    def _attempt(self, call: Callable[[Any], Any]) -> None:
        if self._has_failed:
            return
        try:
            self._tracker = self._tracker or self._make()
            call(self._tracker)
        except Exception as error:  # of any library, also a missing one: a curve is not worth a training
            self._has_failed = True
            self._here.log(listed("program.tracker-failed", name=self._name, error=f"{type(error).__name__}: {error}"))


def open_tracker(name: str, program: str, options: Mapping[str, Any], run: str) -> GeneralTracker:
    """Return accelerate's tracker. It is used without accelerate's state, which would set devices and threads."""
    from accelerate import tracking as library

    library.logger = logging.getLogger("accelerate.tracking")
    known: Any = library.LOGGER_TYPE_TO_CLASS[name]
    kind = type(known.__name__, (known,), {"main_process_only": False})
    folder = Path(options.get("output_dir") or ".")
    given: dict[str, dict[str, Any]] = {
        "tensorboard": {"run_name": run, "logging_dir": str(folder / "tensorboard")},
        "mlflow": {"experiment_name": program, "run_name": run or None},
    }
    tracker = kind(**given.get(name, {"run_name": program}))
    getattr(tracker, "start", lambda: None)()
    tracker.store_init_configuration({key: str(value) for key, value in options.items()})
    return tracker
