"""Where a rehearsal plays: real runs by the `launch` command, in a folder of their own, watched through their files."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from launcher.runs.events import Event, read_events
from launcher.runs.load import read_result
from launcher.runs.metrics import read_metrics
from launcher.runs.rundir import RunDir

_ENTRY = "import sys; sys.path.insert(0, sys.argv.pop(1)); import launch_command; launch_command.entry()"
"""The `launch` of this installation, wherever PATH and PYTHONPATH lead; the workers inherit nothing of it."""
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOOK_EVERY_S = 0.01
_GONE_S = 10.0
"""How long what was killed may take to be gone (the promise of the launcher itself)."""
_TAIL_LINES = 12


class TooLateError(Exception):
    """Something did not happen in time, or cannot happen any more. The text says what."""


class Stage:
    """The folder of a rehearsal and the runs in it. Nothing of it outlives the `with`, unless it is to be kept."""

    def __init__(self, timeout_s: float) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="launch-try-"))
        self.keep = False
        self._deadline_s = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._started: list[Played] = []
        self._shared = set(_shared_memory())

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _held_back():
            self.end_all()
            if not self.keep:
                shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def has_runs(self) -> bool:
        """Whether anything was started."""
        return bool(self._started)

    @property
    def runs(self) -> Path:
        """Where the run directories are."""
        return self.folder / "runs"

    def start(self, *arguments: str, name: str, script_args: Sequence[str] = ()) -> Played:
        """`launch ARGUMENTS`, as the name of a run of its own."""
        options = ["--on", "local", "--follow", "--runs-dir", str(self.runs), "--name", name]
        return self._run([*arguments, *options, *(["--", *script_args] if script_args else [])], name)

    def resume(self, run: RunDir) -> Played:
        """`launch resume RUN`."""
        return self._run(["resume", str(run.path), "--follow"], run.run_id, run)

    def _run(self, arguments: list[str], name: str, run: RunDir | None = None) -> Played:
        output = self.folder / f"{name}{'-resumed' if run else ''}.out"
        environment = {**os.environ, "XDG_STATE_HOME": str(self.folder / "state")}
        with output.open("wb") as file, _held_back():
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _ENTRY, _installed(), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # a Ctrl-C is for the rehearsal, which then ends it
            )
            played = Played(self, process, output, name=name, run=run)
            self._started.append(played)
        return played

    def until(self, what: str, condition: Callable[[], Any], over: Callable[[], bool] = lambda: False) -> Any:
        """Wait for something and return it. Raises TooLateError where it is `over` without, or the time is up."""
        while True:
            was_over = over()
            if found := condition():
                return found
            if was_over:
                raise TooLateError(f"it ended before {what}")
            if time.monotonic() > self._deadline_s:
                raise TooLateError(f"{what}: not within {self._timeout_s:.0f} s (--timeout)")
            time.sleep(_LOOK_EVERY_S)

    def end_all(self) -> None:
        """End every run that goes on, and wait until nobody writes into the folder any more."""
        going_on = [played for played in self._started if played.process.poll() is None]
        for played in going_on:
            played.end()
        deadline_s = time.monotonic() + _GONE_S
        while going_on and (left := _processes_with(str(self.folder))):
            if time.monotonic() > deadline_s:
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                return
            time.sleep(_LOOK_EVERY_S)

    def leftovers(self, patience_s: float = _GONE_S) -> tuple[list[str], list[str]]:
        """Processes and names in /dev/shm that are left of the runs, once they have had the time to go."""
        ids = [path.name for path in self.runs.iterdir()] if self.runs.is_dir() else []
        pids = {event["pid"] for name in ids for event in read_events(self.runs / name) if "pid" in event}
        deadline_s = time.monotonic() + patience_s
        while True:
            processes = [_described(pid) for name in ids for pid in _processes_with(f"LAUNCH_RUN_ID={name}")]
            shared = [name for name in _shared_memory() if name not in self._shared and _is_of(name, ids, pids)]
            if not (processes or shared) or time.monotonic() > deadline_s:
                return processes, shared
            time.sleep(_LOOK_EVERY_S)


class Played:
    """One `launch` command, and the run that it made or went on with."""

    def __init__(
        self, stage: Stage, process: subprocess.Popen[bytes], output: Path, *, name: str, run: RunDir | None
    ) -> None:
        self.process, self.name = process, name
        self._stage, self._output, self._run = stage, output, run
        self._began_s = time.monotonic()

    @property
    def run(self) -> RunDir:
        """Its run directory. Raises TooLateError where the command ended without one."""
        if self._run is None:
            token = self.until(
                "it made a run directory", lambda: next(self._stage.runs.glob(f"{self.name}-*/token"), None)
            )
            self._run = RunDir(token.parent)
        return self._run

    @property
    def events(self) -> list[Event]:
        """What has happened."""
        return read_events(self.run.path)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Its steps."""
        return read_metrics(self.run.metrics)

    @property
    def result(self) -> dict[str, Any]:
        """result.json; empty without one."""
        return read_result(self.run) or {}

    @property
    def last_lines(self) -> list[str]:
        """The end of what the command has printed."""
        return self._output.read_text(errors="replace").splitlines()[-_TAIL_LINES:]

    def until(self, what: str, condition: Callable[[], Any]) -> Any:
        """Wait for something. Raises TooLateError."""
        return self._stage.until(what, condition, lambda: self.process.poll() is not None)

    def happened(self, name: str, **fields: Any) -> Event | None:
        """The first event of a name with these fields."""
        return next(
            (e for e in self.events if e["event"] == name and all(e.get(k) == v for k, v in fields.items())), None
        )

    def wait(self) -> tuple[int, float]:
        """Wait for the end of the command: its exit code, and seconds since it was started. Raises TooLateError."""
        self._stage.until(f"{self.name} ended", lambda: self.process.poll() is not None)
        return self.process.wait(), time.monotonic() - self._began_s

    def send(self, pids: Sequence[int], signum: int) -> list[int]:
        """A signal to processes of this run. Returns those that were still there."""
        mark = f"LAUNCH_RUN_ID={self.run.run_id}".encode()
        sent = []
        for pid in pids:
            try:
                if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    os.kill(pid, signum)
                    sent.append(pid)
            except (FileNotFoundError, ProcessLookupError):
                continue
        return sent

    def has_open(self, pids: Sequence[int], path: Path) -> bool:
        """Whether one of these processes has a file open."""
        real = path.resolve()
        for descriptor in (each for pid in pids for each in Path(f"/proc/{pid}/fd").glob("*")):
            try:
                if descriptor.readlink() == real:
                    return True
            except OSError:  # closed, or the process has gone
                continue
        return False

    def end(self) -> None:
        """End the command and with it the run, however it stands."""
        if self.process.poll() is None:
            self.process.kill()  # a run in the foreground ends with its launcher
            self.process.wait()


@contextlib.contextmanager
def _held_back() -> Iterator[None]:
    """A request to end comes after this: what is half started, or half ended, would be left behind."""
    received: list[int] = []
    handlers = {signum: signal.signal(signum, lambda signum, _: received.append(signum)) for signum in _ENDS}
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
    if received:
        signal.raise_signal(received[0])


def _installed() -> str:
    return str(Path(sys.modules["launcher"].__path__[0]).parent)


def _processes_with(mark: str) -> list[int]:
    """The processes that have this in their environment, which all that is started by them inherits."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if mark.encode() in (path / "environ").read_bytes():
                found.append(int(path.name))
    return found


def _described(pid: int) -> str:
    try:
        return f"process {pid} ({Path(f'/proc/{pid}/comm').read_text().strip()})"
    except OSError:
        return f"process {pid}"


def _shared_memory() -> list[str]:
    return os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []  # noqa: PTH112, PTH208 - names alone


def _is_of(name: str, ids: Sequence[str], pids: set[int]) -> bool:
    words = name.replace("_", "-").split("-")
    tails = {run_id.rsplit("-", 1)[-1] for run_id in ids}
    return any(word in tails or (word.isdigit() and int(word) in pids) for word in words)
