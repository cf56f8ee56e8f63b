"""The code in a plan: from a copy in the run directory, or from the live tree. Pure."""

from __future__ import annotations

import dataclasses
import posixpath
from typing import TYPE_CHECKING

from launcher.planning.plan import CodePlan, Plan

if TYPE_CHECKING:
    from launcher.planning.codefacts import CodeFacts

CODE = "code"
"""The folder of the copy, in the run directory."""


def with_code(plan: Plan, code: CodeFacts | None) -> Plan:
    """The plan that runs this code. The script is the one of the copy, if there is one; the cwd stays the live one."""
    if code is None:
        return plan
    made = CodePlan(
        root=code.root,
        snapshot=code.snapshot,
        reason=code.reason,
        sha256=code.sha256,
        files=len(code.files),
        size_bytes=code.size_bytes,
    )
    worker = plan.worker
    if code.snapshot and worker.script is not None:
        inside = posixpath.relpath(worker.script, code.root)
        worker = dataclasses.replace(worker, script=posixpath.join(plan.run_dir, CODE, inside))
    notes = [*plan.notes, *(f"not in the copy of the code: {path}: {why}" for path, why in code.skipped.items())]
    return dataclasses.replace(plan, code=made, worker=worker, notes=tuple(notes))


def live_script(plan: Plan) -> str | None:
    """Where the user's own file of the script lies."""
    script, code = plan.worker.script, plan.code
    if script is None or code is None or not code.snapshot:
        return script
    return posixpath.normpath(posixpath.join(code.root, posixpath.relpath(script, posixpath.join(plan.run_dir, CODE))))


def code_text(code: CodePlan) -> str:
    """What a dry run says about the code."""
    files = f"{code.files:,} file" + ("" if code.files == 1 else "s")
    if code.snapshot:
        return f"a copy of {code.root}: {files}, {_size(code.size_bytes)}; the same for every attempt"
    return f"{code.root}, not copied ({code.reason}); {files} watched: a change stops the next `launch resume`"


def _size(size_bytes: int) -> str:
    for unit, size in (("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= size:
            return f"{size_bytes / size:.1f} {unit}"
    return f"{size_bytes} bytes"
