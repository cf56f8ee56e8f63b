"""The attempts of a run and where its time went, as rows and as aligned tables. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.runs.events import Event, time_of
from launcher.runs.fold import RunRecord, allocation_sentence
from launcher.runs.ledger import PARTS, Devices, Entry
from launcher.runs.states import POLICIES, Cause, RunState
from launcher.runs.times import Span, spans
from launcher.wording import aligned, first_line, short_duration, short_hosts, shortened

_WIDEST = 70


@dataclass(frozen=True, kw_only=True)
class AttemptRow:
    """One attempt: from where to where, and what ended it."""

    attempt: int
    allocation: int | None
    """On SLURM: the number of the allocation in which it ran."""
    start_step: int | None
    end_step: int | None
    ended_by: str
    time_s: float | None


def attempt_rows(events: Sequence[Event]) -> list[AttemptRow]:
    """Every attempt of a run, over all restarts and resumes."""
    stops = [str(event.get("reason")) for event in events if event.get("event") == "stop_requested"]
    return [
        AttemptRow(
            attempt=span.attempt,
            allocation=span.allocation,
            start_step=span.start_step,
            end_step=span.end_step if span.end_step is not None else span.start_step,
            ended_by=_ended_by(span, stops),
            time_s=round(time_of(span.ended) - span.started_s, 3) if span.ended else None,
        )
        for span in spans(events)
    ]


def attempts_table(rows: Sequence[AttemptRow]) -> str:
    """The attempts as columns; empty where there is none."""
    if not rows:
        return ""
    cells = [
        (
            str(row.attempt),
            "-" if row.start_step is None else f"{row.start_step:,}",
            "-" if row.end_step is None else f"{row.end_step:,}",
            "-" if row.time_s is None else short_duration(row.time_s),
            shortened(row.ended_by, _WIDEST),
        )
        for row in rows
    ]
    return "\n".join(aligned([("attempt", "from", "to", "time", "ended by"), *cells], right=range(4)))


def allocations_table(record: RunRecord) -> str:
    """The allocations of a run on SLURM as columns; empty where there is none."""
    cells = []
    for each in record.allocations:
        queued_s = None if each["submitted_s"] is None else max(0.0, each["started_s"] - each["submitted_s"])
        cells.append(
            (
                str(each["allocation"]),
                each["job"],
                "-" if queued_s is None else short_duration(queued_s),
                "-" if each["ended_s"] is None else short_duration(each["ended_s"] - each["started_s"]),
                short_hosts(each["nodes"]),
                shortened(allocation_end(record, each), _WIDEST),
            )
        )
    head = ("allocation", "job", "queue", "time", "nodes", "ended by")
    return "\n".join(aligned([head, *cells], right=range(4))) if cells else ""


def allocation_end(record: RunRecord, allocation: Mapping[str, Any]) -> str:
    """What ended an allocation."""
    if allocation["sentence"]:
        return str(allocation["sentence"])
    if allocation is not record.allocations[-1]:
        return "it ended without a word"
    return record.sentence or ("" if record.state.is_final else "it goes on")


def time_table(parts: Mapping[str, float], *, has_clock: bool) -> str:
    """Where the time went, in seconds and shares; empty where it is not known."""
    total_s = parts.get("total", 0.0)
    if total_s <= 0:
        return ""
    shown = [name for name in PARTS if parts[name] > 0 or name in ("start", "train")]
    cells = [(_MEANING[name][0], f"{parts[name]:,.1f} s", f"{100 * parts[name] / total_s:.1f} %") for name in shown]
    notes = [_MEANING[name][1] for name in shown]
    rows = [("time", "", ""), *cells, ("total", f"{total_s:,.1f} s", "100 %")]
    lines = aligned(rows, right=(1, 2))
    table = [f"{line}   {note}".rstrip() for line, note in zip(lines, ["", *notes, ""], strict=True)]
    if not has_clock:
        table.append("without a step clock (`progress:`) `train` is all the time in which the workers ran")
    return "\n".join(table)


def ledger_table(entries: Sequence[Entry], devices: Devices) -> str:
    """The attempts and what each part of them took, in seconds, and what they cost; empty where there was none."""
    if not any(entry.attempt for entry in entries):
        return ""
    shown = [name for name in PARTS if any(entry.times[name] for entry in entries)]
    head = ("seconds", *shown, "total", _UNITS[devices.unit])
    cells = [
        (
            f"attempt {entry.attempt}",
            *(f"{entry.times[name] / 1000:,.1f}" for name in shown),
            f"{entry.total / 1000:,.1f}",
            f"{devices.hours(entry, 'total'):,.3f}",
        )
        for entry in entries
    ]
    whole, counted = (sum(devices.hours(entry, name) for entry in entries) for name in ("total", "train"))
    last = f"{whole:,.3f} {_UNITS[devices.unit]} in all, {counted:,.3f} of them in steps that counted"
    return "\n".join([*(aligned([head, *cells], right=range(1, len(head))) if len(entries) > 1 else ()), last])


_UNITS = {"gpu_hours": "GPU hours", "worker_hours": "worker hours"}
_MEANING = {
    "queue": ("queue", "waiting for the cluster"),
    "start": ("start", "from the command to the first step"),
    "train": ("train", "steps that counted"),
    "eval": ("eval", ""),
    "save": ("save", ""),
    "lost": ("lost", "steps that had to be done again, or were rolled back"),
    "down": ("down", "from the failure of an attempt to the first step of the next"),
    "end": ("end", "from the last step to the end of the run"),
}


def _ended_by(span: Span, stops: Sequence[str]) -> str:
    ended = span.ended
    if not ended:
        return "it goes on, or nobody wrote it down"
    if ended.get("event") in ("stopped", "allocation_ended"):
        return allocation_sentence(ended) or "its allocation ended"
    if ended.get("event") == "finished":
        state = ended.get("state")
        if state == RunState.CANCELLED:
            return f"stopped: {stops[-1]}" if stops else "stopped"
        return "finished" if state == RunState.SUCCEEDED else _sentence(ended.get("cause"))
    rank, node = ended.get("rank"), ended.get("node")
    message = first_line(ended.get("message"))
    who = "" if not isinstance(rank, int) else f"rank {rank}: " if rank >= 0 else ""
    return f"{who}{message or _sentence(ended.get('cause'))}" or f"node {node}"


def _sentence(cause: object) -> str:
    return POLICIES[Cause(cause)].sentence if isinstance(cause, str) and cause in set(Cause) else "unknown"
