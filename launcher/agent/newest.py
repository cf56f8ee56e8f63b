"""Which checkpoint of a script's own is the newest: what `resume: {newest: PATTERN}` finds. Standard library only."""

from __future__ import annotations

import glob
import re
from pathlib import Path

_UNFINISHED = re.compile(r"^(tmp|\.tmp)|(\.|-|_)(tmp|temp|part|partial|incomplete)$|~$", re.IGNORECASE)
"""How frameworks name what they are still writing: `tmp-checkpoint-500`, `checkpoint-500.tmp`, `model.ckpt.part`."""


def find_newest(pattern: str) -> str | None:
    """The path that matches and has the highest last number in its name, then the latest change; None without one.

    Links to nothing, empty files and folders, and what is still being written do not count.
    """
    usable = [Path(path) for path in glob.glob(pattern, recursive=True) if _is_usable(Path(path))]  # noqa: PTH207
    return str(max(usable, key=_age)) if usable else None


def _is_usable(path: Path) -> bool:
    if _UNFINISHED.search(path.name):
        return False
    try:
        return any(path.iterdir()) if path.is_dir() else path.stat().st_size > 0
    except OSError:  # a link to nothing, or it was removed just now
        return False


def _age(path: Path) -> tuple[int, int, str]:
    numbers = re.findall(r"\d+", path.name if path.is_dir() else path.stem)
    try:
        changed_ns = path.stat().st_mtime_ns
    except OSError:
        changed_ns = 0
    return int(numbers[-1]) if numbers else -1, changed_ns, str(path)
