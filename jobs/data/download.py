"""Files from the network: once per folder, whatever the number of processes; complete and checked, or absent."""

from __future__ import annotations

import errno
import fcntl
import gzip
import hashlib
import http.client
import os
import shutil
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CONNECT_TIMEOUT_S = 20.0
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_CHUNK_BYTES = 1 << 18


class DownloadError(RuntimeError):
    """No mirror served a file; says what each of them answered."""

    launch_plain = True


@dataclass(frozen=True)
class RemoteFile:
    """A gzipped file by its name below each mirror."""

    name: str
    md5: str
    """Of the content, unpacked."""
    is_of_content: bool = True
    """False: the MD5 is that of the file as it is served."""


def download(files: Sequence[RemoteFile], folder: Path, mirrors: Sequence[str], *, hint: str = "") -> None:
    """Bring the files that are missing in `folder`, from the first mirror that serves the right bytes.

    A file lock makes it one download however many processes ask; the lock of a dead process frees itself.
    Raises DownloadError; `hint` is what else could be done, for its message.
    """
    if all((folder / file.name).exists() for file in files):
        return
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        for file in files:
            if not (folder / file.name).exists():
                _bring(file, folder, mirrors, hint)


def cache_folder() -> Path:
    """Where data is kept that can be brought again: `launcher` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "launcher"


def part_of(path: Path) -> Path:
    """The name that a file or folder has while it is made: no other process has the same, also on another node."""
    return path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}.part")


def _bring(file: RemoteFile, folder: Path, mirrors: Sequence[str], hint: str) -> None:
    refusals = []
    part = part_of(folder / file.name)
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
        f"{file.name}: no mirror served it\n  {lines}\n  hint: copy the file into {folder} by hand{hint}"
    )


def _fetch(url: str, path: Path) -> None:
    with urllib.request.urlopen(url, timeout=CONNECT_TIMEOUT_S) as answer, path.open("wb") as file:
        while chunk := answer.read(_CHUNK_BYTES):
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


def _check(path: Path, file: RemoteFile) -> None:
    digest = hashlib.md5(usedforsecurity=False)
    with gzip.open(path) if file.is_of_content else path.open("rb") as opened:
        while chunk := opened.read(_CHUNK_BYTES):
            digest.update(chunk)
    if digest.hexdigest() != file.md5:
        raise ValueError(f"the wrong content: MD5 {digest.hexdigest()} instead of {file.md5}")


def _reason(error: Exception) -> str:
    return str(error.reason) if isinstance(error, urllib.error.URLError) else f"{type(error).__name__}: {error}"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Alone in a folder that is being filled, with nothing in it that was left half-made.

    Where the file system has no locks, it is said, and several processes may fill it at once: each under names of its
    own, until what it made is complete.
    """
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that fills {folder}", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            print(f"{folder} is on a file system without locks: another run may bring the same files", flush=True)
            yield
            return
        for leftover in folder.glob("*.part"):  # of a process that died; nobody else can be writing
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        yield
