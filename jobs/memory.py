"""States in the memory of the nodes, which outlive the processes that trained them: where an attempt may go on from.

LAUNCH_MEMORY_DIR, one folder per node, has folders `step-<n>` in the format of checkpoints: what a survivor of the last
attempt kept (`jobs.kept`), and snapshots. The agent makes and removes the folder. One rank of each node looks after it.

A state is read and verified by one rank, of the node that has it, and comes to all the others from there.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from jobs.folders import named, read_state, step_of
from jobs.manifest import STATE, BrokenError, compare, look, read_manifest, share
from jobs.private_torch import copy_each
from jobs.state import CheckpointError, DifferenceError, TrainingState
from jobs.storage import TENSORS, parse_list
from jobs.world import Meeting, World
from launcher.agent.memory import VARIABLE

BLOCK_BYTES = 32 << 20
"""What travels at once."""


@dataclass(frozen=True, kw_only=True)
class InMemory:
    """A state in the memory of a node."""

    name: str
    problem: str
    """Why it cannot be used; empty where nothing was found without reading the tensors."""
    reader: int
    """The rank that can read it."""
    node: int
    kept_by: int | None
    """The rank of an earlier attempt that kept it; None: a snapshot."""

    @property
    def step(self) -> int:
        """Of the state."""
        return step_of(self.name)

    @property
    def full_name(self) -> str:
        """Its name, with the node."""
        return f"{self.name} in the memory of node {self.node}"

    def __str__(self) -> str:
        return self.full_name

    @property
    def place(self) -> str:
        """For people."""
        if self.kept_by is None:
            return f"a snapshot in the memory of node {self.node}"
        return f"kept in the memory of node {self.node} (rank {self.kept_by})"


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a checkpoint says beside its tensors."""

    state: Mapping[str, Any]
    """state.json."""
    metrics: Mapping[str, float] | None


