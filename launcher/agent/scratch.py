"""A folder for the temporary files of a run, on the node's own disk: what its processes leave there goes with the run.

It is short, `/tmp/launch-m3xd-4711-9a3f21-1c5e77b0`, since multiprocessing and W&B make sockets below TMPDIR, and the
path of a socket has at most 107 bytes. The name says whose it is: the run, pid and start of its owner, and the place
where that pid counts. The owner removes it at the end; if it was killed, the last zygote does, or the next run of the
same user.
Standard library only.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import shutil
import socket
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from launcher.agent import proc

_NAME = re.compile(r"launch-(?P<run>[^-]+)-(?P<pid>\d+)-(?P<start>[0-9a-f]+)-(?P<place>[0-9a-f]{8})")
_MAX_LENGTH = 68
"""A longer path leaves no room for the sockets below it: the folder is made in `_SHORT` then."""
_SHORT = "/tmp"
_COMPILED = "TORCHINDUCTOR_CACHE_DIR"
VARIABLES = ("TMPDIR", _COMPILED)
"""What `make` sets."""


def make(run_id: str, *, base: str | None = None) -> None:
    """Make the folder, and make it TMPDIR of this process and its children. Where that cannot be, say so.

    base: the folder that it is made in; None = where temporary files go anyway.
    """
    given, base = base, tempfile.gettempdir() if base is None else base
    folder = Path(base, owned_name(run_id))
    if len(os.fsencode(folder)) > _MAX_LENGTH:
        folder = Path(_SHORT, folder.name)
        if given is not None:
            print(f"launch: {given} is too long for sockets below it: temporary files go to {_SHORT}", file=sys.stderr)
    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        print(f"launch: temporary files stay in {base}: {folder} cannot be made: {error.strerror}", file=sys.stderr)
        return
    # What torch has compiled is kept from run to run, where torch would keep it.
    os.environ.setdefault(_COMPILED, str(Path(base, f"torchinductor_{_user()}")))
    os.environ["TMPDIR"] = str(folder)
    forget_default()


def forget_default() -> None:
    """TMPDIR is read anew: `tempfile` keeps what it found first, and forked processes inherit that."""
    tempfile.tempdir = None


def clear() -> None:
    """Remove TMPDIR, where it is a folder of this process, or of an owner that is dead."""
    if remove_owned(os.environ.get("TMPDIR", "/")):
        with contextlib.suppress(OSError, KeyError):
            os.rmdir(os.environ[_COMPILED])  # noqa: PTH106 - only where it is empty: importing torch._dynamo makes it


def sweep(*, base: str | None = None) -> None:
    """Remove what killed runs of this user have left here, in this folder too."""
    for folder in {tempfile.gettempdir(), _SHORT, base or _SHORT}:
        for found in abandoned(folder):
            shutil.rmtree(found, ignore_errors=True)


def owned_name(run_id: str) -> str:
    """The name of a folder of this process: of the run, and with its owner."""
    return f"launch-{_tail(run_id)}-{os.getpid()}-{proc.start_time(os.getpid()) or 0:x}-{_place()}"


def remove_owned(path: str) -> bool:
    """Remove a folder with such a name, if it is of this process or of an owner that is dead; whether it was."""
    folder = Path(path)
    match = _NAME.fullmatch(folder.name)
    if match is None or (int(match["pid"]) != os.getpid() and _owner_lives(match)):
        return False
    shutil.rmtree(folder, ignore_errors=True)
    return True


def abandoned(base: str) -> list[Path]:
    """Folders with such names in this one whose owners are dead, and whose runs have no process left here."""
    found = list(_abandoned(base))
    living = _living_runs() if found else set()
    return [path for path, run in found if run not in living]


def _abandoned(base: str) -> Iterator[tuple[Path, str]]:
    """Folders of dead owners, with the end of their run's id."""
    for entry in os.scandir(base):
        match = _NAME.fullmatch(entry.name)
        if match is None or match["place"] != _place() or not entry.is_dir(follow_symlinks=False):
            continue
        with contextlib.suppress(FileNotFoundError):  # its owner has just removed it
            if entry.stat(follow_symlinks=False).st_uid == os.getuid() and not _owner_lives(match):
                yield Path(entry.path), match["run"]


def _living_runs() -> set[str]:
    """Ends of the run ids of all processes that live: one of them may still use the folder of its dead owner."""
    found = set()
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                for variable in Path(entry.path, "environ").read_bytes().split(b"\0"):
                    if variable.startswith(b"LAUNCH_RUN_ID="):
                        found.add(_tail(os.fsdecode(variable)))
    return found


def _owner_lives(match: re.Match[str]) -> bool:
    """Whether the process with this number is still the one that made the folder."""
    return proc.start_time(int(match["pid"])) == int(match["start"], 16)


def _tail(run_id: str) -> str:
    return run_id.rpartition("-")[2][-4:] or "run"


def _place() -> str:
    """This host and its space of pids: elsewhere the same number is another process."""
    pids = Path("/proc/self/ns/pid").readlink()
    return f"{zlib.crc32(f'{socket.gethostname()} {pids}'.encode()):08x}"


def _user() -> str:
    """As torch spells it in the name of its cache."""
    try:
        name = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        name = f"uid_{os.getuid()}"
    return re.sub(r'[\\/:*?"<>|]', "_", name)
