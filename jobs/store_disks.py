"""Which ranks see the same folder: a token of each node is written there, and all nodes look for it.

A *disk* is a folder of the run as some nodes see it together. On a shared file system there is one, whatever anybody
has configured; two machines without one have two, although the folder has the same path on both.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jobs.world import Meeting
from launcher.wording import count

SEEN_S = 5.0
"""How long a token may take to be seen on a node where `checkpoint.store` says that it must be."""
_PAUSE_S = 0.05


class StoreError(RuntimeError):
    """`checkpoint.store` does not fit what there is: to try again would not help."""

    launch_plain = True


@dataclass(frozen=True, kw_only=True)
class Disks:
    """The disks of an attempt, by the lowest rank that sees each: disk 0 is the one of rank 0."""

    of_rank: tuple[int, ...]
    """The disk of each rank."""
    names: tuple[str, ...]
    """Of each disk, for people: its nodes."""

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.names)

    def ranks(self, disk: int) -> list[int]:
        """Who sees it."""
        return [rank for rank, its in enumerate(self.of_rank) if its == disk]

    def lead(self, disk: int) -> int:
        """The rank that looks after it."""
        return self.of_rank.index(disk)

    def is_lead(self, rank: int) -> bool:
        """Whether this rank looks after its disk."""
        return self.lead(self.of_rank[rank]) == rank

    def share(self, rank: int) -> tuple[int, int]:
        """What a rank does of work that all who see its disk share out: which part, of how many."""
        ranks = self.ranks(self.of_rank[rank])
        return ranks.index(rank), len(ranks)


def one_disk(size: int) -> Disks:
    """All ranks see the same."""
    return Disks(of_rank=(0,) * size, names=("all nodes",))


def find_disks(meeting: Meeting, folder: Path, *, attempt: int, must_be_one: bool) -> Disks:
    """Find out who shares a folder with whom, all ranks together. The folder is there, and can be written.

    must_be_one: to see nothing at once is not enough to say that it is not shared.
    """
    world = meeting.world
    nodes = meeting.gather("tell the nodes", lambda: world.node)
    leads = {node: nodes.index(node) for node in nodes}
    if len(leads) == 1:
        return one_disk(world.size)
    is_lead = leads[world.node] == world.rank
    token = folder / f".probe-{attempt}-shared-{world.rank}-{secrets.token_hex(8)}"
    try:
        told = meeting.gather("leave a token", lambda: _leave(token) if is_lead else "")
        tokens = {rank: name for rank, name in enumerate(told) if name}
        limit_s = SEEN_S if must_be_one else 0.0
        seen = meeting.gather("look for the tokens", lambda: _look(folder, tokens, limit_s) if is_lead else [])
    finally:
        if is_lead:
            token.unlink(missing_ok=True)
    return _join([leads[node] for node in nodes], nodes, seen)


def refuse_several(disks: Disks, folder: Path) -> None:
    """Raise StoreError where `checkpoint.store: shared` is not what there is."""
    if disks.count > 1:
        others = ", ".join(disks.names[1:])
        raise StoreError(
            f"checkpoint.store: shared, and {folder} is another folder on {others} than on {disks.names[0]}: what one "
            "node writes there the others do not see. Put the runs on a file system that all nodes share (--runs-dir), "
            "or set checkpoint.store: replicate (the newest checkpoint on two nodes), or a URL such as s3://bucket/runs"
        )


def _leave(token: Path) -> str:
    token.write_text("who sees this has the same disk\n", encoding="utf-8")
    return token.name


def _look(folder: Path, tokens: dict[int, str], limit_s: float) -> list[int]:
    """Whose tokens are seen here. By their names, which nobody has asked for yet: NFS asks its server then."""
    return _until(lambda: [rank for rank, name in tokens.items() if (folder / name).exists()], len(tokens), limit_s)


def _until(look: Callable[[], list[int]], wanted: int, limit_s: float) -> list[int]:
    deadline_s = time.monotonic() + limit_s
    while len(found := look()) < wanted and time.monotonic() < deadline_s:
        time.sleep(_PAUSE_S)
    return found


def _join(lead_of: Sequence[int], nodes: Sequence[int], seen: Sequence[Sequence[int]]) -> Disks:
    """One is enough to see the other."""
    group = list(lead_of)
    for rank, others in enumerate(seen):
        for other in others:
            low, high = sorted((group[rank], group[other]))
            group = [low if each == high else each for each in group]
    firsts = sorted(set(group))
    of_rank = tuple(firsts.index(each) for each in group)
    names = []
    for disk in range(len(firsts)):
        its = sorted({node for node, each in zip(nodes, of_rank, strict=True) if each == disk})
        names.append(f"{'node' if len(its) == 1 else 'nodes'} {', '.join(map(str, its))}")
    return Disks(of_rank=of_rank, names=tuple(names))


def sentence(disks: Disks, store: str) -> str:
    """What is said of the disks where a recipe asks for more than a shared folder; empty where nothing is to be."""
    if store == "replicate" and disks.count == 1:
        return "checkpoint.store: replicate: all nodes see one folder, so a checkpoint is there once, and not copied"
    if store == "replicate":
        return f"checkpoints are kept on the disks of {disks.names[0]} and {disks.names[1]}"
    if store != "shared" and disks.count > 1:
        return f"checkpoints are put together on the disk of {disks.names[0]} ({count(disks.count, 'disk')})"
    return ""
