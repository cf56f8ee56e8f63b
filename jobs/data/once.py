"""Preparing data once per file system, whatever the number of nodes; before there is a process group."""

from __future__ import annotations

import secrets
from pathlib import Path

from jobs.data.base import DataError, Source
from jobs.world import Meeting


def prepare_once(source: Source, meeting: Meeting) -> None:
    """Let one rank per file system prepare; all ranks together. What fails on one is raised on all.

    The first rank of each node leaves a token in the folder of the data, and looks whose it finds there: of those who
    share a folder the first prepares. So nothing depends on locks that work between nodes, and a rank that is killed
    blocks nobody. Other runs are kept out by a lock in the folder, where locks work.
    """
    world = meeting.world
    leads = world.local_rank == 0
    if not hasattr(source, "home"):
        meeting.gather("prepare the data", lambda: source.prepare() if world.rank == 0 else None)
        meeting.gather("prepare the data of each node", lambda: source.prepare() if leads and world.rank else None)
        return
    home: Path | None = source.home
    if home is None:
        return
    is_ready = source.is_ready  # type: ignore[attr-defined]
    if all(meeting.gather("look for the data", lambda: not leads or bool(is_ready()))):
        return
    key = meeting.decide("find out who shares the data", lambda: secrets.token_hex(8))
    tokens = [home / f".{key}-{rank}" for rank in range(world.size)]
    try:
        meeting.gather("write in the folder of the data", lambda: _leave(tokens[world.rank]) if leads else None)
        first = meeting.gather("look who shares the data", lambda: _first(tokens) if leads else None)[world.rank]
        meeting.gather("prepare the data", lambda: source.prepare() if leads and first == world.rank else None)
    finally:
        tokens[world.rank].unlink(missing_ok=True)


def _leave(token: Path) -> None:
    try:
        token.parent.mkdir(parents=True, exist_ok=True)
        token.touch()
    except OSError as error:
        raise DataError(f"data: no file can be written in {token.parent}, where it is kept: {error.strerror}") from None


def _first(tokens: list[Path]) -> int:
    return next(rank for rank, token in enumerate(tokens) if token.exists())
