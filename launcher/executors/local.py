"""This machine: one supervisor process that forks one agent per node of the plan."""

from __future__ import annotations

import functools
import importlib.util
import os
import resource
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar

import launcher
from launcher.agent import proc
from launcher.errors import Problem
from launcher.executors.base import JobRef
from launcher.executors.local_data import missing_files
from launcher.planning.plan import Plan, local_agent_argv
from launcher.runs.observed import Observation
from launcher.runs.rundir import RunDir

_attached: weakref.WeakSet[subprocess.Popen[bytes]] = weakref.WeakSet()
"""Supervisors of runs that end with this process."""

_OWN_DESCRIPTORS = 32
_DESCRIPTORS_PER_WORKER = 5


class LocalExecutor:
    """Runs all nodes of a plan on this machine."""

    name: ClassVar[str] = "local"

    def __init__(self) -> None:
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._pid = os.getpid()
        self._warmed: tuple[tuple[str, ...], subprocess.Popen[bytes]] | None = None

    def check(self, plan: Plan) -> Sequence[Problem]:
        """A fixed port that is taken, an interpreter, package, folder or file of the data that is not there."""
        problems = [*_missing_packages(plan), *_hidden_jobs(plan), *_few_descriptors(plan), *_missing_data(plan)]
        if plan.master_port is not None and (holder := _port_holder(plan.master_port)) is not None:
            problems.append(
                Problem(
                    where="network.master_port",
                    message=f"port {plan.master_port} is in use on this machine{holder}",
                    hint="leave it out (auto): a free port is chosen for each attempt",
                )
            )
        if not os.access(plan.worker.python, os.X_OK):
            problems.append(Problem(where="python", message=f"{plan.worker.python} is not an interpreter"))
        if not Path(plan.worker.cwd).is_dir():
            problems.append(Problem(where="workdir", message=f"{plan.worker.cwd} is not a folder"))
        return problems

    def warm(self, run_dir: Path) -> None:
        """Start the supervisor's interpreter, which imports torch and then waits for `submit` to say go.

        Importing torch takes longer than everything that this process has to do until then.
        """
        argv = local_agent_argv(sys.executable, str(run_dir))
        self._warmed = argv, _start(argv, run_id=run_dir.name, output=subprocess.DEVNULL)

    def drop(self) -> None:
        """End a supervisor that was started and not needed."""
        if self._warmed is not None:
            _, process = self._warmed
            self._warmed = None
            process.kill()
            process.communicate()

    def submit(self, plan: Plan, run: RunDir, *, attached: bool) -> JobRef:
        """Start the supervisor, or use the one that was started for just this command, and say go.

        Attached: its standard input is a pipe whose other end dies with this process, by whatever means.
        """
        run.console.parent.mkdir(parents=True, exist_ok=True)
        process = self._take_warmed(plan, attached=attached)
        if process is None:
            with run.agents_log.open("ab") as log:
                process = _start(plan.agent_argv, run_id=plan.run_id, output=log.fileno())
            # It may have ended, as an interpreter that cannot start does: `observe` sees it, and its log says why.
            with suppress(BrokenPipeError):
                _say_go(process, attached=attached)
        ref = JobRef(self.name, f"{socket.gethostname()}:{process.pid}:{proc.start_time(process.pid) or 0}")
        self._children[str(ref)] = process
        return ref

    def _take_warmed(self, plan: Plan, *, attached: bool) -> subprocess.Popen[bytes] | None:
        if self._warmed is None or self._warmed[0] != plan.agent_argv or plan.setup or not plan.forks_workers:
            self.drop()
            return None
        _, process = self._warmed
        try:
            _say_go(process, attached=attached)
        except BrokenPipeError:  # it could not even import torch: the next one will write why into the run's log
            self.drop()
            return None
        self._warmed = None
        return process

    def observe(self, ref: JobRef) -> Observation:
        """Whether the supervisor lives; its exit code if it is a child of this process."""
        child = self._children.get(str(ref))
        if child is not None and self._pid == os.getpid():  # in a fork of this process it is nobody's child
            code = child.poll()
            if code is not None and child.stdin is not None:
                child.stdin.close()
            return Observation(alive=code is None, exit_code=code)
        try:
            host, pid, started = _parse(ref)
        except ValueError:
            return Observation(alive=None, detail=f"{ref} is no job of this place")
        if host != socket.gethostname():
            return Observation(alive=None, detail=f"it runs on {host}, this is {socket.gethostname()}")
        return Observation(alive=proc.start_time(pid) == started)

    def observe_all(self, refs: Sequence[JobRef]) -> Mapping[JobRef, Observation]:
        """One look at /proc each."""
        return {ref: self.observe(ref) for ref in refs}

    def cancel(self, ref: JobRef, *, signum: int = signal.SIGTERM, again: bool = False) -> bool:
        """Signal the supervisor, which passes it on to the agents; they count."""
        if self.observe(ref).alive is not True:
            return False
        try:
            os.kill(_parse(ref)[1], signum)
        except ProcessLookupError:
            return False
        return True


