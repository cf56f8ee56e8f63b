"""Events: who, when, what, cause. Append-only JSON lines, one writer per file, so nothing is ever locked.

launch-<time>-<pid>, the command line:
    created {command, user, host} · submitted {ref, chain: [ref]} · prepared {time_s} · cancel_requested {host, user} ·
    resumed {overrides, nodes: [before, now], code: same|current|unchanged, code_sha256, code_kept} ·
    array_submitted {ref, offset, tasks}, of a sweep: the index of a point is the number of its task + offset
supervisor-<pid>:
    supervisor_started {pid, host, channel: {address, port}} · agent_lost {node, pid, status} ·
    supervisor_ended {exit_code, swept} ·
    finished {state, cause, exit_code, reason, setup: {number, line, output}}, of a run that ends before it has agents
watch-<host>-<pid>, the watcher of a run on Docker or ssh, where it was launched:
    watcher_started {pid, host} · agent_lost {node, pid, status, detail}, its container or its process has ended badly ·
    node_replaced {node} · machine_silent {node, detail} · machine_answers {node} ·
    finished {state, cause, exit_code, reason}, where no head agent could say it · watcher_ended {left: [node]}
batch-<k>, the batch side of a SLURM job, k the number of the allocation from 1:
    allocation_started {allocation, job, restart_count, nodes: [host], head: {address, port, interface}, seconds_left} ·
    signal_heard {signal, seconds_left, ignored} ·
    allocation_ended {allocation, job, cause, reason, saved, step, kept, exit_code, node, host}: the run is not over by
    this; of an allocation whose batch side was lost, the next one writes it ·
    requeued {allocation, how: requeue|resubmit|chain, cause, ref}, the next allocation is asked for; ref is its job ·
    finished {state, cause, exit_code, reason}, where no head agent could say it, or it does not go on
keeper-0, on machines that are rented in place of others:
    requeued {how: rented, cause} · resumed {overrides, code} · submitted {ref}
node-<k>, the agent of a node:
    node_failed {node, host, cause, exit_code, message}, before it could join: the run ends ·
    agent_started {node, pid, host} · node_bound {node, host, address, cpus, gpus, env} ·
    worker_started {attempt, node, rank, local_rank, pid} · worker_ended {attempt, node, rank, pid, exit_code, error} ·
    torchrun_started {attempt, node, pid} · zygote_replaced {node, pid} ·
    zygote_woken {node, pid}, it was stopped · head_lost {node, reason} ·
    workers_given_up {node, waited_s, kept}, no head agent was found for so long; kept: the step in memory, or null ·
    progress {attempt, step}, by what rank 0 prints
head, the head agent:
    record_lost {attempt, known_by, host}, the disk of node 0 was lost: that node knows of that attempt ·
    node_joined {node, host} · node_lost {node, host, reason} · stranger_refused {peer, reason} ·
    waiting {missing, waited_s} ·
    preflight {took_s, faults: [sentence], nodes}, before the first attempt on several nodes; of each by its number the
          host, interface, cpu_rate and bytes_per_s; with faults the run ends ·
    attempt_started {attempt, master_addr, master_port, nodes, members: [node], resumes_from, allocation}, members only
          where the number of nodes may change ·
    scaled {attempt, nodes: [node], missing: [node], reason}, it has other nodes than the attempt before ·
    rescued {attempt, step, node, rank, time_s}, of the attempt that has ended: that rank has kept that step in memory,
          or at a stop on disk, which is a checkpoint_saved too · not_rescued {attempt, reason} ·
    failure {attempt, node, rank, pid, cause, exit_code, message, place, exception, step, last_words, log, log_line,
             kept} ·
    hang {attempt, phase, step, waited_s, limit_s, limit, culprits: [{rank, node, host, place}],
          waiting: {place, ranks}, action: restart|report, message}, again each time it has lasted twice as long ·
    hang_over {attempt, step, waited_s}, of one that was reported · straggler {attempt, rank, node, host, own_ms,
          others_ms} ·
    stacks_requested {attempt} · attempt_ended {attempt, cause, node, rank, exit_code, message, step} ·
    restarting {attempt, restarts, max_restarts} · stop_requested {reason, grace_s} ·
    stopped {allocation, reason, cause, saved, exit_code, node, host}, on SLURM: the batch side says what follows ·
    signal_heard {signal, seconds_left, ignored} ·
    tracking {attempt, wandb: {mode, reason, sync}}, of what a script has left offline ·
    finished {state, cause, exit_code, reason}
script, rank 0, by launch_client:
    progress {attempt, step}
adapter, rank 0 of a script with `resume: lightning` or `hf`:
    checkpoint_saved {attempt, step, path, size_bytes, training, files, sha256}
worker, rank 0:
    training_started {attempt, step, resumed_from, memory: {node, rank}, rejected: [{name, problem}], init_from,
                      total_steps, steps_per_epoch, world_size, accumulate}, memory: where the state was, if not on the
                      disk, and which rank had kept it (null: a snapshot) ·
    checkpoint_saved {attempt, step, path, time_s, blocked_s, size_bytes, best}, it is complete on disk: time_s after it
                     was begun, of which the training waited blocked_s · evaluated {attempt, step, time_s} ·
    save_failed {attempt, step, reason, in_a_row} · memory_saved {attempt, step, time_s, blocked_s,
                     size_bytes}, on node 0 ·
    step_skipped {attempt, step, reason, scale}, its batch did not change the weights; scale: gradients that overflow in
                     fp16, and the scale that was too large · memory_grows {attempt, from_step, to_step, from_bytes,
                     to_bytes}, of rank 0, at each look ·
    rolled_back {attempt, step, to_step, reason}, of the steps after to_step up to this one none counts ·
    summary {attempt, step, samples_seen, steps_left_out, steps_skipped, world_size, weights_sha256, metrics,
             times: {train_s, eval_s, save_s}, saves: {started, waited, failed}, snapshots: {count, blocked_s} or null,
             input: {wait_s, advice}, memory: {used_bytes, peak_bytes, reserved_bytes}, compiled: {graphs,
             recompiles, graph_breaks, time_s} or null, samples_per_s, checkpoint, checkpoint_verified}, steps_skipped:
             those whose gradients overflowed, steps_left_out: those of `faults.on_nan`; of saves the time that the
             training waited for them, of the input how long the steps of rank 0 waited for their samples, of rank 0
             the memory and what torch.compile has made
uploader, rank 0, where `checkpoint.store` is a URL:
    uploaded {attempt, step, url, size_bytes, time_s}, complete there, and read back ·
    upload_failed {attempt, step, url, reason}
tracking, the process that copies metrics.jsonl to W&B and TensorBoard:
    tracking {attempt, wandb: {mode, reason, id, dir, url, sync}, tensorboard: {dir}}

Every line also has `time` (seconds since the epoch, of its writer), `event` and `writer`: names that no field may take.
Standard library only: agents and workers write events too.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launcher import redact

Event = dict[str, Any]


class EventWriter:
    """Appends events to one file. Each is a single write of one whole line, so a reader never sees half of one."""

    def __init__(self, run_dir: Path, writer: str) -> None:
        self.writer = writer
        folder = run_dir / "events"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{writer}.jsonl"
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")  # half a line, of a node or a disk that failed, must not swallow the next one

    def write(self, event: str, **fields: Any) -> Event:
        """Append one event and return it. Raises ValueError for a field with a name that every line has."""
        if taken := {"time", "writer"} & fields.keys():
            raise ValueError(f"{event}: {', '.join(sorted(taken))} belongs to every event, not to its fields")
        line: Event = {"time": round(time.time(), 4), "writer": self.writer, "event": event, **fields}
        # A lone surrogate (a file name that is no UTF-8, in an exception) becomes JSON's own escape.
        data = (json.dumps(line, ensure_ascii=False) + "\n").encode(errors="backslashreplace")
        os.write(self._fd, redact.own().data(data))
        return line

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def read_events(run_dir: Path) -> list[Event]:
    """All events of a run, in the order of their times (each writer's own order is kept)."""
    events = [event for path in sorted((run_dir / "events").glob("*.jsonl")) for event in read_lines(path)]
    return sorted((event for event in events if "event" in event), key=time_of)


def read_lines(path: Path) -> Iterator[Event]:
    """The JSON objects of a file of JSON lines; an unfinished last line is left out.

    So is a line that a crash of the machine has spoiled: it must not hide the rest of the run.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n") and (event := parse_object(line)) is not None:
                yield event


def parse_object(line: bytes) -> Event | None:
    """A JSON object, or None where the text is none."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def time_of(event: Event) -> float:
    """Seconds since the epoch; 0 for an event without a time."""
    time_s = event.get("time")
    return float(time_s) if isinstance(time_s, int | float) else 0.0
