"""A checkpoint that one rank writes alone, of a state that it has whole: to memory, or where the others are gone.

Complete or absent, in the format of every checkpoint, so the same code reads and verifies it. No other rank is asked,
and no process group is used: it may be called beside a training that waits for a dead peer.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from jobs.durable import free_bytes, fsync, write_hashed
from jobs.manifest import STATE, Manifest, seal
from jobs.storage import Layout, Part, plan

NO_SPACE = os.strerror(errno.ENOSPC)
"""As the system says it, which is how the cause of a failure is known."""
SMALL_BYTES = 1 << 20
"""For the files of a checkpoint beside its tensors."""


class NoRoomError(OSError):
    """It does not fit; says both numbers."""


def layout_alone(tensors: Mapping[str, Tensor], rank: int) -> Layout:
    """This rank writes everything."""
    return plan(tensors, None, alone=rank)


def write_whole(
    folder: Path,
    name: str,
    layout: Layout,
    parts: Sequence[Part],
    *,
    state: str,
    metrics: Mapping[str, float] | None,
    attempt: int,
) -> int:
    """Write `folder/name` and return its size in bytes. `layout`: of `layout_alone`; `state`: the text of state.json.

    Where it is there already it is left alone. Raises OSError (NoRoomError before anything is written); then nothing of
    it is left.
    """
    place = folder / name
    if place.exists():
        return sum(path.stat().st_size for path in place.iterdir())
    unfinished = folder / f"{name}.tmp-{attempt}-{layout.rank}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        check_fits(folder, layout.size_bytes)
        files = {**layout.write_part(unfinished, parts), **layout.write_list(unfinished)}
        manifest = Manifest(files={**files, STATE: write_hashed(unfinished / STATE, state)}, metrics=metrics)
        seal(unfinished, manifest)
        unfinished.rename(place)
    except OSError:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    fsync(folder)
    return manifest.size_bytes


def check_fits(folder: Path, size_bytes: int) -> None:
    """Raise NoRoomError where the file system of a folder has no room for so many bytes of tensors."""
    wanted, free = size_bytes + SMALL_BYTES, free_bytes(folder)
    if wanted > free:
        raise NoRoomError(f"{NO_SPACE}: {folder} has {free:,} bytes free, and it takes {wanted:,}; make room there")
