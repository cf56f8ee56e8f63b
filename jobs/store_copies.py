"""Checkpoints where the ranks see several disks: whole on the disks that hold them, or absent; sent where one is lost.

The *holders* are the disk of rank 0 and, with `checkpoint.store: replicate`, the next one. Each rank writes its part to
its own disk, and the parts travel from there to the holders that do not see them. All copies of a checkpoint are the
same bytes, with the same manifest.

At a start every disk needs the checkpoint that is gone on from, since each rank reads from its own: it is sent to those
that lack it, or have a broken one, from one that has it whole. Several versions of a step (an attempt has made it again
after the other disk was lost) are told apart by their lists of files; there is never a mix of two.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import xxhash
from torch.distributed import ProcessGroup

from jobs.circle import Circle
from jobs.durable import FileInfo, fsync, hash_file
from jobs.folders import named, read_state, step_of
from jobs.manifest import MANIFEST, STATE, BrokenError, Manifest, look, read_manifest, seal, verify
from jobs.report import Reporter
from jobs.shelf import Shelf, best_of
from jobs.state import CheckpointError
from jobs.storage import TENSORS
from jobs.store_disks import Disks
from jobs.store_record import RecordCopies
from jobs.store_travel import Parcel, carry
from jobs.world import Meeting

Files = Mapping[str, FileInfo]


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A checkpoint on one disk."""

    name: str
    version: str = ""
    """The same for the same files; empty where it cannot be used."""
    attempt: int = 0
    """Which one has written it."""
    problem: str = ""


