"""The contract runs on the virtual cluster: its fixtures, from the folder of the scenarios."""

from tests.cluster.conftest import (  # noqa: F401  # fixtures
    ascendrun,
    cluster,
    cluster_of,
    machine_left_as_found,
    module_cluster,
    no_leftovers,
    pytest_runtest_makereport,
)
