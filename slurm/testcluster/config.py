"""The files of the cluster: what SLURM reads, and what its machines see as /etc/hosts."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from testcluster.layout import LOGIN_ADDRESS, SOCKET_PATH_BYTES, Cluster, ClusterError

GPUS_PER_NODE = 4
MEMORY_PER_NODE_MB = 16000
DATABASE = "slurm_acct_db"
_FOLDERS = ("etc", "munge", "dev", "state", "spool", "run", "log")


def write(cluster: Cluster) -> None:
    """Fill a new scratch folder."""
    _check_path(cluster)
    cluster.scratch.mkdir(mode=0o755)  # never one that somebody else has made meanwhile
    cluster.write_record()
    for name in _FOLDERS:
        (cluster.scratch / name).mkdir()
    for host in cluster.node_hosts:
        (cluster.scratch / "spool" / host.name).mkdir()
    for index in range(GPUS_PER_NODE):
        os.mknod(cluster.scratch / "dev" / f"gpu{index}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    cluster.hosts_file.write_text(hosts_file(cluster, Path("/etc/hosts").read_text()))
    cluster.config.write_text(slurm_conf(cluster))
    (cluster.scratch / "etc" / "gres.conf").write_text(gres_conf(cluster))
    _write_private(cluster.scratch / "etc" / "slurmdbd.conf", slurmdbd_conf(cluster).encode())
    _write_private(cluster.scratch / "munge" / "key", secrets.token_bytes(128))


def hosts_file(cluster: Cluster, of_this_machine: str) -> str:
    """The names of this machine, and those of the cluster's."""
    names = "".join(f"{host.address} {host.name}\n" for host in cluster.hosts)
    return f"{of_this_machine.rstrip()}\n{LOGIN_ADDRESS} login\n{names}"


def slurm_conf(cluster: Cluster) -> str:
    """What every daemon and every client reads."""
    scratch, controller = cluster.scratch, cluster.controller
    cpus = os.cpu_count() or 1
    # CPUs that this machine does not give to us could not be bound to.
    binds = os.sched_getaffinity(0) == set(range(cpus))
    nodes = "\n".join(
        f"NodeName={host.name} NodeHostname={host.name} NodeAddr={host.address} "
        f"CPUs={cpus} RealMemory={MEMORY_PER_NODE_MB} Gres=gpu:{GPUS_PER_NODE} State=UNKNOWN"
        for host in cluster.node_hosts
    )
    names = ",".join(host.name for host in cluster.node_hosts)
    accounting = (
        f"AccountingStorageType=accounting_storage/slurmdbd\nAccountingStorageHost={controller.address}\n"
        f"AccountingStoragePass={cluster.munge_socket}\n"  # what slurmdbd's clients take for the socket of munge
        "JobAcctGatherType=jobacct_gather/linux\n"
        if cluster.accounting
        else "AccountingStorageType=accounting_storage/none\n"
    )
    return f"""\
ClusterName=dev
SlurmctldHost={controller.name}({controller.address})
SlurmUser=root
AuthType=auth/munge
# A requeued job waits for the end of its credential: 120 s by default.
AuthInfo=socket={cluster.munge_socket},cred_expire=5

# Cgroups are left to this machine.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/{"affinity" if binds else "none"}
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
SlurmdTimeout=20
KillWait=10
MinJobAge=300
JobRequeue=1
MaxArraySize={cluster.max_array_size}

SchedulerType=sched/backfill
# Nobody waits here: by default a job is looked at after 3 s, preemption goes on after half a minute.
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU={MEMORY_PER_NODE_MB // (2 * cpus)}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
# Four nodes may promise more than this machine has.
SlurmdParameters=config_overrides
GresTypes=gpu

{accounting}
StateSaveLocation={scratch}/state
SlurmdSpoolDir={scratch}/spool/%n
SlurmctldPidFile={scratch}/run/slurmctld.pid
SlurmdPidFile={scratch}/run/slurmd.%n.pid
SlurmctldLogFile={cluster.log("slurmctld")}
SlurmdLogFile={cluster.log("slurmd.%n")}

{nodes}
PartitionName=low Nodes={names} Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=10
PartitionName=high Nodes={names} MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
PartitionName=short Nodes={names} MaxTime=1 MaxNodes=2 PriorityTier=1 PreemptMode=CANCEL GraceTime=10
"""


def gres_conf(cluster: Cluster) -> str:
    """GPUs that are files like /dev/null: SLURM counts them out, and sets CUDA_VISIBLE_DEVICES."""
    return "".join(
        f"NodeName={host.name} Name=gpu File={cluster.scratch}/dev/gpu[0-{GPUS_PER_NODE - 1}]\n"
        for host in cluster.node_hosts
    )


def slurmdbd_conf(cluster: Cluster) -> str:
    """The database is reached over its socket, by who is root."""
    return f"""\
AuthType=auth/munge
AuthInfo=socket={cluster.munge_socket}
DbdHost={cluster.controller.name}
DbdAddr={cluster.controller.address}
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc={DATABASE}
PidFile={cluster.scratch}/run/slurmdbd.pid
LogFile={cluster.log("slurmdbd")}
"""


def _check_path(cluster: Cluster) -> None:
    """Raise where sockets or SLURM's lists cannot be in a folder of this name."""
    path = str(cluster.scratch)
    longest = max(
        len(os.fsencode(cluster.scratch / name)) for name in ("munge/socket", "spool/n16/n16_12345678.4294967294")
    )
    limit = SOCKET_PATH_BYTES - (longest - len(os.fsencode(path)))
    if longest > SOCKET_PATH_BYTES:
        raise ClusterError(
            f"{path} has {len(path)} characters; below it are sockets, so at most {limit}: use --scratch"
        )
    if wrong := sorted({character for character in path if character.isspace() or character in "#,=%\\[]"}):
        raise ClusterError(f"{path}: {wrong} mean something else in the files of SLURM; use --scratch")


def _write_private(file: Path, content: bytes) -> None:
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
        stream.write(content)
