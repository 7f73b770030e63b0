"""The controller in this process, with every backend that its settings allow."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ascendrun.backends import Backends
from ascendrun.head import daemon
from ascendrun.head.askpass import find_askpass
from ascendrun.head.notifier import Notifier
from ascendrun.head.settings import Settings, load_settings, settings_files

if TYPE_CHECKING:
    from ascendrun.head.store import Store


def run_controller(settings: Settings) -> bool:
    """Is the controller until it ends. False at once when another process already is."""
    backends = Backends(settings, ask=find_askpass(os.environ), transport=settings.transport)
    return daemon.run_controller(settings.state_dir, backends, notifier=make_notifier)


def make_notifier(store: Store) -> Notifier:
    """Follows the settings files of this process's user as they change."""
    return Notifier(store, lambda: load_settings(os.environ).notices, files=settings_files(os.environ))
