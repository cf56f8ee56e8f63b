"""The fold of events into a record: states follow the table, whatever comes and in whatever order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher.runs.events import Event
from launcher.runs.fold import RunRecord, apply, fold
from launcher.runs.observed import ALIVE, GONE, UNKNOWN, Observation
from launcher.runs.states import FINAL, TRANSITIONS, Cause, RunState

CREATED = {"event": "created", "command": ["launch"], "user": "ada", "host": "here"}
SUBMITTED = {"event": "submitted", "ref": "local:here:1:2"}
STARTED = [
    {"event": "supervisor_started", "pid": 1, "host": "here"},
    {"event": "agent_started", "node": 0, "pid": 10, "host": "here"},
    {"event": "agent_started", "node": 1, "pid": 11, "host": "here"},
    {"event": "node_joined", "node": 0},
    {"event": "node_joined", "node": 1},
]
FINISHED = {"event": "finished", "state": "SUCCEEDED", "cause": "done", "exit_code": 0}


def attempt(number: int) -> list[Event]:
    return [
        {"event": "attempt_started", "attempt": number, "world_size": 2},
        *(
            {"event": "worker_started", "attempt": number, "node": rank, "rank": rank, "pid": 100 * number + rank}
            for rank in (0, 1)
        ),
    ]


def ended(number: int, rank: int, code: int = 0) -> Event:
    return {"event": "worker_ended", "attempt": number, "node": rank, "rank": rank, "exit_code": code}


RUNNING = [CREATED, SUBMITTED, *STARTED, *attempt(1)]
WHOLE: list[Event] = [
    *RUNNING,
    {"event": "training_started", "attempt": 1, "step": 0, "total_steps": 632, "steps_per_epoch": 79},
    {"event": "checkpoint_saved", "attempt": 1, "step": 100, "path": "checkpoints/step-100", "best": True},
    ended(1, 1, 137),
    {"event": "failure", "attempt": 1, "node": 1, "rank": 1, "cause": "signal", "exit_code": 137},
    {"event": "attempt_ended", "attempt": 1, "cause": "signal"},
    {"event": "restarting", "attempt": 2, "restarts": 1, "max_restarts": 3},
    *attempt(2),
    {"event": "training_started", "attempt": 2, "step": 100, "total_steps": 632, "steps_per_epoch": 79},
    {"event": "summary", "attempt": 2, "step": 632, "samples_seen": 80896, "metrics": {"eval/accuracy": 0.978}},
    {"event": "tracking", "attempt": 2, "wandb": {"mode": "offline", "id": "x"}},
    ended(2, 0),
    ended(2, 1),
    FINISHED,
    {"event": "supervisor_ended", "exit_code": 0},
]


def timed(events: list[Event]) -> list[Event]:
    return [{"time": 1000.0 + index, "writer": "any", **event} for index, event in enumerate(events)]


def folded(events: list[Event], alive: bool | None = True, result: dict[str, Any] | None = None) -> RunRecord:
    return fold(timed(events), {True: ALIVE, False: GONE, None: UNKNOWN}[alive], result, run_id="r")


ON_SLURM: list[Event] = [
    CREATED,
    {"event": "submitted", "ref": "slurm:7"},
    {"event": "allocation_started", "allocation": 1, "job": "7", "nodes": ["n1", "n2"], "seconds_left": 60.0},
    *STARTED[1:],
    *attempt(1),
    {"event": "checkpoint_saved", "attempt": 1, "step": 100, "path": "checkpoints/step-100"},
    {"event": "stop_requested", "reason": "TERM"},
    {"event": "stopped", "reason": "TERM", "saved": True, "exit_code": 75},
    {"event": "allocation_ended", "allocation": 1, "job": "7", "cause": "preempted", "saved": True, "step": 100},
    {"event": "requeued", "allocation": 1, "how": "resubmit", "cause": "preempted", "ref": "slurm:8"},
    {"event": "allocation_started", "allocation": 2, "job": "8", "nodes": ["n3", "n4"], "seconds_left": None},
    {"event": "node_joined", "node": 0},
    *attempt(2),
]


def test_a_whole_run_with_a_restart() -> None:
    record = folded(WHOLE, None)
    assert (record.state, record.cause, record.exit_code) == (RunState.SUCCEEDED, Cause.DONE, 0)
    assert (record.attempts, record.restarts) == (2, 1)
    assert (record.step, record.total_steps, record.samples_seen) == (632, 632, 80896)
    assert record.metrics == {"eval/accuracy": 0.978}
    assert [event["cause"] for event in record.failures] == ["signal"]
    assert [event["step"] for event in record.checkpoints] == [100]
    assert [node["state"] for node in record.nodes] == ["ended", "ended"]
    assert record.workers == ()
    assert record.started_s == 1000.0
    assert record.ended_s == 1000.0 + WHOLE.index(FINISHED)


def test_a_restart_that_is_free_is_not_counted() -> None:
    assert folded([*RUNNING, {"event": "restarting", "attempt": 2, "restarts": 0}, *attempt(2)]).restarts == 0


def test_workers_are_those_that_live_in_the_newest_attempt() -> None:
    until_second = WHOLE[: WHOLE.index(ended(2, 0))]
    assert [(worker["rank"], worker["pid"], worker["attempt"]) for worker in folded(until_second).workers] == [
        (0, 200, 2),
        (1, 201, 2),
    ]
    assert [worker["rank"] for worker in folded([*until_second, ended(2, 0)]).workers] == [1]


def test_the_end_of_an_old_worker_that_is_told_late_ends_no_new_one() -> None:
    record = folded([*RUNNING, *attempt(2), ended(1, 0, 143)])
    assert [worker["pid"] for worker in record.workers] == [200, 201]


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([], RunState.UNKNOWN),
        ([CREATED, SUBMITTED], RunState.SUBMITTED),
        ([CREATED, SUBMITTED, STARTED[0]], RunState.STARTING),
        (RUNNING, RunState.RUNNING),
        ([*RUNNING, {"event": "restarting", "restarts": 1}], RunState.RESTARTING),
        ([*RUNNING, {"event": "agent_started", "node": 1}], RunState.RUNNING),
        ([CREATED, STARTED[0], SUBMITTED], RunState.STARTING),
        ([*RUNNING, FINISHED, *attempt(2)], RunState.SUCCEEDED),
        ([*RUNNING, {"event": "finished", "state": "CANCELLED", "cause": "cancelled"}], RunState.CANCELLED),
        ([*RUNNING, {"event": "finished", "state": "from the future"}], RunState.UNKNOWN),
        ([*RUNNING, {"event": "not known here"}], RunState.RUNNING),
    ],
)
def test_the_state_after_events(events: list[Event], state: RunState) -> None:
    record = RunRecord()
    for event in timed(events):
        record = apply(record, event)
    assert record.state is state


@pytest.mark.parametrize("alive", [True, False, None])
def test_a_run_that_has_finished_is_what_it_said(alive: bool | None) -> None:
    assert folded(WHOLE, alive).state is RunState.SUCCEEDED


def test_a_job_that_is_gone_without_a_word_has_failed() -> None:
    record = folded(RUNNING, False)
    assert (record.state, record.cause) == (RunState.FAILED, Cause.LAUNCHER_LOST)
    assert "did not say why; last seen RUNNING" in record.sentence
    assert record.workers == ()


def test_a_job_that_cannot_be_seen_is_unknown_and_its_host_is_named() -> None:
    record = folded(RUNNING, None)
    assert record.state is RunState.UNKNOWN
    assert "last seen RUNNING" in record.sentence
    assert "here" in record.sentence


def test_a_run_that_was_never_submitted_says_so() -> None:
    assert folded([CREATED], None).sentence == "it was never submitted"


def test_the_result_is_the_truth() -> None:
    result = {"state": "FAILED", "cause": "oom", "exit_code": 1, "attempts": 4, "restarts": 3, "reason": "too big"}
    record = folded(RUNNING, False, result)
    assert (record.state, record.cause, record.exit_code) == (RunState.FAILED, Cause.OOM, 1)
    assert (record.attempts, record.restarts, record.reason) == (4, 3, "too big")


def test_a_resume_starts_over_and_keeps_attempts_and_checkpoints() -> None:
    events = [*WHOLE, {"event": "resumed", "overrides": []}]
    record = folded(events)
    assert record.state is RunState.SUBMITTED
    assert (record.cause, record.exit_code, record.ended_s, record.ref) == (None, None, None, None)
    assert (record.attempts, record.restarts, record.failures) == (2, 0, ())
    assert [event["step"] for event in record.checkpoints] == [100]
    assert record.started_s == 1000.0 + len(WHOLE)
    again = folded([*events, {"event": "submitted", "ref": "local:here:3:4"}, *STARTED, *attempt(3)])
    assert (again.state, again.attempts, again.ref) == (RunState.RUNNING, 3, "local:here:3:4")


def test_a_run_that_was_killed_can_be_resumed() -> None:
    assert folded([*RUNNING, {"event": "resumed"}]).state is RunState.SUBMITTED


def test_waiting_for_a_node_is_known_until_it_joins() -> None:
    waiting = {"event": "waiting", "missing": [1], "waited_s": 40.0}
    assert folded([*STARTED[:4], waiting]).waiting is not None
    assert folded([*STARTED[:4], waiting, STARTED[4]]).waiting is None


def test_a_lost_agent_takes_its_workers_along() -> None:
    record = folded([*RUNNING, {"event": "agent_lost", "node": 1, "pid": 11, "status": 9}])
    assert [(node["node"], node["state"]) for node in record.nodes] == [(0, "up"), (1, "lost")]
    assert [worker["node"] for worker in record.workers] == [0]


def test_a_lost_node_is_lost_until_an_attempt_has_it_again() -> None:
    def states(*events: Event) -> list[str]:
        return [node["state"] for node in folded([*RUNNING, {"event": "node_lost", "node": 1}, *events]).nodes]

    def attempt_of(*members: int) -> Event:
        return {"event": "attempt_started", "attempt": 2, "members": list(members)}

    assert states() == ["up", "lost"]
    assert states(attempt_of(0)) == ["up", "lost"], "it goes on without"
    assert states(attempt_of(0), {**attempt_of(0, 1), "attempt": 3}) == ["up", "up"]
    assert states({"event": "attempt_started", "attempt": 2}) == ["up", "up"], "a run of a fixed size has all"
    assert states({"event": "node_joined", "node": 1}) == ["up", "up"]


def test_only_a_person_leads_out_of_a_final_state() -> None:
    assert all(TRANSITIONS[state] == {RunState.SUBMITTED} for state in FINAL)
    assert set(TRANSITIONS) == set(RunState)


NAMES = sorted({str(event["event"]) for event in (*WHOLE, *ON_SLURM)} | {"resumed", "waiting", "node_failed", "?"})
FIELDS = ("attempt", "node", "rank", "pid", "state", "cause", "exit_code", "step", "host", "ref", "metrics", "chain")
VALUES: tuple[Any, ...] = (None, True, 0, 3, -1, float("inf"), float("nan"), "", "3", "FAILED", "done", [], [1], {})
noise = st.builds(
    lambda name, fields: {**fields, "event": name},
    st.sampled_from(NAMES),
    st.dictionaries(st.sampled_from(FIELDS), st.sampled_from(VALUES), max_size=4),
)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.sampled_from([*WHOLE, *ON_SLURM]) | noise, max_size=25), st.sampled_from([True, False, None]))
def test_any_events_in_any_order_fold_and_follow_the_table(events: list[Event], alive: bool | None) -> None:
    record = RunRecord()
    for event in events:
        following = apply(record, event)
        allowed = TRANSITIONS[record.state] | {record.state}
        twice = {"resumed": RunState.SUBMITTED, "allocation_started": RunState.STARTING}  # these may take two steps
        assert following.state in allowed or following.state is twice.get(str(event["event"]))
        record = following
    fold(events, Observation(alive=alive), None)


@given(st.integers(0, len(WHOLE)), st.sampled_from([True, False, None]))
def test_every_prefix_of_a_run_folds(length: int, alive: bool | None) -> None:
    assert folded(WHOLE[:length], alive).attempts <= 2


@pytest.mark.parametrize(
    ("status", "cause", "said"),
    [
        (256, Cause.INTERNAL, "the agent of node 1 (here) ended by itself (exit 1), and logs/agents.log says why"),
        (9, Cause.NODE_LOST, "a node was lost: the agent of node 1 (here) was killed by signal 9"),
    ],
)
def test_a_run_that_ended_with_its_agent_says_so(status: int, cause: Cause, said: str) -> None:
    told = [*RUNNING, {"event": "agent_lost", "node": 1, "pid": 11, "status": status}]
    record = fold(told, GONE, None)
    assert (record.state, record.cause) == (RunState.FAILED, cause)
    assert said in record.sentence


def test_the_exit_codes_of_the_newest_attempt_are_kept() -> None:
    assert fold(WHOLE[:13], ALIVE, None).exits == {1: 137}
    assert fold(WHOLE, GONE, None).exits == {0: 0, 1: 0}


def test_the_step_of_a_script_is_what_it_says_of_its_progress() -> None:
    told = [
        *RUNNING,
        {"event": "progress", "attempt": 1, "step": 12},
        {"event": "progress", "attempt": 1, "step": None},
    ]
    assert fold(told, ALIVE, None).step == 12


def on_slurm(until: int | None, seen: Observation, *, after_s: float = 3600.0, **asked: Event) -> RunRecord:
    """Where a run on SLURM stands after so many of its events, so long after the last of them."""
    events = timed([*ON_SLURM[:until], *asked.values()])
    return fold(events, seen, None, run_id="r", now_s=events[-1]["time"] + after_s)


WAITS = Observation(alive=True, state="PENDING", reason="Resources", starts_s=5000.0)
RUNS = Observation(alive=True, state="RUNNING", ends_s=9000.0, nodes="n[1-2]")
FORGOTTEN = Observation(alive=False, detail="SLURM does not know it any more")


@pytest.mark.parametrize(
    ("until", "seen", "state"),
    [
        (2, WAITS, RunState.PENDING),
        (2, Observation(alive=True, state="CONFIGURING"), RunState.PENDING),
        (2, RUNS, RunState.STARTING),
        (3, RUNS, RunState.STARTING),
        (12, RUNS, RunState.RUNNING),
        (14, RUNS, RunState.RUNNING),
        (15, WAITS, RunState.REQUEUED),
        (15, RUNS, RunState.REQUEUED),
        (16, RUNS, RunState.STARTING),
        (None, RUNS, RunState.RUNNING),
        (None, WAITS, RunState.REQUEUED),
    ],
)
def test_the_state_on_slurm_is_that_of_the_events_and_of_the_queue(
    until: int | None, seen: Observation, state: RunState
) -> None:
    record = on_slurm(until, seen)
    assert record.state is state
    assert record.queue is seen
    assert record.workers == () or state is RunState.RUNNING, "nothing of it runs"


def test_allocations_have_their_nodes_and_why_they_ended() -> None:
    record = on_slurm(None, RUNS)
    first, second = record.allocations
    assert (first["job"], first["nodes"], first["cause"], first["step"]) == ("7", ["n1", "n2"], Cause.PREEMPTED, 100)
    assert (first["sentence"], first["ended_s"] - first["started_s"]) == ("preempted by another job", 11.0)
    assert (first["limit_s"], first["submitted_s"]) == (1062.0, 1001.0)
    assert (second["job"], second["ended_s"], second["cause"]) == ("8", None, None)
    assert (record.ref, record.jobs) == ("slurm:8", ("slurm:8",))
    assert [node["host"] for node in record.nodes] == ["n3", "n4"]


def test_the_reason_of_an_allocation_is_in_the_words_of_who_ended_it() -> None:
    ended = {"event": "allocation_ended", "allocation": 1, "cause": "node_lost", "host": "n2", "node": 1}
    assert on_slurm(13, RUNS, ended=ended).allocations[0]["sentence"] == "node n2 was lost"
    ended = {**ended, "reason": "n2 did not answer for 20 s"}
    assert on_slurm(13, RUNS, ended=ended).allocations[0]["sentence"] == "n2 did not answer for 20 s"


def test_the_next_of_a_chain_may_carry_the_run() -> None:
    submitted = {"event": "submitted", "ref": "slurm:7", "chain": ["slurm:7", "slurm:8", "slurm:9"]}
    assert folded([CREATED, submitted]).jobs == ("slurm:7", "slurm:8", "slurm:9")
    started = {"event": "allocation_started", "allocation": 2, "job": "8", "nodes": ["n1"]}
    assert folded([CREATED, submitted, started]).jobs == ("slurm:8", "slurm:9")


@pytest.mark.parametrize(
    ("word", "state", "cause"),
    [
        ("CANCELLED", RunState.CANCELLED, Cause.CANCELLED),
        ("TIMEOUT", RunState.TIMED_OUT, Cause.TIME_LIMIT),
        ("PREEMPTED", RunState.PREEMPTED, Cause.PREEMPTED),
        ("NODE_FAIL", RunState.FAILED, Cause.NODE_LOST),
        ("OUT_OF_MEMORY", RunState.FAILED, Cause.OOM_KILLED),
        ("FAILED", RunState.FAILED, Cause.LAUNCHER_LOST),
        ("", RunState.FAILED, Cause.LAUNCHER_LOST),
    ],
)
def test_a_job_that_slurm_has_ended_says_how(word: str, state: RunState, cause: Cause) -> None:
    """F051: no endless wait for a job that is gone."""
    record = on_slurm(12, Observation(alive=False, state=word))
    assert (record.state, record.cause) == (state, cause)
    assert word in record.sentence


def test_a_job_that_vanished_after_a_cancel_was_cancelled() -> None:
    record = on_slurm(2, FORGOTTEN, asked={"event": "cancel_requested"})
    assert (record.state, record.cause) == (RunState.CANCELLED, Cause.CANCELLED)
    known = on_slurm(2, Observation(alive=False, state="CANCELLED"), asked={"event": "cancel_requested"})
    assert known.sentence == record.sentence == "stopped on request", "nothing that SLURM would have to add"


def test_a_job_that_vanished_is_reported_when_its_last_words_had_time_to_arrive() -> None:
    """F051: neither at once, on a slow file system, nor never."""
    record = on_slurm(12, FORGOTTEN, after_s=5.0)
    assert record.state is RunState.RUNNING
    assert "its last words may take some seconds to arrive" in record.sentence
    record = on_slurm(12, FORGOTTEN, after_s=25.0)
    assert record.state is RunState.FAILED
    assert record.sentence.startswith("it vanished: SLURM does not know job 7 any more, and nobody wrote down why")
    ended_now = Observation(alive=False, state="COMPLETED", nodes="n1", ends_s=1013.0 + 3600)
    assert on_slurm(12, ended_now).state is RunState.RUNNING
    never_began = Observation(alive=False, state="CANCELLED", ends_s=1013.0 + 3600)
    assert on_slurm(2, never_began).state is RunState.CANCELLED, "it has no last words"


def test_a_requeue_without_a_job_is_reported() -> None:
    record = on_slurm(15, FORGOTTEN)
    assert record.state is RunState.FAILED
    assert "last seen REQUEUED" in record.sentence


def test_a_state_of_slurm_that_is_not_known_is_shown_as_it_is() -> None:
    """F052."""
    seen = Observation(alive=None, state="PARKED", detail="SLURM calls its state 'PARKED', which is not known here")
    record = on_slurm(12, seen)
    assert record.state is RunState.UNKNOWN
    assert record.sentence == "last seen RUNNING; SLURM calls its state 'PARKED', which is not known here"


def test_a_node_that_could_not_join_is_a_failure_with_its_host() -> None:
    """F012."""
    failed = {"event": "node_failed", "node": 1, "host": "n2", "cause": "setup", "exit_code": 3, "message": "no torch"}
    record = on_slurm(3, RUNS, failed=failed)
    assert (record.failures[0]["host"], record.failures[0]["attempt"], record.failures[0]["rank"]) == ("n2", 0, None)
    assert record.nodes[1]["state"] == "failed"


@pytest.mark.parametrize(
    ("cause", "reason", "why"),
    [
        ("worker_error", "ValueError: bad\nlr; not retried: no restart is left", "a worker failed: ValueError: bad"),
        (
            "signal",
            "killed by SIGKILL; not retried: no restart is left",
            "a worker was killed by a signal: killed by SIGKILL",
        ),
        ("oom", "OutOfMemoryError: tried; not retried: out of memory repeats", "CUDA out of memory"),
        ("worker_error", "", "a worker failed"),
    ],
)
def test_a_list_names_the_error_where_the_program_itself_has_failed(cause: str, reason: str, why: str) -> None:
    result = {"state": "FAILED", "cause": cause, "reason": reason, "exit_code": 1}
    assert fold((), Observation(alive=False), result).why == why
