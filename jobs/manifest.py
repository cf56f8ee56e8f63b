"""The list of a checkpoint's files, written last: with it a folder is complete, without it the folder is nothing.

    manifest.json    {"format": 2, "files": {NAME: {"size_bytes", "xxh3_128"}}, "metrics": {...} or null,
                      "xxh3_128": hash of the rest}

The metrics stand here since an evaluation may come after the save: one file is replaced, and that is atomic.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from jobs.durable import FileInfo, fsync, hash_file, unfinished_name, write_durably
from jobs.storage import FILE, TENSORS

MANIFEST = "manifest.json"
STATE = "state.json"
FORMAT = 2
_OLD = "it is of format 1, with pickles in it; this version reads format 2 only"


class BrokenError(RuntimeError):
    """A checkpoint is not what was written; says which file and both values."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a complete checkpoint consists of."""

    files: Mapping[str, FileInfo]
    metrics: Mapping[str, float] | None = None

    @property
    def size_bytes(self) -> int:
        """Of all files."""
        return sum(info.size_bytes for info in self.files.values())


def seal(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of files that are on the disk already; the names are on the disk too when it returns."""
    content = {
        "format": FORMAT,
        "files": {name: asdict(info) for name, info in sorted(manifest.files.items())},
        "metrics": None if manifest.metrics is None else dict(manifest.metrics),
    }
    text = json.dumps({**content, "xxh3_128": _hash_of(content)}, indent=1, allow_nan=False)
    write_durably(folder / MANIFEST, text + "\n")
    fsync(folder)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder. Raises BrokenError where there is none, or another than was written."""
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if content["format"] == 1:
            raise BrokenError(_OLD)
        if content["format"] != FORMAT:
            raise BrokenError(f"it is of format {content['format']}; this version reads format {FORMAT}")
        expected = content.pop("xxh3_128")
        files = {name: FileInfo(**info) for name, info in content["files"].items()}
        metrics = content["metrics"]
    except FileNotFoundError:
        raise BrokenError(f"{MANIFEST} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BrokenError(f"{MANIFEST} cannot be read: {error!r}") from error
    if _hash_of(content) != expected:
        raise BrokenError(f"{MANIFEST} has the hash {_hash_of(content)} instead of {expected}")
    return Manifest(files=files, metrics=metrics)


def look(folder: Path) -> Manifest:
    """What can be verified without reading the tensors: names, sizes, the files in JSON. Raises BrokenError."""
    manifest = read_manifest(folder)
    _check_names(folder, manifest)
    for name, info in manifest.files.items():
        size_bytes = (folder / name).stat().st_size
        if size_bytes != info.size_bytes:
            raise BrokenError(f"{name} has {size_bytes:,} bytes instead of {info.size_bytes:,}")
    _compare_files(folder, manifest, [TENSORS, STATE])
    return manifest


def verify(folder: Path, *, part: int = 0, parts: int = 1) -> None:
    """Compare everything with the manifest. Raises BrokenError.

    One part of the files of tensors, where several ranks share the work.
    """
    manifest = look(folder)
    _compare_files(folder, manifest, share(manifest, part, parts))


def share(manifest: Manifest, part: int, parts: int) -> list[str]:
    """The files of tensors that one of several ranks verifies."""
    return sorted(manifest.files.keys() - {TENSORS, STATE}, key=_number)[part::parts]


def compare(manifest: Manifest, hashes: Mapping[str, str]) -> None:
    """Raise BrokenError where the hash of a file is not the one of the manifest."""
    for name, found in hashes.items():
        if found != manifest.files[name].xxh3_128:
            raise BrokenError(f"{name} has the hash {found} instead of {manifest.files[name].xxh3_128}")


def _compare_files(folder: Path, manifest: Manifest, names: Sequence[str]) -> None:
    for name in names:
        try:
            found = hash_file(folder / name)
        except OSError as error:
            raise BrokenError(f"{name} cannot be read: {error.strerror}") from error
        compare(manifest, {name: found})


def _number(name: str) -> int:
    return int(name.removeprefix("rank-").partition(".")[0])


def _check_names(folder: Path, manifest: Manifest) -> None:
    """Tensors and JSON are all that a checkpoint may hold: whatever else lies there, nobody shall ever load it."""
    allowed = {TENSORS, STATE}
    for name in manifest.files:
        if name not in allowed and FILE.fullmatch(name) is None:
            raise BrokenError(f"{MANIFEST} names {name!r}, which no checkpoint of ours has")
    for path in sorted(folder.iterdir()):
        if path.name not in {*manifest.files, MANIFEST, unfinished_name(folder / MANIFEST).name}:
            raise BrokenError(f"{path.name} is not in {MANIFEST}")
    for name in {*allowed, *manifest.files}:
        if name not in manifest.files:
            raise BrokenError(f"{name} is not in {MANIFEST}")
        if not (folder / name).is_file():
            raise BrokenError(f"{name} is missing")


def _hash_of(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return str(xxhash.xxh3_128(text.encode()).hexdigest())
