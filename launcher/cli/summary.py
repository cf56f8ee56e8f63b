"""The final words of a run, as a pure function of its record, its result and its plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.errors import ExitCode
from launcher.runs.report import exit_text, failure_page, newest_saved, total_time_s
from launcher.runs.rundir import RunDir
from launcher.runs.states import RunState
from launcher.wording import count, duration, size

if TYPE_CHECKING:
    from launcher.planning.plan import Plan
    from launcher.runs.fold import RunRecord

_GAP = "      "
_PARTS = ("queue", "start", "train", "eval", "save", "lost", "down")
_METRICS_SHOWN = 3


def final_block(
    record: RunRecord, result: Mapping[str, Any] | None, plan: Plan, *, cwd: Path, name: str = "last"
) -> str:
    """What is printed when a followed run has ended. Paths below `cwd` are shown relative to it.

    name: of the run, in the commands that are proposed.
    """
    result = result or {}
    if record.state is RunState.FAILED:
        page = failure_page(record, result, plan, run=shown_path(Path(plan.run_dir), cwd))
        return "\n".join([*page[:-1], *filter(None, [_wandb(record, plan, cwd, label="W&B".ljust(8))]), page[-1]])
    lines = [
        _headline(record, result),
        *_indented(
            _shape(plan),
            _progress(record, result, plan),
            _times(result),
            str((result.get("input") or {}).get("advice") or ""),
            _compiled(result),
            _exit(record, plan),
            _agents_log(record, plan, cwd),
            _place(record, result, plan, cwd),
            _wandb(record, plan, cwd),
        ),
        _next(record, plan, name),
    ]
    return "\n".join(lines)


def _agents_log(record: RunRecord, plan: Plan, cwd: Path) -> str:
    """What the agents' own Python said, where nobody else says what has become of the run."""
    log = RunDir(Path(plan.run_dir)).agents_log
    return f"log    {shown_path(log, cwd)}" if record.state is RunState.UNKNOWN else ""


def here() -> Path:
    """The current directory; of one that was deleted meanwhile, nothing, so that paths are shown in full."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return Path()


def shown_path(path: Path, cwd: Path) -> str:
    """A path as short as it can be typed: `./runs/x` below `cwd`, else absolute."""
    return f"./{path.relative_to(cwd)}" if path.is_relative_to(cwd) else str(path)


def _indented(*lines: str) -> Iterable[str]:
    return (f"  {line}" for line in lines if line)


def _headline(record: RunRecord, result: Mapping[str, Any]) -> str:
    total_s = total_time_s(record, result)
    line = f"{record.run_id}  {record.state}" + (f" in {duration(total_s)}" if total_s is not None else "")
    why = "" if record.state is RunState.SUCCEEDED else record.sentence
    return f"{line}: {why}" if why else line


def _shape(plan: Plan) -> str:
    nodes = plan.nodes_text
    if plan.executor == "local" and len(plan.nodes) > 1:
        together = "both" if len(plan.nodes) == 2 else "all"
        nodes += f" ({together} on this machine: {len(plan.nodes)} agents)"
    over = "" if plan.interface == "auto" else f" over {plan.interface}"  # of nodes that were not known
    return f"{nodes}   {plan.ranks_text}   {plan.device}, {plan.backend}{over}"


def _progress(record: RunRecord, result: Mapping[str, Any], plan: Plan) -> str:
    parts = []
    if record.step is not None:
        parts.append(f"{record.step}/{record.total_steps} steps" if record.total_steps else f"{record.step} steps")
    if left_out := result.get("steps_left_out"):
        parts.append(f"{count(left_out, 'step')} left out (faults.on_nan)")
    if skipped := result.get("steps_skipped"):
        parts.append(f"{count(skipped, 'step')} skipped (fp16 overflow)")
    if result.get("samples_per_s"):
        parts.append(f"{result['samples_per_s']:,.0f} samples/s")
    if plan.device == "cuda" and (memory := result.get("memory")):
        parts.append(f"{size(memory['peak_bytes'])} of GPU memory")
    parts += [f"{name} {value:.3g}" for name, value in _evaluation(record, plan)]
    return "   ".join([*parts, f"restarts {record.restarts}"])


def _evaluation(record: RunRecord, plan: Plan) -> list[tuple[str, float]]:
    """The metric that decides about the best checkpoint, else the first few of the evaluation."""
    metrics = {name: value for name, value in (record.metrics or {}).items() if isinstance(value, int | float)}
    best = str((plan.recipe.get("checkpoint") or {}).get("best") or "").split(" ")[0]
    if best in metrics:
        return [(best, metrics[best])]
    return [(name, metrics[name]) for name in sorted(metrics) if name.startswith("eval/")][:_METRICS_SHOWN]


def _times(result: Mapping[str, Any]) -> str:
    times = result.get("time") or {}
    return " | ".join(f"{part} {times[f'{part}_s']:.1f} s" for part in _PARTS if times.get(f"{part}_s"))


def _compiled(result: Mapping[str, Any]) -> str:
    """What torch.compile has made, where it was asked for."""
    if not (made := result.get("compiled")):
        return ""
    broken = f", {count(made['graph_breaks'], 'graph break')}" if made["graph_breaks"] else ""
    return (
        f"compiled {count(made['graphs'], 'graph')} in {made['time_s']:.1f} s, {made['recompiles']} of them for shapes "
        f"or modes that came later{broken}"
    )


def _exit(record: RunRecord, plan: Plan) -> str:
    if record.exit_code == ExitCode.STOPPED:
        return f"exit   {record.exit_code} (stopped, and saved)"
    text = exit_text(record, plan)
    return f"exit   {text}" if text else ""


def _place(record: RunRecord, result: Mapping[str, Any], plan: Plan, cwd: Path) -> str:
    line = f"run    {shown_path(Path(plan.run_dir), cwd)}"
    checkpoint = result.get("checkpoint") or {}
    if record.state is RunState.SUCCEEDED and checkpoint.get("best") is not None:
        verified = ", verified" if checkpoint.get("verified") else ""
        return f"{line}{_GAP}best checkpoint: step-{checkpoint['best']}{verified}"
    newest = newest_saved(record, result)
    return f"{line}{_GAP}checkpoint: step-{newest}" if newest is not None else line


def _wandb(record: RunRecord, plan: Plan, cwd: Path, *, label: str = "W&B    ") -> str:
    wandb = (record.tracking or {}).get("wandb") or {}
    mode, sync = wandb.get("mode"), str(wandb.get("sync") or "")
    sync = sync.replace(plan.run_dir, shown_path(Path(plan.run_dir), cwd))
    if mode == "offline":
        offline = f"{label}offline ({wandb.get('reason') or 'no key'})"
        return f"{offline}: {sync}" if sync else offline
    return f"{label}{wandb.get('url') or wandb.get('id')}" if mode == "online" else ""


def _next(record: RunRecord, plan: Plan, name: str) -> str:
    if not record.state.is_final and record.state is not RunState.UNKNOWN:
        commands = [f"launch logs {name} -f", f"launch status {name}", f"launch cancel {name}"]
    elif record.state is RunState.SUCCEEDED:
        last_rank = f"launch logs {name} --rank 1" if plan.world_size > 1 else f"launch logs {name}"
        after = [f"launch eval {name}", f"launch export {name}"] if plan.worker.kind == "job" else []
        commands = [f"launch status {name}", last_rank, *after]
    else:
        logs = [f"launch logs {name}"] if record.attempts else []
        commands = [*([f"launch resume {name}"] if plan.resumable else []), *logs, f"launch status {name}"]
    return "Next   " + _GAP.join(commands)
