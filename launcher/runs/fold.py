"""The fold: events, what the place says, and result.json become one record of where a run stands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from launcher.runs.events import Event, time_of
from launcher.runs.states import POLICIES, TRANSITIONS, Cause, RunState

NodeRecord = dict[str, Any]
WorkerRecord = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Where a run stands. Times are seconds since the epoch, of their writers."""

    run_id: str = ""
    state: RunState = RunState.UNKNOWN
    cause: Cause | None = None
    sentence: str = ""
    """Why it ended, or why its state is not known; empty while it runs."""
    reason: str = ""
    """The same in the words of the head agent, with what it decided."""
    exit_code: int | None = None
    ref: str | None = None
    """The job in the words of its executor. None = never submitted."""
    host: str = ""
    """Where the supervisor runs, or where the run was made."""
    attempts: int = 0
    restarts: int = 0
    nodes: tuple[NodeRecord, ...] = ()
    """`{node, host, pid, state}`, by node; state is joining, up, lost or ended."""
    workers: tuple[WorkerRecord, ...] = ()
    """`{node, rank, pid, attempt}` of those that are alive, by rank."""
    step: int | None = None
    total_steps: int | None = None
    steps_per_epoch: int | None = None
    samples_seen: int | None = None
    metrics: Mapping[str, float] | None = None
    exits: Mapping[int, int | None] = field(default_factory=dict)
    """Exit code of each rank of the newest attempt that has ended."""
    failures: tuple[Event, ...] = ()
    """In the order in which the head agent saw them."""
    checkpoints: tuple[Event, ...] = ()
    tracking: Event | None = None
    waiting: Event | None = None
    """The nodes that the head agent waits for, while it does."""
    stop_reason: str | None = None
    created_s: float | None = None
    started_s: float | None = None
    """When the current submission began: the launch or the newest resume."""
    ended_s: float | None = None
    last_event_s: float | None = None


def fold(
    events: Iterable[Event], observation_alive: bool | None, result: Mapping[str, Any] | None, *, run_id: str = ""
) -> RunRecord:
    """Where a run stands. Never raises for an event that it does not know, or for one that came late."""
    record = RunRecord(run_id=run_id)
    for event in events:
        record = apply(record, event)
    if result is not None:
        record = _with_result(record, result)
    if not record.state.is_final:
        record = _judge(record, observation_alive)
    if record.state.is_final or observation_alive is False:
        record = replace(record, workers=(), nodes=_set_nodes(record, "ended"))
    return record


def apply(record: RunRecord, event: Event) -> RunRecord:
    """One event more. The state follows `TRANSITIONS` only: an event that came late changes no state."""
    time_s = time_of(event)
    record = replace(record, last_event_s=time_s, created_s=time_s if record.created_s is None else record.created_s)
    name = str(event.get("event"))
    if name in _STATES:
        record = _moved(record, _STATES[name])
    return _HANDLERS[name](record, event) if name in _HANDLERS else record


def _moved(record: RunRecord, state: RunState) -> RunRecord:
    return replace(record, state=state) if state in TRANSITIONS[record.state] else record


_STATES: dict[str, RunState] = {
    "created": RunState.SUBMITTED,
    "submitted": RunState.SUBMITTED,
    "supervisor_started": RunState.STARTING,
    "agent_started": RunState.STARTING,
    "node_joined": RunState.STARTING,
    "waiting": RunState.STARTING,
    "attempt_started": RunState.RUNNING,
    "restarting": RunState.RESTARTING,
}
"""The state that an event leads to, where the present one allows it."""


def _submitted(record: RunRecord, event: Event) -> RunRecord:
    return replace(record, ref=_text(event.get("ref")))


def _created(record: RunRecord, event: Event) -> RunRecord:
    return replace(record, host=str(event.get("host", "")), started_s=record.last_event_s)


def _resumed(record: RunRecord, event: Event) -> RunRecord:
    # Written when nothing of the run is alive, so a run that never said how it ended goes on from UNKNOWN.
    ended = _moved(record, RunState.UNKNOWN)
    return replace(
        _moved(ended, RunState.SUBMITTED),
        ref=None,
        started_s=record.last_event_s,
        cause=None,
        sentence="",
        reason="",
        exit_code=None,
        restarts=0,
        nodes=(),
        workers=(),
        failures=(),
        stop_reason=None,
        ended_s=None,
    )


