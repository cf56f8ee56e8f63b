"""What is new in the run directory of this node, for the machine that launched it: `start.py --home --run-dir DIR`.

It reads one JSON object: what is there already, by path: [bytes, mtime in ns, checksum of the last block of these
bytes]. It writes frames: a line of JSON, then so many bytes. Files that only grow travel from where they were; the
result of the run comes last, so that who sees it has everything before it. Standard library only.
"""

from __future__ import annotations

import json
import os
import re
import sys
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

FLAG = "--home"
LAST_BYTES = 4096
"""So many of the bytes before an offset are compared: what was begun anew since is another file."""
RESULT = "result.json"
METRICS = "metrics.jsonl"
"""Of node 0. After the loss of its disk it may begin anew from a shorter copy."""
STAYS = ("agent", "code", "hosts", "replica")
"""Folders that came from the other side, or mean this host alone, or copy what is of another one."""
_STAYS = re.compile(
    r"(plan|code|result)-\d+\.json|(plan|code|launch)\.json|(recipe|resolved)\.yaml|token|stop|events/(launch|watch)-.*"
)
_UNFINISHED = re.compile(r"checkpoints/(?!step-\d+/)[^/]*/|.*\.(tmp|new)$")
_CHECKPOINT = re.compile(r"checkpoints/(step-\d+)/")
_CHUNK_BYTES = 1 << 20

Known = Mapping[str, tuple[int, int, int | None]]


@dataclass(frozen=True, kw_only=True)
class Frame:
    """The head of a piece of a file; `size` bytes follow it."""

    path: str
    """In the run directory."""
    offset: int
    """Where they belong. 0: the whole file, in place of one that is there."""
    size: int
    mtime_ns: int
    mode: int


def grows(path: str) -> bool:
    """Whether a file is only ever appended to."""
    return path.endswith(".jsonl") or path.startswith("logs/")


def checksum(path: Path, end: int) -> int:
    """Of the last block before a place in a file."""
    with path.open("rb") as file:
        file.seek(max(0, end - LAST_BYTES))
        return zlib.crc32(file.read(min(end, LAST_BYTES)))


def files_of(run: Path) -> Iterator[str]:
    """Everything in a run directory that goes home, the result last."""
    found = sorted(_walk(run, ""))
    yield from (path for path in found if path != RESULT)
    yield from (path for path in found if path == RESULT)


def checkpoint_of(path: str) -> str | None:
    """`step-200` of a path in a checkpoint."""
    match = _CHECKPOINT.match(path)
    return None if match is None else match[1]


def checkpoints_of(run: Path) -> list[str]:
    """Names of the checkpoints that are whole."""
    folder = run / "checkpoints"
    return (
        sorted(path.name for path in folder.iterdir() if checkpoint_of(f"checkpoints/{path.name}/"))
        if folder.is_dir()
        else []
    )


def _walk(folder: Path, inside: str) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue  # what is written is renamed when it is whole
            path = f"{inside}{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                if path not in STAYS and not _UNFINISHED.match(f"{path}/"):
                    yield from _walk(folder / entry.name, f"{path}/")
            elif entry.is_file(follow_symlinks=False) and not _STAYS.fullmatch(path) and not _UNFINISHED.match(path):
                yield path


def send(run: Path, known: Known, out: IO[bytes]) -> None:
    """Write what the other side does not have, and which checkpoints are whole at the end of it.

    A file that is removed meanwhile is left out.
    """
    for path in files_of(run):
        try:
            _send_file(run, path, known.get(path), out)
        except FileNotFoundError:
            continue
    out.write(json.dumps({"end": True, "checkpoints": checkpoints_of(run)}).encode() + b"\n")
    out.flush()


def _send_file(run: Path, path: str, there: tuple[int, int, int | None] | None, out: IO[bytes]) -> None:
    with (run / path).open("rb") as file:
        found = os.fstat(file.fileno())
        offset = 0
        if there is not None:
            size, mtime_ns, mark = there
            if grows(path) and found.st_size < size and mark is not None and path != METRICS:
                return  # a copy that was sent here, of what another node, or this one before its disk was lost, wrote
            is_same = size <= found.st_size and (mark is None or mark == checksum(run / path, size))
            if grows(path) and is_same:
                offset = size
                if offset == found.st_size:
                    return
            elif not grows(path) and found.st_mtime_ns <= mtime_ns:
                return  # also where another node wrote it later
        frame = Frame(
            path=path,
            offset=offset,
            size=found.st_size - offset,
            mtime_ns=found.st_mtime_ns,
            mode=found.st_mode & 0o777,
        )
        out.write(json.dumps(asdict(frame)).encode() + b"\n")
        file.seek(offset)
        left = frame.size
        while left:
            data = file.read(min(left, _CHUNK_BYTES))
            # One that became shorter meanwhile is filled up: it is whole the next time, when its time is another.
            data = data or bytes(min(left, _CHUNK_BYTES))
            out.write(data)
            left -= len(data)


def main(argv: list[str]) -> NoReturn:
    """`--run-dir DIR`."""
    run = Path(argv[argv.index("--run-dir") + 1])
    asked: dict[str, Any] = json.loads(sys.stdin.buffer.read() or b"{}")
    send(run, {path: tuple(each) for path, each in asked.items()}, sys.stdout.buffer)
    sys.exit(0)
