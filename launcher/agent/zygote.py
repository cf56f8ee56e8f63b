"""The zygote: a process that has imported everything once and only forks workers and reports their ends.

It stays single-threaded, holds no socket but the one to its agent, and never runs a torch operation: a lock held by
another thread, or an OpenMP pool, would be dead in every child. When the agent ends, however it ends, the zygote sees
the end of its socket, kills what it started, and ends too.

Messages (one datagram each, SOCK_SEQPACKET):
    agent -> zygote   {"start": true} + [WorkerStart, stdout, stderr, more ...]    {"term": [pids]}    {"kill": true}
    zygote -> agent   {"zygote": its pid}, first     {"started": local_rank, "pid": pid}
                      {"ended": pid, "status": wait status}    {"empty": true}
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import random
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from launcher import redact
from launcher.agent import allocation, memory, nsight, proc, scratch, wrapper

_MAX_DATAGRAM_BYTES = 1 << 16
_MAX_DESCRIPTORS = 8
"""That come with a datagram."""
_LOOK_AGAIN_S = 0.01
_OTHERS_SIGNAL_S = 0.5
"""How long a TERM of SLURM may take to all processes of a step, once one of them has it."""
_TERM_FOLLOWS_S = 2.0
"""Where sites send USR2, CONT and TERM in a row, how long TERM may take after the first."""


@dataclass(frozen=True, kw_only=True)
class WorkerStart:
    """One worker to start."""

    local_rank: int
    env: dict[str, str]
    env_unset: tuple[str, ...]
    """Inherited variables that the worker must not see."""
    cwd: str
    cpus: tuple[int, ...]
    module: str | None
    """Call `main(argv)` of this module, in the forked process, with SIGTERM blocked until it has its handler."""
    module_folder: str | None = None
    """Instead, run the module as `python -m` would in this folder: it is a script."""
    script: str | None
    """Run this file, in the forked process or in a fresh interpreter."""
    argv: tuple[str, ...]
    """Arguments; with neither a module nor a script a whole command, which takes the place of the forked process."""
    python: str | None
    """A fresh interpreter for the script; None = the forked process itself."""
    before: tuple[str, ...] = ()
    """A program, and its arguments, that is run with the command of the fresh interpreter: `nsys profile ...`."""
    inherits: tuple[str, ...] = ()
    """Names of variables in which the worker finds further descriptors, in the order in which they are sent."""

    @property
    def is_job(self) -> bool:
        """Whether it is the built-in job, which is called and not run."""
        return self.module is not None and self.module_folder is None

    @property
    def holds_term(self) -> bool:
        """Whether a stop that comes early waits for the handler of the job; not behind a program of others."""
        return self.is_job and not self.before


class PreloadError(Exception):
    """A module that every worker needs raised something while it was imported, which is the cause."""


def preload(modules: Sequence[str]) -> None:
    """Import once what every worker needs. Without the collector, which only costs time while importing.

    Raises PreloadError.
    """
    gc.disable()
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # a module of the user's raises what it likes; raised again, with its name
            raise PreloadError(f"{module} cannot be imported: {type(error).__name__}: {error}") from error
    gc.freeze()
    gc.enable()


def fork_zygote(close: Sequence[socket.socket] = ()) -> socket.socket:
    """Fork a zygote off this process, which must be single-threaded; return the agent's end of their socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        for other in close:
            other.close()
        serve(theirs)
    theirs.close()
    return ours


def exec_argv(python: str, fd: int, modules: Sequence[str]) -> list[str]:
    """The command of a replacement for a zygote that died; it inherits the socket as descriptor `fd`."""
    return [python, "-P", str(Path(__file__).with_name("start.py")), "--zygote", str(fd), *modules]


def serve(sock: socket.socket) -> NoReturn:
    """Fork, reap and report until the agent is gone."""
    proc.adopt_orphans()
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # the agent decides when this ends; the end of the socket says so
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # forked by an agent that still held its signals back
    read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    in_step = allocation.NUMBER in os.environ
    if in_step:
        for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(signum, lambda *_: None)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    _Zygote(sock, read_end, in_step=in_step).run()


