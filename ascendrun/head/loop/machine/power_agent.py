"""Runner of the power agent of hosts, a command of the fence-agents family; it never raises."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from shutil import which
from typing import TYPE_CHECKING, Literal

from ascendrun.core.errors import InvalidInputError, Problem
from ascendrun.core.hosts import Host
from ascendrun.core.settings import settings_files
from ascendrun.head.command import run_command
from ascendrun.head.state.settings_watch import SettingsWatch
from ascendrun.head.state.user_files import load_settings
from ascendrun.text import Text

if TYPE_CHECKING:
    from ascendrun.core.power_settings import PowerAgent
    from ascendrun.core.settings import Settings

IS_ON, IS_OFF = 0, 2
"""Exit codes of `status`, by doc/FenceAgentAPI.md of ClusterLabs/fence-agents; `off` has 0 for success."""
AGAIN_S = 1.0
AT_ONCE = 16
LINE = 200


def ask(power: PowerAgent, host: Host, action: Literal["off", "status"]) -> tuple[int | None, Text]:
    """Run one action of the agent; return its exit code, None: it did not end by itself, and a report."""
    code, output, how = run_command(power.argv(host, action), b"", os.environ, power.timeout_s)
    line = (output.splitlines() or ["-"])[-1].strip()[:LINE]
    return code, Text("power.end", "{how} ({action}): {line}", how=how, action=action, line=line)


def watch_agent() -> Callable[[], PowerAgent | None]:
    """Return a function that finds the agent of the settings files of this process's user, as they are now."""
    files = settings_files(os.environ)

    def read() -> PowerAgent | None:
        from ascendrun.core.power_settings import read_power

        return read_power(load_settings(os.environ))

    return SettingsWatch(read, files, log=partial(print, file=sys.stderr, flush=True)).get


def load_power(settings: Settings) -> PowerAgent | None:
    """Return the agent of the settings; its program exists. Raises InvalidInputError."""
    from ascendrun.core.power_settings import read_power

    power = read_power(settings)
    if power is not None and which(power.command[0]) is None:
        text = Text("notify.cannot-run", "cannot run {program}", program=power.command[0])
        raise InvalidInputError([Problem(power.file, None, None, text)])
    return power


def switch_off(power: PowerAgent, host: Host) -> tuple[int | None, Text]:
    """Switch a host off; return IS_OFF if the agent reports that it did, and that the host is off; and a report."""
    code, why = ask(power, host, "off")
    if code != 0:  # of a wrong command, which may have IS_OFF for its status
        return None, why
    until = time.monotonic() + power.timeout_s
    code, why = ask(power, host, "status")
    while code == IS_ON and time.monotonic() < until:
        time.sleep(AGAIN_S)
        code, why = ask(power, host, "status")
    return code, why


def find_status(power: PowerAgent, host: Host, *, witness: Host | None) -> tuple[int | None, Text]:
    """Return IS_ON or IS_OFF, None: unknown, and a report. `witness`: a host that responds, which the agent must report
    as on before IS_OFF is believed: it may be the exit code of a wrong command."""
    code, why = ask(power, host, "status")
    if code == IS_OFF and (witness is None or ask(power, witness, "status")[0] != IS_ON):
        return None, Text("power.no-witness", "its agent reports it as off, but reports no host that responds as on")
    return code if code in (IS_ON, IS_OFF) else None, why


def examine(settings: Settings, hosts: Sequence[Host], responding: Collection[str]) -> Mapping[str, Text]:
    """Return why hosts with a `bmc` could not be switched off, by name; nothing is changed. One that responds and is
    reported as off has the `bmc` of another host."""
    hosts, power = [host for host in hosts if host.bmc], load_power(settings) if settings.blocks else None
    if power is None:
        return {host.name: Text("power.unset", "the settings have no block `power`") for host in hosts}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = zip(hosts, pool.map(lambda host: ask(power, host, "status"), hosts))
        other = Text("power.other-host", "it responds, but its agent reports it as off: the bmc is of another host")
        reasons = {host.name: other if code == IS_OFF else why for host, (code, why) in found if code != IS_ON}
        away = {host.name for host in hosts if host.name not in responding}
        return {name: why for name, why in reasons.items() if not (why is other and name in away)}
