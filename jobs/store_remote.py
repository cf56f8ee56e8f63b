"""Checkpoints at a URL, reached by fsspec: `URL/RUN_ID/checkpoints/step-<n>/`, complete or absent there as well.

An object store has no rename: the files come first, are read back and compared, and manifest.json comes last. Without
it a folder is nothing, and is removed by the next upload.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from jobs.durable import BLOCK_BYTES, FileInfo, fsync, hashed_file
from jobs.folders import complete, step_of
from jobs.manifest import MANIFEST, BrokenError, Manifest, compare, look, read_manifest
from jobs.shelf import Shelf
from jobs.store_disks import StoreError
from jobs.world import Meeting
from launcher.runs.events import EventWriter

T = TypeVar("T")
KEY = "checkpoint.store"


class RemoteError(RuntimeError):
    """The store has not done what was asked of it; says what it said. It may the next time."""

    launch_plain = True


class Remote:
    """The checkpoints of one run at a URL. Raises RemoteError for whatever goes wrong there."""

    def __init__(self, url: str, run_id: str) -> None:
        """Raises StoreError where the URL cannot be used from here at all."""
        self.url = f"{url.rstrip('/')}/{run_id}/checkpoints"
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise StoreError(f"{KEY}: {url} needs the package fsspec, which is not installed here") from None
        self._files: Any
        try:
            self._files, self._root = url_to_fs(self.url)
        except (ImportError, ValueError) as error:  # of a protocol: its package is missing, or nobody knows it
            raise StoreError(f"{KEY}: {url} cannot be used here: {error}") from None

    def names(self) -> list[str]:
        """Those that are complete, oldest first."""
        return _asked(self._names)

    def upload(self, folder: Path) -> int:
        """Copy a checkpoint there, and read it back. Returns its size in bytes. Raises OSError for the files here."""
        manifest = read_manifest(folder)
        place = f"{self._root}/{folder.name}"
        if _asked(lambda: self._has(place, folder / MANIFEST)):
            return manifest.size_bytes
        for name in sorted(manifest.files):
            self._put(folder / name, f"{place}/{name}")
        _asked(lambda: self._compare(place, manifest))
        self._put(folder / MANIFEST, f"{place}/{MANIFEST}")
        return manifest.size_bytes

    def fetch(self, name: str, unfinished: Path) -> None:
        """Copy one from there into a new folder. Raises BrokenError where it is not what was uploaded, and OSError."""
        unfinished.mkdir(parents=True)
        place = f"{self._root}/{name}"
        _asked(lambda: self._files.get_file(f"{place}/{MANIFEST}", str(unfinished / MANIFEST)))
        manifest = read_manifest(unfinished)
        found = {file: self._get(f"{place}/{file}", unfinished / file).xxh3_128 for file in sorted(manifest.files)}
        compare(manifest, found)
        look(unfinished)
        fsync(unfinished)

    def keep(self, names: Sequence[str]) -> None:
        """Remove all others, also what was not completed."""
        _asked(lambda: self._keep(names))

    # ---------------------------------------------------------------- parts

    def _names(self) -> list[str]:
        # Listings are remembered, and others may have written meanwhile.
        self._files.invalidate_cache()
        found = [name for name in self._folders() if self._files.exists(f"{self._root}/{name}/{MANIFEST}")]
        return sorted(found, key=step_of)

    def _folders(self) -> list[str]:
        if not self._files.exists(self._root):
            return []
        entries = (str(path).rstrip("/").rpartition("/")[2] for path in self._files.ls(self._root, detail=False))
        return [name for name in entries if name.startswith("step-") and name[5:].isdecimal()]

    def _keep(self, names: Sequence[str]) -> None:
        self._files.invalidate_cache()
        for name in self._folders():
            if name not in names:
                place = f"{self._root}/{name}"
                if self._files.exists(f"{place}/{MANIFEST}"):
                    self._files.rm_file(f"{place}/{MANIFEST}")  # first: half-deleted never looks like broken
                self._files.rm(place, recursive=True)

    def _has(self, place: str, manifest: Path) -> bool:
        """Whether this very checkpoint is there. Another one of the same step is nothing from now on."""
        self._files.invalidate_cache()
        if self._files.exists(f"{place}/{MANIFEST}"):
            if self._files.cat_file(f"{place}/{MANIFEST}") == manifest.read_bytes():
                return True
            self._files.rm_file(f"{place}/{MANIFEST}")
        self._files.makedirs(place, exist_ok=True)
        return False

    def _put(self, path: Path, place: str) -> None:
        _asked(lambda: self._files.put_file(str(path), place))

    def _compare(self, place: str, manifest: Manifest) -> None:
        """Read back what was uploaded. Raises RemoteError."""
        try:
            compare(manifest, {name: self._hash(f"{place}/{name}") for name in sorted(manifest.files)})
        except BrokenError as error:
            raise RemoteError(f"what was uploaded reads back otherwise: {error}") from error

    def _hash(self, place: str) -> str:
        digest = xxhash.xxh3_128()
        with self._files.open(place, "rb") as file:
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
        return digest.hexdigest()

    def _get(self, place: str, path: Path) -> FileInfo:
        source = _asked(lambda: self._files.open(place, "rb"))
        with source, hashed_file(path) as file:
            while block := _asked(lambda: source.read(BLOCK_BYTES)):
                file.write(block)
        return file.info


def _asked(action: Callable[[], T]) -> T:
    """Do something at the store. Raises RemoteError for whatever it raises: every file system has errors of its own."""
    try:
        return action()
    except RemoteError:
        raise
    except Exception as error:
        raise RemoteError(f"{type(error).__name__}: {error}") from error


class Uploader:
    """Copies the newest checkpoint to a URL, behind the training's back; in a thread of rank 0."""

    def __init__(self, remote: Remote, shelf: Shelf, events: EventWriter, *, attempt: int, keep: int) -> None:
        self._remote, self._shelf, self._events = remote, shelf, events
        self._attempt, self._kept = attempt, keep
        self._news = threading.Condition()
        self._wanted: str | None = None
        self._now: str | None = None
        threading.Thread(target=self._run, name="uploader", daemon=True).start()

    def offer(self, name: str) -> None:
        """This one is complete here, and newer than what was offered before, which need not be copied any more."""
        with self._news:
            self._wanted = name
            self._shelf.in_use = {name, *([] if self._now is None else [self._now])}
            self._news.notify_all()

    def finish(self, limit_s: float) -> bool:
        """Wait until the newest one is there, or has failed to get there. Returns whether there was time for it."""
        with self._news:
            return self._news.wait_for(lambda: self._wanted is None and self._now is None, limit_s)

    def _run(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._wanted is not None)
                self._now = name = str(self._wanted)
                self._wanted = None
            try:
                self._upload(name)
            finally:
                with self._news:
                    self._now = None
                    self._shelf.in_use = set() if self._wanted is None else {self._wanted}
                    self._news.notify_all()

    def _upload(self, name: str) -> None:
        begin_s = time.monotonic()
        step = step_of(name)
        about = {"attempt": self._attempt, "step": step, "url": self._remote.url}
        try:
            size_bytes = self._remote.upload(self._shelf.folder / name)
            self._tidy(name)
        except (RemoteError, OSError, BrokenError) as error:
            print(f"THE UPLOAD OF STEP {step} to {self._remote.url} HAS FAILED: {error}", flush=True)
            self._events.write("upload_failed", **about, reason=str(error))
            return
        took = round(time.monotonic() - begin_s, 3)
        self._events.write("uploaded", **about, size_bytes=size_bytes, time_s=took)

    def _tidy(self, name: str) -> None:
        """The best one goes there too, and what is held neither there nor here goes."""
        best = self._shelf.best()
        there = self._remote.names()
        if best is not None and best not in there and best in complete(self._shelf.folder):
            self._remote.upload(self._shelf.folder / best)
            there.append(best)
        newest = sorted((other for other in there if step_of(other) <= step_of(name)), key=step_of)[-self._kept :]
        self._remote.keep([*newest, name, *([] if best is None else [best])])