class Copies:
    """Of an attempt, on one rank. `shelf`: the folder on the disk of this rank; `holders`: how many disks have all."""

    def __init__(
        self,
        shelf: Shelf,
        disks: Disks,
        *,
        rank: int,
        attempt: int,
        group: ProcessGroup | None,
        holders: int,
        record: RecordCopies | None = None,
    ) -> None:
        self.disks, self._shelf, self._rank, self._attempt = disks, shelf, rank, attempt
        self._group, self._record = group, record
        self._holders = [disks.lead(disk) for disk in range(min(holders, disks.count))]
        self._found: list[list[Copy]] = []
        """What is on each disk."""

    @property
    def is_lead(self) -> bool:
        """Whether this rank looks after its disk."""
        return self.disks.is_lead(self._rank)

    @property
    def is_holder(self) -> bool:
        """Whether this rank looks after a disk that has all of each checkpoint."""
        return self._rank in self._holders

    def follow(self, report: Reporter) -> None:
        """On rank 0: what this writes of the metrics is copied, too."""
        if self._record is not None:
            self._record.follow(report)

    # ---------------------------------------------------------------- a save

    def commit(self, name: str, files: Files, make: Callable[[], Manifest], circle: Circle) -> int:
        """Complete a checkpoint of which each rank has written its part; all ranks together, in any thread.

        make: on rank 0, when it has all parts: what belongs to it besides. Returns its size in bytes.
        Raises CircleError, after which the ones before are still there.
        """
        unfinished = self._shelf.unfinished(name)
        if self._record is not None:
            self._record.send(circle, self._holders)
        parts = [parcel for file, info in sorted(files.items()) if (parcel := self._to_holders(file, info))]
        circle.gather(lambda: carry(parts, lambda file: unfinished / file, self._group))
        manifest = circle.from_first(lambda: _to_json(make(), unfinished))
        small = {file: FileInfo(**info) for file, info in manifest["small"].items()}
        others = tuple(self._holders)
        parcels = [_parcel(file, info, others) for file, info in small.items()] if len(others) > 1 else []
        circle.gather(lambda: self._receive(parcels, unfinished))
        # From here on it is whole wherever it has its name; it counts when it has it on all of them.
        circle.gather(lambda: self._name(unfinished, name))
        circle.gather(lambda: self._tidy_after(name))
        return int(manifest["size_bytes"])

    def _to_holders(self, file: str, info: FileInfo) -> Parcel | None:
        """The way of what a rank has written; None where all holders see it."""
        writer = int(file.removeprefix("rank-").partition(".")[0])
        targets = [lead for lead in self._holders if self.disks.of_rank[lead] != self.disks.of_rank[writer]]
        return _parcel(file, info, (writer, *targets)) if targets else None

    def _receive(self, parcels: Sequence[Parcel], unfinished: Path) -> None:
        carry(parcels, lambda file: unfinished / file, self._group)
        if self.is_holder:
            try:
                look(unfinished)
            except BrokenError as error:
                raise CheckpointError(f"the copy on {self._place} is broken: {error}") from error
            fsync(unfinished)

    def _name(self, unfinished: Path, name: str) -> None:
        if self.is_holder:
            if (self._shelf.folder / name).exists():  # of a training that went another way
                self._shelf.drop([name])
            self._shelf.give_name(unfinished, name)

    def _tidy_after(self, name: str) -> None:
        if self.is_holder:
            self._shelf.point_to(name)
            self._shelf.prune()
        elif self.is_lead:  # what was brought here to be read, and this rank's part
            if (self._shelf.folder / name).exists():
                return  # a holder's folder, after all: a file system has shown its tokens too late
            shutil.rmtree(self._shelf.unfinished(name), ignore_errors=True)
            self._shelf.clear()

    # ---------------------------------------------------------------- a start

    def look(self, meeting: Meeting) -> tuple[list[dict[str, str]], list[str]]:
        """What is there: remarks (fields of `choice.Rejected`) and names; all ranks together.

        Left out is what a later attempt has not gone on from: its disk was away meanwhile.
        """
        if self._record is not None:
            self._record.fetch(meeting, self._group)
        told = meeting.gather("look for checkpoints", lambda: self._shelf.clean() if self.is_lead else [])
        remarks = [each for of_rank in told for each in of_rank]
        listed = meeting.gather("list the checkpoints", lambda: self._list() if self.is_lead else [])
        leads = [self.disks.lead(disk) for disk in range(self.disks.count)]
        self._found = [[Copy(**copy) for copy in listed[lead]] for lead in leads]
        for copy in _left_behind([copy for of_disk in self._found for copy in of_disk]):
            self._found = [[each for each in of_disk if each != copy] for of_disk in self._found]
            problem = f"is of attempt {copy.attempt}, and a later one has gone on without it"
            remarks.append({"name": copy.name, "problem": problem})
        return remarks, sorted({copy.name for of_disk in self._found for copy in of_disk}, key=step_of)

    def _list(self) -> list[dict[str, Any]]:
        return [asdict(self._copy(name)) for name in named(self._shelf.folder)]

    def _copy(self, name: str) -> Copy:
        try:
            manifest = look(self._shelf.folder / name)
            attempt = int(read_state(self._shelf.folder / name).get("attempt", 0))
        except (BrokenError, CheckpointError) as error:
            return Copy(name=name, problem=f"is broken: {error}")
        return Copy(name=name, version=_version(manifest), attempt=attempt)

    def bring(self, name: str, meeting: Meeting, *, to: Collection[int] | None = None) -> str:
        """Bring a checkpoint to all disks, or to those of these ranks, verified on each; all ranks together.

        Returns why that cannot be; empty where it is there. Broken copies are put aside.
        """
        disks = range(self.disks.count) if to is None else sorted({self.disks.of_rank[rank] for rank in to})
        copies = {disk: copy for disk, of in enumerate(self._found) for copy in of if copy.name == name}
        problems = [copy.problem for copy in copies.values() if copy.problem]
        versions = {copy.version: copy.attempt for copy in copies.values() if not copy.problem}
        for version in sorted(versions, key=lambda each: (-versions[each], each)):
            have = [disk for disk, copy in copies.items() if copy.version == version]
            check = partial(self._verify, name, have)
            found = meeting.gather(f"verify {name} of version {version}", check)
            problems += filter(None, found)
            good = [disk for disk in have if not any(found[rank] for rank in self.disks.ranks(disk))]
            if good:
                missing = [disk for disk in disks if disk not in good]
                self._send(name, version, meeting, good, missing, bad=copies.keys() - set(good))
                return ""
        return problems[0] if problems else "is not there any more"

    def _verify(self, name: str, disks: Collection[int]) -> str:
        """On the ranks of these disks: what is wrong with this rank's share of the copy here."""
        if self.disks.of_rank[self._rank] not in disks:
            return ""
        part, parts = self.disks.share(self._rank)
        try:
            verify(self._shelf.folder / name, part=part, parts=parts)
        except BrokenError as error:
            return f"is broken: {error}"
        return ""

    def _send(
        self,
        name: str,
        version: str,
        meeting: Meeting,
        good: Sequence[int],
        missing: Sequence[int],
        *,
        bad: Collection[int],
    ) -> None:
        """Send a checkpoint from a disk that has it to those that do not, and put what they have of it aside."""
        leads = [self.disks.lead(disk) for disk in good]
        told = meeting.gather(
            f"list the files of {name} of version {version}",
            lambda: self._manifest(name) if self._rank in leads else {},
        )
        # An evaluation may have come after the save, and its note before a kill on one of them alone.
        source = next((lead for lead in leads if told[lead]["metrics"] is not None), leads[0])
        files = {file: FileInfo(**info) for file, info in told[source]["files"].items()}
        targets = [self.disks.lead(disk) for disk in missing]
        parcels = [_parcel(file, info, (source, *targets)) for file, info in sorted(files.items())] if targets else []

        def bring() -> None:
            disk, mine = self.disks.of_rank[self._rank], self._shelf.folder / name
            unfinished = self._shelf.unfinished(name)
            if self.is_lead and disk in bad:
                self._shelf.put_aside([name])
            if self._rank in targets:
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir()
            carry(parcels, lambda file: (unfinished if self._rank in targets else mine) / file, self._group)
            if self._rank in targets:
                seal(unfinished, Manifest(files=files, metrics=told[source]["metrics"]))
                look(unfinished)
                self._shelf.give_name(unfinished, name)
            elif self._rank in leads and told[source]["metrics"] != told[self._rank]["metrics"]:
                seal(mine, replace(read_manifest(mine), metrics=told[source]["metrics"]))

        meeting.gather(f"bring {name} of version {version}", bring)
        if self._rank == 0:
            for disk in bad:
                print(f"{name} on the disk of {self.disks.names[disk]} is not used", flush=True)
            if missing:
                where = ", ".join(self.disks.names[disk] for disk in missing)
                print(f"{name} was sent from the disk of {self._name_of(source)} to {where}", flush=True)

    def _manifest(self, name: str) -> dict[str, Any]:
        manifest = read_manifest(self._shelf.folder / name)
        files = {file: asdict(info) for file, info in manifest.files.items()}
        return {"files": files, "metrics": None if manifest.metrics is None else dict(manifest.metrics)}

    def tidy(self, meeting: Meeting, in_use: str | None, broken: Sequence[str]) -> None:
        """One is gone on from: put the broken ones aside, on every disk, and have the best one on all holders."""
        meeting.gather("tidy the checkpoints", lambda: self._tidy(in_use, broken) if self.is_lead else None)
        told = meeting.gather("look for the best one", lambda: self._shelf.scores() if self.is_lead else {})
        scores = {name: score for of_rank in told for name, score in of_rank.items()}
        best = best_of(scores)
        if best is None or best == in_use or all(best in told[lead] for lead in self._holders):
            return
        if problem := self.bring(best, meeting, to=self._holders):
            print(f"{best}, the best one yet, {problem}", flush=True)

    def _tidy(self, in_use: str | None, broken: Sequence[str]) -> None:
        self._shelf.put_aside([name for name in broken if (self._shelf.folder / name).exists()])
        if in_use is not None:
            self._shelf.point_to(in_use)

    # ---------------------------------------------------------------- parts

    @property
    def _place(self) -> str:
        return self._name_of(self._rank)

    def _name_of(self, rank: int) -> str:
        return self.disks.names[self.disks.of_rank[rank]]


