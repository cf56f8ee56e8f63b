"""Where a rank stands in the device mesh: which share of the batch it has, and which part of the model."""

from __future__ import annotations

from dataclasses import dataclass

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
    """With all axes, by their names, also those of size 1. None where only `dp` is more than 1: the default group."""

    @property
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
    def speaks(self) -> bool:
        """Whether the loss of this rank counts: among those with the same samples one does, on the last stage."""
        return self.place["tp"] == 0 and self.place["pp"] == self.degrees.pp - 1

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the whole model."""
        return self.degrees.size == self.degrees.dp


def make_grid(degrees: Degrees, world: World, device_type: str) -> Grid:
    """The place of this rank, and process groups for the axes where there are some. All ranks together."""
    if degrees.size == degrees.dp:
        return Grid(degrees=degrees, rank=world.rank)
    sizes = tuple(getattr(degrees, axis) for axis in AXES)
    return Grid(degrees=degrees, rank=world.rank, mesh=init_device_mesh(device_type, sizes, mesh_dim_names=AXES))
