"""The final words of a run, as a pure function of its record, its result and its plan."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.cli.screen import duration
from launcher.errors import ExitCode
from launcher.runs.rundir import RunDir
from launcher.runs.states import POLICIES, Cause, Policy, RunState

if TYPE_CHECKING:
    from launcher.planning.plan import Plan
    from launcher.runs.fold import RunRecord

_GAP = "      "
_PARTS = ("start", "train", "eval", "save")
_METRICS_SHOWN = 3


def final_block(record: RunRecord, result: Mapping[str, Any] | None, plan: Plan, *, cwd: Path) -> str:
    """What is printed when a followed run has ended. Paths below `cwd` are shown relative to it."""
    result = result or {}
    lines = [
        _headline(record, result),
        *_indented(
            _shape(plan),
            _progress(record, result, plan),
            _times(result),
            *_failure(record, result, plan, cwd),
            _exit(record, plan),
            "" if result.get("attempts") else f"log    {shown_path(RunDir(Path(plan.run_dir)).agents_log, cwd)}",
            _place(record, result, plan, cwd),
            _wandb(record, plan, cwd),
        ),
        _next(record, result, plan),
    ]
    return "\n".join(lines)


def shown_path(path: Path, cwd: Path) -> str:
    """A path as short as it can be typed: `./runs/x` below `cwd`, else absolute."""
    return f"./{path.relative_to(cwd)}" if path.is_relative_to(cwd) else str(path)


def _indented(*lines: str) -> Iterable[str]:
    return (f"  {line}" for line in lines if line)


def _headline(record: RunRecord, result: Mapping[str, Any]) -> str:
    total_s = result.get("time", {}).get("total_s")
    if total_s is None and record.started_s is not None and record.ended_s is not None:
        total_s = record.ended_s - record.started_s
    line = f"{record.run_id}  {record.state}" + (f" in {duration(total_s)}" if total_s is not None else "")
    why = "" if record.state is RunState.SUCCEEDED else record.sentence
    return f"{line}: {why}" if why else line


def _shape(plan: Plan) -> str:
    nodes = _count(len(plan.nodes), "node")
    if plan.executor == "local" and len(plan.nodes) > 1:
        together = "both" if len(plan.nodes) == 2 else "all"
        nodes += f" ({together} on this machine: {len(plan.nodes)} agents)"
    return f"{nodes}   {_count(plan.world_size, 'rank')}   {plan.device}, {plan.backend} over {plan.interface}"


def _progress(record: RunRecord, result: Mapping[str, Any], plan: Plan) -> str:
    parts = []
    if record.step is not None:
        parts.append(f"{record.step}/{record.total_steps} steps" if record.total_steps else f"{record.step} steps")
    if result.get("samples_per_s"):
        parts.append(f"{result['samples_per_s']:,.0f} samples/s")
    parts += [f"{name} {value:.3g}" for name, value in _evaluation(record, plan)]
    return "   ".join([*parts, _restarts(record, plan)])


def _evaluation(record: RunRecord, plan: Plan) -> list[tuple[str, float]]:
    """The metric that decides about the best checkpoint, else the first few of the evaluation."""
    metrics = {name: value for name, value in (record.metrics or {}).items() if isinstance(value, int | float)}
    best = str((plan.recipe.get("checkpoint") or {}).get("best") or "").split(" ")[0]
    if best in metrics:
        return [(best, metrics[best])]
    return [(name, metrics[name]) for name in sorted(metrics) if name.startswith("eval/")][:_METRICS_SHOWN]


def _restarts(record: RunRecord, plan: Plan) -> str:
    of = f"/{plan.limits.max_restarts}" if record.state is RunState.FAILED and plan.resumable else ""
    return f"restarts {record.restarts}{of}"


def _times(result: Mapping[str, Any]) -> str:
    times = result.get("time") or {}
    return " | ".join(f"{part} {times[f'{part}_s']:.1f} s" for part in _PARTS if times.get(f"{part}_s") is not None)


def _failure(record: RunRecord, result: Mapping[str, Any], plan: Plan, cwd: Path) -> list[str]:
    first = result.get("first_failure") or (record.failures[0] if record.failures else None)
    if record.state is not RunState.FAILED:
        return []
    if first is None:
        return [f"why    {result['reason']}"] if result.get("reason") else []
    policy = _policy(first.get("cause"))
    what = first.get("message") or (policy.sentence if policy else "it ended")
    lines = [f"first  {_who(first, record)}: {what}"]
    lines += [f"       {first['place']}"] if first.get("place") else []
    lines += [f"log    {shown_path(Path(plan.run_dir) / str(first['log']), cwd)}"] if first.get("log") else []
    if decision := _decision(str(result.get("reason") or ""), str(what)):
        lines.append(f"why    {decision}")
    return [*lines, f"hint   {policy.hint}"] if policy and policy.hint else lines


def _decision(reason: str, message: str) -> str:
    """What the head agent says beyond the message of the failure: `not restarted: ...`."""
    return reason.removeprefix(message).lstrip("; ") if reason.startswith(message) else reason


def _who(failure: Mapping[str, Any], record: RunRecord) -> str:
    hosts = {node["node"]: node["host"] for node in record.nodes}
    host = hosts.get(failure.get("node"))
    node = f"node {failure.get('node')}" + (f" ({host})" if host else "")
    return node if failure.get("rank") is None else f"rank {failure['rank']} on {node}"


def _exit(record: RunRecord, plan: Plan) -> str:
    code = record.exit_code
    if code is None or record.state is RunState.SUCCEEDED:
        return ""
    if code == ExitCode.STOPPED:
        return f"exit   {code} (stopped, and saved)"
    if 128 < code <= 128 + signal.SIGRTMAX:
        return f"exit   {code} (128 + signal {code - 128})"
    if record.state is not RunState.FAILED or not record.attempts:
        return f"exit   {code}"
    return f"exit   {code} ({'the script' if plan.worker.kind == 'script' else 'the worker'}'s own)"


def _place(record: RunRecord, result: Mapping[str, Any], plan: Plan, cwd: Path) -> str:
    line = f"run    {shown_path(Path(plan.run_dir), cwd)}"
    checkpoint = result.get("checkpoint") or {}
    if record.state is RunState.SUCCEEDED and checkpoint.get("best") is not None:
        verified = ", verified" if checkpoint.get("verified") else ""
        return f"{line}{_GAP}best checkpoint: step-{checkpoint['best']}{verified}"
    newest = checkpoint.get("latest") or (record.checkpoints[-1].get("step") if record.checkpoints else None)
    return f"{line}{_GAP}checkpoint: step-{newest}" if newest is not None else line


def _wandb(record: RunRecord, plan: Plan, cwd: Path) -> str:
    wandb = (record.tracking or {}).get("wandb") or {}
    mode, sync = wandb.get("mode"), str(wandb.get("sync") or "")
    sync = sync.replace(plan.run_dir, shown_path(Path(plan.run_dir), cwd))
    if mode == "offline":
        return f"W&B    offline (no key): {sync}" if sync else "W&B    offline (no key)"
    return f"W&B    {wandb.get('url') or wandb.get('id')}" if mode == "online" else ""


def _next(record: RunRecord, result: Mapping[str, Any], plan: Plan) -> str:
    if record.state is RunState.SUCCEEDED:
        own = "launch train.py --nodes 2 -- --lr 1e-3   (your own torchrun script)"
        last_rank = ["launch logs last --rank 1"] if plan.world_size > 1 else ["launch logs last"]
        commands = ["launch status last", *last_rank, *([own] if plan.worker.kind == "job" else [])]
    else:
        rank = (result.get("first_failure") or {}).get("rank")
        logs = ["launch logs last" + (f" --rank {rank}" if rank is not None else "")] if record.attempts else []
        goes_on = ["launch resume last"] if plan.resumable else []
        commands = [*goes_on, *logs] if record.state is RunState.CANCELLED else [*logs, *goes_on]
        commands.append("launch status last")
    return "Next   " + _GAP.join(commands)


def _policy(cause: Any) -> Policy | None:
    return POLICIES[Cause(cause)] if cause in set(Cause) else None


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
