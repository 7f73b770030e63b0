"""`ascendrun controller run`, also as started in the background by other commands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.core.settings import Settings


def run_controller(settings: Settings) -> int:
    """Return when the controller has ended. Raises ConflictError when another process is the controller."""
    from ascendrun.backends import controller

    if not controller.run_controller(settings):
        from ascendrun.core.errors import ConflictError

        message = Text("controller.already-runs", "a controller already runs for {path}", path=settings.state_dir)
        raise ConflictError(message, hint="ascendrun controller status")
    return 0
