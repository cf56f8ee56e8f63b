"""The test cluster: one for the session, started by the first test that asks for it. A machine can have only one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from launched import recipe
from slurm_cluster import SlurmCluster
from slurm_launched import login, on_slurm

__all__ = ["login", "on_slurm", "recipe"]

GIVEN_CLUSTER = os.environ.get("LAUNCH_TEST_CLUSTER")
"""As in tests/conftest.py, which cannot be imported."""


@pytest.fixture
def own_cluster() -> Iterator[SlurmCluster]:
    """A cluster that the test starts and ends itself; before that of the session, see below."""
    with tempfile.TemporaryDirectory(prefix="s-") as folder:
        cluster = SlurmCluster(Path(folder) / "c")
        yield cluster
        cluster.down()


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[SlurmCluster]:
    """The cluster of the session: four nodes, accounting. LAUNCH_TEST_CLUSTER: the scratch folder of one that is up."""
    if GIVEN_CLUSTER:
        yield SlurmCluster(Path(GIVEN_CLUSTER))
        return
    with tempfile.TemporaryDirectory(prefix="s-") as folder:
        cluster = SlurmCluster(Path(folder) / "c")
        try:
            cluster.up()
            yield cluster
        finally:
            cluster.down()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that use the session's cluster come last: the others may start one of their own before."""
    items.sort(key=lambda item: "slurm_cluster" in getattr(item, "fixturenames", ()))
