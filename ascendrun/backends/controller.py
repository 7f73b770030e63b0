"""The controller in this process, with the backends that its settings allow."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from typing import TYPE_CHECKING, Callable

from ascendrun.backends import Backends, SshOptions
from ascendrun.core.settings import STANDBY_BLOCK, Settings, settings_files
from ascendrun.head.loop import daemon
from ascendrun.head.notify.notifier import Notifier
from ascendrun.head.state.user_files import load_settings, read_hostfile

if TYPE_CHECKING:
    from ascendrun.core.notices import NoticeSettings
    from ascendrun.core.standby_settings import Standby
    from ascendrun.head.state.store import Store


ASK_S = 60.0


def run_controller(settings: Settings) -> bool:
    """Run the controller until it ends. Return False immediately if another process already is the controller."""
    backends = Backends(settings, SshOptions(find_askpass(os.environ), settings.transport))
    with daemon.reported_refusal(settings.state_dir):
        return daemon.run_controller(
            settings.state_dir,
            backends,
            notifier=make_notifier,
            retention=settings.retention,
            idle_check_s=settings.idle_check_s,
            shared_queue=settings.queue,
            standby=find_standby(settings),
        )


def find_standby(settings: Settings) -> Standby | None:
    """Return the standby of this head, None: it has none. Raises InvalidInputError."""
    if not any(STANDBY_BLOCK in blocks.root.entries for blocks in settings.blocks):
        return None
    from ascendrun.core.standby_settings import read_standby

    return read_standby(settings, read_hostfile)


def make_notifier(store: Store) -> Notifier:
    """Return a notifier that follows changes of the settings files of this process's user."""

    def read() -> NoticeSettings | None:
        settings = load_settings(os.environ)
        if not settings.blocks:
            return None
        from ascendrun.core.notices.settings import read_notices

        return read_notices(settings)

    return Notifier(store, read, files=settings_files(os.environ))


def find_askpass(environ: Mapping[str, str]) -> Callable[[str], str | None] | None:
    """Return a function from a prompt to the passphrase, by $SSH_ASKPASS as in ssh-add; None: none is set.

    The function returns None if the program fails, is cancelled, or takes longer than a minute.
    """
    program = environ.get("SSH_ASKPASS")
    if not program:
        return None

    def ask(prompt: str) -> str | None:
        try:
            done = subprocess.run(
                [program, prompt], capture_output=True, text=True, timeout=ASK_S, check=False, stdin=subprocess.DEVNULL
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.rstrip("\n") if done.returncode == 0 else None

    return ask
