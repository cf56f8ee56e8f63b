"""Whether what `profiler:` wants fits these ranks and this way of starting workers. See `device_options.py`, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from launcher.planning.topology import Finding, Remarks

if TYPE_CHECKING:
    from launcher.recipe.schema import ProfilerSection, Recipe


def check_recording(recipe: Recipe, remarks: Remarks, *, device: str, world_size: int, engine: str) -> None:
    """Add what is wrong with it to the problems, all of it."""
    section = recipe.profiler
    if section is None:
        return
    remarks.problems += _of_numbers(section, world_size)
    if section.tool != "nsys" and recipe.is_script:
        message = (
            f"profiler.tool: {section.tool} is switched on in our own training loop, and this recipe runs a script"
        )
        hint = "tool: nsys records a script from outside; or torch.profiler in the script itself"
        remarks.problems.append(Finding("profiler.tool", message, hint))
    if section.tool == "nsys" and engine == "torchrun":
        message = "profiler.tool: nsys is put before the workers by our agent, and here torchrun starts them"
        remarks.problems.append(Finding("profiler.tool", message, "a torch that this launcher knows, or no profiler"))
    if section.tool == "nsys" and (recipe.is_script or device == "cpu"):
        why = "a script" if recipe.is_script else "a run on the CPU"
        remarks.notes.append(f"profiler.steps has no effect: of {why} nsys records everything, from start to end")


def _of_numbers(section: ProfilerSection, world_size: int) -> list[Finding]:
    found = []
    first, last = (int(text) for text in section.steps.split("-"))
    if first > last:
        message = f"profiler.steps: {section.steps} ends at {last}, before it begins at {first}"
        found.append(Finding("profiler.steps", message, f"steps: {last}-{first}"))
    if missing := sorted({rank for rank in section.ranks if rank >= world_size}):
        there = f"0 to {world_size - 1}" if world_size > 1 else "0 alone"
        message = (
            f"profiler.ranks: {', '.join(map(str, missing))}, and this run has rank{'s' * (world_size > 1)} {there}"
        )
        found.append(Finding("profiler.ranks", message, "ranks: [0]"))
    if not section.ranks:
        found.append(Finding("profiler.ranks", "profiler.ranks: no rank is recorded", "ranks: [0], or no `profiler`"))
    return found