def _supervisor_started(record: RunRecord, event: Event) -> RunRecord:
    return replace(record, host=str(event.get("host", record.host)))


def _agent_started(record: RunRecord, event: Event) -> RunRecord:
    host, pid = str(event.get("host", "")), event.get("pid")
    return _set_node(record, event.get("node"), host=host, pid=pid, state="joining")


def _node_joined(record: RunRecord, event: Event) -> RunRecord:
    return replace(_set_node(record, event.get("node"), state="up"), waiting=None)


def _agent_lost(record: RunRecord, event: Event) -> RunRecord:
    lost = _int(event.get("node"))
    workers = tuple(worker for worker in record.workers if worker["node"] != lost)
    return replace(_set_node(record, lost, state="lost", status=_int(event.get("status"))), workers=workers)


def _waiting(record: RunRecord, event: Event) -> RunRecord:
    return replace(record, waiting=event)


def _attempt_started(record: RunRecord, event: Event) -> RunRecord:
    attempt = _int(event.get("attempt")) or record.attempts
    workers = tuple(worker for worker in record.workers if worker["attempt"] == attempt)
    exits = record.exits if attempt <= record.attempts else {}
    return replace(record, attempts=max(record.attempts, attempt), workers=workers, exits=exits, waiting=None)


def _worker_started(record: RunRecord, event: Event) -> RunRecord:
    worker = {key: _int(event.get(key)) for key in ("node", "rank", "pid", "attempt")}
    others = [other for other in record.workers if other["rank"] != worker["rank"]]
    return replace(record, workers=tuple(sorted([*others, worker], key=_by("rank"))))


def _worker_ended(record: RunRecord, event: Event) -> RunRecord:
    rank, attempt = _int(event.get("rank")), _int(event.get("attempt"))
    workers = tuple(w for w in record.workers if (w["rank"], w["attempt"]) != (rank, attempt))
    if rank is None or attempt != record.attempts:
        return replace(record, workers=workers)
    return replace(record, workers=workers, exits={**record.exits, rank: _int(event.get("exit_code"))})


def _failure(record: RunRecord, event: Event) -> RunRecord:
    return replace(record, failures=(*record.failures, event))


def _restarting(record: RunRecord, event: Event) -> RunRecord:
    return replace(record, restarts=_int(event.get("restarts")) or record.restarts + 1)


def _stop_requested(record: RunRecord, event: Event) -> RunRecord:
    return replace(record, stop_reason=str(event.get("reason", "")))


def _finished(record: RunRecord, event: Event) -> RunRecord:
    moved = _moved(record, _state(event.get("state")))
    cause = _cause(event.get("cause"))
    return replace(
        moved,
        cause=cause,
        sentence=_sentence(cause),
        exit_code=_int(event.get("exit_code")),
        ended_s=record.last_event_s,
    )


def _training_started(record: RunRecord, event: Event) -> RunRecord:
    return replace(
        record,
        step=_int(event.get("step")),
        total_steps=_int(event.get("total_steps")),
        steps_per_epoch=_int(event.get("steps_per_epoch")),
    )


def _progress(record: RunRecord, event: Event) -> RunRecord:
    step = _int(event.get("step"))
    return record if step is None else replace(record, step=step)


def _checkpoint_saved(record: RunRecord, event: Event) -> RunRecord:
    return replace(record, checkpoints=(*record.checkpoints, event), step=_int(event.get("step")) or record.step)


def _summary(record: RunRecord, event: Event) -> RunRecord:
    return replace(
        record,
        step=_int(event.get("step")),
        samples_seen=_int(event.get("samples_seen")),
        metrics=event.get("metrics") or record.metrics,
    )


def _tracking(record: RunRecord, event: Event) -> RunRecord:
    return replace(record, tracking=event)