class _Zygote:
    """in_step: SLURM signals every process of its step. Nobody signals this one alone, so what comes here has come to
    the workers too, and is not sent to them again: a script's handler may save, and must be called once.
    """

    def __init__(self, sock: socket.socket, signals: int, *, in_step: bool) -> None:
        self._sock = sock
        self._signals = signals
        self._in_step = in_step
        self._workers: dict[int, float] = {}
        """When each was started, by its pid."""
        self._heard_term_s = self._warned_s = 0.0
        self._to_stop: set[int] = set()
        self._stop_at_s = 0.0
        self._emptying = False

    def run(self) -> NoReturn:
        self._tell({"zygote": os.getpid()})
        while True:
            # While emptying, a killed process may hand its children over to us without any signal: look again soon.
            timeout_s = _LOOK_AGAIN_S if self._emptying else None
            if self._to_stop:
                timeout_s = min(timeout_s or _OTHERS_SIGNAL_S, max(0.0, self._stop_at_s - time.monotonic()))
            ready, _, _ = select.select([self._sock.fileno(), self._signals], [], [], timeout_s)
            if self._signals in ready:
                with contextlib.suppress(BlockingIOError):
                    self._heard(os.read(self._signals, 512))
            self._reap()
            if self._to_stop and time.monotonic() >= self._stop_at_s:
                self._stop()
            if self._sock.fileno() in ready and not self._receive():
                self._end()
            if self._emptying and proc.sweep() == 0 and not proc.children():
                self._emptying = False
                self._tell({"empty": True})

    def _receive(self) -> bool:
        try:
            data, fds, _, _ = socket.recv_fds(self._sock, _MAX_DATAGRAM_BYTES, _MAX_DESCRIPTORS)
        except ConnectionError:
            return False
        if not data:
            return False
        message: dict[str, Any] = json.loads(data)
        if "start" in message:
            self._start(*fds)
        elif "term" in message:
            self._to_stop |= self._workers.keys() & set(message["term"])
            if self._in_step:
                now_s = time.monotonic()
                self._stop_at_s = max(now_s + _OTHERS_SIGNAL_S, self._warned_s + _TERM_FOLLOWS_S)
            else:
                self._stop()
        elif "kill" in message:
            self._emptying = True
        return True

    def _heard(self, signals: bytes) -> None:
        if signal.SIGTERM in signals:
            self._heard_term_s = time.monotonic()
        if signal.SIGUSR1 in signals or signal.SIGUSR2 in signals:
            self._warned_s = time.monotonic()

    def _stop(self) -> None:
        for pid in self._to_stop & self._workers.keys():
            if self._workers[pid] >= self._heard_term_s:
                proc.send_signal(pid, signal.SIGTERM)  # only the worker: its loader processes would not save anything
        self._to_stop.clear()

    def _start(self, description: int, *fds: int) -> None:
        start = _read_start(description)
        parent = os.getpid()
        # A stop may come before the job has its handler: TERM stays pending until `main` unblocks it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        if signal.SIGTERM in signal.sigpending():  # it came before there was this worker
            self._heard_term_s = time.monotonic()
        pid = os.fork()
        if pid == 0:
            os.close(signal.set_wakeup_fd(-1))
            self._sock.close()
            os.close(self._signals)
            _become_worker(start, parent, fds, in_step=self._in_step)
        for fd in fds:
            os.close(fd)
        self._workers[pid] = time.monotonic()
        if self._in_step:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        self._tell({"started": start.local_rank, "pid": pid})

    def _reap(self) -> None:
        while (pid := proc.next_ended_child()) is not None:
            if pid in self._workers:
                # Loader processes, helpers; before the reaping, while the number is surely its own.
                proc.kill_group(pid)
            status = proc.reap(pid)
            if pid in self._workers:
                del self._workers[pid]
                self._tell({"ended": pid, "status": status})

    def _tell(self, message: dict[str, Any]) -> None:
        # The agent may have ended; the next receive notices.
        with contextlib.suppress(ConnectionError):
            self._sock.send(json.dumps(message).encode())

    def _end(self) -> NoReturn:
        proc.sweep_all()
        scratch.clear()
        memory.clear()
        os._exit(0)


