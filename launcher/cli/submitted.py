"""What is said of a job that SLURM has accepted: where, with what, what ends it and what then, when, and what next."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.planning.slurm import ends_text
from launcher.wording import count, duration

if TYPE_CHECKING:
    from launcher.executors.base import JobRef
    from launcher.planning.plan import Plan
    from launcher.runs.observed import Observation


def submitted_block(
    plan: Plan,
    ref: JobRef,
    seen: Observation,
    *,
    cwd: Path,
    free_bytes: int,
    now_s: float,
    follows: bool = False,
    saved: int | None = None,
) -> str:
    """For people. `free_bytes`: of the disk of the run directory; `now_s`: in seconds since the epoch.

    follows: the output of the run comes next. saved: of a resume, the step of the newest checkpoint.
    """
    jobs = f"job {ref.ident}" if not ref.following else f"jobs {', '.join((ref.ident, *ref.following))}, one by one"
    rows = [*_rows(plan, seen, cwd=cwd, free_bytes=free_bytes, now_s=now_s), *(("says", line) for line in ref.said)]
    if saved is not None:
        rows.insert(0, ("from", f"step-{saved}, or the newest before it that is whole"))
    lines = [f"{plan.run_id}   {jobs}", *(f"  {name:<8}{text}" for name, text in rows)]
    if follows:
        return "\n".join(lines)
    return "\n".join([*lines, "Next   launch status last      launch logs last -f      launch cancel last"])


def submitted_fields(plan: Plan, ref: JobRef, seen: Observation) -> dict[str, Any]:
    """For programs: what a job has beside the run."""
    assert plan.slurm is not None
    return {
        "job": ref.ident,
        "chain": [ref.ident, *ref.following] if ref.following else [],
        "partition": plan.slurm.partition or None,
        "nodes": len(plan.nodes),
        "min_nodes": plan.min_nodes,
        "time_s": plan.slurm.time_s,
        "continue": plan.slurm.continue_how,
        "state": seen.state,
        "reason": seen.reason,
        "starts_s": seen.starts_s,
        "said": list(ref.said),
    }


def free_bytes(folder: Path) -> int:
    """Room for a user on the disk of a folder."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def _rows(plan: Plan, seen: Observation, *, cwd: Path, free_bytes: int, now_s: float) -> Iterator[tuple[str, str]]:
    yield from job_rows(plan, Path(plan.run_dir), cwd=cwd, free_bytes=free_bytes)
    yield "starts", starts_text(seen, _first_only(plan), now_s=now_s)


def job_rows(plan: Plan, path: Path, *, cwd: Path, free_bytes: int) -> Iterator[tuple[str, str]]:
    """What is known before SLURM says anything. path: of the run, or of all points of a sweep."""
    assert plan.slurm is not None
    slurm = plan.slurm
    gives = [count(slurm.cpus_per_node, "CPU"), *([count(slurm.gpus_per_node, "GPU")] if slurm.gpus_per_node else [])]
    nodes = f"{plan.nodes_text} with {' and '.join(gives)} each"
    where = f"partition {slurm.partition}" if slurm.partition else "the default partition"
    yield "where", f"{where}: {nodes}; {plan.ranks_text} on {plan.device}"
    setup = f", after {count(len(plan.setup), 'line')} of setup" if plan.setup else ""
    yield "runs", f"{plan.worker.python}{setup}; in {plan.worker.cwd}"
    shown = f"./{path.relative_to(cwd)}" if path.is_relative_to(cwd) else str(path)
    yield "disk", f"{shown} ({free_bytes / 1e9:,.0f} GB free)"
    yield "ends", ends_text(slurm)


def starts_text(seen: Observation, waits_for: Sequence[str], *, now_s: float) -> str:
    """When a job begins, as far as SLURM says."""
    after = f"; {', '.join(waits_for)}" if waits_for else ""
    if not seen.waits:
        on = f" on {seen.nodes}" if seen.nodes else ""
        return f"{seen.state.lower()}{on}{after}" if seen.state else f"SLURM does not say{after}"
    reason = f" (waits: {seen.reason})" if seen.reason and seen.reason != "None" else ""
    if seen.starts_s is None:
        return f"SLURM does not say yet{reason}{after}"
    moment = time.strftime("%Y-%m-%d %H:%M", time.localtime(seen.starts_s))
    return f"expected {moment}, in {duration(max(0.0, seen.starts_s - now_s))}{reason}{after}"


def _first_only(plan: Plan) -> list[str]:
    dependency, begin = _flag(plan, "--dependency"), _flag(plan, "--begin")
    return [
        *([f"not before {_waited_for(plan, dependency.partition(':')[2])} has ended well"] if dependency else []),
        *([f"not before {begin}"] if begin else []),
    ]


def _waited_for(plan: Plan, job: str) -> str:
    """`job 7`; where a run was named, `RUN (job 7)`."""
    asked = str((plan.recipe.get("slurm") or {}).get("after") or job)
    return f"job {job}" if asked.isdecimal() else f"{asked} (job {job})"


def _flag(plan: Plan, name: str) -> str | None:
    assert plan.slurm is not None
    return next((flag.value for flag in plan.slurm.flags if flag.flag == name), None)
