"""The command line: up, down, status, run; and what breaks things: cut, mend, stop, start."""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from testcluster import checks, config, daemons, network
from testcluster.layout import (
    LINK,
    MAX_NODES,
    Cluster,
    ClusterError,
    default_scratch,
    read_record,
    running_scratch,
)


def main() -> int:
    """Do what the command line says; return the exit code: 0, 1 (status: not up, or not whole), 2 (refused, failed)."""
    arguments = _parser().parse_args()
    try:
        return int(arguments.command(arguments))
    except (ClusterError, OSError) as error:  # of the system: no such folder, disk full, not permitted
        print(f"slurm/cluster {arguments.name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"slurm/cluster {arguments.name}: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slurm/cluster", description="A real SLURM cluster on this machine. Needs root."
    )
    commands = parser.add_subparsers(dest="name", required=True)
    up = commands.add_parser("up", help="start it, or what of it does not run")
    up.add_argument("--scratch", type=Path, help=f"a new folder for all its files (default: {default_scratch()})")
    up.add_argument("--no-accounting", action="store_true", help="without slurmdbd and its database, as many sites are")
    up.add_argument("--nodes", type=int, default=4, help="how many (default: 4)")
    up.add_argument("--max-array-size", type=int, default=1001, help="of job arrays (default: 1001, as SLURM has it)")
    up.set_defaults(command=_up)
    down = commands.add_parser("down", help="end it and its jobs, and remove all its files")
    down.add_argument("--scratch", type=Path, help="of a cluster that is not up any more")
    down.set_defaults(command=_down)
    status = commands.add_parser("status", help="what runs and where; exit code 1 where it is not up, or not whole")
    status.set_defaults(command=_status)
    run = commands.add_parser("run", help="run a command that sees the cluster, as on its login node")
    run.add_argument("argv", nargs=argparse.REMAINDER, metavar="CMD...")
    run.set_defaults(command=_run)
    check = commands.add_parser("check", help="print the packages that are missing; exit code 2 where SLURM is real")
    check.add_argument("--no-accounting", action="store_true", help="as of `up`")
    check.set_defaults(command=_check)
    for name, does in (("cut", "cut a node off from the network"), ("mend", "put it back on")):
        link = commands.add_parser(name, help=does)
        link.add_argument("node", metavar="NODE")
        link.set_defaults(command=_link)
    stop = commands.add_parser("stop", help="end a daemon at once: slurmdbd, slurmctld, slurmd.n2 ...")
    stop.add_argument("daemon", metavar="DAEMON")
    stop.set_defaults(command=_stop)
    start = commands.add_parser("start", help="start the daemons that do not run")
    start.set_defaults(command=_start)
    return parser


def _up(arguments: argparse.Namespace) -> int:
    if not 1 <= arguments.nodes <= MAX_NODES:
        raise ClusterError(f"--nodes {arguments.nodes}: from 1 to {MAX_NODES}")
    scratch = (arguments.scratch or running_scratch() or default_scratch()).absolute()
    wanted = Cluster(
        scratch.resolve(),
        nodes=arguments.nodes,
        accounting=not arguments.no_accounting,
        max_array_size=arguments.max_array_size,
    )
    running = running_scratch()
    if running is not None and running != wanted.scratch:
        raise ClusterError(f"a cluster is up in {running}, and a machine can have one; end that: slurm/cluster down")
    checks.refuse(wanted)
    with _alone():
        there = read_record(wanted.scratch)
        if there is not None and network.is_made(there) and there != wanted:
            raise ClusterError(f"up already, with {_describe(there)}, not {_describe(wanted)}: slurm/cluster down")
        is_new = there is None or not network.is_made(there)
        if is_new:
            _remove(wanted.scratch)
        try:
            if is_new:
                config.write(wanted)
                network.make(wanted)
            started = daemons.start_missing(wanted)
        except BaseException:  # Ctrl-C too
            if is_new:
                _remove(wanted.scratch)
            raise
    print(f"up{'' if started else ' already'}: {_describe(wanted)}; all files are in {wanted.scratch}")
    if started and not is_new:
        print(f"started anew: {', '.join(started)}")
    print(f"    slurm/cluster run sinfo         or: export SLURM_CONF={wanted.config}")
    print("    slurm/cluster down              ends it, its jobs and all its files")
    return 0


