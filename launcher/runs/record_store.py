"""The record of a run at a URL, for machines that are taken down when it ends. Reached by fsspec, imported when needed.

What the nodes write down (events, logs, metrics, the result) is copied there while the run goes on, and from there to
the machine that launched it, or to machines that take over. Checkpoints are not: `checkpoint.store` sees to them. The
token never leaves a machine. Standard library only, but for fsspec, which comes with torch.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

STOP = "stop-requested"
"""A file beside the record: somebody asks the run to stop. Its text is the signal's number."""
_FOLDERS = ("events", "logs", "devices", "profile")
_FILES = re.compile(r"metrics\.jsonl|evals\.jsonl|result(-\d+)?\.json")
_OLD_LOGS = re.compile(r"logs/attempt-\d+/")
_RATE_BYTES_PER_S = 2_000_000
"""A long file that grows is copied whole each time, so the longer it is, the more seldom."""

Stamp = tuple[int, int]
"""Time of the last change in ns, and size in bytes."""


def stamps(run_dir: Path) -> dict[str, Stamp]:
    """What belongs to the record in a run directory, by its path there."""
    return {name: (at.st_mtime_ns, at.st_size) for name, at in _record_of(run_dir)}


def _record_of(run_dir: Path) -> Iterator[tuple[str, Any]]:
    tops = [path for path in run_dir.iterdir() if _FILES.fullmatch(path.name)] if run_dir.is_dir() else []
    nested = [path for folder in _FOLDERS for path in (run_dir / folder).rglob("*")]
    for path in (*tops, *nested):
        try:
            if path.is_file() and not path.is_symlink() and path.suffix != ".tmp":
                yield path.relative_to(run_dir).as_posix(), path.stat()
        except FileNotFoundError:
            continue  # it was renamed meanwhile


class RecordStore:
    """The record of one run at a URL. Raises what fsspec and its file systems raise."""

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        self._files: Any
        self._files, self._root = url_to_fs(url)
        self._is_folder = url.startswith("file:")

    def names(self) -> dict[str, int]:
        """What is there, with sizes in bytes. Names that are no record's are left out: others may write there, too."""
        if not self._files.exists(self._root):
            return {}
        self._files.invalidate_cache()
        found: Mapping[str, Mapping[str, Any]] = self._files.find(self._root, detail=True)
        sizes = {path[len(self._root) :].lstrip("/"): int(entry["size"]) for path, entry in found.items()}
        return {name: size for name, size in sizes.items() if is_of_record(name)}

    def fetch(self, run_dir: Path, *, old_logs: bool) -> list[str]:
        """Copy what is there, and other here, into a run directory. old_logs: those of the workers, too."""
        fetched = []
        for name, size in self.names().items():
            local = run_dir / name
            if not old_logs and _OLD_LOGS.match(name):
                continue
            if local.is_file() and local.stat().st_size == size and not name.startswith("result"):
                continue
            local.parent.mkdir(parents=True, exist_ok=True)
            part = local.with_name(f".{local.name}.tmp")
            self._files.get_file(f"{self._root}/{name}", str(part))
            part.rename(local)
            fetched.append(name)
        return fetched

    def put(self, run_dir: Path, name: str) -> None:
        """Copy one file there, whole."""
        target = f"{self._root}/{name}"
        if self._is_folder:  # elsewhere folders are parts of names
            self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
        self._files.put_file(str(run_dir / name), target)

    def withdraw(self) -> None:
        """Take a request to stop away, and the result: the run goes on."""
        for name in (STOP, "result.json"):
            if self._files.exists(f"{self._root}/{name}"):
                self._files.rm_file(f"{self._root}/{name}")

    def ask_to_stop(self, signum: int) -> None:
        """Leave the request for the nodes."""
        if self._is_folder:
            self._files.makedirs(self._root, exist_ok=True)
        self._files.pipe_file(f"{self._root}/{STOP}", str(signum).encode())

    def stop_asked(self) -> int | None:
        """The signal that somebody has asked for."""
        self._files.invalidate_cache()
        if not self._files.exists(f"{self._root}/{STOP}"):
            return None
        text = self._files.cat_file(f"{self._root}/{STOP}").decode(errors="replace").strip()
        return int(text) if text.isdecimal() else None


class Copier:
    """Copies what a node writes, and nothing that it has `found`: each file has one writer, on one node."""

    def __init__(
        self,
        store: RecordStore,
        run_dir: Path,
        *,
        found: Mapping[str, Stamp],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._run_dir, self._clock = store, run_dir, clock
        self._copied: dict[str, Stamp] = dict(found)
        self._at_s: dict[str, float] = {}

    def copy(self, *, everything: bool = False) -> list[str]:
        """Copy what has changed; long files not each time, but with `everything`."""
        now_s, copied = self._clock(), []
        for name, stamp in stamps(self._run_dir).items():
            if self._copied.get(name) == stamp:
                continue
            wait_s = stamp[1] / _RATE_BYTES_PER_S
            if not everything and now_s - self._at_s.get(name, -wait_s) < wait_s:
                continue
            self._store.put(self._run_dir, name)
            self._copied[name], self._at_s[name] = stamp, now_s
            copied.append(name)
        return copied


def is_of_record(name: str) -> bool:
    """Whether a path below a run directory is part of the record."""
    parts: Collection[str] = name.split("/")
    return ".." not in parts and "" not in parts and (bool(_FILES.fullmatch(name)) or name.startswith(_NESTED))


_NESTED = tuple(f"{folder}/" for folder in _FOLDERS)
