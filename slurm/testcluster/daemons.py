"""The daemons: what each is started with, when it is ready, and how all come to their end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from typing import NamedTuple

from testcluster.checks import find_program
from testcluster.layout import Cluster, ClusterError, Host
from testcluster.network import Running, call, processes_in

READY_S = 60.0
"""For each daemon, on a machine that has other things to do."""
POLL_S = 0.05
LEAVE_S = 5.0
"""What jobs may take to clean up."""
WITH_NAMES = ("--mount", "--propagation", "slave", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"')
"""Arguments of `unshare`, before a hosts file and a command. Mounts that this machine makes later are still seen."""


class Daemon(NamedTuple):
    """A program that runs as long as the cluster is up."""

    program: str
    host: Host
    arguments: tuple[str, ...]
    problem: Callable[[], str]
    """Why it is not ready to answer; empty when it is."""

    @property
    def log_name(self) -> str:
        """`slurmd.n1` for the node's, else the program's name."""
        return f"{self.program}.{self.host.name}" if self.program == "slurmd" else self.program


def daemons_of(cluster: Cluster) -> list[Daemon]:
    """All daemons, in the order in which they are started."""
    scratch, controller = cluster.scratch, cluster.controller
    munge, database = scratch / "munge", scratch / "db"
    accounting = [
        Daemon(
            "mariadbd",
            controller,
            (
                *("--no-defaults", "--user=root", f"--datadir={database}", f"--socket={cluster.database_socket}"),
                *("--skip-networking", f"--pid-file={database}/pid", "--innodb-flush-log-at-trx-commit=0"),
            ),
            lambda: _unanswered(
                cluster, "mariadb", "--no-defaults", f"--socket={cluster.database_socket}", "-e", "SELECT 1"
            ),
        ),
        Daemon(
            "slurmdbd",
            controller,
            ("-D",),
            lambda: _closed(controller, 6819) or _unanswered(cluster, "sacctmgr", "-n", "show", "cluster"),
        ),
    ]
    return [
        Daemon(
            "munged",
            controller,
            (
                # Forced: a scratch folder below a private one is closed to other users, and may be.
                *("--foreground", "--force", f"--key-file={munge}/key", f"--socket={cluster.munge_socket}"),
                *(f"--pid-file={munge}/pid", f"--seed-file={munge}/seed"),
            ),
            lambda: _unanswered(cluster, "munge", "-n", f"--socket={cluster.munge_socket}"),
        ),
        *(accounting if cluster.accounting else []),
        Daemon(
            "slurmctld",
            controller,
            ("-D",),
            lambda: _closed(controller, 6817) or _unanswered(cluster, "scontrol", "ping"),
        ),
        *(Daemon("slurmd", host, ("-D", "-N", host.name), lambda: "") for host in cluster.node_hosts),
    ]


def start_missing(cluster: Cluster) -> list[str]:
    """Start what does not run, wait until every node can take jobs; return what was started."""
    running = set(processes_in(cluster).values())
    started: dict[str, subprocess.Popen[bytes]] = {}
    for daemon in daemons_of(cluster):
        if Running(daemon.host.name, daemon.program) in running:
            continue
        if daemon.program == "mariadbd" and not (cluster.scratch / "db").exists():
            _make_database(cluster)
        started[daemon.log_name] = _start(cluster, daemon)
        _wait(daemon.problem, cluster, started)
        if daemon.program == "slurmdbd" and not output_of(cluster, "sacctmgr", "-nP", "show", "cluster"):
            output_of(cluster, "sacctmgr", "-i", "add", "cluster", "dev")
    _wait(lambda: _unanswered(cluster, "sinfo") or ", ".join(nodes_not_ready(cluster)), cluster, started)
    return list(started)


def nodes_not_ready(cluster: Cluster) -> list[str]:
    """Nodes that cannot take jobs, each with its state."""
    nodes = [line.split() for line in output_of(cluster, "sinfo", "-h", "-N", "-p", "low", "-o", "%N %T").splitlines()]
    ready = ("idle", "mixed", "allocated", "completing")
    return [f"{name} is {state}" for name, state in nodes if state not in ready]


def environment_of(cluster: Cluster) -> dict[str, str]:
    """What clients of the cluster need."""
    return os.environ | {"SLURM_CONF": str(cluster.config)}


def output_of(cluster: Cluster, *command: str) -> str:
    """What a client prints; it has to succeed."""
    done = subprocess.run(command, env=environment_of(cluster), capture_output=True, text=True, check=False)
    if done.returncode:
        raise ClusterError(
            f"`{' '.join(command)}` ended with {done.returncode}: {(done.stderr or done.stdout).strip()}"
        )
    return done.stdout.strip()


def stop(cluster: Cluster, name: str) -> None:
    """End a daemon at once, by its name (`slurmdbd`, `slurmd.n2`), and wait until it has gone. Jobs go on."""
    daemons = {daemon.log_name: daemon for daemon in daemons_of(cluster)}
    if name not in daemons:
        raise ClusterError(f"{name}: there is no such daemon; they are {', '.join(daemons)}")
    wanted = Running(daemons[name].host.name, daemons[name].program)
    _signal(cluster, signal.SIGKILL, lambda running: running == wanted)
    deadline_s = time.monotonic() + LEAVE_S
    while wanted in processes_in(cluster).values():
        if time.monotonic() > deadline_s:
            raise ClusterError(f"{name} does not end")
        time.sleep(POLL_S)


def end_all(cluster: Cluster) -> None:
    """End what runs on the machines: the daemons at once (their state goes too), jobs after they were asked to."""
    programs = {daemon.program for daemon in daemons_of(cluster)} | {"slurmstepd", "srun"}
    _signal(cluster, signal.SIGKILL, lambda running: running.program in programs)
    _signal(cluster, signal.SIGTERM, lambda _: True)
    deadline_s = time.monotonic() + LEAVE_S
    while processes_in(cluster):
        if time.monotonic() > deadline_s:
            _signal(cluster, signal.SIGKILL, lambda _: True)
        time.sleep(POLL_S)


def _start(cluster: Cluster, daemon: Daemon) -> subprocess.Popen[bytes]:
    program = find_program(daemon.program) or daemon.program
    network = ("nsenter", f"--net={cluster.namespace(daemon.host)}")
    name = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', daemon.host.name)
    names = ("unshare", *WITH_NAMES, str(cluster.hosts_file))
    # Nothing of the user's environment: his secrets are not for a daemon that lives on.
    environment = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "SLURM_CONF": str(cluster.config),
        "MYSQL_UNIX_PORT": str(cluster.database_socket),
    }
    with cluster.output(daemon.log_name).open("ab") as output:
        return subprocess.Popen(
            [*network, *name, *names, program, *daemon.arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd="/",
            env=environment,
            start_new_session=True,
        )


def _make_database(cluster: Cluster) -> None:
    folder = cluster.scratch / "db"
    folder.mkdir(mode=0o700)
    # On the machine, so that it is ended with the rest if it is interrupted.
    machine = ["nsenter", f"--net={cluster.namespace(cluster.controller)}"]
    command = ["mariadb-install-db", "--no-defaults", f"--datadir={folder}", "--user=root", "--skip-test-db"]
    call([*machine, *command, "--auth-root-authentication-method=socket"], "make the database")


def _wait(problem: Callable[[], str], cluster: Cluster, started: dict[str, subprocess.Popen[bytes]]) -> None:
    """Wait until there is no problem any more, or say why there will be."""
    deadline_s = time.monotonic() + READY_S
    while said := problem():
        for name, process in started.items():
            if process.poll() is not None:
                raise ClusterError(f"{name} has ended with {process.returncode}{_last_lines(cluster, name)}")
        if time.monotonic() > deadline_s:
            raise ClusterError(
                f"after {READY_S:.0f} s: {said}{_last_lines(cluster, next(reversed(started), 'slurmctld'))}"
            )
        time.sleep(POLL_S)


def _unanswered(cluster: Cluster, *command: str) -> str:
    """What keeps a client from its answer; empty where it gets one."""
    try:
        output_of(cluster, *command)
    except ClusterError as error:
        return str(error)
    return ""


def _closed(host: Host, port: int) -> str:
    """That nobody listens there; empty where somebody does. SLURM's own clients would try for seconds."""
    try:
        socket.create_connection((host.address, port), timeout=POLL_S).close()
    except OSError as error:
        return f"{host.name} ({host.address}), port {port}: {error}"
    return ""


def _last_lines(cluster: Cluster, name: str) -> str:
    """The last words of a daemon; with the cluster its logs go too."""
    for file in (cluster.log(name), cluster.output(name)):
        if file.exists() and (lines := file.read_text(errors="replace").splitlines()):
            return "; the last lines of its log:\n    " + "\n    ".join(lines[-10:])
    return "; it said nothing"


def _signal(cluster: Cluster, number: signal.Signals, is_meant: Callable[[Running], bool]) -> None:
    """Send a signal to processes on the machines, and to no other that has got such a pid since."""
    for pid, running in processes_in(cluster).items():
        if not is_meant(running):
            continue
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            if pid in processes_in(cluster):
                signal.pidfd_send_signal(descriptor, number)
        except ProcessLookupError:
            pass
        finally:
            os.close(descriptor)
