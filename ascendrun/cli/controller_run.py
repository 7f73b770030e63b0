"""`ascendrun controller run`, also as the command line starts it in the background."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ascendrun.head.state.settings import Settings


def run_controller(settings: Settings) -> int:
    """Returns when the controller has ended. Raises ConflictError when another process is the controller."""
    from ascendrun.backends import controller

    if not controller.run_controller(settings):
        from ascendrun.core.errors import ConflictError

        raise ConflictError(f"a controller already runs for {settings.state_dir}", hint="ascendrun controller status")
    return 0