class Away:
    """The store of an attempt, on one rank. `remote` and `uploader`: on rank 0."""

    def __init__(self, shelf: Shelf, *, remote: Remote | None, uploader: Uploader | None) -> None:
        self._shelf, self._remote, self._uploader = shelf, remote, uploader

    def fetch(self, meeting: Meeting) -> None:
        """Bring the newest one to rank 0's disk, where none of the disks has one that is as new; all ranks together."""
        of_ranks = meeting.gather("look for the newest one here", lambda: _newest(self._shelf.folder))
        for text in meeting.decide("fetch the newest one", lambda: self._fetch(max(of_ranks))):
            if meeting.world.rank == 0:
                print(text, flush=True)

    def _fetch(self, newer_than: int) -> list[str]:
        assert self._remote is not None
        try:
            return fetch_newest(self._remote, self._shelf, newer_than=newer_than)
        except (RemoteError, OSError) as error:
            raise RemoteError(f"{KEY}: {self._remote.url} could not be read: {error}") from error

    def offer(self, name: str) -> None:
        """This one is complete here."""
        if self._uploader is not None:
            self._uploader.offer(name)

    def finish(self, limit_s: float) -> None:
        """Wait until the newest one is there."""
        if self._uploader is not None and not self._uploader.finish(limit_s):
            print(f"the newest checkpoint was not uploaded within {limit_s:g} s; the next attempt does it", flush=True)


def _newest(folder: Path) -> int:
    return max(map(step_of, complete(folder)), default=-1)


def fetch_newest(remote: Remote, shelf: Shelf, *, newer_than: int) -> list[str]:
    """Bring the newest good one to the shelf, if there is a newer one than this step; for one rank.

    Returns what is to be said. Raises RemoteError where the store does not answer: to train from zero
    beside checkpoints that are there is not for us to decide.
    """
    said = []
    for name in reversed(remote.names()):
        if step_of(name) <= newer_than:
            break
        unfinished = shelf.unfinished(name)
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            remote.fetch(name, unfinished)
        except BrokenError as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            said.append(f"{name} at {remote.url} is broken: {error}")
            continue
        shelf.give_name(unfinished, name)
        return [*said, f"{name} was fetched from {remote.url}"]
    return said