def _missing_packages(plan: Plan) -> list[Problem]:
    """What the workers import and this environment, whose interpreter runs them, does not have."""
    needed = ("torch", "numpy", "xxhash") if plan.worker.kind == "job" else ("torch",)
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if plan.worker.python != sys.executable or not missing:
        return []
    message = f"{', '.join(missing)}: not installed for {sys.executable}, which runs the workers"
    install = "pip install -c constraints.txt '.[train]'"
    other = "; or `python:` in the recipe names an interpreter that has it" if plan.worker.kind == "script" else ""
    return [Problem(where="python", message=message, hint=f"{install}{other}")]


def _hidden_jobs(plan: Plan) -> list[Problem]:
    """Another package of the name `jobs` that stands before ours, by PYTHONPATH."""
    found = importlib.util.find_spec("jobs") if plan.worker.kind == "job" else None
    ours = Path(launcher.__file__).resolve().parents[1] / "jobs" / "__init__.py"
    if found is None or found.origin is None or Path(found.origin).resolve() == ours:
        return []
    message = f"{Path(found.origin).parent} hides the training program of the launcher, which is a package `jobs` too"
    return [Problem(where="PYTHONPATH", message=message, hint="take that folder out of PYTHONPATH for this launch")]


def _few_descriptors(plan: Plan) -> list[Problem]:
    """A limit of open files that the agents of this plan would reach: two streams and a log per worker of theirs."""
    needed = _OWN_DESCRIPTORS + _DESCRIPTORS_PER_WORKER * plan.nproc_per_node + len(plan.nodes)
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY or limit >= needed:
        return []
    message = f"a process may have {limit} open files here, and the agents of this plan need up to {needed}"
    return [Problem(where="ulimit -n", message=message, hint=f"ulimit -n {max(1024, needed)}")]


def _missing_data(plan: Plan) -> Iterator[Problem]:
    """Files that the data names, unless lines of the recipe may bring them first."""
    data = plan.recipe.get("data")
    if not data or plan.prepare or plan.setup:
        return
    origins = {value.key: value.origin for value in plan.values}
    for option, path in missing_files(data.get("name"), data, Path(plan.worker.cwd)):
        key = f"data.{option}"
        where = origins.get(key, key).removeprefix("override ")
        hint = "" if Path(str(data[option])).is_absolute() else f"it is relative to the workdir, {plan.worker.cwd}"
        yield Problem(where=where, message=f"{key}: there is no {path}", hint=hint)


def _start(argv: Sequence[str], *, run_id: str, output: int) -> subprocess.Popen[bytes]:
    with _held_back(signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        return subprocess.Popen(
            [*argv, "--wait"],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, "LAUNCH_RUN_ID": run_id},
        )


def _say_go(process: subprocess.Popen[bytes], *, attached: bool) -> None:
    """See `launcher.agent.supervisor`. Raises BrokenPipeError if the process has ended."""
    assert process.stdin is not None
    process.stdin.write(b"attached\n" if attached else b"detached\n")
    if not attached:
        process.stdin.close()
        return
    _attached.add(process)
    _register_fork()


@functools.cache
def _register_fork() -> None:
    os.register_at_fork(after_in_child=_let_go)


def _let_go() -> None:
    """In a fork of this process (a data loader of a notebook): a run ends with the process that launched it alone."""
    nothing = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    for process in list(_attached):
        if process.stdin is not None and not process.stdin.closed:
            os.dup2(nothing, process.stdin.fileno(), inheritable=False)
    os.close(nothing)


@contextmanager
def _held_back(*signals: int) -> Iterator[None]:
    """A process that is started inside has these pending until it unblocks them, so an early stop is not its end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _parse(ref: JobRef) -> tuple[str, int, int]:
    host, pid, started = ref.ident.rsplit(":", 2)
    return host, int(pid), int(started)


def _port_holder(port: int) -> str | None:
    """Who listens on a port: "" if that cannot be told, None if nobody does."""
    for family, host in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
                probe.listen()
        except OSError as error:
            if error.errno == 97 and family == socket.AF_INET6:  # a machine without IPv6
                continue
            return _name_holder(port)
    return None


def _name_holder(port: int) -> str:
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN:
                if connection.pid is None:
                    return ""
                return f", by pid {connection.pid} ({psutil.Process(connection.pid).name()})"
    except (psutil.AccessDenied, psutil.NoSuchProcess):
        return ""
    return ""
