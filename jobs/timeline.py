"""Where the time of recorded steps went: from the events of torch.profiler to shares and a list of operators."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from torch.autograd import DeviceType  # type: ignore[attr-defined]  # as its own documentation has it

from jobs.host_sum import MARK

INPUT = "launch::input"
"""The range in which a batch is waited for."""
PARTS = ("compute", "communication", "input", "other")
_STEP = "ProfilerStep"
"""How the ranges of the profiler's own steps begin."""
_COMMUNICATION = re.compile(rf"nccl|gloo:|c10d::|_c10d_functional::|^{MARK}$")
_COMPUTED = re.compile(r"\w+::\w")
_AROUND = re.compile(r"autograd::|torch::autograd::|c10d::|profiler::|launch::")
"""Events of the CPU that only surround the work of others."""
_OPERATORS = 12
Interval = tuple[float, float]
"""Begin and end."""


def divide_time(events: Iterable[Any], *, on_gpu: bool) -> dict[str, float]:
    """The share of each of `PARTS` in the time of the recorded steps; 1 together.

    What overlaps counts once. On a GPU, compute (kernels) comes first: communication and input count where nothing is
    computed meanwhile. On a CPU the input comes first, since its reading is computing too.
    """
    found = list(events)
    steps = [_interval(event) for event in found if event.name.startswith(_STEP) and not _is_on_gpu(event)]
    if not steps:
        return {}
    main = next(event.thread for event in found if event.name.startswith(_STEP) and not _is_on_gpu(event))
    of = {
        "compute": [_interval(each) for each in found if _computes(each, main, on_gpu=on_gpu)],
        "communication": [_interval(each) for each in found if _communicates(each, on_gpu=on_gpu)],
        "input": [_interval(each) for each in found if each.name == INPUT and not _is_on_gpu(each)],
    }
    taken: list[Interval] = []
    whole = merged([(min(begin for begin, _ in steps), max(end for _, end in steps))])
    order = ("compute", "communication", "input") if on_gpu else ("input", "compute", "communication")
    total, shares = length(whole), dict.fromkeys(PARTS, 0.0)
    for part in order:
        before = length(taken)
        taken = merged([*taken, *clipped(of[part], whole[0])])
        shares[part] = (length(taken) - before) / total
    shares["other"] = 1 - length(taken) / total
    return {part: round(share, 4) for part, share in shares.items()}


def top_operators(averages: Iterable[Any], *, on_gpu: bool) -> list[dict[str, Any]]:
    """The operators (on a GPU: kernels as well) that took most time by themselves, not counting what they call."""
    field = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    rows = [
        {"name": each.key, "calls": each.count, "time_s": getattr(each, field) / 1e6}
        for each in averages
        if not each.key.startswith((_STEP, INPUT)) and getattr(each, field) > 0
    ]
    total_s = sum(row["time_s"] for row in rows)
    rows.sort(key=lambda row: -row["time_s"])
    return [
        {**row, "time_s": round(row["time_s"], 6), "share": round(row["time_s"] / total_s, 4)}
        for row in rows[:_OPERATORS]
    ]


def merged(intervals: Sequence[Interval]) -> list[Interval]:
    """The same times, without overlaps."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def clipped(intervals: Iterable[Interval], within: Interval) -> list[Interval]:
    """What of them lies within another one."""
    cut = [(max(begin, within[0]), min(end, within[1])) for begin, end in intervals]
    return [(begin, end) for begin, end in cut if begin < end]


def length(intervals: Iterable[Interval]) -> float:
    """Of intervals without overlaps."""
    return sum(end - begin for begin, end in intervals)


def _interval(event: Any) -> Interval:
    return event.time_range.start, event.time_range.end


def _is_on_gpu(event: Any) -> bool:
    return bool(event.device_type != DeviceType.CPU)


def _communicates(event: Any, *, on_gpu: bool) -> bool:
    return _COMMUNICATION.match(event.name) is not None and _is_on_gpu(event) == on_gpu


def _computes(event: Any, main: int, *, on_gpu: bool) -> bool:
    if on_gpu:
        return _is_on_gpu(event) and not event.is_user_annotation and _COMMUNICATION.match(event.name) is None
    is_work = _COMPUTED.match(event.name) is not None and _AROUND.match(event.name) is None
    # a range that a library has marked (`FSDP::all_gather`) waits as well as computes
    return event.thread == main and is_work and not event.is_user_annotation and not _is_on_gpu(event)
