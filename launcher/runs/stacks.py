"""Python stacks of the ranks, as values: read from py-spy or from a log, put together where they are the same. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from launcher.wording import ranges

_LIBRARY = re.compile(
    r"^<|/(site|dist)-packages/(?!jobs/)|/lib/python\d+\.\d+/(?!(site|dist)-packages/)|/launcher/agent/|/agent/launcher/"
)
"""Files that are neither the user's nor the training program's."""
_DUMP = re.compile(r"(?:Current t|T)hread 0x[0-9a-f]+ .*\(most recent call first\):")
_DUMP_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)')
DUMP_BEGINS = "(most recent call first):"
"""In the first line of what faulthandler writes about a thread."""


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One call."""

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"

    @property
    def is_library(self) -> bool:
        """Whether it is code of Python, of a package or of the launcher."""
        return _LIBRARY.search(self.file) is not None


@dataclass(frozen=True, kw_only=True)
class Thread:
    """One thread of a worker."""

    name: str
    main: bool
    running: bool | None
    """Whether it used a processor; None = not known."""
    frames: tuple[Frame, ...]
    """The innermost first."""


@dataclass(frozen=True, kw_only=True)
class RankStack:
    """Where one rank is, or why that is not known."""

    rank: int
    node: int
    pid: int
    threads: tuple[Thread, ...] = ()
    source: str = ""
    """`py-spy`, or `its log`: it wrote them itself."""
    trouble: str = ""
    hint: str = ""

    @property
    def main(self) -> Thread | None:
        """The thread that runs the program."""
        return next((thread for thread in self.threads if thread.main), None)


def parse_pyspy(text: str, pid: int) -> tuple[Thread, ...]:
    """What `py-spy dump --json` prints. Raises ValueError for anything else."""
    try:
        return tuple(_spied(thread, pid) for thread in json.loads(text))
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a dump of py-spy: {error}") from error


def _spied(thread: dict[str, Any], pid: int) -> Thread:
    return Thread(
        name=thread["thread_name"] or "",
        main=thread["os_thread_id"] == pid,
        running=bool(thread["active"]),
        frames=tuple(
            Frame(function=frame["name"], file=frame["filename"], line=frame["line"]) for frame in thread["frames"]
        ),
    )


def parse_dump(text: str) -> tuple[Thread, ...]:
    """The newest dump of faulthandler in a text, whatever else was printed in between. Empty where there is none.

    The main thread is the last: Python lists the newest first.
    """
    threads: list[list[Frame]] = []
    for line in text.splitlines():
        if _DUMP.match(line):
            threads.append([])
        elif threads and (match := _DUMP_FRAME.match(line)):
            number = 0 if match["line"] == "???" else int(match["line"])
            threads[-1].append(Frame(function=match["function"], file=match["file"], line=number))
    return tuple(
        Thread(name="", main=index == len(threads) - 1, running=None, frames=tuple(frames))
        for index, frames in enumerate(threads)
    )


def place_of(thread: Thread) -> str:
    """`all_reduce at train.py:41 in step`: the innermost call, and the line of the user's own that led there."""
    if not thread.frames:
        return "no Python code"
    innermost, own = thread.frames[0], own_frame(thread)
    name = _WORDS.get(innermost.function, innermost.function)
    return str(own) if own is innermost else f"{name} at {own}"


def own_frame(thread: Thread) -> Frame | None:
    """The innermost call that is the user's own, else the innermost one. None without any."""
    return next((frame for frame in thread.frames if not frame.is_library), next(iter(thread.frames), None))


_COLLECTIVE = re.compile(r"/torch/distributed/(distributed_)?c10d(_logger)?\.py$")
"""Files of torch whose calls wait for other ranks, whatever they call."""
_WAITS_ITSELF = re.compile(
    r"/torch/(distributed/(?!elastic/)|nn/parallel/distributed\.py)|/jobs/(agreement|host_sum|world)\.py$"
)
"""Files in which the innermost call waits for other ranks: below it there is only C++."""
_BACKWARD = "_engine_run_backward"
"""In a backward of DDP the waits are in C++ below it. What else a backward calls in Python has frames of its own."""
_WORDS = {_BACKWARD: "backward"}
"""Of calls whose names nobody knows."""
_WAITING_LINE = re.compile(r"\.(wait|all_reduce|barrier|broadcast|all_gather\w*|reduce_scatter\w*|all_to_all\w*)\(")
"""Of the user's own: calls of C++ leave no frame, the line that makes them shows it."""


def waits_for_others(frames: Sequence[Frame], line: str = "") -> bool:
    """Whether a main thread waits for other ranks.

    frames: the innermost first, down to one of the user's own. line: the text of the innermost, where it is known.
    """
    if not frames:
        return False
    inner = frames[0]
    if not inner.is_library and _WAITING_LINE.search(line):
        return True
    if inner.function == _BACKWARD or _WAITS_ITSELF.search(inner.file):
        return True
    return any(_COLLECTIVE.search(frame.file) for frame in to_own(frames))


def to_own(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """From the innermost call to the first that is the user's own, that one included; all where there is none."""
    own = next((index for index, frame in enumerate(frames) if not frame.is_library), len(frames))
    return tuple(frames[: own + 1])


def summary(stacks: Sequence[RankStack]) -> list[str]:
    """One line for all ranks that are at the same place, the larger groups first."""
    groups: dict[str, list[RankStack]] = {}
    for stack in stacks:
        groups.setdefault(place_of(stack.main) if stack.main else stack.trouble, []).append(stack)
    ordered = sorted(groups.items(), key=lambda group: (-len(group[1]), group[1][0].rank))
    width = max((len(_ranks(members)) for _, members in ordered), default=0)
    return [f"{_ranks(members):<{width}}  {place}{_state(members)}" for place, members in ordered]


def detail(stack: RankStack) -> list[str]:
    """Every thread of a rank, the innermost call first."""
    lines = [f"rank {stack.rank}   node {stack.node}   pid {stack.pid}   {stack.source or stack.trouble}"]
    for thread in sorted(stack.threads, key=lambda each: not each.main):
        state = {True: ", running", False: ", waiting", None: ""}[thread.running]
        lines.append(f"  {thread.name or ('MainThread' if thread.main else 'thread')}{state}")
        lines += [f"    {frame}" for frame in thread.frames]
    return lines


def as_fields(stacks: Iterable[RankStack]) -> list[dict[str, Any]]:
    """For `--json`."""
    return [asdict(stack) for stack in stacks]


def _ranks(stacks: Sequence[RankStack]) -> str:
    return f"rank{'s' * (len(stacks) > 1)} {ranges(sorted(stack.rank for stack in stacks), ', ')}"


def _state(stacks: Sequence[RankStack]) -> str:
    """Said only where it holds for all: a rank that waits for the others is not busy, one that spins is."""
    states = {stack.main.running for stack in stacks if stack.main}
    return "   (running)" if states == {True} else "   (waiting)" if states == {False} else ""
