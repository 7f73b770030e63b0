"""Makes a host of the virtual cluster a simulated Ascend node."""

from __future__ import annotations

import sys

from ascendrun.core.errors import AscendrunError
from ascendrun.sim.ascend.scenario import Scenario
from ascendrun.sim.ascend.tree import install_tree
from tests.lib.vcluster.cluster import VirtualCluster
from tests.lib.vcluster.spec import PACKAGE_HOME

_MAKE_DEVICES = (
    f"import sys; sys.path.insert(0, {str(PACKAGE_HOME)!r}); "
    "from tests.lib.vcluster.devices import main; main(sys.argv[1:])"
)


def install_on(cluster: VirtualCluster, name: str, scenario: Scenario, *, python: str = "") -> None:
    """Host `name` of the cluster is from now on a node of this scenario; its files are gone with the host.

    It gets device nodes, in its own /dev. `python`: the interpreter of the tools, this
    one's by default; say /usr/bin/python3 where accounts other than root run them and this one is in root's home.
    Raises InvalidInputError, HostDownError, AscendrunError where the host may not have its own /dev.
    """
    install_tree(cluster.path(name, "/"), scenario, python=python, has_devices=False)
    devices = len(scenario.cards_ids) * scenario.family.dies
    argv = [sys.executable, "-I", "-S", "-c", _MAKE_DEVICES, str(devices)]
    done = cluster.host_run(name, argv, capture_output=True, text=True)
    if done.returncode:
        words = done.stderr.strip().splitlines()
        raise AscendrunError(f"{name}: cannot create device nodes: {words[-1] if words else 'no error output'}")
