"""The fold: events, what the place says, and result.json become one record of where a run stands."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from launcher.errors import ExitCode
from launcher.runs.events import Event, time_of
from launcher.runs.observed import Observation
from launcher.runs.states import NOT_RETRIED, POLICIES, TRANSITIONS, Cause, RunState
from launcher.wording import first_line, shortened

NodeRecord = dict[str, Any]
WorkerRecord = dict[str, Any]
AllocationRecord = dict[str, Any]

_LAST_WORDS_S = 20.0
"""What a run wrote before its job ended is seen on another machine after this time, on a slow file system too."""


_OWN_ERRORS = frozenset({Cause.WORKER_ERROR, Cause.SIGNAL, Cause.REPEATED})
_WHY_WIDTH = 80


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
    """The job in the words of its executor, the newest of them. None = never submitted."""
    chain: tuple[str, ...] = ()
    """The jobs that were submitted at once, each to go on where the one before it ends."""
    allocations: tuple[AllocationRecord, ...] = ()
    """`{allocation, job, nodes, submitted_s, started_s, ended_s, cause, sentence, saved, step}` of a run on SLURM, by
    number, over all launches and resumes. ended_s None: it is the present one, or nobody wrote down its end."""
    queue: Observation | None = None
    """What SLURM says of the job, where it was asked."""
    is_cancelled: bool = False
    """Whether `launch cancel` was called since the launch or the newest resume."""
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
    hang: Event | None = None
    """While it stands still."""
    stragglers: tuple[Event, ...] = ()
    """Of the newest attempt."""
    waiting: Event | None = None
    """The nodes that the head agent waits for, while it does."""
    stop_reason: str | None = None
    created_s: float | None = None
    started_s: float | None = None
    """When the current submission began: the launch or the newest resume."""
    submitted_s: float | None = None
    """When its newest job was submitted, or requeued."""
    ended_s: float | None = None
    last_event_s: float | None = None

    @property
    def jobs(self) -> tuple[str, ...]:
        """The jobs that may be carrying the run, or may yet: its newest, and what follows that in a chain."""
        if self.ref in self.chain:
            return self.chain[self.chain.index(self.ref) :]
        return () if self.ref is None else (self.ref,)

    @property
    def why(self) -> str:
        """Why it is where it is, on a line of a list: with the error, where the program itself has failed."""
        error = first_line(self.reason.partition(NOT_RETRIED)[0]) if self.cause in _OWN_ERRORS else ""
        return f"{self.sentence}: {shortened(error, _WHY_WIDTH)}" if error else self.sentence

    @property
    def on_slurm(self) -> bool:
        """Whether a scheduler knows more of its job than whether it is alive."""
        return self.ref is not None and self.ref.startswith("slurm:")

    @property
    def on_sky(self) -> bool:
        """Whether SkyPilot has rented machines for it."""
        return self.ref is not None and self.ref.startswith("sky:")

    @property
    def is_far(self) -> bool:
        """Whether others than this machine, or hosts of the user's, have it: they are asked now and then."""
        return self.on_slurm or self.on_sky


def fold(
    events: Iterable[Event],
    seen: Observation,
    result: Mapping[str, Any] | None,
    *,
    run_id: str = "",
    now_s: float | None = None,
) -> RunRecord:
    """Where a run stands. Never raises for an event that it does not know, or for one that came late.

    seen: what the place says of its job. now_s: the time at which it said so; it tells a job that ended just now,
    whose last words are on their way, from one that has vanished.
    """
    record = RunRecord(run_id=run_id)
    for event in events:
        record = apply(record, event)
    if result is not None:
        record = _with_result(record, result)
    if not record.state.is_final:
        record = _judge(record, seen, now_s)
    if record.state in _WAITING:
        return replace(record, workers=(), nodes=())
    if record.state.is_final or seen.alive is False:
        record = replace(record, hang=None, workers=(), nodes=_set_nodes(record, "ended"))
    return record


