"""The folder of checkpoints on one disk: what is written gets its name there, what is old goes, what is broken moves.

For one rank of those that see the folder; what all agree on is `jobs.checkpoint`'s and `jobs.store_copies`'.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from jobs.durable import fsync, write_durably
from jobs.folders import complete, step_of
from jobs.manifest import read_manifest

LATEST = "latest"
_DELETED = ".tmp-deleted"
_ASIDE = re.compile(r"step-(\d+)\.broken-\d+")


class Shelf:
    """Of one attempt. `keep`: how many of the newest stay; `best`: the metric of the one that stays too."""

    def __init__(self, folder: Path, *, attempt: int, keep: int, best: str | None) -> None:
        self.folder = folder
        self._attempt, self._keep, self._best = attempt, keep, best
        self.in_use: Collection[str] = ()
        """Names of those that somebody reads: they stay, too."""

    def unfinished(self, name: str) -> Path:
        """Where a checkpoint is written until it is whole."""
        return self.folder / f"{name}.tmp-{self._attempt}"

    def clean(self) -> list[dict[str, str]]:
        """Remove what dead attempts left. Returns what is worth saying about it (fields of `choice.Rejected`)."""
        remarks = []
        for leftover in sorted(self.folder.glob("step-*.tmp-*")):
            problem = "was not finished, and is removed"
            try:
                shutil.rmtree(leftover)
            except OSError as error:
                problem = f"was not finished, and cannot be removed: {error}"
            if not leftover.name.endswith(_DELETED):
                remarks.append({"name": leftover.name, "problem": problem})
        for probe in self.folder.glob(".probe-*"):
            if not probe.name.startswith(f".probe-{self._attempt}-"):  # of a rank that died while it tried
                probe.unlink()
        latest = self.folder / LATEST
        target = latest.read_text(encoding="utf-8", errors="replace").strip() if latest.is_file() else ""
        if target and not (self.folder / target).is_dir():
            remarks.append({"name": LATEST, "problem": f"names {target}, which is not there"})
        return remarks

    def put_aside(self, names: Collection[str]) -> None:
        """Keep what is broken out of the way, until newer ones have taken its place."""
        for name in names:
            aside = self.folder / f"{name}.broken-{self._attempt}"
            shutil.rmtree(aside, ignore_errors=True)
            (self.folder / name).rename(aside)

    def point_to(self, name: str) -> None:
        """Let `latest` name a checkpoint."""
        write_durably(self.folder / LATEST, f"{name}\n")
        fsync(self.folder)

    def give_name(self, unfinished: Path, name: str) -> None:
        """It is whole: from here on it is there."""
        unfinished.rename(self.folder / name)
        fsync(self.folder)

    def scores(self) -> dict[str, float]:
        """The complete checkpoints that were evaluated, by the metric of the recipe; more is better."""
        if self._best is None:
            return {}
        metric, direction = self._best.rsplit(" ", 1)
        sign = 1 if direction == "max" else -1
        of_each = ((name, read_manifest(self.folder / name).metrics or {}) for name in complete(self.folder))
        return {name: sign * metrics[metric] for name, metrics in of_each if metric in metrics}

    def best(self) -> str | None:
        """Name of the best checkpoint; None without one."""
        return best_of(self.scores())

    def prune(self) -> None:
        """Remove what `keep` and `best` do not hold. Only complete ones count: what is no checkpoint replaces none."""
        names = complete(self.folder)
        newest = names[-self._keep :]
        kept = {*newest, self.best(), *self.in_use}
        try:
            self.drop(name for name in names if name not in kept)
            for path in self.folder.glob("step-*"):
                aside = _ASIDE.fullmatch(path.name)
                if aside is not None and int(aside[1]) < step_of(newest[0]):
                    shutil.rmtree(path)
        except OSError as error:  # somebody reads it on a network disk: the training need not end for that
            print(f"old checkpoints could not be removed, the next save tries again: {error}", flush=True)

    def clear(self) -> None:
        """Remove all complete ones: they are on other disks."""
        try:
            self.drop(complete(self.folder))
        except OSError as error:
            print(f"checkpoints that are not needed here could not be removed: {error}", flush=True)

    def drop(self, names: Iterable[str]) -> None:
        """Remove these. Raises OSError; what is half removed then is no checkpoint."""
        for name in names:  # a rename first: half-deleted never looks like broken
            (self.folder / name).rename(self.folder / f"{name}{_DELETED}")
        for path in self.folder.glob(f"step-*{_DELETED}"):
            shutil.rmtree(path)


def best_of(scores: Mapping[str, float]) -> str | None:
    """The name with the highest score, the newest of equals."""
    return max(scores, key=lambda name: (scores[name], step_of(name)), default=None)
