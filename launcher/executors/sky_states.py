"""What SkyPilot answers about a job and its machines, as an observation. Pure.

Its own words are kept: PENDING, STARTING, RUNNING, RECOVERING, SUCCEEDED, FAILED, FAILED_SETUP, CANCELLED ... of a
managed job; INIT, PENDING, SETTING_UP, RUNNING ... of a job on a cluster; INIT, UP, STOPPED of the cluster.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.planning.plan import SkyPlan
from launcher.runs.observed import Observation
from launcher.wording import first_line

ENDED = frozenset({"SUCCEEDED", "CANCELLED"})
"""Words for jobs that are over, besides FAILED and those that begin so: FAILED_SETUP, FAILED_NO_RESOURCE ..."""


def read_answer(text: str) -> Any:
    """The JSON in what a command has printed, after whatever else it says; None where there is none."""
    lines = text.splitlines()
    start = next((index for index, line in enumerate(lines) if line[:1] in ("[", "{")), None)
    if start is None:
        return None
    try:
        return json.loads("\n".join(lines[start:]))
    except ValueError:
        return None


def job_state(sky: SkyPlan, answers: Sequence[Any]) -> Observation:
    """What the answers to `sky.state` say. None among them: there was none."""
    if all(answer is None for answer in answers):
        return Observation(alive=None, detail=f"`{' '.join(sky.state[0])}` does not answer")
    if sky.managed:
        record = _newest(answers[0], sky.name)
        if record is None:
            return Observation(alive=False, detail=f"SkyPilot does not know a job {sky.name} any more")
        return _observed(record, machines=str(record.get("infra") or ""))
    return _on_cluster(sky, *answers)


def _on_cluster(sky: SkyPlan, jobs: Any, clusters: Any) -> Observation:
    machines = next((each for each in clusters or () if each.get("name") == sky.name), None)
    if clusters is not None and machines is None:
        return Observation(alive=False, detail=f"SkyPilot has no cluster {sky.name} any more")
    queue = jobs.get(sky.name) if isinstance(jobs, Mapping) else None
    if queue:
        up = machines is not None and machines.get("status") == "UP"
        seen = _observed(max(queue, key=lambda each: each.get("job_id") or 0), machines=sky.name if up else "")
        # The record of a job outlives machines that have gone: it says RUNNING then.
        if seen.alive and machines is not None and machines.get("status") == "STOPPED":
            return Observation(alive=False, state="STOPPED", detail="its machines were stopped")
        return seen
    if machines is None:
        return Observation(alive=None, detail="SkyPilot does not say how the job is")
    status = str(machines.get("status") or "")
    said = str(machines.get("init_status_reason") or machines.get("last_event") or "")
    return Observation(alive=status != "STOPPED", state=status, detail=first_line(said))


def _newest(records: Any, name: str) -> Mapping[str, Any] | None:
    found = [each for each in records or () if each.get("job_name") == name or each.get("task_name") == name]
    return max(found, key=lambda each: each.get("job_id") or 0, default=None)


def _observed(record: Mapping[str, Any], *, machines: str) -> Observation:
    state = str(record.get("status") or "")
    if not state:
        return Observation(alive=None, detail="SkyPilot does not say how the job is")
    over = state in ENDED or state.startswith("FAILED")
    ended = record.get("end_at")
    reason = first_line(str(record.get("failure_reason") or ""))
    recovered = record.get("recovery_count") or 0
    detail = reason or (f"machines were replaced {recovered}x" if recovered else "")
    return Observation(
        alive=not over,
        exit_code=0 if state == "SUCCEEDED" else None,
        detail=detail,
        state=state,
        ends_s=float(ended) if over and isinstance(ended, int | float) else None,
        nodes=machines,
    )
