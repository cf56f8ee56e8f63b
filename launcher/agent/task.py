"""One node of several: what is started there, once, by srun (`run_task`) or by whoever else reaches the machine
(`run_node`). It imports for the workers, forks the agent, and sees it out.

What keeps a node from joining ends the run: the node says so in an event (`node_failed`) and leaves with a code that
makes srun end the other tasks; but not those of a run that goes on with fewer nodes.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from launcher import redact
from launcher.agent import addresses, allocation, binding, channel, memory, proc, scratch, secrets_file, zygote
from launcher.agent.allocation import Allocation
from launcher.agent.binding import NodeError
from launcher.agent.hearing import STOP_SIGNALS, hear_signals
from launcher.agent.logs import say
from launcher.agent.node_setup import SetupFailed, SetupStopped, environment_after, next_start, run_setup
from launcher.agent.supervisor import ENGINE, GAVE_UP, Supervisor
from launcher.planning.plan import Plan
from launcher.runs.events import EventWriter
from launcher.runs.rundir import RunDir
from launcher.runs.states import Cause


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Which node this is, and where its head agent listens."""

    node: int
    head: tuple[str, int]
    allocation: Allocation | None


def run_task(run: RunDir, *, setup_done: bool = False) -> NoReturn:
    """Run the agent of this node of a SLURM job and exit when it has ended: 0 in order, else with what ends the job."""
    # Nobody is to die of a warning that SLURM was asked to send: the agent decides what it means.
    signals = hear_signals((signal.SIGUSR1, signal.SIGUSR2))
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    _run(run, host, _in_job, signals=signals, setup_done=setup_done)


def run_node(run: RunDir, node: int, head: tuple[str, int], *, setup_done: bool = False) -> NoReturn:
    """Run the agent of one node of a plan whose nodes are machines of their own; exit as `run_task` does.

    head: address and port of the head agent, which is the agent of node 0 and listens there.
    """

    missing = secrets_file.take()  # before anything else: whatever is started from here on has them

    def place(plan: Plan) -> _Place:
        if missing:
            raise NodeError(missing)
        if not 0 <= node < len(plan.nodes):
            raise NodeError(f"--node {node}: the plan has the nodes 0 to {len(plan.nodes) - 1}")
        return _Place(node=node, head=head, allocation=None)

    _run(run, socket.gethostname(), place, signals=hear_signals(), setup_done=setup_done)


def _run(run: RunDir, host: str, find_place: Callable[[Plan], _Place], *, signals: int, setup_done: bool) -> NoReturn:
    proc.adopt_orphans()
    sys.stdout, sys.stderr = redact.RedactedStream(1), redact.RedactedStream(2)
    try:
        plan = Plan.from_json(run.plan.read_text(encoding="utf-8"))
    except OSError as error:
        sys.exit(f"launch: {host} does not see the run directory: {run.plan}: {error.strerror}")
    redact.remember(plan.secrets)
    node = -1
    try:
        place = find_place(plan)
        node = place.node
        if plan.setup and not setup_done:
            _set_up(plan, run, signals)
        code = _serve(plan, run, host, place=place, signals=signals)
    except NodeError as error:
        code = _fail(run, node, host, error)
    finally:
        scratch.clear()
        memory.clear()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _in_job(plan: Plan) -> _Place:
    """As the batch side says. Raises NodeError for a node that is none of the plan."""
    node = binding.node_index(os.environ, len(plan.nodes), at_least=plan.min_nodes)
    try:
        found = allocation.from_environment(os.environ, now_s=time.monotonic())
    except ValueError as error:
        raise NodeError(str(error)) from None
    return _Place(node=node, head=found.head, allocation=found)