def _left_behind(copies: Sequence[Copy]) -> list[Copy]:
    """Those that a later attempt has not gone on from: it has written an earlier step."""
    good = [copy for copy in copies if not copy.problem]
    return [
        copy
        for copy in good
        if any(other.attempt > copy.attempt and step_of(other.name) < step_of(copy.name) for other in good)
    ]


def _version(manifest: Manifest) -> str:
    """Of the files alone: an evaluation may be noted later."""
    files = {name: asdict(info) for name, info in sorted(manifest.files.items())}
    return str(xxhash.xxh3_128(json.dumps(files).encode()).hexdigest())


def _to_json(manifest: Manifest, folder: Path) -> dict[str, Any]:
    """Of what rank 0 has just written: the small files, and the size of all."""
    own = folder / MANIFEST
    infos = {name: manifest.files[name] for name in (TENSORS, STATE)}
    infos[MANIFEST] = FileInfo(size_bytes=own.stat().st_size, xxh3_128=hash_file(own))
    return {"size_bytes": manifest.size_bytes, "small": {name: asdict(info) for name, info in infos.items()}}


def _parcel(name: str, info: FileInfo, chain: tuple[int, ...]) -> Parcel:
    return Parcel(name=name, size_bytes=info.size_bytes, chain=chain, xxh3_128=info.xxh3_128)
