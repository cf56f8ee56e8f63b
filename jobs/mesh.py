"""Where a rank stands in the device mesh: which share of the batch it has, and which part of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from jobs.world import World
from launcher.recipe.degrees import Degrees

AXES = ("pp", "dp", "fsdp", "tp")
"""From the outermost to the innermost."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The mesh, and this rank's place in it."""

    degrees: Degrees
    rank: int
    mesh: DeviceMesh | None = None
    """With all axes, by their names, also those of size 1. None of one rank, or plain replicas: the default group."""
    pipeline: str = "1f1b"
    """The order of forwards and backwards of the stages, or gpipe."""
    data_group: dist.ProcessGroup | None = None
    """The ranks that have the same part of the model, and other samples. None = all ranks."""

    @cached_property
    def place(self) -> dict[str, int]:
        """Coordinate on each axis."""
        rest, place = self.rank, {}
        for axis in reversed(AXES):
            rest, place[axis] = divmod(rest, getattr(self.degrees, axis))
        return place

    @property
    def data_rank(self) -> int:
        """Which share of a batch this rank has, of `degrees.data`."""
        return self.place["dp"] * self.degrees.fsdp + self.place["fsdp"]

    @property
    def data_first(self) -> int:
        """The rank with the first share, of those that have the same part of the model as this one."""
        return rank_at(self.degrees, {**self.place, "dp": 0, "fsdp": 0})

    @property
    def speaks(self) -> bool:
        """Whether the loss of this rank counts: among those with the same samples one does, on the last stage."""
        return self.place["tp"] == 0 and self.place["pp"] == self.degrees.pp - 1

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the whole model, in tensors of its own."""
        return self.mesh is None

    def axis(self, *names: str) -> DeviceMesh:
        """The part of the mesh along some axes, through this rank."""
        assert self.mesh is not None, "replicas have no mesh"
        return self.mesh[names if len(names) > 1 else names[0]]


def rank_at(degrees: Degrees, place: Mapping[str, int]) -> int:
    """The rank at these coordinates."""
    rank = 0
    for axis in AXES:
        rank = rank * getattr(degrees, axis) + place[axis]
    return rank


def make_grid(
    degrees: Degrees, world: World, device_type: str, *, pipeline: str = "1f1b", by_fsdp: bool = False
) -> Grid:
    """The place of this rank, and process groups for the axes where there are some. All ranks together.

    by_fsdp: FSDP2 makes replicas, too (hsdp with one rank per replica); it asks for a mesh.
    """
    if degrees.size == 1 or (degrees.size == degrees.dp and not by_fsdp):
        return Grid(degrees=degrees, rank=world.rank)
    sizes = tuple(getattr(degrees, axis) for axis in AXES)
    mesh = init_device_mesh(device_type, sizes, mesh_dim_names=AXES)
    group = _data_group(degrees, mesh)
    return Grid(degrees=degrees, rank=world.rank, mesh=mesh, pipeline=pipeline, data_group=group)


def _data_group(degrees: Degrees, mesh: DeviceMesh) -> dist.ProcessGroup | None:
    if degrees.model == 1:
        return None
    if degrees.dp == 1:
        return mesh.get_group("fsdp")
    if degrees.fsdp == 1:
        return mesh.get_group("dp")
    # of both axes: the mesh has a group for each of its axes, and none for two of them
    ranks = [
        [
            rank_at(degrees, {"pp": pp, "dp": dp, "fsdp": fsdp, "tp": tp})
            for dp, fsdp in product(range(degrees.dp), range(degrees.fsdp))
        ]
        for pp, tp in product(range(degrees.pp), range(degrees.tp))
    ]
    group: dist.ProcessGroup = dist.new_subgroups_by_enumeration(ranks)[0]  # type: ignore[no-untyped-call]
    return group
