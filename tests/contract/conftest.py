"""The contract runs on the virtual cluster, with a Slurm: its fixtures, from the folder of the scenarios."""

import os
from collections.abc import Iterator

import pytest

from tests.cluster.conftest import (  # noqa: F401  # fixtures
    ascendrun,
    cluster,
    cluster_of,
    machine_left_as_found,
    no_leftovers,
    pytest_runtest_makereport,
    start_cluster,
)
from tests.contract.pods import kubernetes, scene  # noqa: F401
from tests.lib.vcluster.cluster import VirtualCluster
from tests.lib.vcluster.requirements import NotSupportedError
from tests.lib.vcluster.slurm import require_slurm

ALWAYS = {
    "docker": ("failing_rank", "stop_ends", "shell_has", "words_and", "docker-daemon"),
    "podman": ("stop_ends", "words_and"),
    "slurm-docker": ("stop_ends", "ends_with_its_allocation"),
}
"""Tests of a container runtime that every run has; --thorough has all."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kubernetes", action="store_true", help="contract: in pods, in place of all other places")
    parser.addoption(
        "--deaths", metavar="N", type=int, default=1, help="contract: how often each part of an engine dies"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Function]) -> None:
    places = {item: item.callspec.params.get("place") for item in items if hasattr(item, "callspec")}
    in_pods = {item for item in items if places.get(item) == "kubernetes" or "kubernetes" in item.fixturenames}
    items[:] = [item for item in items if (item in in_pods) == config.getoption("--kubernetes")]
    for item in items:
        backend = places.get(item)
        if backend in ALWAYS and not any(words in item.name for words in ALWAYS[backend]):
            item.add_marker("thorough")


@pytest.fixture(scope="module")
def module_cluster() -> Iterator[VirtualCluster]:
    try:
        require_slurm()
        has_slurm = True
    except NotSupportedError:
        has_slurm = os.environ.get("CI") == "true"  # there its absence is a failure
    with start_cluster(2, has_slurm=has_slurm, has_containers=True) as made:
        yield made
