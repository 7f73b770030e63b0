"""The controller in this process, with every backend that its settings allow."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ascendrun.backends import Backends
from ascendrun.core.settings import Settings, load_settings, settings_files
from ascendrun.head.loop import daemon
from ascendrun.head.notify.notifier import Notifier
from ascendrun.head.ssh.askpass import find_askpass

if TYPE_CHECKING:
    from ascendrun.head.state.store import Store


def run_controller(settings: Settings) -> bool:
    """Is the controller until it ends. False at once when another process already is."""
    backends = Backends(settings, ask=find_askpass(os.environ), transport=settings.transport)
    return daemon.run_controller(settings.state_dir, backends, notifier=make_notifier)


def make_notifier(store: Store) -> Notifier:
    """Follows the settings files of this process's user as they change."""
    return Notifier(store, lambda: load_settings(os.environ).notices, files=settings_files(os.environ))