class Memory:
    """The folder of this node; None: it has none."""

    def __init__(self, folder: Path | None, world: World, *, run_id: str) -> None:
        self._folder, self._world, self._run_id = folder, world, run_id
        self._is_mine = folder is not None and world.local_rank == 0

    @classmethod
    def from_env(cls, env: Mapping[str, str], world: World, *, run_id: str) -> Memory:
        """Of this process."""
        folder = env.get(VARIABLE)
        return cls(Path(folder) if folder else None, world, run_id=run_id)

    def look(self, meeting: Meeting) -> list[InMemory]:
        """The states of all nodes, newest first; all ranks together. Removes what was not finished."""
        found = meeting.gather("look into the memory", lambda: list(self._look()))
        states = [InMemory(**each) for of_rank in found for each in of_rank]
        return sorted(states, key=lambda each: (-each.step, each.reader))

    def load(
        self, chosen: InMemory, meeting: Meeting, state: TrainingState, group: ProcessGroup | None
    ) -> tuple[str, Found | None]:
        """Bring a state to all ranks; all together. Returns why that is worth nothing, or what else was found."""
        if chosen.problem:
            return chosen.problem, None
        if not state.is_whole:
            return "is of no use to ranks that share the model out", None
        reader = chosen.reader
        is_reader = self._world.rank == reader
        what = f"read {chosen.full_name}"
        read: list[Any] = meeting.gather(what, lambda: self._read(chosen, state) if is_reader else None)
        problem, saved, metrics, listed = read[reader]
        if problem:
            return problem, None
        if is_reader:
            spread(state.tensors(), reader, group)
        else:
            tensors, _ = parse_list(listed)
            state.refill(chosen.full_name, saved["optimizer"], tensors, lambda into: spread(into, reader, group))
        return "", Found(state=saved, metrics=metrics)

    def remove(self, states: Sequence[InMemory]) -> None:
        """Remove those of them that are on this node."""
        for each in states:
            if self._is_mine and each.reader == self._world.rank:
                assert self._folder is not None
                shutil.rmtree(self._folder / each.name, ignore_errors=True)

    def saved(self, step: int) -> None:
        """A checkpoint is complete on disk: what is older, or the same, is of no use any more."""
        if self._is_mine:
            assert self._folder is not None
            for name in named(self._folder):
                if step_of(name) <= step:
                    shutil.rmtree(self._folder / name, ignore_errors=True)

    def _look(self) -> Iterator[dict[str, Any]]:
        if not self._is_mine:
            return
        assert self._folder is not None
        for leftover in self._folder.glob("step-*.tmp-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        for name in named(self._folder):
            problem, kept_by = "", None
            try:
                look(self._folder / name)
                content = read_state(self._folder / name)
                kept_by = content.get("kept", {}).get("rank")
                problem = self._difference(name, content)
            except (BrokenError, CheckpointError) as error:
                problem = f"is broken: {error}"
            yield {
                "name": name,
                "problem": problem,
                "reader": self._world.rank,
                "node": self._world.node,
                "kept_by": kept_by,
            }

    def _difference(self, name: str, content: Mapping[str, Any]) -> str:
        if content["run_id"] != self._run_id:
            return f"is of another run: {content['run_id']}, not {self._run_id}"
        if content["step"] != step_of(name):
            return f"is broken: {STATE} says step {content['step']}"
        return ""

    def _read(self, chosen: InMemory, state: TrainingState) -> tuple[str, Any, Any, Any]:
        """On the rank that has it: restore, alone, and verify. Returns what is wrong, and what the others must know.

        Raises DifferenceError.
        """
        assert self._folder is not None
        path = self._folder / chosen.name
        try:
            saved, manifest = read_state(path), read_manifest(path)
            hashes = state.restore(path, saved["optimizer"], None, verify=share(manifest, 0, 1), alone=True)
            compare(manifest, hashes)
        except DifferenceError:
            raise
        except (BrokenError, CheckpointError) as error:
            return f"is broken: {error}", None, None, None
        return "", saved, manifest.metrics, json.loads((path / TENSORS).read_text(encoding="utf-8"))


def of_no_use(states: Sequence[InMemory], chosen: str | InMemory, rejected: Collection[str]) -> list[InMemory]:
    """What can go now that a training goes on from one of them, or from a checkpoint on the disk."""
    if isinstance(chosen, str):
        return list(states)
    return [each for each in states if each.step != chosen.step or each.full_name in rejected]


def spread(tensors: Mapping[str, Tensor], source: int, group: ProcessGroup | None) -> None:
    """Bring the tensors of one rank into those of all others: same names, types and shapes everywhere.

    As bytes, in blocks: many small ones travel together, a large one in parts. Over a group of gloo, so tensors on a
    GPU come through the memory of the host.
    """
    is_source = dist.get_rank() == source
    ordered = [tensors[name].detach() for name in sorted(tensors) if tensors[name].numel()]
    on_host = [tensor.cpu().contiguous() for tensor in ordered]  # the tensor itself, where it is that already
    parts = [part for tensor in on_host for part in torch.split(tensor.reshape(-1).view(torch.uint8), BLOCK_BYTES)]
    block = torch.empty(min(BLOCK_BYTES, sum(map(len, parts))), dtype=torch.uint8)
    for together in _fill(parts):
        sizes = [len(part) for part in together]
        view = block[: sum(sizes)]
        if is_source:
            torch.cat(together, out=view)
        dist.broadcast(view, src=source, group=group)
        if not is_source:
            copy_each(together, list(torch.split(view, sizes)))
    for tensor, received in zip(ordered, on_host, strict=True):
        if not is_source and received is not tensor:
            tensor.copy_(received)


def _fill(parts: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Parts that fit into a block together."""
    together: list[Tensor] = []
    for part in parts:
        if together and sum(map(len, together)) + len(part) > BLOCK_BYTES:
            yield together
            together = []
        together.append(part)
    if together:
        yield together