def _down(arguments: argparse.Namespace) -> int:
    scratch = (arguments.scratch or running_scratch() or default_scratch()).resolve()
    if running_scratch() is None and read_record(scratch) is None:
        print("no cluster is up")
        return 0
    if os.geteuid() != 0:
        raise ClusterError("needs root")
    with _alone():
        _remove(scratch)
    print(f"down; {scratch} is removed")
    return 0


def _status(_: argparse.Namespace) -> int:
    cluster = _running()
    if cluster is None:
        print("no cluster is up: slurm/cluster up")
        return 1
    if os.geteuid() != 0:
        raise ClusterError("needs root; `sinfo` does not")
    runs = network.processes_in(cluster)
    places = {running: pid for pid, running in sorted(runs.items(), reverse=True)}
    is_whole = True
    print(f"{_describe(cluster)} in {cluster.scratch}")
    for daemon in daemons.daemons_of(cluster):
        pid = places.get(network.Running(daemon.host.name, daemon.program))
        is_whole &= pid is not None
        state = (
            f"pid {pid}" if pid else f"does not run (`slurm/cluster up` starts it; log: {cluster.log(daemon.log_name)})"
        )
        print(f"  {daemon.host.name:4} {daemon.host.address:14} {daemon.program:10} {state}")
    if is_whole:
        problems = daemons.nodes_not_ready(cluster)
        is_whole = not problems
        print(f"  {', '.join(problems) if problems else 'every node takes jobs'}")
    print(f"  export SLURM_CONF={cluster.config}")
    return 0 if is_whole else 1


def _check(arguments: argparse.Namespace) -> int:
    checks.refuse_real(_running() or Cluster(default_scratch()))
    print(*checks.missing_packages(accounting=not arguments.no_accounting))
    return 0


def _link(arguments: argparse.Namespace) -> int:
    network.switch(_needed(), arguments.node, on=arguments.name == "mend")
    return 0


def _stop(arguments: argparse.Namespace) -> int:
    daemons.stop(_needed(), arguments.daemon)
    return 0


def _start(_: argparse.Namespace) -> int:
    cluster = _needed()
    with _alone():
        started = daemons.start_missing(cluster)
    print(f"started: {', '.join(started) or 'nothing, all run'}")
    return 0


def _run(arguments: argparse.Namespace) -> int:
    cluster = _needed()
    argv = arguments.argv[1:] if arguments.argv[:1] == ["--"] else arguments.argv
    if not argv:
        raise ClusterError("which command? For example: slurm/cluster run sinfo")
    if (program := shutil.which(argv[0])) is None:
        raise ClusterError(f"{argv[0]}: there is no such command")
    if os.geteuid() == 0:
        argv = ["unshare", *daemons.WITH_NAMES, str(cluster.hosts_file), program, *argv[1:]]
    os.execvpe(argv[0], argv, daemons.environment_of(cluster))


def _needed() -> Cluster:
    cluster = _running()
    if cluster is None:
        raise ClusterError("no cluster is up: slurm/cluster up")
    return cluster


def _running() -> Cluster | None:
    scratch = running_scratch()
    return None if scratch is None else read_record(scratch)


def _remove(scratch: Path) -> None:
    """End and remove whatever there is of a cluster, also of one that was only half made."""
    there = read_record(scratch)
    if there is not None:
        daemons.end_all(there)
    network.remove(scratch)
    if scratch.exists():
        shutil.rmtree(scratch)


@contextmanager
def _alone() -> Iterator[None]:
    """No two of `up` and `down` at once; the name of the socket goes with this process."""
    with socket.socket(socket.AF_UNIX) as name:
        try:
            name.bind(f"\0{LINK}")
        except OSError as error:
            raise ClusterError("another `up` or `down` is at work; try again when it has ended") from error
        yield


def _describe(cluster: Cluster) -> str:
    accounting = "accounting" if cluster.accounting else "no accounting"
    arrays = "" if cluster.max_array_size == 1001 else f", MaxArraySize={cluster.max_array_size}"
    return (
        f"{cluster.nodes} node{'s' if cluster.nodes > 1 else ''} of {config.GPUS_PER_NODE} GPUs ({accounting}{arrays})"
    )
