"""Where the test cluster refuses to start; needs no SLURM."""

from __future__ import annotations

from pathlib import Path

import pytest
from testcluster import checks, config
from testcluster.layout import Cluster, ClusterError, read_record


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """On a machine that would do."""
    monkeypatch.setattr(checks, "_PLACES_OF_CONFIGURATION", ())
    monkeypatch.setattr(checks, "find_program", lambda name: f"/usr/sbin/{name}")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    return Cluster(tmp_path / "c")


def test_a_configured_slurm_is_left_alone(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    checks.refuse(cluster)
    monkeypatch.setenv("SLURM_CONF", str(cluster.config))
    checks.refuse(cluster)  # its own
    monkeypatch.setenv("SLURM_CONF", "/opt/site/slurm.conf")
    with pytest.raises(ClusterError, match="SLURM_CONF=/opt/site/"):
        checks.refuse(cluster)
    monkeypatch.delenv("SLURM_CONF")
    (tmp_path / "slurm.conf").touch()
    monkeypatch.setattr(checks, "_PLACES_OF_CONFIGURATION", (str(tmp_path / "slurm*.conf")[1:],))
    with pytest.raises(ClusterError, match=f"there is {tmp_path}/slurm.conf"):
        checks.refuse(cluster)


def test_what_is_not_installed_is_named_with_the_command(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "find_program", lambda name: None if name in ("slurmd", "slurmdbd") else name)
    with pytest.raises(ClusterError, match=r"not installed: slurmd, slurmdbd.*\n.*apt-get install -y .*slurm-wlm"):
        checks.refuse(cluster)
    with pytest.raises(ClusterError, match=r"not installed: slurmd\.") as caught:
        checks.refuse(Cluster(cluster.scratch, accounting=False))
    assert "mariadb" not in str(caught.value), "without accounting less is needed"
    assert checks.missing_packages(accounting=False) == checks.PACKAGES
    monkeypatch.setattr(checks, "find_program", lambda name: name)
    assert checks.missing_packages(accounting=True) == ()


def test_needs_root(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match="needs root"):
        checks.refuse(cluster)


def test_a_folder_of_other_things_is_never_taken(tmp_path: Path) -> None:
    assert read_record(tmp_path / "new") is None
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ClusterError, match=r"holds other things.*--scratch"):
        read_record(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ClusterError, match="not a folder of yours"):
        read_record(tmp_path / "link")


def test_the_record_of_a_cluster_is_the_cluster(tmp_path: Path) -> None:
    wanted = Cluster(tmp_path, nodes=3, accounting=False, max_array_size=100)
    wanted.write_record()
    assert read_record(tmp_path) == wanted


@pytest.mark.parametrize("name", ["x" * 80, "my folder", "a,b", "n[1-4]"])
def test_a_path_that_slurm_cannot_take_is_refused_before_anything_is_made(tmp_path: Path, name: str) -> None:
    cluster = Cluster(Path("/nowhere") / name)
    with pytest.raises(ClusterError, match="--scratch"):
        config.write(cluster)


def test_the_configuration_follows_the_options(tmp_path: Path) -> None:
    text = config.slurm_conf(Cluster(tmp_path, nodes=2, accounting=False))
    assert "accounting_storage/none" in text
    assert "MaxArraySize=1001\n" in text
    assert "MaxArraySize=100\n" in config.slurm_conf(Cluster(tmp_path, max_array_size=100))
    assert "Nodes=n1,n2 " in text
    assert "slurmdbd" not in text
    assert "AccountingStorageHost=198.18.77.10" in config.slurm_conf(Cluster(tmp_path))
