"""The test cluster: one for the session, started by the first test that asks for it. A machine can have only one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster


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
    if given := os.environ.get("LAUNCH_TEST_CLUSTER"):
        yield SlurmCluster(Path(given))
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
