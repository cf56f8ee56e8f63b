"""Files from the network: once per folder, whatever the number of processes; complete and checked, or absent."""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CONNECT_TIMEOUT_S = 20.0
_CHUNK_BYTES = 1 << 18


class DownloadError(RuntimeError):
    """No mirror served a file; says what each of them answered."""

    launch_plain = True


@dataclass(frozen=True)
class RemoteFile:
    """A gzipped file by its name below each mirror."""

    name: str
    raw_md5: str
    """Of the content, unpacked."""


def download(files: Sequence[RemoteFile], folder: Path, mirrors: Sequence[str]) -> None:
    """Bring the files that are missing in `folder`, from the first mirror that serves the right bytes.

    A file lock makes it one download however many processes ask; the lock of a dead process frees itself.
    Raises DownloadError.
    """
    if all((folder / file.name).exists() for file in files):
        return
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / ".lock"):
        for leftover in folder.glob("*.part"):  # of a process that died; nobody else can be writing
            leftover.unlink()
        for file in files:
            if not (folder / file.name).exists():
                _bring(file, folder, mirrors)


def _bring(file: RemoteFile, folder: Path, mirrors: Sequence[str]) -> None:
    refusals = []
    part = folder / f"{file.name}.part"
    for mirror in mirrors:
        url = f"{mirror.rstrip('/')}/{file.name}"
        print(f"downloading {url}", flush=True)
        try:
            _fetch(url, part)
            _check(part, file)
        except (OSError, http.client.HTTPException, EOFError, ValueError) as error:
            refusals.append(f"{url}: {_reason(error)}")
            print(refusals[-1], flush=True)
            continue
        part.rename(folder / file.name)
        return
    lines = "\n  ".join(refusals)
    raise DownloadError(
        f"{file.name}: no mirror served it\n  {lines}\n"
        f"  hint: copy the file into {folder} by hand, or use the shipped sample (data.full=false)"
    )


def _fetch(url: str, path: Path) -> None:
    with urllib.request.urlopen(url, timeout=CONNECT_TIMEOUT_S) as answer, path.open("wb") as file:
        while chunk := answer.read(_CHUNK_BYTES):
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


def _check(path: Path, file: RemoteFile) -> None:
    digest = hashlib.md5(usedforsecurity=False)
    with gzip.open(path) as unpacked:
        while chunk := unpacked.read(_CHUNK_BYTES):
            digest.update(chunk)
    if digest.hexdigest() != file.raw_md5:
        raise ValueError(f"the wrong content: MD5 {digest.hexdigest()} instead of {file.raw_md5}")


def _reason(error: Exception) -> str:
    return str(error.reason) if isinstance(error, urllib.error.URLError) else f"{type(error).__name__}: {error}"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that downloads into {path.parent}", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
