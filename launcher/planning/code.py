"""Which code a run is, as values: its files and their hashes, and how one differs from another. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

LINK = "-> "
"""What stands for the hash of a symbolic link, before its target."""


@dataclass(frozen=True, kw_only=True)
class CodeSource:
    """What is launched, and where its code is looked for."""

    root: str
    """The live workdir, absolute."""
    script: str | None
    """Absolute."""
    module: str | None
    runs_dir: str
    """Where run directories are made: no part of any code."""
    holds_secret: Callable[[bytes], bool] = lambda content: False
    """Whether a text has a secret of the user's in it, which no copy may hold."""


@dataclass(frozen=True, kw_only=True)
class CodeFacts:
    """The code of a run: what is copied, or what is watched."""

    root: str
    """The live folder that `files` are relative to."""
    snapshot: bool
    """Whether it can be copied. Else `files` are those of the live tree that are watched."""
    reason: str = ""
    """Why it is not copied."""
    files: dict[str, str] = field(default_factory=dict)
    """Path -> sha256 of the content; of a symbolic link `-> target`."""
    size_bytes: int = 0
    links: dict[str, str] = field(default_factory=dict)
    """What git ignores: path -> where it lies."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Path -> why it is not copied."""

    @property
    def sha256(self) -> str:
        """Over names and contents of the files."""
        lines = "".join(f"{path}\0{self.files[path]}\n" for path in sorted(self.files))
        return hashlib.sha256(lines.encode(errors="surrogateescape")).hexdigest()


@dataclass(frozen=True, kw_only=True)
class CodeChanges:
    """How one code differs from another: paths, sorted."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    modified: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.modified)

    def lines(self, limit: int = 10) -> list[str]:
        """`modified train.py`, at most so many, and how many more there are."""
        kinds = (("modified", self.modified), ("added", self.added), ("removed", self.removed))
        every = [f"{kind} {path}" for kind, paths in kinds for path in paths]
        return every[:limit] + ([f"and {len(every) - limit} more"] if len(every) > limit else [])


def code_changes(old: CodeFacts, new: CodeFacts) -> CodeChanges:
    """What changed from one to the other. What either of them left out is no change."""
    left_out = old.skipped.keys() | new.skipped.keys()
    before, after = (
        {path: digest for path, digest in each.files.items() if path not in left_out} for each in (old, new)
    )
    return CodeChanges(
        added=tuple(sorted(after.keys() - before.keys())),
        removed=tuple(sorted(before.keys() - after.keys())),
        modified=tuple(sorted(path for path in before.keys() & after.keys() if before[path] != after[path])),
    )


def is_link(digest: str) -> bool:
    """Whether it is that of a symbolic link."""
    return digest.startswith(LINK)
