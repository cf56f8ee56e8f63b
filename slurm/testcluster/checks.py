"""When this machine cannot, or must not, have a test cluster."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from testcluster.layout import Cluster, ClusterError
from testcluster.network import processes_in

PACKAGES = ("slurm-wlm", "slurmctld", "slurmd", "slurm-client", "munge", "iproute2")
"""Of Debian and Ubuntu."""
PACKAGES_OF_ACCOUNTING = ("slurmdbd", "mariadb-server")
_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "nsenter", "unshare", "mount")
_PROGRAMS_OF_ACCOUNTING = ("slurmdbd", "sacctmgr", "mariadbd", "mariadb", "mariadb-install-db")
_PLACES_OF_CONFIGURATION = ("etc/slurm*/slurm.conf", "usr/local/etc/slurm.conf", "usr/local/etc/slurm*/slurm.conf")


def packages(*, accounting: bool) -> tuple[str, ...]:
    """All that a cluster needs of the system."""
    return PACKAGES + (PACKAGES_OF_ACCOUNTING if accounting else ())


def missing_programs(*, accounting: bool) -> list[str]:
    """What has to be installed first."""
    wanted = _PROGRAMS + (_PROGRAMS_OF_ACCOUNTING if accounting else ())
    return [name for name in wanted if find_program(name) is None]


def missing_packages(*, accounting: bool) -> tuple[str, ...]:
    """All that are needed, where anything is missing: those that are there are not installed again."""
    return packages(accounting=accounting) if missing_programs(accounting=accounting) else ()


def install_command(*, accounting: bool) -> str:
    """What installs them, as root."""
    return f"apt-get install -y --no-install-recommends {' '.join(packages(accounting=accounting))}"


def find_program(name: str) -> str | None:
    """Where a program is; daemons are often not on the PATH."""
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin:/sbin")


def refuse(cluster: Cluster) -> None:
    """Raise where a test cluster would be in the way of a real one, or cannot be."""
    refuse_real(cluster)
    if os.geteuid() != 0:
        raise ClusterError("needs root: namespaces and daemons of many users. Try it with sudo, or in a container")
    if missing := missing_programs(accounting=cluster.accounting):
        install = install_command(accounting=cluster.accounting)
        raise ClusterError(f"not installed: {', '.join(missing)}. As root:\n    apt-get update; {install}")


def refuse_real(cluster: Cluster) -> None:
    """Raise where a test cluster would be in the way of a real one."""
    if (other := _real_slurm(cluster)) is not None:
        raise ClusterError(f"a real SLURM is configured here: {other}. A test cluster would be in its way; not started")


def _real_slurm(cluster: Cluster) -> str | None:
    """What shows that this machine belongs to a SLURM that is not ours."""
    named = os.environ.get("SLURM_CONF")
    if named and Path(named) != cluster.config:
        return f"SLURM_CONF={named} (unset it if that is of no use any more)"
    for pattern in _PLACES_OF_CONFIGURATION:
        if found := sorted(Path("/").glob(pattern)):
            return f"there is {found[0]}"
    ours = processes_in(cluster)
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal() or int(folder.name) in ours:
            continue
        try:
            name = (folder / "comm").read_text().strip()
            is_alive = bool((folder / "cmdline").read_bytes())  # a zombie has none
        except (FileNotFoundError, ProcessLookupError):
            continue
        if name in ("slurmctld", "slurmd") and is_alive:
            return f"{name} runs (pid {folder.name})"
    return None
