"""Command lines that open a terminal, or run one command, on a host through the user's own OpenSSH."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from ascendrun.core.errors import UnreachableError
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.core.hosts import Host
    from ascendrun.core.settings import Settings


def terminal_argv(settings: Settings, host: Host, argv: Sequence[str], *, has_terminal: bool) -> list[str]:
    """Return the command line that runs `argv` on the host; on a local host `argv` itself.

    Host keys are verified as for every other connection. Raises UnreachableError without an ssh command.
    """
    if host.is_local:
        return list(argv)
    if shutil.which("ssh") is None:
        raise UnreachableError(
            Text("shell.no-ssh", "{host}: ssh not found on this machine", host=host.name),
            hint=Text("shell.no-ssh.hint", "install the OpenSSH client"),
        )
    from ascendrun.backends import Backends

    with closing(Backends(settings)) as backends:
        command = backends.ssh().terminal_argv(host, has_terminal=has_terminal)
    return [*command, " ".join(map(shlex.quote, argv))]
