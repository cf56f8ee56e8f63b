"""Machines as in `ssh_hosts.py`, each with a real Docker Engine of its own."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import base_image
import pytest
from engine import BASE, remove_groups, site_packages
from hosts import Host
from launched import LIMIT_S
from ssh_hosts import SshBed

_READY_S = 60.0
_LOOK_EVERY_S = 0.1


class DockerBed(SshBed):
    """So many machines with sshd and an engine, and `caller` with neither."""

    def __init__(self, folder: Path, count: int) -> None:
        super().__init__(folder, count)
        try:
            archive = folder / "base.tar"
            base_image.write(archive)
            for host in self.hosts:
                self.start_engine(host)
                self.docker(host, "import", *base_image.CHANGES, str(archive), BASE)
            archive.unlink()
        except BaseException:
            self.remove()
            raise

    def start_engine(self, host: Host) -> None:
        """Without a bridge: it leaves the network of its machine alone, as far as it can."""
        data, log = self.folder / f"docker_{host.name}", self.folder / f"docker_{host.name}.log"
        argv = ["dockerd", "--bridge", "none", "--iptables=false", "--data-root", str(data)]
        argv += [
            "--exec-root",
            "/run/docker-exec",
            "--pidfile",
            "/run/dockerd.pid",
            "--host",
            "unix:///run/docker.sock",
        ]
        argv += [
            "--exec-opt",
            "native.cgroupdriver=cgroupfs",
            "--cgroup-parent",
            f"/launch-test-{os.getpid()}-{host.name}",
        ]
        host.start(argv, env={}, output=log)
        deadline_s = time.monotonic() + _READY_S
        while subprocess.run(host.inside("docker", "version"), capture_output=True, check=False).returncode:
            assert time.monotonic() < deadline_s, log.read_text()
            time.sleep(_LOOK_EVERY_S)

    def remove(self) -> None:
        """Switch everything off."""
        super().remove()
        for host in self.hosts:
            remove_groups(self._cgroup(host).strip("/"))

    def _cgroup(self, host: Host) -> str:
        return f"/launch-test-{os.getpid()}-{host.name}"

    def docker(self, host: Host, *arguments: str) -> str:
        """What `docker ...` says on a machine."""
        done = subprocess.run(
            host.inside("docker", *arguments), capture_output=True, text=True, check=False, timeout=LIMIT_S
        )
        assert done.returncode == 0, f"docker {' '.join(arguments)}: {done.stderr}"
        return done.stdout.strip()

    def left(self) -> list[str]:
        """Containers on all machines that are up."""
        names = [self.docker(host, "ps", "--all", "--format", "{{.Names}}") for host in self.hosts if host.is_up]
        return [name for each in names for name in each.splitlines()]

    def site_packages_mount(self) -> str:
        """What gives a container the packages of these tests."""
        return f"{site_packages()[1].split(':')[0]}:/site-packages:ro"

    def docker_profile(self, **docker: Any) -> Path:
        """The profile of these machines."""
        section = {
            "hosts": [host.name for host in self.hosts],
            "image": BASE,
            "mounts": [self.site_packages_mount()],
            "args": ["--env", "PYTHONPATH=/site-packages"],
            **docker,
        }
        path = self.folder / "boxes.yaml"
        path.write_text(json.dumps({"executor": "docker", "docker": section, "ssh": {"config": str(self.config)}}))
        return path


@pytest.fixture
def docker_bed(tmp_path: Path) -> Iterator[DockerBed]:
    """Two of them."""
    folder = tmp_path / "bed"
    folder.mkdir()
    bed = DockerBed(folder, 2)
    yield bed
    bed.remove()
