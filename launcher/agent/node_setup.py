"""The recipe's `setup`: lines of bash that are run on a node before anything else there. Standard library only.

What they export is the environment of all that follows, so the process that ran them starts itself again in it: a
library path counts only from the start of a process.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from launcher import redact
from launcher.agent import proc
from launcher.agent.logs import LineFile, Stream, prefixed
from launcher.runs.rundir import RunDir

_KEPT_LINES = 5
_OWN_NAMES = frozenset({b"_", b"SHLVL"})
"""bash changes these by itself."""


@dataclass(frozen=True, kw_only=True)
class SetupFailed:
    """A line that failed; the last of what was printed."""

    exit_code: int
    number: int | None
    """Of the line, from 1; None where bash could not say."""
    line: str
    output: tuple[str, ...]

    def __str__(self) -> str:
        first, *more = self.line.splitlines() or [""]
        which = f"line {self.number} of `setup` (`{first}{' ...' if more else ''}`)" if self.number else "`setup`"
        said = f": {self.output[-1]}" if self.output else ""
        return f"{which} ended with exit code {self.exit_code}{said}"


@dataclass(frozen=True, kw_only=True)
class SetupStopped:
    """A signal came, or (None) the launcher has ended."""

    signum: int | None


SetupEnd = dict[bytes, bytes] | SetupFailed | SetupStopped


def run_setup(
    lines: Sequence[str], run: RunDir, *, cwd: str, signals: int, stop_signals: Collection[int], watch_fd: int | None
) -> SetupEnd:
    """Run the lines as one bash script that ends at the first failure; return the environment it leaves.

    `signals` is a wakeup descriptor, on which the end of a child is heard too.
    """
    kept: deque[str] = deque(maxlen=_KEPT_LINES)
    files = [LineFile(run.setup_log), LineFile(run.console)]

    def take(text: bytes) -> None:
        files[0].write(text)
        files[1].write(prefixed(text, "setup"))
        kept.extend(text.decode(errors="replace").splitlines())

    (out_read, out_write), (report_read, report_write) = os.pipe(), os.pipe()
    command = ["bash", "-euo", "pipefail", "-c", _script(lines, report_write), "setup"]
    parent = os.getpid()
    try:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=out_write,
            stderr=out_write,
            pass_fds=[report_write],
            start_new_session=True,
            preexec_fn=lambda: _in_child(parent),  # noqa: PLW1509 - there are no threads
        )
    except OSError as error:
        return SetupFailed(exit_code=127, number=None, line="", output=(f"{error.filename}: {error.strerror}",))
    finally:
        os.close(out_write)
        os.close(report_write)
    stream, report = Stream(out_read, take), bytearray()
    os.set_blocking(report_read, False)
    stopped = _watch(
        process,
        stream,
        report_read=report_read,
        report=report,
        signals=signals,
        stop_signals=stop_signals,
        watch_fd=watch_fd,
    )
    stream.drain_and_close()
    _read(report_read, report)
    os.close(report_read)
    for file in files:
        file.close()
    if stopped is not None:
        proc.kill_group(process.pid)
        return stopped
    return _judge(lines, process.returncode, bytes(report), tuple(kept))


def environment_after(before: dict[bytes, bytes], left: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """What the next process gets: what `setup` left, but for what bash changes by itself."""
    own = {name: before[name] for name in _OWN_NAMES & before.keys()}
    return {**{name: value for name, value in left.items() if name not in _OWN_NAMES}, **own}


def _script(lines: Sequence[str], report: int) -> str:
    """The lines, each with a note of its number, so that the one that fails can be named.

    A line may have set any PATH (`-p` needs none), and `set -a`, which exports our note too.
    """
    numbered = "".join(f"launch_setup_line={number}; {line}\n" for number, line in enumerate(lines, 1))
    told = f"""trap 'printf "%s %s" "$?" "$launch_setup_line" >&{report}' EXIT"""
    return f"{told}; {numbered}trap - EXIT\nexport -n launch_setup_line\ncommand -p env -0 >&{report}\n"


def _in_child(parent: int) -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    proc.die_with_parent(parent)


def _watch(
    process: subprocess.Popen[bytes],
    stream: Stream,
    *,
    report_read: int,
    report: bytearray,
    signals: int,
    stop_signals: Collection[int],
    watch_fd: int | None,
) -> SetupStopped | None:
    """Take what bash says until it ends (what it started may go on), or until somebody wants to stop."""
    open_fds = {stream.fileno(), report_read, signals} | ({watch_fd} if watch_fd is not None else set())
    while process.poll() is None:
        ready, _, _ = select.select(list(open_fds), [], [])
        if stream.fileno() in ready and not stream.read():
            open_fds.discard(stream.fileno())
        if report_read in ready and not _read(report_read, report):
            open_fds.discard(report_read)
        if watch_fd in ready and not os.read(watch_fd, 1):
            return SetupStopped(signum=None)
        if signals in ready:
            for signum in os.read(signals, 64):
                if signum in stop_signals:
                    return SetupStopped(signum=signum)
    return None


def _read(fd: int, into: bytearray) -> bool:
    """Take what is there; False at the end."""
    with contextlib.suppress(BlockingIOError):
        while data := os.read(fd, 1 << 16):
            into += data
        return False
    return True


def _judge(lines: Sequence[str], exit_code: int, report: bytes, output: tuple[str, ...]) -> SetupEnd:
    if exit_code == 0 and b"\0" in report:
        return dict(_variables(report))
    _, _, number = report.decode(errors="replace").rpartition(" ")
    index = int(number) if number.isdecimal() and 1 <= int(number) <= len(lines) else None
    line = "" if index is None else redact.own().text(lines[index - 1].strip())
    if exit_code == 0:
        return SetupFailed(exit_code=1, number=index, line=line, output=("it left before the end, with exit code 0",))
    code = 128 - exit_code if exit_code < 0 else exit_code
    return SetupFailed(exit_code=code, number=index, line=line, output=output)


def _variables(report: bytes) -> Iterator[tuple[bytes, bytes]]:
    for item in report.split(b"\0"):
        name, separator, value = item.partition(b"=")
        if separator:
            yield name, value


def next_start(argv: Sequence[str], *, watch_fd: int | None) -> list[str]:
    """The command of this process without `--wait`, to go on after the setup."""
    again = [word for word in argv if word != "--wait"]
    return [*again, "--setup-done", *(("--watch-fd", str(watch_fd)) if watch_fd is not None else ())]
