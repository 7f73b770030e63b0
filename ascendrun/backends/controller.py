"""The controller in this process, with every backend that its settings allow."""

from __future__ import annotations

import os

from ascendrun.backends import Backends
from ascendrun.head import daemon
from ascendrun.head.askpass import find_askpass
from ascendrun.head.settings import Settings


def run_controller(settings: Settings) -> bool:
    """Is the controller until it ends. False at once when another process already is."""
    backends = Backends(settings, ask=find_askpass(os.environ), transport=settings.transport)
    return daemon.run_controller(settings.state_dir, backends)
