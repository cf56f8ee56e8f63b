"""Measurements of devices as people read them: `runs/devices.py` has the numbers. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launcher.runs.devices import THROTTLED, NodeUse, Series, Use, fold_measured, warnings_of
from launcher.wording import aligned

_NODES_SHOWN = 8
_OLD_S = 60.0


def uses_text(uses: Sequence[NodeUse]) -> str:
    """What `launch report` says: a table, and what is wrong."""
    if not uses:
        return ""
    lines = aligned(use_rows(uses[:_NODES_SHOWN]), right=range(1, 20))
    more = [f"... and {len(uses) - _NODES_SHOWN} more nodes: launch report --json"] if len(uses) > _NODES_SHOWN else []
    return "\n".join([*lines, *more, *(f"! {text}" for use in uses for text in warnings_of(use))])


def now_text(record: Mapping[str, Any], *, now_s: float) -> str:
    """A measurement as a short line: the node, then its GPUs together."""
    use = fold_measured(0, [record])
    own = {name: each.last for name, each in use.own.series.items()}
    parts = [
        _percent("cpu", own.get("cpu/util")),
        _of(own.get("memory/used_bytes"), own.get("memory/total_bytes"), prefix="memory "),
        _size(own.get("workers/rss_bytes"), prefix="workers "),
        *_gpus_now(use.gpus),
        *use.notes,
        _age(now_s - float(record.get("time", now_s))),
    ]
    return "   ".join(filter(None, parts))


def _gpus_now(gpus: Mapping[int, Use]) -> list[str]:
    if not gpus:
        return []
    together = {
        name: [gpu.series[name].last for gpu in gpus.values() if name in gpu.series]
        for name in ("util", "memory_used_bytes", "memory_total_bytes", "power_w", "power_limit_w", "temperature_c")
    }
    power, limit = together["power_w"], together["power_limit_w"]
    heat = together["temperature_c"]
    wrong = [f"gpu {index}: {text}" for index, gpu in gpus.items() for text in _wrong_now(gpu)]
    return [
        f"{len(gpus)} GPU" + ("s" if len(gpus) > 1 else ""),
        _range("util", together["util"], "%"),
        _of(max(together["memory_used_bytes"], default=None), max(together["memory_total_bytes"], default=None)),
        f"{max(power):.0f}" + (f" of {max(limit):.0f}" if limit else "") + " W" if power else "",
        f"{max(heat):.0f} C" if heat else "",
        *wrong,
    ]


def _wrong_now(gpu: Use) -> list[str]:
    if "lost" in gpu.series:
        return ["lost"]
    reasons = [text for reason, text in THROTTLED.items() if gpu.reasons.get(reason)]
    return [f"throttled, {', '.join(reasons)}"] if reasons else []


def use_rows(uses: Sequence[NodeUse]) -> list[tuple[str, ...]]:
    """A table of nodes and their GPUs: averages and peaks."""
    rows: list[tuple[str, ...]] = [
        ("devices", "util", "peak", "memory", "peak", "of", "workers", "power", "peak", "limit", "heat", "clock")
    ]
    for use in uses:
        own = use.own.series
        node = (
            f"node {use.node}",
            *_mean_peak(own.get("cpu/util"), "%"),
            *_sizes(own.get("memory/used_bytes"), own.get("memory/total_bytes")),
            _size(own["workers/rss_bytes"].peak) if "workers/rss_bytes" in own else "",
        )
        rows.append((*node, *[""] * (len(rows[0]) - len(node))))
        rows += [_gpu_row(index, gpu) for index, gpu in use.gpus.items()]
    kept = [column for column in range(len(rows[0])) if column == 0 or any(row[column] for row in rows[1:])]
    return [tuple(row[column] for column in kept) for row in rows]


def _gpu_row(index: int, gpu: Use) -> tuple[str, ...]:
    series = gpu.series
    limit, heat, clock = (series.get(name) for name in ("power_limit_w", "temperature_c", "sm_clock_mhz"))
    return (
        f"  gpu {index}",
        *_mean_peak(series.get("util"), "%"),
        *_sizes(series.get("memory_used_bytes"), series.get("memory_total_bytes")),
        "",
        *_mean_peak(series.get("power_w"), "W"),
        f"{limit.last:.0f} W" if limit else "",
        f"{heat.peak:.0f} C" if heat else "",
        f"{clock.mean:.0f} MHz" if clock else "",
    )


def _mean_peak(series: Series | None, unit: str) -> tuple[str, str]:
    return ("", "") if series is None else (f"{series.mean:.0f} {unit}", f"{series.peak:.0f} {unit}")


def _sizes(used: Series | None, total: Series | None) -> tuple[str, str, str]:
    if used is None:
        return "", "", ""
    return _size(used.mean), _size(used.peak), "" if total is None else _size(total.last)


def _percent(name: str, value: float | None) -> str:
    return "" if value is None else f"{name} {value:.0f} %"


def _range(name: str, values: Sequence[float], unit: str) -> str:
    if not values:
        return ""
    low, high = min(values), max(values)
    return f"{name} {high:.0f} {unit}" if low == high else f"{name} {low:.0f} to {high:.0f} {unit}"


def _size(size_bytes: float | None, prefix: str = "") -> str:
    if size_bytes is None:
        return ""
    return prefix + (f"{size_bytes / 2**30:.1f} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:.0f} MiB")


def _of(used: float | None, total: float | None, prefix: str = "") -> str:
    if used is None or total is None:
        return ""
    return f"{prefix}{used / 2**30:.1f} of {total / 2**30:.1f} GiB"


def _age(age_s: float) -> str:
    return f"measured {age_s / 60:.0f} min ago" if age_s > _OLD_S else ""