def _become_worker(start: WorkerStart, parent: int, fds: Sequence[int], *, in_step: bool) -> NoReturn:
    """The forked child's way to the user's code. Never returns."""
    os.setsid()
    proc.die_with_parent(parent)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for signum in (signal.SIGUSR1, signal.SIGUSR2) if in_step else ():
        signal.signal(signum, signal.SIG_IGN)  # a warning of SLURM; whoever wants to hear it has a handler
    if not start.holds_term:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    for target, fd in zip((1, 2), fds[:2], strict=True):
        os.dup2(fd, target)
        os.close(fd)
    for name, fd in zip(start.inherits, fds[2:], strict=True):
        os.set_inheritable(fd, True)  # a script's own interpreter is executed
        os.environ[name] = str(fd)
    sys.stdout, sys.stderr = _unbuffered(1), _unbuffered(2)
    wrapper.show_stacks_on_signal()
    # A traceback begins in the user's script, or in the job, not in what is around it.
    entry = getattr(sys.modules.get(start.module or ""), "__file__", None) if start.is_job else start.script
    wrapper.leave(wrapper.guarded(lambda: _work(start), below=entry), finish=not start.is_job)


def _unbuffered(fd: int) -> io.TextIOWrapper:
    """A stream as `python -u` has it: what was printed is out, whatever happens next."""
    raw = io.FileIO(fd, "w", closefd=False)
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)


def _work(start: WorkerStart) -> int | None:
    for name in start.env_unset:
        os.environ.pop(name, None)
    os.environ.update(start.env)
    scratch.forget_default()
    os.chdir(start.cwd)
    if start.cpus:
        os.sched_setaffinity(0, start.cpus)
    if start.module is None and start.script is None:
        os.execv(start.argv[0], start.argv)
    if start.python is not None and (start.before or not start.is_job):
        _execute(start, start.python)
    _unshare_random_state()
    if start.module is None:
        wrapper.run_script(str(start.script), start.argv)
        return 0
    if start.module_folder is not None:
        wrapper.run_module(start.module_folder, start.module, start.argv)
        return 0
    code: int | None = importlib.import_module(start.module).main(list(start.argv))
    return code


def _execute(start: WorkerStart, python: str) -> NoReturn:
    """In a fresh interpreter, which may be started by another program."""
    what = [str(start.script)]
    if start.module is not None:
        what = ["--job", start.module] if start.is_job else ["-m", str(start.module_folder), start.module]
    command = [*start.before, python, "-u", "-P", wrapper.__file__, *what, *start.argv]
    if start.before and shutil.which(command[0]) is None:
        raise nsight.MissingNsysError(socket.gethostname())
    os.execvp(command[0], command)


def _unshare_random_state() -> None:
    """Undo what forked children inherit and fresh processes do not: one random state, and one count of threads."""
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.seed()
        threads = os.environ.get("OMP_NUM_THREADS", "")
        if threads.isdigit():
            torch.set_num_threads(int(threads))  # OMP_NUM_THREADS is read when torch is imported, which was long ago


def send_start(sock: socket.socket, start: WorkerStart, fds: Sequence[int]) -> None:
    """Order a worker, with its standard output, its standard error and what `start.inherits` names.

    Its description goes in a file in memory: arguments may be longer than a datagram.

    Raises ConnectionError where the zygote is gone.
    """
    description = os.memfd_create("worker-start", os.MFD_CLOEXEC)
    with os.fdopen(description, "w", encoding="utf-8", errors="surrogateescape") as file:
        json.dump(asdict(start), file)
        file.flush()
        socket.send_fds(sock, [b'{"start": true}'], [description, *fds])


def _read_start(description: int) -> WorkerStart:
    with os.fdopen(description, encoding="utf-8", errors="surrogateescape") as file:
        file.seek(0)  # the other side has written, and the position is shared
        raw: dict[str, Any] = json.load(file)
    tuples = {key: tuple(raw[key]) for key in ("cpus", "env_unset", "argv", "before", "inherits")}
    return WorkerStart(**{**raw, **tuples})


def main(fd: int, modules: Sequence[str]) -> NoReturn:
    """A replacement zygote, whose socket is descriptor `fd`."""
    sock = socket.socket(fileno=fd)
    sys.stdout, sys.stderr = redact.RedactedStream(1), redact.RedactedStream(2)
    preload(modules)
    serve(sock)
