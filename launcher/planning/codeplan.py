"""The code in a plan: from a copy in the run directory, or from the live tree. Pure."""

from __future__ import annotations

import dataclasses
import posixpath
from typing import TYPE_CHECKING

from launcher.planning.code import CodeSource
from launcher.planning.plan import CODE, CodePlan, Plan
from launcher.wording import count

if TYPE_CHECKING:
    from collections.abc import Callable

    from launcher.planning.code import CodeFacts
    from launcher.recipe.loader import LoadedRecipe


def code_source(
    loaded: LoadedRecipe, *, cwd: str, runs_dir: str, holds_secret: Callable[[bytes], bool]
) -> CodeSource | None:
    """Where the code of a recipe is looked for; None for the built-in job."""
    recipe = loaded.recipe
    if not recipe.is_script:
        return None
    folder = cwd if loaded.source is None else str(loaded.source.parent)
    return CodeSource(
        root=cwd if recipe.workdir is None else absolute(folder, recipe.workdir),
        script=None if recipe.script is None else absolute(folder, recipe.script),
        module=recipe.module,
        runs_dir=absolute(cwd, runs_dir),
        holds_secret=holds_secret,
    )


def code_plan(code: CodeFacts) -> CodePlan:
    """What a plan says of a code."""
    return CodePlan(
        root=code.root,
        snapshot=code.snapshot,
        reason=code.reason,
        sha256=code.sha256,
        files=len(code.files),
        size_bytes=code.size_bytes,
    )


def with_code(plan: Plan, code: CodeFacts | None) -> Plan:
    """The plan that runs this code. The script is the one of the copy, if there is one; the cwd stays the live one."""
    if code is None:
        return plan
    worker = plan.worker
    if code.snapshot and worker.script is not None:
        inside = posixpath.relpath(worker.script, code.root)
        worker = dataclasses.replace(worker, script=posixpath.join(plan.run_dir, CODE, inside))
    left_out = (f"not in the copy of the code: {_shown(path)}: {why}" for path, why in code.skipped.items())
    return dataclasses.replace(plan, code=code_plan(code), worker=worker, notes=(*plan.notes, *left_out))


def code_text(code: CodePlan) -> str:
    """What a dry run says about the code."""
    files = count(code.files, "file")
    if code.snapshot:
        return f"a copy of {code.root}: {files}, {_size(code.size_bytes)}; the same for every attempt"
    return f"in {code.root}, not copied: {code.reason}. A change of its {files} stops a resume"


def absolute(base: str, path: str) -> str:
    """A path as it is seen from a folder, without looking at the disk."""
    return posixpath.normpath(posixpath.join(base, path))


def _shown(path: str) -> str:
    """A path as text, whatever its bytes are."""
    return path.encode(errors="surrogateescape").decode(errors="replace")


def _size(size_bytes: int) -> str:
    for unit, size in (("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= size:
            return f"{size_bytes / size:.1f} {unit}"
    return f"{size_bytes} bytes"
