"""The list of a checkpoint's files, written last: with it a folder is complete, without it the folder is nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import xxhash

MANIFEST = "manifest.json"
_CHUNK_BYTES = 1 << 22


class BrokenError(RuntimeError):
    """A checkpoint is not what was written; says which file and both values."""


def seal(folder: Path) -> int:
    """Bring all files of a folder to the disk and write its manifest. Returns their total size in bytes."""
    files = {path.name: _describe(path) for path in sorted(folder.iterdir())}
    for name in files:
        fsync(folder / name)
    write_durably(folder / MANIFEST, json.dumps({"format": 1, "files": files}, indent=1) + "\n")
    fsync(folder)
    return sum(int(entry["size_bytes"]) for entry in files.values())


def verify(folder: Path) -> None:
    """Compare every file with the manifest: size, then hash. Raises BrokenError."""
    for name, expected in _read(folder).items():
        path = folder / name
        if not path.is_file():
            raise BrokenError(f"{name} is missing")
        if path.stat().st_size != expected["size_bytes"]:
            raise BrokenError(f"{name} has {path.stat().st_size} bytes instead of {expected['size_bytes']}")
        found = _describe(path)["xxh3_128"]
        if found != expected["xxh3_128"]:
            raise BrokenError(f"{name} has the hash {found} instead of {expected['xxh3_128']}")


def write_durably(path: Path, text: str) -> None:
    """Write a small file under another name, bring it to the disk, and give it its name."""
    unnamed = path.with_name(f".{path.name}.tmp")
    unnamed.write_text(text, encoding="utf-8")
    fsync(unnamed)
    unnamed.rename(path)


def fsync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(folder: Path) -> dict[str, dict[str, Any]]:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files: dict[str, dict[str, Any]] = manifest["files"]
    except FileNotFoundError:
        raise BrokenError(f"{MANIFEST} is missing") from None
    except (ValueError, KeyError, TypeError) as error:
        raise BrokenError(f"{MANIFEST} cannot be read: {error!r}") from error
    return files


def _describe(path: Path) -> dict[str, Any]:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return {"size_bytes": path.stat().st_size, "xxh3_128": digest.hexdigest()}