def apply(record: RunRecord, event: Event) -> RunRecord:
    """One event more. The state follows `TRANSITIONS` only: an event that came late changes no state."""
    time_s = time_of(event)
    record = replace(record, last_event_s=time_s, created_s=time_s if record.created_s is None else record.created_s)
    name = str(event.get("event"))
    if name in _STATES:
        record = _moved(record, _STATES[name])
    return _HANDLERS[name](record, event) if name in _HANDLERS else record


_WAITING = (RunState.SUBMITTED, RunState.PENDING, RunState.REQUEUED)
"""The states of a run of which nothing runs."""


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
    "requeued": RunState.REQUEUED,
}
"""The state that an event leads to, where the present one allows it."""


def _submitted(record: RunRecord, event: Event) -> RunRecord:
    chain = event.get("chain")
    return replace(
        record,
        ref=_text(event.get("ref")),
        chain=tuple(map(str, chain)) if isinstance(chain, list) else (),
        submitted_s=record.last_event_s,
    )


def _created(record: RunRecord, event: Event) -> RunRecord:
    return replace(record, host=str(event.get("host", "")), started_s=record.last_event_s)


def _resumed(record: RunRecord, event: Event) -> RunRecord:
    # Written when nothing of the run is alive, so a run that never said how it ended goes on from UNKNOWN.
    ended = _moved(record, RunState.UNKNOWN)
    return replace(
        _moved(ended, RunState.SUBMITTED),
        ref=None,
        chain=(),
        is_cancelled=False,
        submitted_s=None,
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


def _node_lost(record: RunRecord, event: Event) -> RunRecord:
    """Nothing is heard of it, or its agent has gone; its workers end by themselves, and are told of when they have."""
    return _set_node(record, event.get("node"), state="lost")


def _node_failed(record: RunRecord, event: Event) -> RunRecord:
    """A node that could not take part: with the failures, though no attempt and no rank of it is known."""
    failed = _set_node(record, event.get("node"), host=str(event.get("host", "")), state="failed")
    return replace(failed, failures=(*record.failures, {**event, "attempt": record.attempts, "rank": None}))


def _allocation_started(record: RunRecord, event: Event) -> RunRecord:
    """A job has its nodes. Whatever the last one left open is over, for a run has one at a time."""
    number = _int(event.get("allocation")) or len(record.allocations) + 1
    nodes, left_s = event.get("nodes"), event.get("seconds_left")
    allocation: AllocationRecord = {
        "allocation": number,
        "job": str(event.get("job", "")),
        "nodes": [str(node) for node in nodes] if isinstance(nodes, list) else [],
        "submitted_s": record.submitted_s,
        "started_s": record.last_event_s,
        "limit_s": time_of(event) + left_s if isinstance(left_s, int | float) else None,
        "ended_s": None,
        "cause": None,
        "sentence": "",
        "saved": None,
        "step": None,
    }
    others = [each for each in record.allocations if each["allocation"] != number]
    job = f"slurm:{allocation['job']}"
    begun = replace(
        _moved(_moved(record, RunState.REQUEUED), RunState.STARTING),
        allocations=tuple(sorted([*others, allocation], key=_by("allocation"))),
        ref=job if allocation["job"] and (record.ref is None or record.on_slurm) else record.ref,
        nodes=(),
        workers=(),
        waiting=None,
        stop_reason=None,
    )
    for index, host in enumerate(allocation["nodes"]):
        begun = _set_node(begun, index, host=host)
    return begun


def _allocation_ended(record: RunRecord, event: Event) -> RunRecord:
    number, cause = _int(event.get("allocation")), _cause(event.get("cause"))
    ended = {
        "ended_s": record.last_event_s,
        "cause": cause,
        "sentence": allocation_sentence(event),
        "step": _int(event.get("step")),
    }
    if event.get("saved") is not None and not any(
        each["saved"] for each in record.allocations if each["allocation"] == number
    ):
        ended["saved"] = event["saved"]  # the head agent, which has stopped the workers, knows it better
    allocations = tuple({**each, **ended} if each["allocation"] == number else each for each in record.allocations)
    return replace(record, allocations=allocations, workers=(), nodes=_set_nodes(record, "ended"), waiting=None)


def allocation_sentence(event: Mapping[str, Any]) -> str:
    """Why an allocation ended, by its `allocation_ended`."""
    cause, host = _cause(event.get("cause")), event.get("host")
    if reason := _text(event.get("reason")):
        return reason
    if cause is Cause.NODE_LOST and host:
        return f"node {host} was lost"
    return _sentence(cause)


def _requeued(record: RunRecord, event: Event) -> RunRecord:
    ref = _text(event.get("ref")) or record.ref
    return replace(record, ref=ref, workers=(), submitted_s=record.last_event_s)


def _cancel_requested(record: RunRecord, event: Event) -> RunRecord:
    return replace(record, is_cancelled=True)


def _stopped(record: RunRecord, event: Event) -> RunRecord:
    number = record.allocations[-1]["allocation"] if record.allocations else None
    saved = {"saved": event.get("saved")}
    allocations = tuple({**each, **saved} if each["allocation"] == number else each for each in record.allocations)
    reason = _text(event.get("reason")) or record.stop_reason
    return replace(record, stop_reason=reason, workers=(), allocations=allocations)


def _waiting(record: RunRecord, event: Event) -> RunRecord:
    return replace(record, waiting=event)


def _attempt_started(record: RunRecord, event: Event) -> RunRecord:
    attempt = _int(event.get("attempt")) or record.attempts
    workers = tuple(worker for worker in record.workers if worker["attempt"] == attempt)
    exits = record.exits if attempt <= record.attempts else {}
    began = replace(record, attempts=max(record.attempts, attempt), workers=workers, exits=exits, waiting=None)
    members = event.get("members")  # None: all of them take part
    for node in (
        node for node in began.nodes if node["state"] == "lost" and node["node"] in (members or [node["node"]])
    ):
        began = _set_node(began, node["node"], state="up")
    return replace(began, hang=None, stragglers=())


def _hang(record: RunRecord, event: Event) -> RunRecord:
    return replace(record, hang=event)


def _hang_over(record: RunRecord, event: Event) -> RunRecord:
    return replace(record, hang=None)


def _straggler(record: RunRecord, event: Event) -> RunRecord:
    return replace(record, stragglers=(*record.stragglers, event))


def _worker_started(record: RunRecord, event: Event) -> RunRecord:
    worker = {key: _int(event.get(key)) for key in ("node", "rank", "pid", "attempt")}
    return replace(record, workers=_put(record.workers, "rank", worker))


def _worker_ended(record: RunRecord, event: Event) -> RunRecord:
    rank, attempt = _int(event.get("rank")), _int(event.get("attempt"))
    workers = tuple(w for w in record.workers if (w["rank"], w["attempt"]) != (rank, attempt))
    if rank is None or attempt != record.attempts:
        return replace(record, workers=workers)
    return replace(record, workers=workers, exits={**record.exits, rank: _int(event.get("exit_code"))})


def _failure(record: RunRecord, event: Event) -> RunRecord:
    return replace(record, failures=(*record.failures, event))


def _restarting(record: RunRecord, event: Event) -> RunRecord:
    told = _int(event.get("restarts"))
    return replace(record, restarts=record.restarts + 1 if told is None else told)  # a free one leaves it at 0


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
    "node_lost": _node_lost,
    "node_failed": _node_failed,
    "allocation_started": _allocation_started,
    "allocation_ended": _allocation_ended,
    "requeued": _requeued,
    "cancel_requested": _cancel_requested,
    "stopped": _stopped,
    "waiting": _waiting,
    "attempt_started": _attempt_started,
    "worker_started": _worker_started,
    "worker_ended": _worker_ended,
    "failure": _failure,
    "hang": _hang,
    "hang_over": _hang_over,
    "straggler": _straggler,
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


def _judge(record: RunRecord, seen: Observation, now_s: float | None) -> RunRecord:
    """The state of a run that did not say how it ended."""
    if seen.alive:
        return _in_queue(record, seen)
    was = record.state.value
    if record.ref is None:
        return replace(record, state=RunState.UNKNOWN, sentence="it was never submitted")
    if seen.alive is None:
        why = f"whether it is alive cannot be told from here, ask on {record.host or 'its host'}"
        if record.is_far:
            why = seen.detail or "whether it is alive cannot be told from here"
        return replace(record, state=RunState.UNKNOWN, sentence=f"last seen {was}; {why}", queue=_told(seen))
    if record.is_far:
        return _taken_down(record, seen) if record.on_sky else _vanished(record, seen, now_s)
    gone = replace(record, state=RunState.FAILED, ended_s=record.last_event_s)
    lost = next((node for node in record.nodes if node["state"] == "lost" and node.get("status") is not None), None)
    if lost is not None:
        return _without_agent(gone, lost)
    sentence = f"it is gone, and did not say why; last seen {was} (its processes were killed, or the machine went down)"
    return replace(gone, cause=Cause.LAUNCHER_LOST, sentence=sentence)


def _in_queue(record: RunRecord, seen: Observation) -> RunRecord:
    """What the place knows better than the events: that a job waits, or has got its nodes."""
    record = replace(record, queue=_told(seen))
    if seen.waits:
        again = record.state not in (RunState.SUBMITTED, RunState.PENDING, RunState.UNKNOWN)
        return _moved(record, RunState.REQUEUED if again else RunState.PENDING)
    # A job that asked to be requeued runs on until SLURM has ended it.
    return _moved(record, RunState.STARTING) if seen.state and record.state is RunState.SUBMITTED else record


def _told(seen: Observation) -> Observation | None:
    """What is worth showing: a place that only knows whether a job is alive adds nothing."""
    return seen if seen.state or seen.detail else None


_GONE: dict[str, tuple[RunState, Cause]] = {
    "CANCELLED": (RunState.CANCELLED, Cause.CANCELLED),
    "TIMEOUT": (RunState.TIMED_OUT, Cause.TIME_LIMIT),
    "DEADLINE": (RunState.TIMED_OUT, Cause.TIME_LIMIT),
    "PREEMPTED": (RunState.PREEMPTED, Cause.PREEMPTED),
    "NODE_FAIL": (RunState.FAILED, Cause.NODE_LOST),
    "BOOT_FAIL": (RunState.FAILED, Cause.NODE_LOST),
    "OUT_OF_MEMORY": (RunState.FAILED, Cause.OOM_KILLED),
}
"""What became of a run whose job SLURM has ended before anybody could write it down."""


def _vanished(record: RunRecord, seen: Observation, now_s: float | None) -> RunRecord:
    """A job that is not in the queue any more, and of which nobody says how the run ended."""
    ident = (record.ref or "").partition(":")[2]
    over = f"job {ident} is over ({seen.state})" if seen.state else f"SLURM does not know job {ident} any more"
    ended_s = seen.ends_s if seen.ends_s is not None else record.last_event_s
    record = replace(record, queue=_told(seen))
    never_began = bool(seen.state) and not seen.nodes  # so it has no last words
    if now_s is not None and ended_s is not None and now_s - ended_s < _LAST_WORDS_S and not never_began:
        return replace(record, sentence=f"{over}; its last words may take some seconds to arrive")
    # Times of SLURM are whole seconds.
    ended_s = max((each for each in (ended_s, record.last_event_s) if each is not None), default=None)
    gone = replace(record, ended_s=ended_s, exit_code=record.exit_code or seen.exit_code or None)
    if seen.state in _GONE:
        state, cause = _GONE[seen.state]
        code = gone.exit_code if state is RunState.FAILED else gone.exit_code or ExitCode.TERMINATED
        asked = record.is_cancelled and cause is Cause.CANCELLED  # by `launch cancel`: nothing that SLURM has to add
        said = _sentence(cause) if asked else f"{_sentence(cause)} (SLURM: {seen.state})"
        return replace(gone, state=state, cause=cause, exit_code=code, sentence=said)
    if record.is_cancelled:
        cancelled = replace(gone, state=RunState.CANCELLED, cause=Cause.CANCELLED, sentence=_sentence(Cause.CANCELLED))
        return replace(cancelled, exit_code=gone.exit_code or ExitCode.TERMINATED)
    looked = "" if record.allocations else "; it may not have begun: slurm/ in the run directory has its output, if any"
    sentence = f"it vanished: {over}, and nobody wrote down why; last seen {record.state.value}{looked}"
    return replace(gone, state=RunState.FAILED, cause=Cause.LAUNCHER_LOST, sentence=sentence)


_TAKEN_DOWN: dict[str, tuple[RunState, Cause | None]] = {
    "SUCCEEDED": (RunState.SUCCEEDED, None),
    "CANCELLED": (RunState.CANCELLED, Cause.CANCELLED),
    "FAILED_SETUP": (RunState.FAILED, Cause.SETUP),
}
"""What became of a run whose record did not come home, by SkyPilot's word for its job."""


def _taken_down(record: RunRecord, seen: Observation) -> RunRecord:
    """A job of SkyPilot that is over, and of which no result has come home."""
    ended_s = seen.ends_s if seen.ends_s is not None else record.last_event_s
    record = replace(record, queue=_told(seen), ended_s=ended_s)
    state, cause = _TAKEN_DOWN.get(seen.state, (RunState.FAILED, Cause.LAUNCHER_LOST))
    if record.is_cancelled and state is RunState.FAILED:
        state, cause = RunState.CANCELLED, Cause.CANCELLED
    said = f"SkyPilot: {seen.state or 'gone'}" + (f", {seen.detail}" if seen.detail else "")
    exit_code = 0 if state is RunState.SUCCEEDED else record.exit_code
    sentence = f"its result has not come home ({said})"
    return replace(record, state=state, cause=cause, exit_code=exit_code, sentence=sentence)


def _without_agent(record: RunRecord, lost: NodeRecord) -> RunRecord:
    """A run that ended with an agent that was not replaced: a fault of ours, or it was killed too often."""
    code, signum = lost["status"] >> 8, lost["status"] & 0x7F
    cause = Cause.NODE_LOST if signum else Cause.INTERNAL
    how = f"was killed by signal {signum}" if signum else f"ended by itself (exit {code}), and logs/agents.log says why"
    where = f"node {lost['node']}" + (f" ({lost['host']})" if lost["host"] else "")
    sentence = f"{POLICIES[cause].sentence}: the agent of {where} {how}"
    return replace(record, cause=cause, sentence=sentence)


def _set_node(record: RunRecord, node: Any, **fields: Any) -> RunRecord:
    changed: NodeRecord = {"node": _int(node), "host": "", "pid": None, "state": "joining"}
    at = bisect_left(record.nodes, _by("node")(changed), key=_by("node"))
    if record.nodes[at : at + 1] and record.nodes[at]["node"] == changed["node"]:
        changed = record.nodes[at]
    return replace(record, nodes=_put(record.nodes, "node", {**changed, **fields}))


def _put(among: tuple[dict[str, Any], ...], key: str, new: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """In the place of the one with the same key, in their order. Of thousands: nothing is sorted for each."""
    at = bisect_left(among, _by(key)(new), key=_by(key))
    same = among[at : at + 1] and among[at][key] == new[key]
    return (*among[:at], new, *among[at + 1 if same else at :])


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
