"""Which files the data of a recipe names, and whether this machine has them: the workers would look for them here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher.recipe.catalog import catalog

_PATTERN = re.compile(r"[*?\[]")


def missing_files(name: str | None, options: Mapping[str, Any], folder: Path) -> Iterator[tuple[str, Path]]:
    """Options of a data set that name a file or folder which is not there, and where it would be.

    name: of ours; what a `target` does with its options is its own. folder: where the workers are, to which paths are
    relative. A pattern may match nothing yet, and is left to the worker.
    """
    yield from ((option, path) for option, path in named_files(name, options, folder) if not path.exists())


def named_files(name: str | None, options: Mapping[str, Any], folder: Path) -> Iterator[tuple[str, Path]]:
    """Options of a data set that name a file or folder, and where that would be. As for `missing_files`."""
    entry = catalog("datasets").get(name or "")
    if entry is None:
        return
    for option in entry.paths:
        value = options.get(option)
        if isinstance(value, str) and value not in entry.no_paths and not _PATTERN.search(value):
            yield option, folder / Path(value).expanduser()