_HANDLERS: dict[str, Callable[[RunRecord, Event], RunRecord]] = {
    "created": _created,
    "submitted": _submitted,
    "resumed": _resumed,
    "supervisor_started": _supervisor_started,
    "agent_started": _agent_started,
    "agent_lost": _agent_lost,
    "node_joined": _node_joined,
    "waiting": _waiting,
    "attempt_started": _attempt_started,
    "worker_started": _worker_started,
    "worker_ended": _worker_ended,
    "failure": _failure,
    "restarting": _restarting,
    "stop_requested": _stop_requested,
    "finished": _finished,
    "training_started": _training_started,
    "progress": _progress,
    "checkpoint_saved": _checkpoint_saved,
    "summary": _summary,
    "tracking": _tracking,
}
"""What an event adds to the record."""


def _with_result(record: RunRecord, result: Mapping[str, Any]) -> RunRecord:
    """result.json is the truth about the end."""
    cause = _cause(result.get("cause"))
    return replace(
        record,
        state=_state(result.get("state")),
        cause=cause,
        sentence=_sentence(cause),
        reason=_text(result.get("reason")) or "",
        exit_code=_int(result.get("exit_code")),
        attempts=_int(result.get("attempts")) or record.attempts,
        restarts=_int(result.get("restarts")) or 0,
        step=record.step if result.get("step") is None else _int(result["step"]),
        samples_seen=_int(result.get("samples_seen")) or record.samples_seen,
        metrics=result.get("metrics") or record.metrics,
        stop_reason=_text(result.get("stop_reason")) or record.stop_reason,
        ended_s=record.ended_s or record.last_event_s,
    )


def _judge(record: RunRecord, alive: bool | None) -> RunRecord:
    """The state of a run that did not say how it ended."""
    if alive:
        return record
    was = record.state.value
    if record.ref is None:
        return replace(record, state=RunState.UNKNOWN, sentence="it was never submitted")
    if alive is None:
        sentence = f"last seen {was}; whether it is alive cannot be told from here, ask on {record.host or 'its host'}"
        return replace(record, state=RunState.UNKNOWN, sentence=sentence)
    gone = replace(record, state=RunState.FAILED, ended_s=record.last_event_s)
    lost = next((node for node in record.nodes if node["state"] == "lost" and node.get("status") is not None), None)
    if lost is not None:
        return _without_agent(gone, lost)
    sentence = f"it is gone, and did not say why; last seen {was} (its processes were killed, or the machine went down)"
    return replace(gone, cause=Cause.LAUNCHER_LOST, sentence=sentence)


def _without_agent(record: RunRecord, lost: NodeRecord) -> RunRecord:
    """A run that ended with an agent that was not replaced: a fault of ours, or it was killed too often."""
    code, signum = lost["status"] >> 8, lost["status"] & 0x7F
    cause = Cause.NODE_LOST if signum else Cause.INTERNAL
    how = f"was killed by signal {signum}" if signum else f"ended by itself (exit {code}), and logs/agents.log says why"
    where = f"node {lost['node']}" + (f" ({lost['host']})" if lost["host"] else "")
    sentence = f"{POLICIES[cause].sentence}: the agent of {where} {how}"
    return replace(record, cause=cause, sentence=sentence)


def _set_node(record: RunRecord, node: Any, **fields: Any) -> RunRecord:
    index = _int(node)
    known = {each["node"]: each for each in record.nodes}
    blank: NodeRecord = {"node": index, "host": "", "pid": None, "state": "joining"}
    known[index] = {**known.get(index, blank), **fields}
    return replace(record, nodes=tuple(sorted(known.values(), key=_by("node"))))


def _set_nodes(record: RunRecord, state: str) -> tuple[NodeRecord, ...]:
    return tuple({**node, "state": node["state"] if node["state"] == "lost" else state} for node in record.nodes)


def _by(key: str) -> Callable[[Mapping[str, Any]], int]:
    return lambda each: -1 if each[key] is None else int(each[key])


def _state(value: Any) -> RunState:
    return RunState(value) if isinstance(value, str) and value in RunState.__members__ else RunState.UNKNOWN


def _cause(value: Any) -> Cause | None:
    return Cause(value) if isinstance(value, str) and value in set(Cause) else None


def _sentence(cause: Cause | None) -> str:
    return POLICIES[cause].sentence if cause else ""


def _int(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
