"""The page of a failed run: what failed first, what followed, what was decided, what is kept, what to do next. Pure."""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.runs.remedies import changed_value, remedies
from launcher.runs.rundir import RunDir
from launcher.runs.states import POLICIES, Cause, Policy, is_signal
from launcher.wording import aligned, count, first_line, short_duration, shortened, signal_name

if TYPE_CHECKING:
    from launcher.planning.plan import Plan
    from launcher.runs.fold import RunRecord

Clock = Callable[[float], str]
GAP = "      "
_LABEL = 8
_MESSAGE_LINES = 3
_LINE_WIDTH = 240
_TRACEBACK = "Traceback (most recent call last):"
_SHOWN_ID = re.compile(r"-\d{4}-([a-z0-9]{4}(?:\.\d+)?)$")
_CUDA_OOM = re.compile(r"Tried to allocate (?P<asked>[\d.]+ \w+)")
_CUDA_ALL = re.compile(r"total capacity of (?P<all>[\d.]+) (?P<unit>\w+)")
_CUDA_USED = re.compile(r"this process has (?P<used>[\d.]+) (?P<unit>\w+) memory in use")


def local_clock(time_s: float) -> str:
    """A moment as the clock on the wall here shows it."""
    return datetime.fromtimestamp(time_s).astimezone().strftime("%H:%M:%S")


def failure_page(
    record: RunRecord, result: Mapping[str, Any], plan: Plan, *, run: str, clock: Clock = local_clock
) -> list[str]:
    """The lines of the page. `run`: the path of the run directory, as it is to be shown."""
    first = first_failure(record, result)
    policy = POLICIES[record.cause] if record.cause else None
    lines = [headline(record, result, plan)]
    if first is not None:
        lines += _labelled("first", _first(first, record, plan, clock))
        lines += _labelled("then", _then(first, record))
    else:
        lines += _labelled("why", list(filter(None, [str(result.get("reason") or record.reason)])))
    if not (record.attempts and result) and record.cause is not Cause.SETUP:
        # What there is, is what the agents' own Python said.
        before = record.on_slurm and not record.allocations
        lines += _labelled("log", [f"{run}/slurm" if before else f"{run}/logs/{RunDir(Path(run)).agents_log.name}"])
    lines += _labelled("policy", _policy(policy, record, result, plan))
    lines += _labelled("kept", _kept(record, result, plan))
    change = changed_value(record.cause, plan)
    tries = remedies(record.cause, plan, str((first or {}).get("message") or ""))
    lines += _labelled("hint", [] if change or policy is None or not policy.hint else [policy.hint])
    if len(tries) > (change is not None):
        lines += _labelled("try", aligned([(each.change, each.brings) for each in tries]))
    lines += _labelled("run", [run])
    return [*lines, *_labelled("Next", [GAP.join(_next(first, record, plan, change))])]


