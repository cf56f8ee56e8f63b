"""The checkpoints that a framework has finished in this run, one event each, and whether they are still whole.

An event is written after a checkpoint is complete. So one that was interrupted has none, and neither has one of another
run that lies in the same folder: neither is ever taken.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from .ranks import say

WRITER = "adapter"
"""Of the events, and the name of their file."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """One finished checkpoint: the fields of its event `checkpoint_saved`."""

    attempt: int
    step: int
    path: str
    """A file, or a folder; relative to the run directory where it is in there."""
    size_bytes: int
    training: int
    """Which training of the script: 1 for its first `fit` or `train`."""
    files: dict[str, int]
    """Sizes in bytes, by the path in the folder; of a single file under the empty name."""
    sha256: dict[str, str]
    """Of small files that tell it from the checkpoint of another run."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Where to go on from, and what was passed over."""

    path: str | None
    step: int
    skipped: tuple[str, ...]


Damage = Callable[[Path, Saved], str | None]
"""What a framework knows to be wrong with a checkpoint."""


class Ledger:
    """What this run has saved, in all its attempts."""

    def __init__(self) -> None:
        self._run = Path(os.environ["LAUNCH_RUN_DIR"])
        self._file = self._run / "events" / f"{WRITER}.jsonl"
        self.folder = Path(os.environ["LAUNCH_CHECKPOINT_DIR"])

    def add(self, path: Path, *, step: int, training: int, identity: tuple[str, ...] = ()) -> None:
        """Note a finished checkpoint. `identity`: its files that go by content."""
        files = _sizes_bytes(path)
        saved = Saved(
            attempt=int(os.environ["LAUNCH_ATTEMPT"]),
            step=step,
            path=self._inside(path),
            size_bytes=sum(files.values()),
            training=training,
            files=files,
            sha256={name: _sha256(path / name) for name in identity if (path / name).is_file()},
        )
        event = {"time": round(time.time(), 4), "writer": WRITER, "event": "checkpoint_saved", **asdict(saved)}
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def knows(self, path: Path) -> bool:
        """Whether a checkpoint was finished there, in any training of this run."""
        return self._inside(path) in self._all()

    def newest(
        self, *, training: int, damage: Callable[[Path, Saved], str | None] = lambda path, saved: None
    ) -> Choice:
        """The checkpoint with the most steps of a training that is still whole. `damage` says what else is wrong."""
        skipped: list[str] = []
        own = [saved for saved in self._all().values() if saved.training == training]
        for saved in sorted(own, key=lambda saved: saved.step, reverse=True):
            path = self._run / saved.path
            if not os.path.lexists(path):
                continue  # the framework keeps a few only
            reason = _changed(path, saved) or _first_damage(path) or damage(path, saved)
            if reason is None:
                return Choice(path=str(path), step=saved.step, skipped=tuple(skipped))
            skipped.append(f"{path} is broken: {reason}")
        return Choice(path=None, step=0, skipped=tuple(skipped))

    def _all(self) -> dict[str, Saved]:
        """The last word on each path: what is written over is another checkpoint."""
        try:
            lines = self._file.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return {}
        found: dict[str, Saved] = {}
        for line in lines:
            try:
                event = json.loads(line)
                saved = Saved(**{field.name: event[field.name] for field in fields(Saved)})
            except (ValueError, TypeError, KeyError):  # a line that a kill or a full disk cut short
                continue
            found[saved.path] = saved
        return found

    def _inside(self, path: Path) -> str:
        path = path.absolute()
        return str(path.relative_to(self._run)) if path.is_relative_to(self._run) else str(path)


def announce(choice: Choice, asked: str | None) -> None:
    """Say where a training begins, and why. `asked`: the checkpoint that the script itself names, if it does."""
    for skipped in choice.skipped:
        say(f"skipped: {skipped}")
    if choice.path is not None:
        instead = f", not from the script's {asked}: that was the beginning" if asked else ""
        say(f"resumes from step {choice.step}: {choice.path}{instead}")
    elif asked:
        say(f"begins with the script's {asked}: this run has no checkpoint of its own yet")
    elif os.environ["LAUNCH_ATTEMPT"] != "1":
        say("begins at step 0: this run has no checkpoint that it could go on from")


def _files(path: Path) -> Iterator[tuple[str, Path]]:
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            if file.is_file():
                yield str(file.relative_to(path)), file
    elif path.is_file():
        yield "", path


def _sizes_bytes(path: Path) -> dict[str, int]:
    return {name: file.stat().st_size for name, file in _files(path)}


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _changed(path: Path, saved: Saved) -> str | None:
    found = _sizes_bytes(path)
    for name, size_bytes in saved.files.items():
        label = name or path.name
        if name not in found:
            return f"{label} is missing"
        if found[name] != size_bytes:
            return f"{label} has {found[name]:,} bytes instead of {size_bytes:,}"
    for name, sha256 in saved.sha256.items():
        if _sha256(path / name) != sha256:
            return f"{name} is not the one that this run wrote"
    return None


def _first_damage(path: Path) -> str | None:
    for name, file in _files(path):
        reason = damage_of_file(file)
        if reason is not None:
            return f"{name or path.name} {reason}"
    return None


def damage_of_file(file: Path) -> str | None:
    """What is wrong with a file of a checkpoint, as far as its format tells; None for a good one."""
    if file.suffix in (".ckpt", ".pt", ".pth"):
        return _damage_of_archive(file)
    if file.suffix == ".safetensors":
        return _damage_of_safetensors(file)
    if file.suffix == ".json":
        try:
            json.loads(file.read_bytes())
        except ValueError:
            return "is no JSON"
    return None


def _damage_of_archive(file: Path) -> str | None:
    """torch.save writes a ZIP archive with a checksum for each tensor."""
    import torch

    try:
        with zipfile.ZipFile(file) as archive:
            # A script may turn the checksums off to save faster: then there is nothing to compare.
            bad = archive.testzip() if torch.serialization.get_crc32_options() else None
    except (zipfile.BadZipFile, EOFError, struct.error) as error:
        return f"cannot be read ({error})"
    return None if bad is None else f"is damaged inside ({bad})"


def _damage_of_safetensors(file: Path) -> str | None:
    """Eight bytes of length, a JSON header, and the tensors, which must be all there."""
    with file.open("rb") as stream:
        length = stream.read(8)
        header_bytes = int.from_bytes(length, "little") if len(length) == 8 else 0
        size_bytes = file.stat().st_size
        if not 0 < header_bytes <= size_bytes - 8:
            return "has no header"
        try:
            header = json.loads(stream.read(header_bytes))
            ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
        except (ValueError, TypeError, KeyError, AttributeError, IndexError):
            return "has a header that cannot be read"
    if 8 + header_bytes + max(ends, default=0) != size_bytes:
        return "is cut off"
    return None


def sync(path: Path) -> None:
    """Bring a folder, and every file in it, onto the disk: after a rename they are there, whatever happens."""
    for _, file in _files(path):
        _sync_one(file)
    for folder in (path, *(found for found in path.rglob("*") if found.is_dir())):
        _sync_one(folder)


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
