"""Paths as users write them. Questions about one never raise: a bad one gets its message where it is read."""

from __future__ import annotations

import os
from pathlib import Path


def expanded(text: str) -> Path:
    """The path with `~` and `~user` replaced. One of a user that does not exist stays as written."""
    return Path(os.path.expanduser(text))  # noqa: PTH111 - Path.expanduser raises for an unknown user


def real(path: Path) -> Path:
    """The absolute path behind all links. One that leads in a circle stays as it is."""
    return Path(os.path.realpath(path))


def real_but_name(path: Path) -> Path:
    """The absolute path whose folders are no links. The last part stays: a script behind one goes by its own name."""
    return real(path.parent) / path.name


def interpreter(path: Path) -> Path:
    """The interpreter that a path is, or that of the environment whose folder it is.

    Links stay as they are: they are how an interpreter finds its environment.
    """
    absolute = Path(os.path.abspath(path))  # noqa: PTH100 - Path.absolute keeps `..`
    return absolute / "bin" / "python" if is_folder(absolute) else absolute


def is_file(path: Path) -> bool:
    """Whether there is a file. No for a name that no file can have (too long)."""
    return os.path.isfile(path)  # noqa: PTH113 - Path.is_file raises for such names


def is_folder(path: Path) -> bool:
    """Whether there is a folder. No for a name that no folder can have."""
    return os.path.isdir(path)  # noqa: PTH112 - Path.is_dir raises for such names