def first_failure(record: RunRecord, result: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What failed first in the last attempt; of a run that did not say how it ended, what its events show."""
    known: Mapping[str, Any] | None = result.get("first_failure")
    if known is None:  # of a node that could not take part, no rank knows
        known = next((each for each in record.failures if each.get("event") == "node_failed"), None)
    if result or known is not None:
        return known
    return next((failure for failure in record.failures if failure.get("attempt") == record.attempts), None)


def headline(record: RunRecord, result: Mapping[str, Any], plan: Plan) -> str:
    """`lora-8b-1130-1412-m3xd  FAILED: CUDA out of memory, step 4,180, after 6h12m   exit 1 (the script's own)`."""
    step = (result.get("first_failure") or {}).get("step")
    step = record.step if step is None else step
    total_s = total_time_s(record, result)
    parts = [
        f"{record.run_id}  {record.state}: {record.sentence}",
        "" if step is None else f"step {step:,}",
        "" if total_s is None else f"after {short_duration(total_s)}",
    ]
    code = exit_text(record, plan)
    return ", ".join(filter(None, parts)) + (f"   exit {code}" if code else "")


def total_time_s(record: RunRecord, result: Mapping[str, Any]) -> float | None:
    """How long a run took, by its result or, of one that wrote none, by its events."""
    known: float | None = (result.get("time") or {}).get("total_s")
    if known is None and record.started_s is not None and record.ended_s is not None:
        return record.ended_s - record.started_s
    return known


def newest_saved(record: RunRecord, result: Mapping[str, Any]) -> int | None:
    """The step of the newest checkpoint, by its result or by its events."""
    latest: int | None = (result.get("checkpoint") or {}).get("latest")
    return latest or (record.checkpoints[-1].get("step") if record.checkpoints else None)


def exit_text(record: RunRecord, plan: Plan) -> str:
    """The exit code, and whose it is; empty where it is not known, or 0."""
    code = record.exit_code
    if not code:
        return ""
    if is_signal(code):
        return f"{code} (128 + {signal_name(code - 128)})"
    froze = record.cause is Cause.HANG and any(
        _froze(each) for each in record.failures if each.get("attempt") == record.attempts
    )
    if not record.attempts or froze or record.cause in (Cause.NODE_LOST, Cause.RENDEZVOUS, Cause.INTERNAL):
        return str(code)
    return f"{code} ({'the script' if plan.worker.kind == 'script' else 'the worker'}'s own)"


def short_id(run_id: str) -> str:
    """The last four characters, which name a run; an id of another form whole."""
    match = _SHOWN_ID.search(run_id)
    return match[1] if match else run_id


def _labelled(label: str, lines: list[str]) -> list[str]:
    return [(label if index == 0 else "").ljust(_LABEL) + line for index, line in enumerate(lines)]


def _first(first: Mapping[str, Any], record: RunRecord, plan: Plan, clock: Clock) -> list[str]:
    time_s, place = first.get("time"), shown_place(str(first.get("place") or ""), plan)
    who = _who(first, record, plan) + (f", {clock(time_s)}" if isinstance(time_s, int | float) else "")
    words = str(first.get("last_words") or "").splitlines()
    log, line = first.get("log"), first.get("log_line")
    return [
        who + (f"   {place}" if place else ""),
        *_message(first),
        *(f"| {text}" for text in words),
        *(
            [f"{log}:{line}" if line else f"{log} ({'its stack' if _froze(first) else 'it wrote nothing'})"]
            if log
            else []
        ),
    ]


def _froze(first: Mapping[str, Any]) -> bool:
    """Whether it did not end by itself, but was found standing still, and ended: it wrote its stack, and no error."""
    return bool(first.get("exception") == "hang")


def _who(first: Mapping[str, Any], record: RunRecord, plan: Plan) -> str:
    node, rank = first.get("node"), first.get("rank")
    hosts = {each["node"]: each["host"] for each in record.nodes}
    planned = next((each for each in plan.nodes if each.index == node), None)
    about = [hosts.get(node) or (planned.host if planned else "")]
    if rank is None or rank < 0:
        return f"node {node}" + (f" ({about[0]})" if about[0] else "")
    if planned is not None and planned.gpus:
        about.append(f"GPU {planned.gpus[rank % plan.nproc_per_node % len(planned.gpus)]}")
    return f"rank {rank} on node {node} ({', '.join(filter(None, about))})"


def shown_place(place: str, plan: Plan) -> str:
    """`file:line in function`, the file as short as it is known by: relative to the code that runs."""
    roots = [RunDir(Path(plan.run_dir)).code, Path(plan.worker.cwd)]
    if plan.code is not None:
        roots.append(Path(plan.code.root))
    for root in roots:
        if place.startswith(f"{root}/"):
            return place.removeprefix(f"{root}/")
    return place


def _message(first: Mapping[str, Any]) -> list[str]:
    """What was raised, in a few lines; out of CUDA memory in one."""
    message = str(first.get("message") or "it ended")
    if first.get("cause") == Cause.OOM.value and (asked := _CUDA_OOM.search(message)):
        name = message.partition(":")[0]
        used, whole = _CUDA_USED.search(message), _CUDA_ALL.search(message)
        same = used is not None and whole is not None and used["unit"] == whole["unit"]
        of = f" ({used['used']} of {whole['all']} in use)" if same and used and whole else ""
        return [f"{name}: tried to allocate {asked['asked']}{of}"]
    lines = [line.rstrip() for line in message.splitlines() if line.strip()]
    cut = [shortened(line, _LINE_WIDTH) for line in lines]
    if len(cut) <= _MESSAGE_LINES:
        return cut
    if _TRACEBACK in message:  # of a process of its own, passed on: what that has raised stands at the end
        return [cut[0], f"... ({len(cut)} lines)", cut[-1]]
    return [*cut[:_MESSAGE_LINES], f"... ({len(cut)} lines)"]


def _then(first: Mapping[str, Any], record: RunRecord) -> list[str]:
    """What the other ranks died of."""
    attempt = first.get("attempt") or record.attempts
    others = {
        (each.get("node"), each.get("rank")): each
        for each in record.failures
        if each.get("attempt") == attempt
        and (each.get("node"), each.get("rank")) != (first.get("node"), first.get("rank"))
    }
    kinds = Counter(map(_kind, others.values()))
    parts = [
        f"{count(ranks, 'rank')}: {kind}" for kind, ranks in sorted(kinds.items(), key=lambda each: each[0] == _LOST)
    ]
    killed = 128 + signal.SIGKILL
    known = {rank for _, rank in others} | {first.get("rank")}
    ended = [rank for rank, code in record.exits.items() if code == killed and rank not in known]
    parts += [f"{count(len(ended), 'rank')}: ended by the launcher"] if ended else []
    return ["; ".join(parts)] if parts else []


_LOST = "lost peer (consequence)"


def _kind(failure: Mapping[str, Any]) -> str:
    if failure.get("cause") == Cause.PEER_LOST.value:
        return _LOST
    return shortened(first_line(failure.get("message")), 80)


def _policy(policy: Policy | None, record: RunRecord, result: Mapping[str, Any], plan: Plan) -> list[str]:
    if not record.attempts:
        return []
    why_not = result.get("policy") or (policy.why_not if policy else "")
    budget = f"restarts {record.restarts}/{plan.limits.max_restarts}"
    return [f"not retried: {why_not}. {budget}" if why_not else budget]


def _kept(record: RunRecord, result: Mapping[str, Any], plan: Plan) -> list[str]:
    if record.cause is Cause.CHECKPOINT:
        return []  # what is there is just what could not be used
    checkpoint = result.get("checkpoint") or {}
    newest = newest_saved(record, result)
    if newest is not None:
        return [f"step {newest:,}: launch path {short_id(record.run_id)} --checkpoint latest"]
    if checkpoint.get("path"):
        return [f"{checkpoint['path']}: launch path {short_id(record.run_id)} --checkpoint latest"]
    return ["no checkpoint yet"] if plan.worker.kind == "job" and record.attempts else []


def _next(first: Mapping[str, Any] | None, record: RunRecord, plan: Plan, change: str | None) -> list[str]:
    run = short_id(record.run_id)
    rank = None if first is None else first.get("rank")
    wrote = first is not None and (first.get("log_line") or _froze(first))
    logs = f"launch logs {run}" + (f" --rank {rank}" if wrote and rank is not None and rank >= 0 else "")
    if record.cause is Cause.CHECKPOINT:
        return [logs, f"launch path {run}"]  # a resume would meet the same checkpoints
    of_code = record.cause in (Cause.WORKER_ERROR, Cause.USAGE, Cause.REPEATED, Cause.HANG)
    if record.cause is Cause.RECIPE:
        change = "KEY=VALUE"  # what is wrong is in the message
    of_values = change is None and record.cause in (Cause.OOM, Cause.OOM_HOST, Cause.NAN)
    again = "launch resume" if plan.resumable else "launch rerun"
    if plan.resumable and (of_code or of_values) and plan.worker.kind == "script" and plan.code is not None:
        change = "--code current"
    elif record.cause is Cause.SETUP or of_values or (of_code and not plan.resumable):
        return [logs]  # the same again would end the same way
    return [f"{again} {run}" + (f" {change}" if change else ""), logs]
