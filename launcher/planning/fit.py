"""Whether a recipe fits the place where it would run, as far as that is known without a plan: for `launch check`. Pure.

A recipe says what is trained, never where. So what only this machine lacks is a remark; what does not go together, or
cannot be had of the scheduler, is a problem.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from launcher.planning.decisions import ON_SLURM, check_training
from launcher.planning.profiling import check_recording
from launcher.planning.slurm_nodes import shape_nodes
from launcher.planning.topology import Device, Remarks, choose_device
from launcher.recipe.degrees import ONE_PROCESS

if TYPE_CHECKING:
    from launcher.planning.facts import Facts
    from launcher.recipe.schema import Recipe

UNKNOWN = "the workers are one per GPU: where those are known (--on), degrees and batch are checked"


def fit(recipe: Recipe, facts: Facts, executor: str) -> Remarks:
    """What is wrong, and what is to be said, about workers and devices of a recipe at an executor."""
    remarks = Remarks()
    if executor in ON_SLURM:
        shape = shape_nodes(recipe, facts, remarks, inside=executor == "here")
        return _of_training(recipe, facts, shape.device, remarks, on_slurm=True)
    here = Remarks()
    device = choose_device(recipe, facts, here)
    remarks.notes += [f"it would not start here: {problem.message}" for problem in here.problems]
    one = device.index is not None or recipe.parallelism.name in ONE_PROCESS
    if here.problems and recipe.resources.nproc_per_node == "auto" and not one:
        remarks.notes.append(UNKNOWN)
        return remarks
    return _of_training(recipe, facts, device, remarks, on_slurm=False)


def _of_training(recipe: Recipe, facts: Facts, device: Device, remarks: Remarks, *, on_slurm: bool) -> Remarks:
    check_training(recipe, facts, device, remarks, elsewhere=on_slurm)
    world_size = recipe.resources.max_nodes * device.nproc_per_node
    check_recording(recipe, remarks, device=device.name, world_size=world_size, engine="agent")
    return remarks