def _serve(plan: Plan, run: RunDir, host: str, *, place: _Place, signals: int) -> int:
    node, head = place.node, place.head
    try:
        if plan.forks_workers:
            zygote.preload(ENGINE)
        _say_who(plan, node, host)
        known = addresses.own_addresses()
        if place.allocation is None:
            plan = binding.bind_host(plan, node, host=host, head=head[0], known=known, env=os.environ)
        else:
            cpus = os.sched_getaffinity(0)
            bound = binding.bind(plan, node, env=os.environ, host=host, head=head[0], cpus=cpus, known=known)
            for warning in bound.warnings:
                say(run.console, warning)
            plan = bound.plan
        base = _scratch(plan.scratch)
        scratch.sweep(base=base)
        scratch.make(run.run_id, base=base)
        memory.forget()
        if plan.worker.kind == "job":
            memory.sweep()
            memory.make(run.run_id)
        listener = _listen(head) if node == 0 else None
        zygote.preload((plan.worker.preload or ()) if plan.forks_workers else ())
    except zygote.PreloadError as error:
        where = f"{sys.executable} on this node" if error.__cause__ is None else f"by {sys.executable}"
        raise NodeError(f"{error} ({where})", cause=Cause.USAGE) from error
    code = Supervisor(plan, run, listener, signals, nodes=(node,), head=head, allocation=place.allocation).run()
    if code == GAVE_UP and node and plan.is_elastic and place.allocation is not None:
        from launcher.agent.headless import see_to_job

        see_to_job(plan, run, node, place.allocation, signals=signals)
    return code


def _say_who(plan: Plan, node: int, host: str) -> None:
    """The first line of a node: which interpreter this is, and which torch."""
    torch = sys.modules.get("torch")
    version = f"torch {torch.__version__}" if torch is not None else "torch is the workers' own"
    print(f"launch: node {node} is {host}: python {sys.version.split()[0]} in {sys.prefix}, {version}", flush=True)


def _listen(head: tuple[str, int]) -> socket.socket:
    """Where the other agents come to; who starts the agents has chosen it."""
    try:
        return channel.listen(*head)
    except OSError as error:
        address = f"{head[0]}:{head[1]}"
        raise NodeError(f"the head agent cannot listen at {address}, which was chosen for it: {error}") from None


def _scratch(folder: str | None) -> str | None:
    """The folder for temporary files, as bash here expands it. Raises NodeError where there is none."""
    if folder is None:
        return None
    text = folder.replace("\\", "\\\\").replace('"', '\\"')
    bash = shutil.which("bash") or "/bin/bash"  # `setup` may have left any PATH
    try:
        done = subprocess.run([bash, "-c", f'printf %s "{text}"'], capture_output=True, text=True, check=False)
    except OSError as error:
        raise NodeError(f"scratch: {bash} cannot be run: {error.strerror}") from None
    found = done.stdout
    if done.returncode or not found or not Path(found).is_dir() or not os.access(found, os.W_OK):
        said = f": {done.stderr.strip()}" if done.stderr.strip() else ""
        raise NodeError(f"scratch: {folder} is {found or 'nothing'} here, and no folder to write to{said}")
    return found


def _set_up(plan: Plan, run: RunDir, signals: int) -> NoReturn:
    """Run the plan's `setup` here, then start this process again in the environment that it leaves."""
    end = run_setup(plan.setup, run, cwd=plan.worker.cwd, signals=signals, stop_signals=STOP_SIGNALS, watch_fd=None)
    if isinstance(end, SetupFailed):
        raise NodeError(str(end), cause=Cause.SETUP, exit_code=end.exit_code)
    if isinstance(end, SetupStopped):
        os._exit(128 + (end.signum or signal.SIGTERM))
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # a stop that comes now waits for the handlers of the next
    for signum in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    os.execve(sys.executable, next_start(sys.orig_argv, watch_fd=None), environment_after(dict(os.environb), end))


def _fail(run: RunDir, node: int, host: str, error: NodeError) -> int:
    """Say why this node cannot take part, in the record of the run and to whoever reads SLURM's output."""
    fields = {"cause": error.cause.value, "exit_code": error.exit_code, "message": str(error)}
    EventWriter(run.path, f"node-{node}" if node >= 0 else f"task-{host}").write(
        "node_failed", node=node, host=host, **fields
    )
    text = f"node {node} ({host}): {error}"
    say(run.console, text)
    print(f"launch: {text}", file=sys.stderr)
    return error.exit_code
